"""The settings of the MLP's Ops."""

from __future__ import annotations

from typing import NamedTuple

from paddle_te.ops.recompute import MLPRecompute
from paddle_te.ops.te.low_rank import LowRankSettings
from paddle_te.ops.te.norm import NormSettings


class MLPSettings(NamedTuple):
    """norm: its NormSettings.

    activation: its name. add_residual: x is added to the output, and else returned behind it. chunk_rows: of x in a
    chunk, None for all tokens at once. fc1, fc2: of the products beside the GEMMs, None where there is none.
    """

    norm: NormSettings
    activation: str
    add_residual: bool
    recompute: MLPRecompute
    chunk_rows: int | None = None
    fc1: LowRankSettings | None = None
    fc2: LowRankSettings | None = None

    @property
    def stores_input(self) -> bool:
        """Whether all tokens' input of the activation is kept in MXFP8."""
        return self.recompute.fp8_input_store and self.recompute.part != "mlp"
