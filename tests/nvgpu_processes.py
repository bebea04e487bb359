"""Processes with the nvgpu plug-in, which is loaded when Paddle is imported, for nvgpu's tests and paddle_te's."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import processes

ROOT = Path(__file__).parents[1]
PLUGIN_TESTS = ROOT / "nvgpu/tests"
SEED = 1234


def build_host():
    """The folder of the host runtime for CUSTOM_DEVICE_ROOT, compiled if it is not there or not up to date."""
    command = [sys.executable, ROOT / "nvgpu/build.py", "--runtime", "host"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def python_path():
    """PYTHONPATH with this repository before what the caller has there, which may be Paddle."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def environment(plugin, **more):
    settings = dict(CUSTOM_DEVICE_ROOT=plugin, NVGPU_TIMEOUT="120", OMP_NUM_THREADS="1", PYTHONPATH=python_path())
    settings["FLAGS_tcp_store_using_libuv"] = "0"  # see paddle_te/upstream/threaded_store.py
    settings["DEFERRED_IMPORTS"] = "1"
    return {**os.environ, **settings, **{key: str(value) for key, value in more.items()}}


def run(plugin, *arguments, **more):
    return processes.run([sys.executable, *arguments], timeout=300, env=environment(plugin, **more))


def run_ranks(plugin, size, *arguments, timeout=240, **more):
    """Exit codes and outputs of one process a rank, started as paddle.distributed.launch does but watched by nobody.

    Those that still run after `timeout` seconds are killed: exit code -9, the output so far and their stacks.
    more: variables that they get.
    """
    endpoints = [f"127.0.0.1:{port}" for port in processes.free_ports(size)]
    command = [sys.executable, *map(str, arguments)]
    ranks = []
    for rank in range(size):
        variables = environment(
            plugin,
            PADDLE_TRAINER_ID=rank,
            PADDLE_TRAINERS_NUM=size,
            PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
            PADDLE_CURRENT_ENDPOINT=endpoints[rank],
            PADDLE_DISTRI_BACKEND="xccl",
            PADDLE_XCCL_BACKEND="nvgpu",
            FLAGS_selected_nvgpus=rank,
            **more,
        )
        output = tempfile.TemporaryFile()  # a pipe would hold up a rank until somebody reads it
        ranks.append((subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT), output))
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process, _ in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    processes.write_stacks(*(process.pid for process, _ in ranks if process.poll() is None))
    for process, _ in ranks:
        process.kill()
    codes = [process.wait() for process, _ in ranks]
    with contextlib.ExitStack() as files:
        return codes, [processes.written(files.enter_context(output)) for _, output in ranks]


def llama(plugin, device, dtype, seed, **more):
    result = run(plugin, PLUGIN_TESTS / "llama.py", device, dtype, seed, **more)
    assert "DONE" in result.stdout, result.stderr[-3000:]
    return [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("LOSS")], result.stderr


def llama_runs(plugin):
    """Losses of the same model: on the CPU and on nvgpu in float32, on nvgpu in bfloat16; and the last one's trace."""
    cpu, _ = llama(plugin, "cpu", "float32", SEED)
    nvgpu, _ = llama(plugin, "nvgpu:0", "float32", SEED)
    # Paddle itself aborts while a process with this GLOG variable exits; the losses are out by then.
    half, trace = llama(plugin, "nvgpu:0", "bfloat16", SEED, NVGPU_TRACE=1, GLOG_vmodule="kernel_factory=3")
    return cpu, nvgpu, half, trace


def check_on_device(trace):
    """That the plug-in's trace of a Llama's training has no step whose activations or kernels left the device."""
    steps = trace.split("STEP 1")[1]
    assert not re.findall("missing nvgpu kernel: .*|on the CPU: .*", steps)
    copies = [int(count) for count in re.findall(r"copy \w+ host: (\d+) bytes", steps)]
    assert copies and max(copies) <= 256  # numbers, not activations
    assert "allocate" not in steps.split("STEP 3")[1]  # Paddle's cache serves it
