"""Numbers in MXFP8 (kernels/mxfp8.cuh): what is kept between forward and backward in half of the memory.

Of each BLOCK numbers beside each other an e4m3 byte, and for all of them one byte, the exponent of their power of 2.
Addresses are ints, of 16 bytes; x: bfloat16 or float16.
"""

from paddle_te.native.kernels import ELEMENTS, kernel

BLOCK = 32
_THREADS = 256


def stored_bytes(n):
    """That n numbers take, a multiple of BLOCK: their bytes, and behind these the exponents."""
    return n + n // BLOCK


def store(te, stream, x, stored, n, dtype):
    """Writes what stands for n numbers of a DType. A block where one is not finite is restored as such numbers."""
    _launch("store", te, stream, x, stored, n, dtype)


def restore(te, stream, stored, x, n, dtype):
    """Writes the numbers that were stored, rounded as MXFP8 has them."""
    _launch("restore", te, stream, stored, x, n, dtype)


def _launch(name, te, stream, source, target, n, dtype):
    element, vector = ELEMENTS[dtype]
    function = kernel(f"mxfp8_{name}", "mxfp8.cu", stream.capability, ELEMENT=element)
    te.launch(function, -(-n // (vector * _THREADS)), _THREADS, 0, stream, source, target, n)
