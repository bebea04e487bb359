"""What config.json says of each family's models, in PaddleNLP's words and in transformers': tables for `config`."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Words:
    """A family's.

    defaults: {key: what transformers means where its config.json leaves the key out}, all keys of PaddleNLP's that both
    have, in its words; a function of the values before it, for what follows from them.
    only: {key: values}, in both languages, what makes a model one that PaddleNLP's layers compute; the first is the
    default. Weights do not tell: those of a model with a sliding window have the names and shapes of one without.
    hf_only: the same of what transformers' config.json has alone; both are written into one.
    theirs: {key: transformers' words}, where they are others: the first is read, all are written.
    values: {key: {transformers' value: PaddleNLP's}}, where they are others; of two for one the first is written.
    """

    defaults: dict
    only: dict
    hf_only: dict = field(default_factory=dict)
    theirs: dict = field(default_factory=dict)
    values: dict = field(default_factory=dict)

    def in_theirs(self, key: str) -> tuple:
        """transformers' words for a key of PaddleNLP's."""
        return self.theirs.get(key, (key,))

    def read(self, config: dict, hf: bool) -> dict:
        """{key: value} of all keys of `defaults` in a config.json, transformers' (hf) or PaddleNLP's."""
        said = {}
        for key, default in self.defaults.items():
            words = self.in_theirs(key) if hf else (key,)
            value = config.get(words[0], default) if words else default
            if hf and key in self.values:
                value = self.values[key].get(value, value)
            if callable(default) and value in (None, default):
                value = default(said)
            said[key] = value
        return said

    def in_hf(self, said: dict) -> dict:
        """What `read` gives, in transformers' words."""
        only = {key: values[0] for key, values in (self.hf_only or self.only).items() if values[0] is not None}
        for key, value in said.items():
            value = next((theirs for theirs, ours in self.values.get(key, {}).items() if ours == value), value)
            only |= dict.fromkeys(self.in_theirs(key), value)
        return only


# Hugging Face's defaults differ from PaddleNLP's, so each is written.
_ROTARY = {
    "vocab_size": None,
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": lambda before: before["num_attention_heads"],
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
WORDS = {
    "llama": Words(
        _ROTARY,
        {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "sliding_window": (None,)},
    ),
    "qwen2": Words(
        _ROTARY | {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None},
        {
            "hidden_act": ("silu",),
            "use_sliding_window": (False,),
            "attention_dropout": (0.0,),
            "rope_scaling_type": (None,),
        },
    ),
    "mistral": Words(
        _ROTARY | {"max_position_embeddings": 131072, "sliding_window": 4096},
        {
            "hidden_act": ("silu",),
            "attention_dropout": (0.0,),
            "rope_scaling_type": (None,),
            "tie_word_embeddings": (False,),
        },
    ),
    "gpt": Words(
        {
            "vocab_size": 50257,
            "hidden_size": 768,
            "intermediate_size": lambda before: 4 * before["hidden_size"],
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 1024,
            "hidden_activation": "gelu",
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "initializer_range": 0.02,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
            "pad_token_id": None,
            "tie_word_embeddings": True,
            "ignore_index": -100,
        },
        {
            "hidden_activation": ("gelu", "relu"),
            "normalize_before": (True,),
            "rope_scaling": (None,),
            "scale_qk_coeff": (1.0,),
            "tie_word_embeddings": (True,),
        },
        hf_only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", "relu"),
            "layer_norm_epsilon": (1e-5,),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        theirs={
            "hidden_size": ("n_embd",),
            "intermediate_size": ("n_inner",),
            "num_hidden_layers": ("n_layer",),
            "num_attention_heads": ("n_head",),
            "max_position_embeddings": ("n_positions",),
            "hidden_activation": ("activation_function",),
            "hidden_dropout_prob": ("resid_pdrop", "embd_pdrop"),
            "attention_probs_dropout_prob": ("attn_pdrop",),
            "ignore_index": (),  # transformers' loss has no other
        },
        values={"hidden_activation": {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}},
    ),
}
