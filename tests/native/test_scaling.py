"""The kernel of scaling.cu: its own source run on the CPU, and how it is launched."""

import ctypes
import subprocess

import numpy as np
import pytest

from paddle_te.native import scaling
from tests.native.cuda_on_cpu import FOLDER, HARNESS

LAUNCH = """
extern "C" void launch(unsigned grid, unsigned block, const long long* a) { run(reciprocals, grid, block, a); }
"""


@pytest.fixture(scope="module")
def launch(gxx, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaling")
    (folder / "kernel.cpp").write_text(HARNESS.replace("@KERNEL@", (FOLDER / "scaling.cu").read_text()) + LAUNCH)
    command = [gxx, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, folder / "kernel.cpp", "-o", folder / "libkernel.so"], check=True)
    return ctypes.CDLL(str(folder / "libkernel.so")).launch


@pytest.mark.parametrize("n", [1, 255, 256, 700])
def test_reciprocals(monkeypatch, launch, n):
    """Correctly rounded, and nothing between them or behind them is touched."""

    class OnCPU:
        capability = (9, 0)

        def launch(self, kernel, grid, block, shared, stream, *arguments):
            assert kernel == ("reciprocals", "scaling.cu", (9, 0)) and shared == 0 and stream is self
            launch(grid, block, (ctypes.c_longlong * len(arguments))(*arguments))

    monkeypatch.setattr(scaling, "kernel", lambda *key: key)
    te = OnCPU()
    scale = np.exp2(np.random.uniform(-30, 30, n)).astype("float32")
    inverse = np.full([n + 1, 4], np.nan, "float32")
    scaling.reciprocals(te, te, scale.ctypes.data, inverse.ctypes.data, n)
    np.testing.assert_array_equal(inverse[:n, 0], np.float32(1) / scale)
    assert np.isnan(inverse[:n, 1:]).all() and np.isnan(inverse[n]).all()
