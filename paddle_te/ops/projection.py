"""A GEMM of a layer."""

from __future__ import annotations

from typing import NamedTuple

from paddle import Tensor

from paddle_te.fp8 import GemmQuantizers
from paddle_te.ops.low_rank import LowRankUpdate
from paddle_te.options.layers import FuseWgrad


class Projection(NamedTuple):
    """x · weightᵀ (+ bias) (+ low_rank's product).

    weight: [out, in]; one that exists in fp8 only is uint8, and its quantizers.weight a `fp8.StoredWeight`.
    bias: [out of this rank]; of a row-parallel GEMM [out], and added once to the sum over the ranks. Then each rank
        gets the bias's whole gradient, under sequence parallelism too.
    quantizers: what `fp8.ModuleScaling.begin_forward` returned for the GEMM; None: it is in the activations' own
        precision.
    fuse_wgrad_accumulation: where the GEMM adds the weight's gradient, a FuseWgrad.
    """

    weight: Tensor
    bias: Tensor | None = None
    quantizers: GemmQuantizers | None = None
    fuse_wgrad_accumulation: FuseWgrad = False
    low_rank: LowRankUpdate | None = None
