"""fp8 matrices: data, the transposed copy that Hopper's fp8 GEMM reads in backward, and scaling factors."""

import paddle

from paddle_te.native import DType
from paddle_te.ops.te import runtime
from paddle_te.ops.te.runtime import FLOAT32

FP8 = {"e4m3": int(DType.FLOAT8_E4M3), "e5m2": int(DType.FLOAT8_E5M2)}


class Float8Matrix:
    """A matrix (rows, cols) in fp8.

    data: uint8 [rows, cols]; columnwise: uint8 [cols, rows], its transpose. Either may be None.
    scale_inv: device address of 1 / scale. native: what TE's functions take.
    """

    __slots__ = ("shape", "quantizer", "data", "columnwise", "native", "scale_inv", "_factors")

    def __init__(self, rt, shape, quantizer, columnwise=True):
        self.shape, self.quantizer = shape, quantizer
        rows, cols = shape
        self.data = rt.empty([rows, cols], paddle.uint8)
        self.columnwise = rt.empty([cols, rows], paddle.uint8) if columnwise else None
        self._factors = None
        scale, amax, self.scale_inv = quantizer.scale_ptr, quantizer.amax_ptr, quantizer.scale_inv_ptr
        if quantizer.kind == "current":  # its own factors: amax, scale, two unused, scale_inv (16-byte aligned)
            self._factors = rt.empty([8], paddle.float32)
            amax = self._factors.data_ptr()
            scale, self.scale_inv = amax + 4, amax + 16
        self._bind(rt, scale, amax)

    def _bind(self, rt, scale=0, amax=0):
        data = 0 if self.data is None else self.data.data_ptr()
        columnwise = 0 if self.columnwise is None else self.columnwise.data_ptr()
        self.native = rt.tensor(data, self.shape, FP8[self.quantizer.dtype], columnwise, scale, amax, self.scale_inv)

    def fill(self, rt, source):
        """Quantizes the native tensor `source`."""
        if self.quantizer.kind == "current":
            rt.te.compute_amax(source, self.native, rt.stream)
            rt.te.compute_scale_from_amax(self.native, rt.stream)
        rt.te.quantize(source, self.native, rt.stream)
        return self

    def drop_data(self, rt):
        """Frees the rowwise data: backward reads the transposed copy only."""
        self.data = None
        self._bind(rt)

    def gathered(self, rt, tp, rowwise=True):
        """The rows of all ranks of `tp`, with their transpose. The ranks' scales must be the same."""
        out = Float8Matrix.__new__(Float8Matrix)
        rows, cols = self.shape[0] * tp.size, self.shape[1]
        out.shape, out.quantizer, out.scale_inv, out._factors = (
            (rows, cols),
            self.quantizer,
            self.scale_inv,
            self._factors,
        )
        out.data = tp.all_gather(self.data)
        out.columnwise = rt.empty([cols, rows], paddle.uint8)
        code = FP8[self.quantizer.dtype]
        source = rt.tensor(out.data.data_ptr(), (rows, cols), code)
        rt.te.transpose(source, rt.tensor(out.columnwise.data_ptr(), (cols, rows), code), rt.stream)
        if not rowwise:
            out.data = None
        out._bind(rt)
        return out


def quantize(rt, source, quantizer, columnwise=True):
    """A Float8Matrix of a Matrix."""
    return Float8Matrix(rt, source.shape, quantizer, columnwise).fill(rt, source.native)


def quantized_weight(rt, weight, code, quantizers):
    """The weight in fp8: the copy kept by an earlier micro-batch, or a new one."""
    if not quantizers.update_weight:
        return quantizers.cached_weight
    result = quantize(rt, rt.matrix(weight, code), quantizers.weight)
    quantizers.cache_weight(result)
    return result


def amax_and_scale_update(history, scale, fp8_max, margin, amax_compute_algo):
    """Delayed scaling's update of all scales in one kernel, in place; what `fp8.register_backend` asks for."""
    rt = runtime.current()
    dtype = FP8["e4m3" if fp8_max == 448 else "e5m2"]
    history, scale = rt.matrix(history, FLOAT32).native, rt.vector(scale, scale.shape[0], FLOAT32)
    rt.te.amax_and_scale_update(history, scale, amax_compute_algo, dtype, margin, rt.stream)
