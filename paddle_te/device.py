"""Tell what Paddle's API leaves out of the device that Paddle computes on: stream, capability, memory.

Knows three kinds: "cpu"; "gpu", paddlepaddle-gpu's; "nvgpu", the plug-in of nvgpu. Nothing else in the package
tests for a place. `place` is a Paddle place, such as `tensor.place`; None: where Paddle computes now.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import paddle
from paddle import Tensor, _C_ops
from paddle.base import core

from paddle_te.native import library

Place: TypeAlias = Any  # core.Place or one of its kinds, whose methods Paddle's stubs leave out
_expected: tuple[Place, tuple[str, int]] = None, ("cpu", 0)  # Paddle's expected place last time, its kind and number


def _resolve(place: Place | None) -> tuple[str, int]:
    """Return (kind, device number) of the place."""
    global _expected
    if place is not None:
        return _kind_and_number(place)
    place = paddle.framework._current_expected_place_()
    if place is not _expected[0]:  # asked for several times a layer, changed almost never
        _expected = place, _kind_and_number(place)
    return _expected[1]


def _kind_and_number(place: Place) -> tuple[str, int]:
    if place.is_gpu_place():
        return "gpu", place.gpu_device_id()
    if place.is_custom_place():
        return place.custom_device_type(), place.custom_device_id()
    return "cpu", 0


def kind(place: Place | None = None) -> str:
    """Return "cpu", "gpu", "nvgpu", or the name of another CustomDevice."""
    return _resolve(place)[0]


def check_name(name: str) -> None:
    """Raise ValueError for a device, such as "gpu" or "nvgpu:1", that Paddle does not have in this process."""
    device = name.partition(":")[0]
    remedies = {
        "gpu": "needs paddlepaddle-gpu, and the installed Paddle is not; or nvgpu, with the plug-in of nvgpu",
        "nvgpu": "needs its plug-in: pip install ./nvgpu, or CUSTOM_DEVICE_ROOT",
    }
    plugged_in = paddle.device.get_all_custom_device_type() or []
    there = device in plugged_in or device == "gpu" and paddle.is_compiled_with_cuda()
    if device in remedies and not there:
        raise ValueError(f"--device {name} {remedies[device]}; cpu is always there")


def raw_stream(place: Place | None = None) -> int:
    """Return the cudaStream_t, as an int, that Paddle gives work to now (`paddle.device.stream_guard` changes it).

    Raises RuntimeError on a CPU, which has none.
    """
    name, number = _resolve(place)
    if name == "gpu":
        return core._get_current_stream(number).cuda_stream  # type: ignore[attr-defined]  # Paddle's stub lacks it
    if name == "cpu":
        raise RuntimeError("the CPU has no stream: choose an NVIDIA device with paddle.set_device")
    stream = core._get_current_custom_device_stream  # type: ignore[attr-defined]  # Paddle's stub lacks it
    return stream(name, number).raw_stream


@cache
def nvgpu_library() -> str | None:
    """Return the path of the nvgpu plug-in's library, which is named after its runtime; None where it is not loaded."""
    with open("/proc/self/maps") as maps:
        found = re.search(r"/.*/libnvgpu_(cuda|host)\.so", maps.read())
    return found and found[0]


@cache
def _nvgpu_operators() -> set[str]:
    """Return the names of nvgpu's own operators (its kernels/training.cc).

    Paddle tells them once, and knows them from then on.
    """
    path = nvgpu_library()
    assert path is not None  # its tensors are there
    return {*core.load_op_meta_info_and_register_op(path)}


def nvgpu_operator(name: str, *arguments: Any) -> list[Tensor]:
    """Call one of nvgpu's own operators, with its inputs and attributes. Return the list of its outputs.

    Raises RuntimeError where the plug-in lacks it.
    """
    if name not in _nvgpu_operators():
        raise RuntimeError(f"{nvgpu_library()} is of another version and lacks {name}: pip install ./nvgpu")
    return _C_ops._run_custom_op(name, *arguments)  # type: ignore[attr-defined]  # Paddle's stub lacks it


