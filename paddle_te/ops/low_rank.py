"""The low-rank product of a linear operation."""

from __future__ import annotations

from typing import NamedTuple

from paddle import Tensor


class LowRankUpdate(NamedTuple):
    """scaling · x · A · B, which LoRA (Hu et al., 2021) adds to the parts of a linear operation's output.

    a, b: of each part A [in_features, r] and B [r, its size], tensors of this rank with one r, or None for a part that
    gets nothing. sizes: of the parts, which lie side by side in the output. x: in the place of the operation's own,
    with dropout; None where that is to be taken.

    With tensor parallelism A is whole and B split in a column-parallel operation, and the other way round in a
    row-parallel one: what travels between the ranks has as many columns as the A together.
    """

    a: tuple[Tensor | None, ...]
    b: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]
    scaling: float
    x: Tensor | None = None
