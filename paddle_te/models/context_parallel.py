"""Which ranks share a model's sequences, by PaddleNLP's flags.

`flags` is a model's configuration or the Trainer's arguments.
"""

from paddle_te.distributed import ContextParallel


def cp_comm_type(flags):
    """TransformerLayer's cp_comm_type; None where each rank has whole sequences."""
    if flags.sep_parallel_degree > 1:
        return "a2a"
    return "p2p" if flags.context_parallel_degree > 1 else None


def context_parallel(flags):
    """The `distributed.ContextParallel` of this rank; None where it has whole sequences."""
    comm_type = cp_comm_type(flags)
    return comm_type and ContextParallel.from_fleet(comm_type)


def sequence_ranks(flags):
    """How many ranks share a sequence."""
    return max(flags.sep_parallel_degree, flags.context_parallel_degree, 1)


def rank_sequence_length(config):
    """How many tokens of a sequence of config.seq_length tokens a rank has."""
    return config.seq_length // sequence_ranks(config)
