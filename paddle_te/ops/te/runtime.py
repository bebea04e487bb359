"""Paddle tensors as TE's library takes them: addresses, dtypes, the current stream and its scratch memory.

A layer makes some 40 tensors and 60 native calls in forward and backward, and the GPU waits for them. So this file
avoids each Paddle operation that a pointer, a kept shape or a kept dtype can replace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Protocol

import paddle
from paddle import Tensor

from paddle_te import device, native
from paddle_te.native import DType

DTYPES = {
    paddle.bfloat16: int(DType.BFLOAT16),
    paddle.float16: int(DType.FLOAT16),
    paddle.float32: int(DType.FLOAT32),
}
FLOAT32, INT32, INT64, BYTE = int(DType.FLOAT32), int(DType.INT32), int(DType.INT64), int(DType.BYTE)
WITH_BYTES = {**DTYPES, paddle.uint8: BYTE}  # fp8 weights are bytes to Paddle
HALF = {dtype: DTYPES[dtype] for dtype in (paddle.bfloat16, paddle.float16)}
view = paddle.base.core.eager.ops.view_shape  # Tensor.view likewise


class Memory(Protocol):
    """The facts about memory that TE's library needs, from a tensor or a `recording.Placeholder`."""

    @property
    def shape(self) -> list[int]: ...
    @property
    def dtype(self) -> Any: ...
    def data_ptr(self) -> int: ...


class Matrix:
    """Hold a row-major matrix on a tensor's memory: `native` for TE's functions, `memory` to keep it alive."""

    __slots__ = ("memory", "native", "shape")
    memory: Any  # a Placeholder where ops are recorded, else a Tensor
    split_accumulator, has_rows = False, True  # see quantized.Float8Matrix

    def __init__(self, rt: Runtime, memory: Memory, shape: tuple[int, int], code: int) -> None:
        self.memory, self.shape = memory, shape
        self.native = rt.tensor(memory.data_ptr(), shape, code)

    def rows(self, rt: Runtime, first: int, count: int) -> Matrix:
        """Make the Matrix of `count` rows from row `first` on; only of a Placeholder [..., cols]."""
        return Matrix(rt, self.memory.rows(first, count), (count, self.shape[1]), self.native.dtype)


# Native tensors that are kept, of all streams together: TE's pool has 20 MiB for its handles, about 19,900 of them.
KEPT_TENSORS = 2**13


@cache
def kept_tensors(tensor_class: Callable[..., Any]) -> Callable[..., Any]:
    """Put te.Tensor behind a cache of the last KEPT_TENSORS."""
    return lru_cache(KEPT_TENSORS)(tensor_class)


class Runtime:
    """Hold one stream of one device.

    te: the native module; stream: its Stream; place: where results are allocated.
    tensor: native tensors, by the arguments of te.Tensor. They own no memory, so that equal arguments make equal
    tensors, and a training's steps get the same addresses again and again: most were made before.
    allocate(shape, dtype, place): paddle.empty without its checks, in half the time.
    """

    allocate = staticmethod(paddle.base.core.eager.ops.empty)

    def __init__(self, raw_stream: int) -> None:
        self.te: Any = native.load()
        self.tensor = kept_tensors(self.te.Tensor)
        self.place = paddle.framework._current_expected_place()
        self.stream = self.te.Stream(raw_stream, lambda size: self.empty([size], paddle.uint8))
        self._scratch: Tensor | None = None
        self._scratch_size = 0

    def empty(self, shape: Sequence[int], dtype: Any) -> Tensor:
        """Make an uninitialised tensor."""
        return self.allocate(shape, dtype, self.place)  # type: ignore[arg-type]  # a tuple as well

    def scratch(self, size: int) -> Tensor | None:
        """Return memory of at least so many bytes, for calls that are made at once. Later ones get it again."""
        if size > self._scratch_size:
            self._scratch, self._scratch_size = self.empty([size], paddle.uint8), size
        return self._scratch

    def matrix(self, tensor: Memory, code: int) -> Matrix:
        """Make the Matrix [rows, cols] of a contiguous tensor [..., cols]; code: its dtype as in DTYPES."""
        *lead, cols = tensor.shape
        return Matrix(self, tensor, (math.prod(lead), cols), code)

    def new_matrix(self, shape: tuple[int, int], dtype: Any, code: int) -> Matrix:
        """Make an uninitialised Matrix; shape: (rows, cols)."""
        return Matrix(self, self.empty(list(shape), dtype), shape, code)

    def view(self, tensor: Memory, shape: tuple[int, ...], code: int) -> Any:
        """Make the native tensor of that shape, a tuple, on a contiguous tensor that others keep alive."""
        return self.tensor(tensor.data_ptr(), shape, code)


_runtimes: dict[int, Runtime] = {}


def current() -> Runtime:
    """Return the Runtime of Paddle's current stream."""
    raw = device.raw_stream()
    runtime = _runtimes.get(raw)
    if runtime is None:
        runtime = _runtimes[raw] = Runtime(raw)
    return runtime


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or a contiguous copy of a strided view."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def dtype_code(what: str, tensor: Memory, allowed: Mapping[Any, int] = HALF) -> int:
    """Return the tensor's dtype as TE counts them.

    Raises TypeError, naming the tensor, for one that TE's kernels lack.
    """
    code = allowed.get(tensor.dtype)
    if code is None:
        names = " or ".join(str(dtype).removeprefix("paddle.") for dtype in allowed)
        raise TypeError(f"backend transformer_engine: {what} is {tensor.dtype}; it must be {names}")
    return code


def check_tensor(what: str, tensor: Memory, shape: Iterable[int], dtype: Any) -> None:
    """Raise TypeError or ValueError, naming the tensor, where it is not of that dtype and shape.

    TE's kernels read memory as they are told, and would read another's.
    """
    dtype_code(what, tensor, {dtype: WITH_BYTES[dtype]})
    if list(tensor.shape) != list(shape):
        raise ValueError(f"backend transformer_engine: {what} is {list(tensor.shape)}; it must be {list(shape)}")


def needs_grad(*tensors: Tensor) -> bool:
    """Say whether a backward may follow this forward."""
    return paddle.is_grad_enabled() and not all([tensor.stop_gradient for tensor in tensors])
