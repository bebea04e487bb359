"""What kernels that cast to fp8 (kernels/cast_tile.cuh) write to."""

import ml_dtypes
import numpy as np

from paddle_te.native import DType, casts
from tests.unit.native.cuda_on_cpu import address, aligned

FLOAT8 = {
    DType.FLOAT8_E4M3: (ml_dtypes.float8_e4m3fn, 448),
    DType.FLOAT8_E5M2: (ml_dtypes.float8_e5m2, 57344),
}


class Output:
    """An fp8 matrix with its transpose and factors, poisoned, at addresses of 16 bytes."""

    def __init__(self, shape, float8, scale):
        rows, cols = shape
        self.dtype, self.greatest = FLOAT8[float8]
        self.data, self.transposed = aligned((rows, cols), np.uint8), aligned((cols, rows), np.uint8)
        self.data[:], self.transposed[:] = 0x55, 0x55
        self.scale, self.amax, self.scale_inv = (np.array([x], np.float32) for x in (scale, 0, np.nan))
        arrays = self.data, self.transposed, self.scale, self.amax, self.scale_inv
        self.target = casts.CastTarget(*map(address, arrays))

    def bits(self, values):
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.clip(values * self.scale, -self.greatest, self.greatest)
        return scaled.astype(self.dtype).view(np.uint8)
