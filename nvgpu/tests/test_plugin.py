"""The nvgpu plug-in with its host runtime: kernels, collectives between processes, training, and its refusals.

The plug-in is loaded when Paddle is imported, so everything runs in processes of its own.
"""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from tests import nvgpu_processes, seeds
from tests.nvgpu_processes import PLUGIN_TESTS, ROOT, check_on_device, run, run_ranks

# ---- kernels


@pytest.fixture(scope="module")
def cases(plugin):
    result = run(plugin, ROOT / "tests/nvgpu_cases.py", seeds.seed_of("nvgpu_cases"))
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kernels_agree_with_the_cpu(cases, dtype):
    results = {name: wrong for name, wrong in cases.items() if name.endswith(dtype)}
    assert len(results) > 70
    assert not {name: wrong for name, wrong in results.items() if wrong is not None}


IN_PLACE = """
import paddle
paddle.set_device("nvgpu:0")
for dtype in ("float32", "bfloat16"):
    x = paddle.ones([4, 4], dtype)
    view, address = x.reshape([16]), x.data_ptr()
    view.scale_(3.0)
    x.add_(paddle.ones([4, 4], dtype))
    x[1:3, ::2] = 7.0
    x.put_along_axis_(paddle.zeros([4, 1], "int64"), 9.0, 1)
    assert x.data_ptr() == address and (view.astype("float32").numpy() == x.astype("float32").numpy().ravel()).all()
    assert x.astype("float32").numpy().tolist() == [[9, 4, 4, 4], [9, 4, 7, 4], [9, 4, 7, 4], [9, 4, 4, 4]], x
x = paddle.to_tensor([1.5, 2.5])
x.cast_("bfloat16")
assert x.dtype == paddle.bfloat16 and x.astype("float32").tolist() == [1.5, 2.5]
stream = paddle.device.current_stream().stream_base.raw_stream
side = paddle.device.Stream()
with paddle.device.stream_guard(side):
    assert paddle.device.current_stream().stream_base.raw_stream == side.stream_base.raw_stream != stream
paddle.seed(3)
a = paddle.randn([64])
state = paddle.get_rng_state()
b = paddle.nn.functional.dropout(paddle.ones([64]), 0.5)
paddle.set_rng_state(state)
assert (paddle.nn.functional.dropout(paddle.ones([64]), 0.5) == b).all() and 0 < (b > 0).sum() < 64
paddle.seed(3)
assert (paddle.randn([64]) == a).all()
print("DONE")
"""


def test_in_place_streams_and_random_states(plugin):
    result = run(plugin, "-c", IN_PLACE)
    assert "DONE" in result.stdout, result.stderr[-3000:]


FULL = """
import resource

import paddle

paddle.set_device("nvgpu:0")
megabytes = lambda count: paddle.empty([count * 2**20], "uint8")
megabytes(1)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, resource.RLIM_INFINITY))
megabytes(600)  # is let go at once, and stays in Paddle's cache
megabytes(700)
try:
    megabytes(2048)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_a_full_device(plugin):
    """Paddle's cache is given back first; what does not fit then is said in Paddle's usual words."""
    result = run(plugin, "-c", FULL)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Out of memory error on nvgpu:0. Cannot allocate 2.0" in result.stdout


FULL_IN_BACKWARD = """
import os
import paddle
paddle.set_device("nvgpu:0")
x = paddle.ones([1024, 1024]).astype("bfloat16")
x.stop_gradient = False
def tensors(size):
    while True:
        try:
            yield paddle.empty([size], "uint8")
        except MemoryError:
            return
for name in ("softplus", "elu", "exp"):  # a kernel via the CPU, Paddle's fallback, a kernel of the device
    loss = getattr(paddle.nn.functional, name, paddle.exp)(x.astype("float32")).sum()
    os.environ["NVGPU_HOST_MEMORY"] = "0"
    held = [*tensors(2**20), *tensors(2**14), *tensors(256)]
    try:
        loss.backward()
    except (MemoryError, OSError) as error:
        print(f"{name}: {error}")
    del held, os.environ["NVGPU_HOST_MEMORY"]
