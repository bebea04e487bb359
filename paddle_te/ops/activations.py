"""The activations between an MLP's two GEMMs, under Transformer Engine's names."""

from typing import NamedTuple

import paddle
from paddle import Tensor

# How wide fc1's output is, in widths of the activation's: gated ones have a gate, which is activated, and beside it
# what the gate multiplies (Shazeer, 2020). gelu is its tanh form (Hendrycks and Gimpel, 2016).
FC1_WIDTHS = {"swiglu": 2, "geglu": 2, "gelu": 1, "relu": 1}
EXPERTS_FC1_WIDTHS = FC1_WIDTHS | {"clamped_swiglu": 2}  # which experts may have, too


class Clamp(NamedTuple):
    """The numbers of clamped_swiglu, g · sigmoid(alpha · g) · (u + offset).

    g is the gate, at most limit, and u what it multiplies, between -limit and limit. The numbers are Transformer
    Engine's defaults, and gpt-oss's.
    """

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0


CLAMP = Clamp()


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap · tanh(x / cap), whose magnitudes are below cap (Bello et al., 2016, arXiv 1611.09940); x for 0."""
    return cap * paddle.tanh(x / cap) if cap else x
