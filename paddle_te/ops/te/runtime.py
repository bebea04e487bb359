"""Paddle tensors as TE's library takes them: addresses, dtypes, the current stream and its scratch memory."""

import paddle

from paddle_te import device, native
from paddle_te.native import DType

DTYPES = {
    paddle.bfloat16: int(DType.BFLOAT16),
    paddle.float16: int(DType.FLOAT16),
    paddle.float32: int(DType.FLOAT32),
    paddle.uint8: int(DType.BYTE),
}
HALF = (paddle.bfloat16, paddle.float16)


class Runtime:
    """One stream of one device.

    te: the native module; stream: its Stream; place: where results are allocated.
    """

    def __init__(self, raw_stream):
        self.te = native.load()
        self.place = paddle.framework._current_expected_place()
        self.stream = self.te.Stream(raw_stream, lambda size: self.empty([size], paddle.uint8))

    def empty(self, shape, dtype):
        """An uninitialised tensor. Half the cost of paddle.empty, which a layer would call 40 times."""
        return paddle._C_ops.empty(shape, dtype, self.place)

    def view(self, tensor, shape=None):
        """The native Tensor on a contiguous Paddle tensor's memory, of another shape (tuple) if given."""
        return self.te.Tensor(tensor.data_ptr(), shape or tuple(tensor.shape), DTYPES[tensor.dtype])


_runtimes = {}


def current():
    """The Runtime of Paddle's current stream."""
    raw = device.raw_stream()
    runtime = _runtimes.get(raw)
    if runtime is None:
        runtime = _runtimes[raw] = Runtime(raw)
    return runtime


def dense(tensor):
    """The tensor itself, or a contiguous copy of a strided view."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def check_dtype(what, tensor, allowed=HALF):
    """Raises TypeError, naming the tensor, for a dtype that TE's kernels do not take."""
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("paddle.") for dtype in allowed)
        raise TypeError(f"backend transformer_engine: {what} is {tensor.dtype}; it must be {names}")


def needs_grad(*tensors):
    """Whether a backward may follow this forward."""
    return paddle.is_grad_enabled() and not all(tensor.stop_gradient for tensor in tensors)
