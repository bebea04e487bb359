"""Weights that exist in fp8 only: a frozen base, beside which no copy in higher precision is kept."""

import paddle

from .recipe import FP8_MAX


class StoredWeight:
    """How such a weight is read: e4m3 bytes under one scale for the whole tensor. It has the place of the weight's
    Quantizer, but nothing is quantized in a step: backends multiply the bytes by scale_inv.

    The bytes are the layer's parameter, uint8 of the weight's shape. A backend's `quantize_weight` writes both.
    scale_inv: float32 [1] on the present device, at a 16-byte aligned address.
    """

    kind, dtype, fp8_max = "stored", "e4m3", FP8_MAX["e4m3"]
    scale_ptr = amax_ptr = 0  # of a Quantizer's addresses it has one only

    def __init__(self):
        self.scale_inv = paddle.ones([1], "float32")
        if self.scale_inv_ptr % 16:
            raise RuntimeError("scale_inv is not 16-byte aligned: this device's allocator cannot serve fp8 GEMMs")

    @property
    def scale_inv_ptr(self):
        """The address of scale_inv."""
        return self.scale_inv.data_ptr()

    def move_to(self, block, column):
        """Its scale is updated in no step: the column of a delayed scaling's block stays empty."""
