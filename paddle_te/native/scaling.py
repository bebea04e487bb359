"""Write factors of fp8 tensors that no other kernel writes as needed (kernels/scaling.cu). Addresses are ints."""

from paddle_te.native.interface import Shim, Stream
from paddle_te.native.kernels import kernel

_BLOCK = 256


def reciprocals(te: Shim, stream: Stream, scale: int, scale_inv: int, n: int) -> None:
    """Write scale_inv[i, 0] = 1 / scale[i]: float32 [n, 4] and [n]."""
    function = kernel("reciprocals", "scaling.cu", stream.capability)
    te.launch(function, -(-n // _BLOCK), _BLOCK, 0, stream, scale, scale_inv, n)


def raise_amaxes(te: Shim, stream: Stream, first: int, first_amax: int, second: int, second_amax: int) -> None:
    """Raise each amax to its tensor's, where that is greater: float32 numbers."""
    function = kernel("raise_amaxes", "scaling.cu", stream.capability)
    te.launch(function, 1, 1, 0, stream, first, first_amax, second, second_amax)
