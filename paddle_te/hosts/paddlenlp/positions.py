"""A model's positions: how many there are, and which of them tokens get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import paddle
from paddle import Tensor

from paddle_te.configs.families import family_of
from paddle_te.host import HostConfig
from paddle_te.hosts.paddlenlp.decoder import FROM_ZERO

# [b, s]; None or FROM_ZERO for tokens that follow those of the cache
Positions = Tensor | Literal[False] | None


def check_positions(config: HostConfig, length: int) -> None:
    """Raise ValueError for sequences longer than the positions that a model has learned."""
    if family_of(config).learned_positions and length > config.max_position_embeddings:
        raise ValueError(
            f"sequences of {length} tokens: the model has learned {config.max_position_embeddings} positions "
            "(max_position_embeddings); give shorter ones"
        )


def positions_of(config: HostConfig, shape: Sequence[int], position_ids: Positions, past: int = 0) -> Tensor:
    """Return the positions [b, s] of tokens of that shape: position_ids, or those that follow `past` others.

    Raises ValueError as `check_positions`.
    """
    check_positions(config, past + shape[1])
    if position_ids is not None and position_ids is not FROM_ZERO:
        return position_ids
    return paddle.arange(past, past + shape[1], dtype="int64").unsqueeze(0).expand(shape)
