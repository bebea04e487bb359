"""Add two tensors that no other kernel adds in passing (kernels/addition.cu). Addresses are ints, of 16 bytes."""

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, kernel

_BLOCK = 256


def add_to(te: Shim, stream: Stream, out: int, other: int, n: int, dtype: int) -> None:
    """Add n numbers of a DType: out += other, rounded once."""
    name, vector = ELEMENTS[dtype]
    function = kernel(f"add_to_{name}", "addition.cu", stream.capability)
    te.launch(function, -(-(n // vector + 1) // _BLOCK), _BLOCK, 0, stream, out, other, n)
