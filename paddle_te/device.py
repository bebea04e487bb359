"""The device that Paddle computes on, for what needs more of it than Paddle's API: addresses, streams, capability.

Knows three kinds: "cpu"; "gpu", paddlepaddle-gpu's; "nvgpu", the plug-in of tools/nvgpu. Nothing else in the package
tests for a place. `place` is a Paddle place, such as `tensor.place`; None: where Paddle computes now.
"""

import paddle
from paddle.base import core

from paddle_te.native import library

NVIDIA_KINDS = ("gpu", "nvgpu")


def _resolve(place):
    """(kind, device number) of the place."""
    place = paddle.framework._current_expected_place_() if place is None else place
    if place.is_gpu_place():
        return "gpu", place.gpu_device_id()
    if place.is_custom_place():
        return place.custom_device_type(), place.custom_device_id()
    return "cpu", 0


def kind(place=None):
    """ "cpu", "gpu", "nvgpu", or the name of another CustomDevice."""
    return _resolve(place)[0]


def data_ptr(tensor):
    """Address of the tensor's first element as an int; on its device, for a tensor on a device."""
    return tensor.data_ptr()


def raw_stream(place=None):
    """The cudaStream_t, as an int, that Paddle gives work to now (`paddle.device.stream_guard` changes it).

    Raises RuntimeError on a CPU, which has none.
    """
    name, index = _resolve(place)
    if name == "gpu":
        return core._get_current_stream(index).cuda_stream
    if name == "cpu":
        raise RuntimeError("the CPU has no stream: choose an NVIDIA device with paddle.set_device")
    return core._get_current_custom_device_stream(name, index).raw_stream


def compute_capability(place=None):
    """(major, minor) of an NVIDIA GPU; None for what is not one (the CPU, nvgpu's host runtime)."""
    name, index = _resolve(place)
    if name not in NVIDIA_KINDS:
        return None
    properties = paddle.device.get_device_properties(f"{name}:{index}")
    return (properties.major, properties.minor) if properties.major else None


def sm_count(place=None):
    """Number of streaming multiprocessors of an NVIDIA GPU; None for what is not one."""
    name, index = _resolve(place)
    if name not in NVIDIA_KINDS or compute_capability(place) is None:
        return None
    return paddle.device.get_device_properties(f"{name}:{index}").multi_processor_count


def bf16_supported(place=None):
    """Whether a model can train in bf16 there. Not on the CPU: Paddle has no bf16 matmul there, and autocast computes
    in float32 without saying so. On NVIDIA GPUs from Ampere on; on nvgpu's host runtime always."""
    name, capability = kind(place), compute_capability(place)
    return name == "nvgpu" if capability is None else capability >= library.MIN_CAPABILITY


def fp8_supported(place=None):
    """Whether the GPU computes in fp8 (Ada, Hopper and newer)."""
    capability = compute_capability(place)
    return capability is not None and capability >= library.MIN_CAPABILITY_FP8


def peak_memory(place=None):
    """Greatest number of bytes that tensors have had on the device since start or `reset_peak_memory`."""
    name, index = _resolve(place)
    value = core.host_memory_stat_peak_value if name == "cpu" else core.device_memory_stat_peak_value
    return value("Allocated", index)


def reset_peak_memory(place=None):
    """Lets `peak_memory` count from what is allocated now."""
    name, index = _resolve(place)
    reset = core.host_memory_stat_reset_peak_value if name == "cpu" else core.device_memory_stat_reset_peak_value
    reset("Allocated", index)
