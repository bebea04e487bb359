"""The activation's input in MXFP8 between forward and backward, in a little more than half of the memory."""

from __future__ import annotations

import math

import paddle

from paddle_te import native
from paddle_te.native import mxfp8
from paddle_te.ops.te.runtime import Matrix, Runtime


class StoredInput:
    """Stand for a Matrix of a shape, dtype and code: `memory`, a tensor of bytes, which are not written yet."""

    __slots__ = ("memory", "shape", "dtype", "code")

    def __init__(self, rt: Runtime, matrix: Matrix, code: int) -> None:
        """Allocate for a Matrix. Raises BackendUnavailable where there is no fp8."""
        native.load(fp8=True)
        self.shape, self.dtype, self.code = matrix.shape, matrix.memory.dtype, code
        self.memory = rt.empty([mxfp8.stored_bytes(math.prod(matrix.shape))], paddle.uint8)

    def fill(self, rt: Runtime, matrix: Matrix) -> None:
        """Store a Matrix."""
        addresses = matrix.memory.data_ptr(), self.memory.data_ptr()
        mxfp8.store(rt.te, rt.stream, *addresses, math.prod(self.shape), self.code)

    def restored(self, rt: Runtime) -> Matrix:
        """Return a new Matrix of the numbers."""
        matrix = rt.new_matrix(self.shape, self.dtype, self.code)
        addresses = self.memory.data_ptr(), matrix.memory.data_ptr()
        mxfp8.restore(rt.te, rt.stream, *addresses, math.prod(self.shape), self.code)
        return matrix
