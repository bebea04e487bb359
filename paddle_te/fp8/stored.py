"""Weights that exist in fp8 only: a frozen base, of which no copy in higher precision is kept."""

import paddle

from .recipe import FP8_MAX
from .scaling import TensorScaling


class StoredWeight:
    """How such a weight is read: e4m3 numbers, all multiplied by the same scale_inv.

    A StoredWeight takes the place of the weight's Quantizer in a Gemm, although no step quantizes anything for it. The
    bytes of the numbers are the layer's parameter, uint8 of the weight's shape. A backend's `quantize_weight` writes
    the bytes and scale_inv.
    scale_inv: float32 [1] on the present device, at a 16-byte aligned address.
    """

    scaling = TensorScaling("stored", "e4m3")
    kind, dtype, fp8_max = *scaling, FP8_MAX[scaling.dtype]
    scale_ptr = amax_ptr = 0  # a Quantizer has three addresses, a StoredWeight scale_inv's alone

    def __init__(self):
        self.scale_inv = paddle.ones([1], "float32")
        if self.scale_inv_ptr % 16:
            raise RuntimeError("scale_inv is not 16-byte aligned: this device's allocator cannot serve fp8 GEMMs")

    @property
    def scale_inv_ptr(self):
        """The address of scale_inv."""
        return self.scale_inv.data_ptr()

    def move_to(self, block, column):
        """Does nothing: no step updates this scale, so its column in a block of delayed scaling stays empty."""
