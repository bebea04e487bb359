"""GPU tests run on Paddle's GPU device: paddlepaddle-gpu's `gpu`, or nvgpu's `nvgpu` (CUSTOM_DEVICE_ROOT)."""

import ctypes

import pytest

from paddle_te.native import library
from tests.gpu.device import gpu_device
from tests.small_models import MIXTURES
from tools.status import of_cards


@pytest.fixture(scope="session", autouse=True)
def _repairs():
    """As the commands do: many tests train on the CPU and on the GPU in this one process."""
    from paddle_te import upstream

    upstream.apply()


@pytest.fixture(scope="session", autouse=True)
def _cards(record_testsuite_property):
    """A report (--junitxml) says on which GPUs its tests ran; tools/status.py reads it."""
    name = ctypes.create_string_buffer(96)
    try:
        library.driver().cuDeviceGetName(name, len(name), 0)
    except OSError:
        return  # tests/unit/hosts/paddlenlp/emulated_gpu.py runs some of them without a driver
    record_testsuite_property("cards", of_cards(name.value.decode(), len(library.gpus())))


@pytest.fixture
def gpu(seed):
    """Paddle on the GPU for one test; its name."""
    import paddle

    name = f"{gpu_device()}:0"
    paddle.set_device(name)
    paddle.seed(seed)  # the device has a generator of its own
    yield name
    paddle.set_device("cpu")


@pytest.fixture
def grouped_gemms(gpu):
    """For experts, which need cuBLAS 13.4 to 13.6."""
    from paddle_te.native import BackendUnavailable
    from paddle_te.ops.moe import get_moe_ops

    try:
        get_moe_ops("transformer_engine").check_experts()
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def poisoned(gpu, monkeypatch):
    """Every tensor that te's ops allocate is full of NaN until it is written."""
    from tests.poison import poison_allocations

    poison_allocations(monkeypatch)


@pytest.fixture(autouse=True)
def _families_with_experts(request):
    """Skip the case of a family with experts where `grouped_gemms` are missing."""
    case = getattr(request.node, "callspec", None)
    if case and case.params.get("family") in MIXTURES:
        request.getfixturevalue("grouped_gemms")
