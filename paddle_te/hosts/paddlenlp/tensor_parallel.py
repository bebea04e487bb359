"""The fused weights of a decoder layer for PaddleNLP's tensor parallelism.

PaddleNLP asks a model class for a table {parameter name: action}; an action turns a whole weight into one rank's
share, or the list of all shares into the whole.
"""

from functools import partial

from paddle_te.configs.families import family_of
from paddle_te.weights import Dims, layer_splits, te_layout


def model_dims(config):
    """The Dims of a model's configuration."""
    return Dims(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
    )


def layer_mappings(config, is_split):
    """{name: action} of every decoder layer's split weights, names without the family's prefix."""
    degree, rank = config.tensor_parallel_degree, config.tensor_parallel_rank
    splits = layer_splits(te_layout(family=family_of(config)), model_dims(config))
    return {
        f"layers.{layer}.{name}": partial(split.share, degree=degree, rank=rank) if is_split else split.whole
        for layer in range(config.num_hidden_layers)
        for name, split in splits.items()
    }
