"""Kernels that cast to fp8 (kernels/cast_tile.cuh) on the CPU, and what they write to."""

import functools

import ml_dtypes
import numpy as np

from paddle_te.native import DType, casts, statistics
from tests.unit.native.cuda_on_cpu import OnCPU

FLOAT8 = {
    DType.FLOAT8_E4M3: (ml_dtypes.float8_e4m3fn, 448),
    DType.FLOAT8_E5M2: (ml_dtypes.float8_e5m2, 57344),
}
NUMPY = {DType.FLOAT32: np.float32, DType.BFLOAT16: ml_dtypes.bfloat16}


class CastsOnCPU:
    """Stands for the extension: launches on the CPU what the wrappers ask for, compiled once for each set of macros."""

    capability = (9, 0)

    def __init__(self, gxx, new_folder):
        self._compiled = functools.cache(lambda file, defines: OnCPU(gxx, new_folder("casts"), file, **dict(defines)))

    def install(self, monkeypatch):
        for module in (casts, statistics):
            monkeypatch.setattr(module, "kernel", lambda *key, **defines: (*key, defines))

    def launch(self, kernel, grid, block, shared, stream, *arguments):
        name, file, capability, defines = kernel
        assert name == defines["NAME"]
        on_cpu = self._compiled(file, tuple(defines.items()))
        on_cpu.launch(("NAME", file, capability), grid, block, shared, on_cpu, *arguments)


class Output:
    """An fp8 matrix with its transpose and factors, poisoned, at addresses of 16 bytes."""

    def __init__(self, shape, float8, scale):
        rows, cols = shape
        self.dtype, self.greatest = FLOAT8[float8]
        self.data, self.transposed = aligned((rows, cols), np.uint8), aligned((cols, rows), np.uint8)
        self.data[:], self.transposed[:] = 0x55, 0x55
        self.scale, self.amax, self.scale_inv = (np.array([x], np.float32) for x in (scale, 0, np.nan))
        arrays = self.data, self.transposed, self.scale, self.amax, self.scale_inv
        self.target = casts.CastTarget(*(array.ctypes.data for array in arrays))

    def bits(self, values):
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.clip(values * self.scale, -self.greatest, self.greatest)
        return scaled.astype(self.dtype).view(np.uint8)


def aligned(shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 16, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + size].view(dtype).reshape(shape)
