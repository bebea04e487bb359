"""The sizes of a decoder model, as far as memory and time depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paddle_te.configs.families import family_of, is_tied, value

MOST_PARAMETERS = 10**13  # 20 TB in 16 bits


class Gemm(NamedTuple):
    """Of a decoder layer. part: "attention" or "mlp". mode: how tensor parallel ranks share its weight, "column" or
    "row". inputs: numbers of a token that go in; outputs: those that come out, by what is fused in the weight."""

    part: str
    mode: str
    inputs: int
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A decoder: Llama's, with RMSNorm, a gated MLP and grouped key-value heads, or one that differs in what follows.

    tied: embedding and lm_head are one weight. qkv_bias: the projections to q, k and v have biases. bias: all have, and
    the norms too. gated: the MLP is. positions: those that are learned. window: attention has a sliding window.
    pipeline: PaddleNLP has a pipeline model of it.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    qkv_bias: bool = False
    bias: bool = False
    gated: bool = True
    positions: int = 0
    window: bool = False
    pipeline: bool = True

    @classmethod
    def of(cls, config) -> Model:
        """From a configuration, a dict or PaddleNLP's object. Without num_key_value_heads each head has its own."""
        sizes = {
            "hidden": "hidden_size",
            "ffn": "intermediate_size",
            "layers": "num_hidden_layers",
            "heads": "num_attention_heads",
            "vocabulary": "vocab_size",
        }
        family = family_of(config)
        return cls(
            **{name: value(config, key) for name, key in sizes.items()},
            kv_heads=value(config, "num_key_value_heads") or value(config, "num_attention_heads"),
            tied=is_tied(config),
            qkv_bias=family.has_bias("q"),
            bias=family.biases == "all",
            gated=family.gated,
            positions=value(config, "max_position_embeddings") if family.learned_positions else 0,
            window=bool(family.window and value(config, "sliding_window")),
            pipeline=family.pipeline,
        )

    @cached_property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @cached_property
    def qkv(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @cached_property
    def kv(self) -> int:
        """Numbers of a token's keys and values."""
        return 2 * self.kv_heads * self.head_dim

    @cached_property
    def fc1(self) -> int:
        """Numbers of a token's output of the MLP's first GEMM."""
        return self.ffn * (2 if self.gated else 1)

    @cached_property
    def mlp_weights(self) -> int:
        """Elements of the two matrices of a layer's MLP."""
        return self.hidden * (self.fc1 + self.ffn)

    @cached_property
    def gemm_weights(self) -> int:
        """Elements of a layer's matrices."""
        return self.hidden * (self.qkv + self.hidden) + self.mlp_weights

    @cached_property
    def gemms(self) -> tuple[Gemm, ...]:
        """Those of a layer's weights."""
        kv = self.kv // 2
        fc1 = (self.ffn,) * (self.fc1 // self.ffn)
        return (
            Gemm("attention", "column", self.hidden, (self.hidden, kv, kv)),
            Gemm("attention", "row", self.hidden, (self.hidden,)),
            Gemm("mlp", "column", self.hidden, fc1),
            Gemm("mlp", "row", self.ffn, (self.hidden,)),
        )

    @cached_property
    def layer_weights(self) -> int:
        """Elements of a layer's weights."""
        all_biases = self.qkv + self.fc1 + 4 * self.hidden
        return self.gemm_weights + 2 * self.hidden + (all_biases if self.bias else self.qkv * self.qkv_bias)

    @cached_property
    def embedding(self) -> int:
        """Elements of the embedding, and of lm_head."""
        return self.vocabulary * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Elements of all weights."""
        outside = (1 if self.tied else 2) * self.embedding + self.positions * self.hidden
        return self.layers * self.layer_weights + outside + self.hidden * (2 if self.bias else 1)


def check_size(config, source: str) -> None:
    """Raises ValueError, which begins with `source`, for a configuration, as `Model.of` takes it, of a model that no
    machine holds."""
    model = Model.of(config)
    if model.parameters > MOST_PARAMETERS:
        raise ValueError(f"{source}: {described(model)}, and no machine holds more than {MOST_PARAMETERS:,}")


def described(model: Model) -> str:
    """How many parameters a Model has, and from which sizes in config.json."""
    sizes = f"num_hidden_layers={model.layers}, hidden_size={model.hidden}, intermediate_size={model.ffn}"
    return f"{sizes} and vocab_size={model.vocabulary} make {model.parameters:,} parameters"
