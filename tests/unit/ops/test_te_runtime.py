"""Native tensors that are found again, on the emulated library."""

import pytest

from paddle_te.ops.te import runtime
from tests import emulated_te


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)


def test_equal_arguments_give_the_same_native_tensor():
    rt = runtime.Runtime(0)
    first = rt.tensor(4096, (2, 16), 7, 8192)
    assert rt.tensor(4096, (2, 16), 7, 8192) is first
    others = (4097, (2, 16), 7, 8192), (4096, (16, 2), 7, 8192), (4096, (2, 16), 8, 8192), (4096, (2, 16), 7)
    assert all(rt.tensor(*arguments) is not first for arguments in others)


def test_kept_tensors_of_all_streams_are_bounded():
    """Those of TE's pool are one process's; more would be refused."""
    first, second = runtime.Runtime(1), runtime.Runtime(2)
    for i in range(runtime.KEPT_TENSORS):
        first.tensor(64 * i, (16,), 4)
        second.tensor(64 * i + 32, (16,), 4)
    assert first.tensor.cache_info().currsize == second.tensor.cache_info().currsize == runtime.KEPT_TENSORS
    assert first.tensor is second.tensor and runtime.KEPT_TENSORS < 19_900 // 2
