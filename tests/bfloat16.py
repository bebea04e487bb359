"""bfloat16 numbers in NumPy's float32."""

import numpy as np


def truncated(values):
    """The float32 array with numbers that bfloat16 holds: without their lower 16 bits."""
    return (values.view("uint32") & 0xFFFF0000).view("float32")


def rounded(values):
    """The float32 array, finite, with each number's nearest of bfloat16, of two as near the even one."""
    bits = values.view("uint32")
    return truncated((bits + 0x7FFF + (bits >> np.uint32(16) & 1)).view("float32"))
