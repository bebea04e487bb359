"""config.json of GPT: PaddleNLP's words, and those of transformers' GPT-2."""

from paddle_te.weights.tensors import CheckpointError

# transformers' words for what PaddleNLP has too
_WORDS = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "initializer_range": "initializer_range",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}
# transformers' defaults that are not PaddleNLP's, and are left out of a config.json
_DEFAULTS = dict(
    vocab_size=50257, n_embd=768, n_layer=12, n_head=12, n_positions=1024, resid_pdrop=0.1, attn_pdrop=0.1,
    initializer_range=0.02, bos_token_id=50256, eos_token_id=50256,
)  # fmt: skip
# What makes GPT-2 what PaddleNLP's GPT computes: {key: its values, transformers' default first}.
_ONLY = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "relu"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def is_hf(config):
    """Whether config.json speaks transformers' words."""
    return config.get("model_type") == "gpt2"


def from_hf(config, dtype=None):
    """transformers' config.json in PaddleNLP's words. Raises CheckpointError for what PaddleNLP's GPT computes not."""
    for key, possible in _ONLY.items():
        if config.get(key, possible[0]) not in possible:
            wanted = " or ".join(map(repr, possible))
            raise CheckpointError(f"config.json: {key}={config[key]!r}: PaddleNLP's GPT has only {wanted}")
    said = _DEFAULTS | config
    converted = {theirs: said.get(ours) for ours, theirs in _WORDS.items()}
    converted["intermediate_size"] = converted["intermediate_size"] or 4 * converted["hidden_size"]
    relu = config.get("activation_function") == "relu"
    return converted | {
        "architectures": ["GPTForCausalLM"],
        "model_type": "gpt",
        "hidden_activation": "relu" if relu else "gelu",
        "tie_word_embeddings": True,
        "ignore_index": -100,  # transformers' loss has no other
        "dtype": dtype,
    }


def to_hf(config, dtype):
    """PaddleNLP's config.json in transformers' words."""
    return {ours: config.get(theirs) for ours, theirs in _WORDS.items()} | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "relu" if config.get("hidden_activation") == "relu" else "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": config.get("hidden_dropout_prob"),
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
    }
