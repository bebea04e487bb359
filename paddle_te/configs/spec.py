"""A model as one typed thing: a ModelSpec, with a LayerSpec for each decoder layer, from a configuration of any family.

Planner, weights, layers and hosts read a model's sizes and parts here. What all models of a family share stands in its
row of `configs.families`; what the words of config.json mean in `configs.schema`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paddle_te.configs.families import Config, Family, family_of, is_tied, value
from paddle_te.configs.rope import scaling_of, theta_of
from paddle_te.configs.schema import SCHEMAS

_EPS = {"RMSNorm": "rms_norm_eps", "LayerNorm": "layer_norm_eps"}
# config.json's word for an activation with a gate: Transformer Engine's
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu"}


@dataclass(frozen=True)
class NormSpec:
    """kind: RMSNorm or LayerNorm, which has a bias. eps: what is added before the root."""

    kind: str = "RMSNorm"
    eps: float = 1e-6


@dataclass(frozen=True)
class RotationSpec:
    """Rotary positions.

    theta: the base of the angles. scaling: the items of `configs.rope.scaling_of`'s dictionary; () for none.
    fraction: how much of each head is turned, from its beginning. interleaved: a pair is two neighbours, numbers 2i and
    2i + 1 of a head, not numbers i and i + half.
    """

    theta: float = 10000.0
    scaling: tuple[tuple[str, float | str], ...] = ()
    fraction: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """heads: of the queries. groups: heads of the keys, and of the values. head_dim: width of a head.

    rotation: None without rotary positions. qk_norm: "head" norms each head of q and of k before rotation, with a
    weight that all heads share; "all" norms all heads together; None: neither. window: tokens that a token sees,
    itself included; None: all before it. qkv_bias, proj_bias: whether the projections to q, k and v, and the one after
    attention, have biases. scale: of the scores; None is 1 / √head_dim. dropout: of attention's weights.
    """

    heads: int
    groups: int
    head_dim: int
    rotation: RotationSpec | None = None
    qk_norm: str | None = None
    window: int | None = None
    qkv_bias: bool = False
    proj_bias: bool = False
    scale: float | None = None
    dropout: float = 0.0

    @property
    def q_size(self) -> int:
        """Numbers of a token's queries."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers of a token's keys, and of its values."""
        return self.groups * self.head_dim

    @property
    def queries(self) -> int:
        """Query heads to each head of the keys."""
        return self.heads // self.groups


@dataclass(frozen=True)
class DenseSpec:
    """A feed-forward of two matrices, or three. ffn: its width. activation: Transformer Engine's name, gated or not.
    bias: both GEMMs have one."""

    ffn: int
    activation: str = "swiglu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """A decoder layer.

    feed_forward: a DenseSpec; a further kind is another record in this slot. norm: of all its norms. norms: where they
    stand, "before" attention and feed-forward, "after" them, before the residual is added, or "both". dropout: of what
    each half adds to its input.
    """

    attention: AttentionSpec
    feed_forward: DenseSpec
    norm: NormSpec = NormSpec()
    norms: str = "before"
    dropout: float = 0.0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder model.

    hidden: width of a token between the layers. vocabulary: rows of the embedding and of the head. layers: one
    LayerSpec each. norm: the one after the last layer. positions: the longest sequence. learned_positions: whether an
    embedding of so many positions is added. tied: the head is the embedding. embedding_scale: what embedded tokens are
    multiplied by. initializer_range: standard deviation of new weights.
    """

    family: Family
    hidden: int
    vocabulary: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec = NormSpec()
    positions: int = 2048
    learned_positions: bool = False
    tied: bool = False
    embedding_scale: float = 1.0
    initializer_range: float = 0.02

    @cached_property
    def layer(self) -> LayerSpec:
        """The first layer; for who reads what all layers have alike."""
        return self.layers[0]


def spec_of(config: Config) -> ModelSpec:
    """Return the ModelSpec of a configuration in PaddleNLP's words, a dict or a host's object.

    What it leaves out has the default of the family's record in `configs.schema`. Raises ConfigError for a scaling of
    the rotary positions that is not known, and ValueError for a family that is not known.
    """
    words = _Words(config)
    norm = NormSpec(words.family.normalization, words(_EPS[words.family.normalization]))
    return ModelSpec(
        words.family,
        hidden=words("hidden_size"),
        vocabulary=words("vocab_size"),
        layers=_layers(words, norm),
        norm=norm,
        positions=words("max_position_embeddings"),
        learned_positions=words.family.learned_positions,
        tied=is_tied(config),
        initializer_range=words("initializer_range"),
    )


class _Words:
    """What a configuration says, or else its family's record."""

    def __init__(self, config: Config) -> None:
        self.config, self.family = config, family_of(config)
        self._record = SCHEMAS[self.family.model_type]

    def __call__(self, name: str) -> Any:
        return value(self.config, name, getattr(self._record, name, None))


def _layers(words: _Words, norm: NormSpec) -> tuple[LayerSpec, ...]:
    windows = [words("sliding_window") if words.family.window else None] * words("num_hidden_layers")
    feed_forward, dropout = _feed_forward(words), words("hidden_dropout_prob") or 0.0
    layers = {
        window: LayerSpec(_attention(words, window), feed_forward, norm, words.family.norms, dropout)
        for window in {*windows}
    }
    return tuple(layers[window] for window in windows)


def _attention(words: _Words, window: int | None) -> AttentionSpec:
    heads = words("num_attention_heads")
    biases = words.family.biases
    return AttentionSpec(
        heads,
        words("num_key_value_heads") or heads,
        words("head_dim") or words("hidden_size") // heads,
        rotation=None if words.family.learned_positions else _rotation(words),
        qk_norm=words.family.qk_norm,
        window=window,
        qkv_bias=biases in ("qkv", "all"),
        proj_bias=biases == "all",
        dropout=words("attention_probs_dropout_prob") or 0.0,
    )


def _rotation(words: _Words) -> RotationSpec:
    scaling = tuple((scaling_of(words.config) or {}).items())
    said = value(words.config, "rope_parameters") or {}  # of transformers 5
    fraction = said.get("partial_rotary_factor") or words("partial_rotary_factor") or 1.0
    return RotationSpec(theta_of(words.config), scaling, fraction, words.family.interleaved)


def _feed_forward(words: _Words) -> DenseSpec:
    hidden, gated = words("hidden_size"), words.family.gated
    activation = _GATED.get(words("hidden_act"), words("hidden_act")) if gated else words("hidden_activation")
    return DenseSpec(words("intermediate_size") or 4 * hidden, activation, gated, words.family.biases == "all")
