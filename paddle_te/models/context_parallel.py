"""Which ranks share a model's sequences, by PaddleNLP's flags.

`flags` is a model's configuration or the Trainer's arguments.
"""

from __future__ import annotations

from typing import Any

from paddle_te.distributed import ContextParallel


def cp_comm_type(flags: Any) -> str | None:
    """Return TransformerLayer's cp_comm_type; None where each rank has whole sequences."""
    if flags.sep_parallel_degree > 1:
        return "a2a"
    return "p2p" if flags.context_parallel_degree > 1 else None


def context_parallel(flags: Any) -> ContextParallel | None:
    """Return the `distributed.ContextParallel` of this rank; None where it has whole sequences."""
    comm_type = cp_comm_type(flags)
    return None if comm_type is None else ContextParallel.from_fleet(comm_type)


def sequence_ranks(flags: Any) -> int:
    """Say how many ranks share a sequence."""
    return max(flags.sep_parallel_degree, flags.context_parallel_degree, 1)


def rank_sequence_length(config: Any) -> int:
    """Say how many tokens of a sequence of config.seq_length tokens a rank has."""
    return config.seq_length // sequence_ranks(config)
