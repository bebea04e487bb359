"""How the tensors of a GEMM are scaled when they become fp8: what a recipe says of each, for backends to look up."""

from typing import NamedTuple

from paddle_te.options import FP8_RECIPES

BLOCK = FP8_RECIPES["block"]  # numbers of a block, in a dimension in which it has more than one


class TensorScaling(NamedTuple):
    """One scale for the whole tensor.

    kind: where it comes from: "delayed": earlier steps; "current": the tensor at hand; "stored": it was made with the
    tensor, which exists in fp8 only. dtype: "e4m3" or "e5m2".
    """

    kind: str
    dtype: str

    multiple = FP8_RECIPES["delayed"]  # what divides the dimensions of the GEMM


class BlockScaling(NamedTuple):
    """A scale for each block of the tensor, from the amax of the block at hand.

    dtype: "e4m3" or "e5m2".
    block_scaling_dim: 1: blocks are 1 x 128 along the dimension that the GEMM sums over, so that of a matrix [rows,
    cols] the numbers are others where a GEMM sums over the rows; 2: blocks are 128 x 128.
    power_2_scale: scales are rounded down to powers of 2. amax_epsilon: the least amax.
    """

    dtype: str
    block_scaling_dim: int
    power_2_scale: bool
    amax_epsilon: float

    kind = "block"
    multiple = FP8_RECIPES[kind]


class GemmScalings(NamedTuple):
    """Those of the tensors of a GEMM y = x · weightᵀ."""

    input: TensorScaling | BlockScaling
    weight: TensorScaling | BlockScaling
    grad_output: TensorScaling | BlockScaling
