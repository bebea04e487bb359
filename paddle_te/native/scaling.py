"""Factors of fp8 tensors that no other kernel writes as they are needed (kernels/scaling.cu). Addresses are ints."""

from paddle_te.native.kernels import kernel

_BLOCK = 256


def reciprocals(te, stream, scale, scale_inv, n):
    """scale_inv[i, 0] = 1 / scale[i]: float32 [n, 4] and [n]."""
    function = kernel("reciprocals", "scaling.cu", stream.capability)
    te.launch(function, -(-n // _BLOCK), _BLOCK, 0, stream, scale, scale_inv, n)


def raise_amaxes(te, stream, first, first_amax, second, second_amax):
    """Each amax becomes the greater of itself and its tensor's: float32 numbers."""
    function = kernel("raise_amaxes", "scaling.cu", stream.capability)
    te.launch(function, 1, 1, 0, stream, first, first_amax, second, second_amax)
