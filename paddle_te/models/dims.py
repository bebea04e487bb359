"""The sizes of a model, from its configuration."""

from paddle_te.weights import Dims


def model_dims(config):
    """The Dims of a configuration in PaddleNLP's words, as `models.decoder` reads it."""
    return Dims(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
    )
