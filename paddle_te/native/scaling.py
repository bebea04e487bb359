"""Factors of fp8 tensors that no kernel of TE's writes (kernels/scaling.cu). Addresses are ints."""

from paddle_te.native.kernels import kernel

_BLOCK = 256


def reciprocals(te, stream, scale, scale_inv, n):
    """scale_inv[i, 0] = 1 / scale[i]: float32 [n, 4] and [n]."""
    function = kernel("reciprocals", "scaling.cu", stream.capability)
    te.launch(function, -(-n // _BLOCK), _BLOCK, 0, stream, scale, scale_inv, n)
