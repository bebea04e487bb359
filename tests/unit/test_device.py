"""paddle_te.device on the CPU, and its branches for GPUs with Paddle's answers replaced."""

import mmap
import tempfile
from pathlib import Path
from types import SimpleNamespace

import paddle
import pytest

from paddle_te import device
from paddle_te.native import library


class Place:
    def __init__(self, kind, index=0):
        self.kind, self.index = kind, index

    def is_gpu_place(self):
        return self.kind == "gpu"

    def is_custom_place(self):
        return self.kind not in ("cpu", "gpu")

    def gpu_device_id(self):
        return self.index

    custom_device_id = gpu_device_id

    def custom_device_type(self):
        return self.kind


@pytest.fixture
def driver(monkeypatch):
    """Sets what the driver says of device 2, and that nvgpu's runtime is CUDA's."""
    monkeypatch.setattr(device, "_on_nvgpu_host_runtime", lambda: False)
    return lambda *capability: monkeypatch.setattr(library, "gpus", lambda: [(0, 0), (0, 0), capability])


def test_cpu():
    tensor = paddle.ones([3, 4])
    assert device.kind() == device.kind(tensor.place) == "cpu"
    assert device.compute_capability() is None and device.bf16_supported() is False
    with pytest.raises(RuntimeError, match="set_device"):
        device.raw_stream()


def test_peak_memory():
    device.reset_peak_memory()
    before = device.peak_memory()
    big = paddle.zeros([1 << 20], dtype="float32")
    assert device.peak_memory() - before >= 4 << 20
    del big
    assert device.peak_memory() - before >= 4 << 20
    device.reset_peak_memory()
    assert device.peak_memory() - before < 4 << 20


@pytest.mark.parametrize("kind", ["gpu", "nvgpu"])
@pytest.mark.parametrize("capability, bf16", [((7, 5), False), ((8, 0), True), ((8, 9), True), ((10, 0), True)])
def test_capability(driver, kind, capability, bf16):
    driver(*capability)
    place = Place(kind, 2)
    assert device.kind(place) == kind
    assert device.compute_capability(place) == capability and device.bf16_supported(place) is bf16


def test_host_runtime(monkeypatch):
    """nvgpu without a GPU: trains in bf16, is no NVIDIA GPU."""
    monkeypatch.setattr(device, "_on_nvgpu_host_runtime", lambda: True)
    place = Place("nvgpu")
    assert device.compute_capability(place) is None and device.bf16_supported(place)


def test_host_runtime_is_recognised():
    """By its library among the process's."""
    if not paddle.device.get_all_custom_device_type():
        assert device.nvgpu_library.__wrapped__() is None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libnvgpu_host.so"
        path.write_bytes(b"x")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            assert device.nvgpu_library.__wrapped__() == str(path)


def test_other_device(driver):
    driver(9, 0)
    assert device.kind(Place("npu")) == "npu" and device.compute_capability(Place("npu", 2)) is None
    assert not device.bf16_supported(Place("npu", 2))


def test_expected_place_changes(monkeypatch):
    """The place is remembered only as long as Paddle expects the same one."""
    for place in (Place("gpu", 1), Place("nvgpu", 3), Place("cpu")):
        monkeypatch.setattr(paddle.framework, "_current_expected_place_", lambda place=place: place)
        for _ in range(2):
            assert device._resolve(None) == (place.kind, place.index)


def test_raw_stream(monkeypatch):
    monkeypatch.setattr(device.core, "_get_current_stream", lambda i: SimpleNamespace(cuda_stream=0x70 + i))
    monkeypatch.setattr(
        device.core,
        "_get_current_custom_device_stream",
        lambda name, i: SimpleNamespace(raw_stream={"nvgpu": 0x80}[name] + i),
    )
    assert device.raw_stream(Place("gpu", 1)) == 0x71
    assert device.raw_stream(Place("nvgpu", 2)) == 0x82
