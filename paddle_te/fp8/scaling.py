"""Describe how the tensors of a GEMM become fp8: a recipe's record of each, for backends to look up.

The records are part of what backends look their recorded calls up by in each call, hence no dataclasses: to hash and
compare these takes ten times as long.
"""

from collections.abc import Sequence
from typing import NamedTuple

from paddle_te.options import FP8_RECIPES

BLOCK = FP8_RECIPES["block"]  # numbers of a block, in a dimension in which it has more than one
MXFP8_BLOCK = 32  # numbers beside each other that share a power of 2 in MXFP8


class TensorScaling(NamedTuple):
    """One scale for the whole tensor.

    kind: where it comes from: "delayed": earlier steps; "current": the tensor at hand. dtype: "e4m3" or "e5m2".
    """

    kind: str
    dtype: str

    @property
    def multiple(self) -> int:
        """What divides the dimensions of the GEMM."""
        return FP8_RECIPES["delayed"]


class BlockScaling(NamedTuple):
    """A scale for each block of the tensor, from the amax of the block at hand.

    dtype: "e4m3" or "e5m2".
    block_scaling_dim: 1: blocks are 1 x 128 along the dimension that the GEMM sums over, so a GEMM that sums over the
    rows reads other fp8 numbers of a matrix than one that sums over the columns; 2: blocks are 128 x 128.
    power_2_scale: scales are rounded down to powers of 2. amax_epsilon: the least amax.
    """

    dtype: str
    block_scaling_dim: int
    power_2_scale: bool
    amax_epsilon: float

    @property
    def kind(self) -> str:
        """The word that TensorScaling has a field for."""
        return "block"

    @property
    def multiple(self) -> int:
        """What divides the dimensions of the GEMM."""
        return FP8_RECIPES["block"]


def check_block_sizes(name: str, shape: Sequence[int]) -> None:
    """Raise ValueError where the sizes of a weight are no multiples of a block's. shape: of the rank's part."""
    if any(size % BLOCK for size in shape):
        raise ValueError(
            f"fp8_recipe=block needs weights whose sizes {BLOCK} divides, and {name} is {list(shape)} on a rank; take "
            "another size or degree of tensor parallelism, or delayed or current scaling"
        )


class StoredScaling(NamedTuple):
    """The scaling of a weight which exists in fp8 only: its scales were made together with it.

    made_by: how: by a TensorScaling of kind "current", or by a BlockScaling. keeps_transpose: whether a backend whose
    backward reads a transposed copy of the weight keeps that copy.
    """

    made_by: TensorScaling | BlockScaling
    keeps_transpose: bool = False

    @property
    def kind(self) -> str:
        """The word that TensorScaling has a field for."""
        return "stored"

    @property
    def dtype(self) -> str:
        """The dtype, as a TensorScaling's."""
        return self.made_by.dtype

    @property
    def in_blocks(self) -> bool:
        """Whether each block has a scale. Such a weight is multiplied only with tensors that have block scaling."""
        return isinstance(self.made_by, BlockScaling)

    @property
    def words(self) -> str:
        """The words for the precision of such a weight. Other bytes of the same weight have other words."""
        if not isinstance(self.made_by, BlockScaling):
            return "fp8"
        of_scales = "of powers of 2" if self.made_by.power_2_scale else "of float32"
        least = f" and an amax of at least {self.made_by.amax_epsilon:g}" if self.made_by.amax_epsilon else ""
        return f"fp8 in blocks with scales {of_scales}{least}"


class GemmScalings(NamedTuple):
    """The scalings of the tensors of a GEMM y = x · weightᵀ."""

    input: TensorScaling | BlockScaling
    weight: TensorScaling | BlockScaling
    grad_output: TensorScaling | BlockScaling
