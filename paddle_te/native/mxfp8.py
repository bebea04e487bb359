"""Store numbers in MXFP8 (kernels/mxfp8.cuh), to keep them between forward and backward in half of the memory.

Each number takes an e4m3 byte, and each BLOCK beside each other one byte more, the exponent of their power of 2.
Addresses are ints, of 16 bytes; x: bfloat16 or float16.
"""

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import ELEMENTS, kernel

BLOCK = 32
_THREADS = 256


def stored_bytes(n: int) -> int:
    """Return the bytes that n numbers take, a multiple of BLOCK: their bytes, and behind these the exponents."""
    return n + n // BLOCK


def store(te: Shim, stream: Stream, x: int, stored: int, n: int, dtype: int) -> None:
    """Store n numbers of a DType. A block with a number that is not finite is restored as such numbers."""
    _launch("store", te, stream, x, stored, n, dtype)


def restore(te: Shim, stream: Stream, stored: int, x: int, n: int, dtype: int) -> None:
    """Write the numbers that were stored, rounded as MXFP8 has them."""
    _launch("restore", te, stream, stored, x, n, dtype)


def _launch(name: str, te: Shim, stream: Stream, source: int, target: int, n: int, dtype: int) -> None:
    element, vector = ELEMENTS[dtype]
    function = kernel(f"mxfp8_{name}", "mxfp8.cu", stream.capability, ELEMENT=element)
    te.launch(function, -(-n // (vector * _THREADS)), _THREADS, 0, stream, source, target, n)
