"""Paddle's profiler on nvgpu: what CUPTI records is in its trace. CUPTI is a fake; tests/gpu has the real one."""

import json
import os
import subprocess
from pathlib import Path

import paddle
import pytest

from tests.nvgpu_processes import run

PROFILED = """
import ctypes, sys
if len(sys.argv) > 2:
    ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL)
import paddle
paddle.set_device("nvgpu:0")
profiler = paddle.profiler.Profiler(on_trace_ready=paddle.profiler.export_chrome_tracing(sys.argv[1], "worker"))
for window in range(2):
    profiler.start()
    with paddle.profiler.RecordEvent("ours"):
        paddle.ones([16]).scale(2.0)
    profiler.stop()
    profiler.summary()
"""


def traces(folder):
    """The events of each window that was profiled."""
    return [json.loads(file.read_text())["traceEvents"] for file in sorted(Path(folder).glob("*.json"))]


def test_what_cupti_records_is_in_paddles_trace(fake_cupti, tmp_path, plugin):
    done = run(plugin, "-c", PROFILED, tmp_path, fake_cupti)
    assert done.returncode == 0, done.stderr[-3000:]
    windows = traces(tmp_path)
    assert len(windows) == 2
    for events in windows:
        named = {event["name"].partition("[")[0]: event for event in events if event.get("ph") == "X"}
        assert "ours" in named
        kernel = named["scale(float*, int)"]
        assert kernel["dur"] == pytest.approx(7, abs=1e-3)  # microseconds
        assert (kernel["args"]["registers per thread"], kernel["args"]["stream"]) == (40, 13)
        assert kernel["args"]["grid"] == [5, 6, 7] and kernel["args"]["block"] == [128, 2, 1]
        assert named["MEMCPY_DtoD"]["args"]["bytes"] == 4096 and named["MEMSET"]["args"]["bytes"] == 512
        ours = named["ours"]
        assert abs(kernel["ts"] - ours["ts"]) < 60e6  # the system's clock, not CUPTI's, which is ahead by a day
        calls = [name for name in named if name.startswith("cu")]
        assert sorted(calls) == ["cuLaunchKernel", "cudaLaunchKernel_v7000"]


def test_host_runtime_without_cupti(tmp_path, plugin):
    done = run(plugin, "-c", PROFILED, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all("ours" in str(events) for events in traces(tmp_path))


LAYOUT = """
#include <cstddef>
#include <cupti.h>
#define AT(record, field, offset) static_assert(offsetof(record, field) == offset);
#define BOTH(record) AT(record, bytes, 8) AT(record, start, 16) AT(record, streamId, 40) AT(record, correlationId, 44)
AT(CUpti_ActivityKernel10, registersPerThread, 6) AT(CUpti_ActivityKernel10, start, 16)
AT(CUpti_ActivityKernel10, deviceId, 40) AT(CUpti_ActivityKernel10, gridX, 52) AT(CUpti_ActivityKernel10, blockX, 64)
AT(CUpti_ActivityKernel10, staticSharedMemory, 76) AT(CUpti_ActivityKernel10, localMemoryPerThread, 84)
AT(CUpti_ActivityKernel10, correlationId, 92) AT(CUpti_ActivityKernel10, name, 104)
BOTH(CUpti_ActivityMemcpy6) BOTH(CUpti_ActivityMemset4) AT(CUpti_ActivityMemcpy6, copyKind, 4)
AT(CUpti_ActivityAPI, cbid, 4) AT(CUpti_ActivityAPI, start, 8) AT(CUpti_ActivityAPI, threadId, 28)
AT(CUpti_ActivityAPI, correlationId, 32)
static_assert(CUPTI_ACTIVITY_KIND_MEMCPY == 1 && CUPTI_ACTIVITY_KIND_MEMSET == 2 && CUPTI_ACTIVITY_KIND_DRIVER == 4);
static_assert(CUPTI_ACTIVITY_KIND_RUNTIME == 5 && CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL == 10);
static_assert(CUPTI_ACTIVITY_THREAD_ID_TYPE_SYSTEM == 1 && CUPTI_ACTIVITY_FLAG_FLUSH_FORCED == 1);
static_assert(CUPTI_CB_DOMAIN_DRIVER_API == 1 && CUPTI_CB_DOMAIN_RUNTIME_API == 2);
"""


def test_records_are_laid_out_as_in_cudas_headers(tmp_path):
    folders = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), str(Path(paddle.__file__).parents[1] / "nvidia/cu13")]
    found = [f"{folder}/include" for folder in folders if Path(folder, "include/cupti_activity.h").is_file()]
    if not found:
        pytest.skip("no CUPTI headers (a CUDA toolkit's, or nvidia-cuda-cupti's)")
    (tmp_path / "layout.cpp").write_text(LAYOUT)
    subprocess.run(["g++", "-fsyntax-only", f"-I{found[0]}", tmp_path / "layout.cpp"], check=True)