"""


def test_a_full_device_in_backward(plugin):
    result = run(plugin, "-c", FULL_IN_BACKWARD)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("Out of memory error on nvgpu:0") == 3


def test_benchmark_of_kernels(plugin, tmp_path):
    script = ROOT / "tools/benchmark/nvgpu_kernels.py"
    result = run(plugin, script, "--quick", "--device", "cpu", "--output", tmp_path / "kernels.json")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = json.loads((tmp_path / "kernels.json").read_text())["operations"]
    assert len(rows) > 10 and all(row["bytes"] > 0 and row["ms"]["median"] > 0 for row in rows.values())
    table = (tmp_path / "kernels.md").read_text()
    assert all(f"| {name} |" in table for name in rows)


# ---- training


@pytest.fixture(scope="module")
def llama_runs(plugin):
    return nvgpu_processes.llama_runs(plugin)


def test_llama_float32_equals_the_cpu(llama_runs):
    cpu, nvgpu, _, _ = llama_runs
    np.testing.assert_allclose(nvgpu, cpu, rtol=1e-5)


def test_llama_bfloat16_follows_float32(llama_runs):
    cpu, _, half, _ = llama_runs
    np.testing.assert_allclose(half, cpu, rtol=1e-2)
    assert half[-1] < half[0] - 0.3


def test_no_kernel_of_a_llama_step_runs_on_the_cpu(llama_runs):
    check_on_device(llama_runs[3])


def test_tensor_parallel_bfloat16_and_sharding3(plugin, tmp_path):
    """c_identity in bfloat16, and stage 3's slices: two processes against one.

    All layouts are in tests/multiprocess/distributed.
    """
    script = PLUGIN_TESTS / "train.py"
    outputs = {}
    for mode in ("one", "tp", "sharding3"):
        codes, texts = run_ranks(plugin, 1 if mode == "one" else 2, script, mode)
        assert not any(codes), texts[0][-3000:]
        outputs[mode] = [float(x) for x in re.findall(r"^LOSS (\S+)$", texts[0], re.M)]
        if mode == "sharding3":
            assert "SLICED 0" not in texts[0] and "SLICED" in texts[0]
    assert len(outputs["one"]) == 4 and outputs["one"][-1] < outputs["one"][0]
    np.testing.assert_allclose(outputs["tp"], outputs["one"], rtol=3e-3)
    np.testing.assert_allclose(outputs["sharding3"], outputs["one"], rtol=3e-3)


# ---- collectives


def test_collectives_of_three_processes(plugin):
    codes, outputs = run_ranks(plugin, 3, PLUGIN_TESTS / "ranks.py", "collectives")
    assert codes == [0, 0, 0], "\n".join(output[-2000:] for output in outputs)


def test_a_ring_of_grouped_transfers(plugin):
    codes, outputs = run_ranks(plugin, 3, PLUGIN_TESTS / "ranks.py", "ring")
    assert codes == [0, 0, 0], "\n".join(output[-2000:] for output in outputs)


def test_receives_are_waited_for_whoever_else_synchronizes(plugin):
    codes, outputs = run_ranks(plugin, 2, PLUGIN_TESTS / "ranks.py", "race")
    assert codes == [0, 0], outputs[0][-2000:]


def test_a_dead_rank_ends_the_others(plugin):
    codes, outputs = run_ranks(plugin, 3, PLUGIN_TESTS / "ranks.py", "die")
    assert codes == [3, -9, 3], "\n".join(output[-2000:] for output in outputs)
    assert "rank 1 of 3 ended during all-reduce" in outputs[0]
    assert float(re.search(r"FAILED after (\S+) s", outputs[0]).group(1)) < 60, "long before NVGPU_TIMEOUT, 120 s"


def test_waiting_does_not_burn_a_core(plugin):
    codes, outputs = run_ranks(plugin, 2, PLUGIN_TESTS / "ranks.py", "wait")
    assert codes == [0, 0], outputs[0][-2000:]
    assert float(re.search(r"CPU (\S+)", outputs[0]).group(1)) < 0.5


# ---- refusals


def test_another_paddle_is_refused(plugin, tmp_path):
    shutil.copytree(plugin, tmp_path / "old", ignore=shutil.ignore_patterns("built_from"))
    definitions = ['-DNVGPU_PADDLE_VERSION="2.6.2 (abc)"', '-DNVGPU_RUNTIME="host"']
    subprocess.run(
        ["g++", "-std=c++17", "-shared", "-fPIC", *definitions, ROOT / "nvgpu/csrc/loader.cc"]
        + ["-o", tmp_path / "old/libnvgpu.so", "-ldl"],
        check=True,
    )
    result = run(str(tmp_path / "old"), "-c", "import paddle")
    assert result.returncode == 1, result.stderr[-2000:]
    assert "it was built for Paddle 2.6.2 (abc), this is Paddle 3." in result.stderr


@pytest.mark.parametrize("devices", [1, 2])
def test_training_device_finds_it(plugin, devices):
    """Paddle numbers its names only where there are several devices."""
    code = "from paddle_te.env import training_device; print(training_device())"
    result = run(plugin, "-c", code, NVGPU_HOST_DEVICES=devices)
    assert result.stdout.split()[-1:] == ["nvgpu"], result.stderr[-2000:]
