"""The fused weights of a decoder layer for PaddleNLP's tensor parallelism.

PaddleNLP asks a model class for a table {parameter name: action}; an action turns a whole weight into one rank's
share, or the list of all shares into the whole.
"""

from functools import partial

from paddle_te.configs.families import family_of
from paddle_te.models.dims import model_dims
from paddle_te.weights import layer_splits, te_layout


def layer_mappings(config, is_split):
    """{name: action} of every decoder layer's split weights, names without the family's prefix."""
    degree, rank = config.tensor_parallel_degree, config.tensor_parallel_rank
    splits = layer_splits(te_layout(family=family_of(config)), model_dims(config))
    return {
        f"layers.{layer}.{name}": partial(split.share, degree=degree, rank=rank) if is_split else split.whole
        for layer in range(config.num_hidden_layers)
        for name, split in splits.items()
    }
