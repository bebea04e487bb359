"""The sizes of a decoder model, as far as memory and time depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paddle_te.configs.families import family_of


@dataclass(frozen=True)
class Model:
    """A Llama-like decoder: RMSNorm, gated MLP, grouped key-value heads.

    tied: embedding and lm_head are one weight. qkv_bias: the projections to q, k and v have biases.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    qkv_bias: bool = False

    @classmethod
    def of(cls, config: Mapping) -> Model:
        """From what `configs.read` returns."""
        sizes = {
            "hidden": "hidden_size",
            "ffn": "intermediate_size",
            "layers": "num_hidden_layers",
            "heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads",
            "vocabulary": "vocab_size",
        }
        return cls(
            **{name: config[key] for name, key in sizes.items()},
            tied=bool(config.get("tie_word_embeddings")),
            qkv_bias=family_of(config).qkv_bias,
        )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def gemm_weights(self) -> int:
        """Elements of a layer's matrices."""
        return self.hidden * (self.qkv + self.hidden + 3 * self.ffn)

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's weights."""
        return self.gemm_weights + 2 * self.hidden + self.qkv * self.qkv_bias

    @property
    def embedding(self) -> int:
        """Elements of the embedding, and of lm_head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self.layers * self.layer_weights + (1 if self.tied else 2) * self.embedding + self.hidden
