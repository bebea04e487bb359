"""How little of an MLP is kept for backward."""

from __future__ import annotations

from typing import NamedTuple


class MLPRecompute(NamedTuple):
    """What backward computes again instead of keeping it.

    part: "mlp_act" the activation, "mlp" all from the norm to the activation, None nothing.
    chunk_tokens: with more tokens the GEMMs take so many at a time, and backward computes each chunk again; 0: never.
    fp8_input_store: the activation's input is kept in MXFP8, and backward computes what it computes again from that;
        with part "mlp" and in chunks nothing is kept.
    """

    part: str | None = None
    chunk_tokens: int = 0
    fp8_input_store: bool = False


NOTHING_AGAIN = MLPRecompute()
