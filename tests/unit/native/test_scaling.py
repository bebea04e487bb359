"""The kernel of scaling.cu: its own source run on the CPU, and how it is launched."""

import ctypes
import subprocess

import numpy as np
import pytest

from paddle_te.native import scaling
from tests.unit.native.cuda_on_cpu import FOLDER, HARNESS

LAUNCH = """
#define LAUNCH(name) \\
  extern "C" void launch_##name(unsigned grid, unsigned block, const long long* a) { run(name, grid, block, a); }
LAUNCH(reciprocals)
LAUNCH(raise_amaxes)
"""


class OnCPU:
    """The extension and its stream."""

    capability = (9, 0)

    def __init__(self, library):
        self.library = library

    def launch(self, kernel, grid, block, shared, stream, *arguments):
        name, file, capability = kernel
        assert (file, capability, shared, stream) == ("scaling.cu", (9, 0), 0, self)
        getattr(self.library, f"launch_{name}")(grid, block, (ctypes.c_longlong * len(arguments))(*arguments))


@pytest.fixture(scope="module")
def library(gxx, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaling")
    (folder / "kernel.cpp").write_text(HARNESS.replace("@KERNEL@", (FOLDER / "scaling.cu").read_text()) + LAUNCH)
    command = [gxx, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, folder / "kernel.cpp", "-o", folder / "libkernel.so"], check=True)
    return ctypes.CDLL(str(folder / "libkernel.so"))


@pytest.fixture
def te(library, monkeypatch):
    monkeypatch.setattr(scaling, "kernel", lambda *key: key)
    return OnCPU(library)


@pytest.mark.parametrize("n", [1, 255, 256, 700])
def test_reciprocals(te, n):
    """Correctly rounded, and nothing between them or behind them is touched."""
    scale = np.exp2(np.random.uniform(-30, 30, n)).astype("float32")
    inverse = np.full([n + 1, 4], np.nan, "float32")
    scaling.reciprocals(te, te, scale.ctypes.data, inverse.ctypes.data, n)
    np.testing.assert_array_equal(inverse[:n, 0], np.float32(1) / scale)
    assert np.isnan(inverse[:n, 1:]).all() and np.isnan(inverse[n]).all()


def test_raise_amaxes(te):
    first, second, amaxes = np.float32([3]), np.float32([4]), np.float32([5, 1, 7])
    at = amaxes.ctypes.data
    scaling.raise_amaxes(te, te, first.ctypes.data, at, second.ctypes.data, at + 4)
    assert amaxes.tolist() == [5, 4, 7]
