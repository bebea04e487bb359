"""The low-rank product of a linear operation."""

from __future__ import annotations

from typing import NamedTuple

from paddle import Tensor


class LowRankUpdate(NamedTuple):
    """scaling · x · A · B, which LoRA (Hu et al., 2021) adds to the parts of a linear operation's output.

    a, b: for each part A [in_features, r] and B [r, its size] of this rank, with the same r, or None for a part
        without LoRA.
    sizes: the columns of the parts, which lie side by side in the output.
    x: the operation's input after dropout; None: the operation's own input.

    With tensor parallelism a column-parallel operation has A whole and B split, a row-parallel one A split and B whole.
    So ranks exchange only as many columns as all A have together.
    """

    a: tuple[Tensor | None, ...]
    b: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]
    scaling: float
    x: Tensor | None = None
