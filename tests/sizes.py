"""Sizes of the models that tests make, in the words of config.json."""

# A model that trains a step in milliseconds. tests/model/config.json has six layers of it, for pipelines.
TINY = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
# What a GPT is given beside sizes: no dropout, the label that is left out of the loss, and as many kv heads as heads.
GPTS = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, ignore_index=-100, num_key_value_heads=None)
