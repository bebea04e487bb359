"""The fused weights of a decoder layer for PaddleNLP's tensor parallelism.

PaddleNLP asks a model class for a table {parameter name: action}; an action turns a whole weight into one rank's
share, or the list of all shares into the whole.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from paddle_te.configs.families import family_of, is_tied
from paddle_te.configs.spec import spec_of
from paddle_te.host import HostConfig
from paddle_te.weights import Dims, Split, layer_splits, te_layout

Action = Callable[..., Any]  # as PaddleNLP calls it, with a tensor or a list of shares


def _action(split: Split, config: HostConfig, is_split: bool) -> Action:
    degree, rank = config.tensor_parallel_degree, config.tensor_parallel_rank
    return partial(split.share, degree=degree, rank=rank) if is_split else split.whole


def mappings_of_tied_head(config: HostConfig, is_split: bool) -> dict[str, Action]:
    """Return {name: action} of a head that is the embedding, which ranks share as they share that.

    PaddleNLP's GPT leaves it out. {} for another head, and for a vocabulary that the ranks cannot share.
    """
    if not is_tied(config) or config.vocab_size % config.tensor_parallel_degree:
        return {}
    return {"lm_head.weight": _action(Split(0, (config.vocab_size,)), config, is_split)}


def vocabulary_mappings(config: HostConfig, is_split: bool) -> dict[str, Action]:
    """Return {name: action} of our embedding and head; {} for a vocabulary that the ranks cannot share."""
    if config.vocab_size % config.tensor_parallel_degree:
        return {}
    rows = Split(0, (config.vocab_size,))
    head = rows if is_tied(config) else Split(1, (config.vocab_size,))
    splits = {"embed_tokens.weight": rows, "lm_head.weight": head}
    return {name: _action(split, config, is_split) for name, split in splits.items()}


def layer_mappings(config: HostConfig, is_split: bool) -> dict[str, Action]:
    """Return {name: action} of every decoder layer's split weights, names without the family's prefix."""
    layout, dims = te_layout(family=family_of(config)), Dims(spec_of(config))
    return {
        f"layers.{layer}.{name}": _action(split, config, is_split)
        for layer in range(config.num_hidden_layers)
        for name, split in layer_splits(layout, dims, layer).items()
    }