_opened = cache(ctypes.CDLL)  # a step has a section for each of hundreds of gradients


def check_nvgpu(section: str) -> None:
    """Raise ValueError where the nvgpu plug-in is loaded and too old for a `nvgpu_section`."""
    path = nvgpu_library()
    if path and not hasattr(_opened(path), f"nvgpu_{section}_start"):
        raise ValueError(f"{path} is of another version and lacks nvgpu_{section}_start: pip install ./nvgpu")


@contextmanager
def nvgpu_section(name: str) -> Iterator[None]:
    """Do in this thread what the nvgpu plug-in says of a section of this name (its plugin.cc).

    Raises RuntimeError where the plug-in fails at its end; it has printed why.
    """
    library = _opened(nvgpu_library())
    _check_status(getattr(library, f"nvgpu_{name}_start")())
    try:
        yield
    finally:
        _check_status(getattr(library, f"nvgpu_{name}_end")())


def run_deferred() -> None:
    """Make what this thread deferred in its last `nvgpu_section("defer")`, once.

    Raises RuntimeError where the plug-in fails; it has printed why.
    """
    _check_status(_opened(nvgpu_library()).nvgpu_run_deferred())


def _check_status(status: int) -> None:
    if status:
        raise RuntimeError("the nvgpu plug-in has failed; it printed why")


def _on_nvgpu_host_runtime() -> bool:
    """Return whether nvgpu's device is plain memory. Paddle has no way to ask."""
    return (nvgpu_library() or "").endswith("/libnvgpu_host.so")


def compute_capability(place: Place | None = None) -> tuple[int, int] | None:
    """Return (major, minor) of an NVIDIA GPU; None for what is not one (the CPU, nvgpu's host runtime)."""
    name, number = _resolve(place)
    if name == "gpu" or (name == "nvgpu" and not _on_nvgpu_host_runtime()):
        return library.gpus()[number]
    return None


def bf16_supported(place: Place | None = None) -> bool:
    """Return whether a model can train in bf16 there: on NVIDIA GPUs from Ampere on, and on nvgpu's host runtime.

    Not on the CPU: Paddle has no bf16 matmul there, and autocast computes in float32 without saying so.
    """
    name, capability = kind(place), compute_capability(place)
    return name == "nvgpu" if capability is None else capability >= library.MIN_CAPABILITY


def peak_memory(place: Place | None = None) -> int:
    """Return the greatest number of bytes that tensors have had on the device since start or `reset_peak_memory`."""
    name, number = _resolve(place)
    value = core.host_memory_stat_peak_value if name == "cpu" else core.device_memory_stat_peak_value
    return value("Allocated", number)


def memory_in_use(place: Place | None = None) -> tuple[int, int]:
    """Return the bytes that tensors have on the device now, and those that Paddle keeps for them and for later ones."""
    name, number = _resolve(place)
    value = core.host_memory_stat_current_value if name == "cpu" else core.device_memory_stat_current_value
    return value("Allocated", number), value("Reserved", number)


def total_memory(place: Place | None = None) -> int | None:
    """Return the bytes of the NVIDIA GPU's memory; None for what is not one."""
    if compute_capability(place) is None:
        return None
    total = ctypes.c_size_t()
    library.driver().cuDeviceTotalMem_v2(ctypes.byref(total), _resolve(place)[1])
    return total.value


def host_memory() -> int:
    """Return the bytes that this machine has for its processes, or a container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    said = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(said)) if said.isdigit() else total


def reset_peak_memory(place: Place | None = None) -> None:
    """Let `peak_memory` count from what is allocated now."""
    name, number = _resolve(place)
    reset = core.host_memory_stat_reset_peak_value if name == "cpu" else core.device_memory_stat_reset_peak_value
    reset("Allocated", number)


def synchronize() -> None:
    """Wait until the device has done all work that this process has given it; do nothing on a CPU."""
    if kind() != "cpu":
        paddle.device.synchronize()
