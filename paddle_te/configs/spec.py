"""A model as one typed thing: a ModelSpec, with a LayerSpec for each decoder layer, from a configuration of any family.

Planner, weights, layers and hosts read a model's sizes and parts here. What all models of a family share stands in its
row of `configs.families`; what the words of config.json mean in `configs.schema`.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any

from paddle_te.configs.families import Config, Family, family_of, is_tied, value
from paddle_te.configs.rope import longest_sequence, scaling_of, theta_of
from paddle_te.configs.schema import SCHEMAS

_EPS = {"RMSNorm": "rms_norm_eps", "LayerNorm": "layer_norm_eps"}
# config.json's word for an activation with a gate: Transformer Engine's
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu"}


@dataclass(frozen=True)
class NormSpec:
    """kind: RMSNorm or LayerNorm, which has a bias. eps: what is added before the root. zero_centered: it multiplies by
    1 + weight."""

    kind: str = "RMSNorm"
    eps: float = 1e-6
    zero_centered: bool = False


@dataclass(frozen=True)
class RotationSpec:
    """Rotary positions.

    theta: the base of the angles. scaling: the items of `configs.rope.scaling_of`'s dictionary, lists as tuples; () for
    none. fraction: how much of each head is rotated, from its beginning. interleaved: a pair is two neighbours, numbers
    2i and 2i + 1 of a head, not numbers i and i + half.
    """

    theta: float = 10000.0
    scaling: tuple[tuple[str, Any], ...] = ()
    fraction: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    The names are config.json's. kv_lora_rank: width of the latent vector of which keys and values are made.
    qk_rope_head_dim: numbers at the end of a head of the queries and keys that are rotated; all heads of the keys share
    them. v_head_dim: width of a head of the values. q_lora_rank: that of the queries' latent vector; None: they have
    none. eps: of the latent vectors' norms, whatever the others have.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    eps: float = 1e-6


@dataclass(frozen=True)
class AttentionSpec:
    """heads: of the queries. groups: heads of the keys, and of the values. head_dim: width of a head.

    latent: a LatentSpec, with head_dim that of queries and keys; None: keys and values have projections of their own.
    rotation: None without rotary positions. qk_norm: "head" norms each head of q and of k before rotation, with a
    weight that all heads share; "all" norms all heads together; None: neither. window: tokens that a token sees,
    itself included; None: all before it. qkv_bias, proj_bias: whether the projections to q, k and v, and the one after
    attention, have biases. scale: of the scores; None is 1 / √head_dim. softcap: c, of which they then become
    c · tanh(scores / c); None: they stay. dropout: of attention's weights. sinks: each head's softmax has a learnt
    score beside those of the keys, which has no value.
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
    softcap: float | None = None
    dropout: float = 0.0
    sinks: bool = False
    latent: LatentSpec | None = None

    @property
    def value_dim(self) -> int:
        """Width of a head of the values, and of attention's output."""
        return self.latent.v_head_dim if self.latent else self.head_dim

    @property
    def context_size(self) -> int:
        """Numbers that attention gives for a token."""
        return self.heads * self.value_dim

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        if self.rotation is None:
            return 0
        return self.latent.qk_rope_head_dim if self.latent else int(self.head_dim * self.rotation.fraction)

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
class ExpertsSpec:
    """A mixture of experts; `layers.moe.MoEConfig` says how its numbers are computed.

    experts: how many there are. topk: how many of them a token gets. ffn: width of one expert. activation, gated, bias:
    as DenseSpec's, of each expert. shared_ffn: width of an MLP that all tokens go through besides; None: there is none.
    shared_gate: its output is multiplied by the sigmoid of a learnt product with the token.
    score: "softmax" or "sigmoid", of the router's logits. router_bias: these have one, learnt. pre_softmax: a chosen
    expert's probability is that among all experts; False: among those that are chosen. groups, group_topk: experts are
    chosen among those of the best groups, by the sum of each one's group_best best scores; None: topk / group_topk.
    scaling: multiplies the probabilities. expert_bias: experts are chosen by scores and a bias that follows their load.
    aux_loss_coeff: of the loss that balances their load. by_sequence: in each sequence, not in all tokens together.
    """

    experts: int
    topk: int
    ffn: int
    activation: str = "swiglu"
    gated: bool = True
    bias: bool = False
    shared_ffn: int | None = None
    shared_gate: bool = False
    score: str = "softmax"
    router_bias: bool = False
    pre_softmax: bool = False
    groups: int | None = None
    group_topk: int | None = None
    group_best: int | None = None
    scaling: float | None = None
    expert_bias: bool = False
    aux_loss_coeff: float = 0.0
    by_sequence: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """A decoder layer.

    feed_forward: an MLP, or experts; a further kind is another record in this slot. norm: of all its norms. norms:
    where they stand, "before" attention and feed-forward, "after" them, before the residual is added, or "both".
    dropout: of what each half adds to its input. residual_scale: m, by which that is multiplied, in all layers alike;
    only with norms "before".

    No layer multiplies by m: x / m goes through the layers in place of x (`stream_scale`), so that each half adds what
    it computes, and the norm before it gives the same with eps / m² (`input_eps`).
    """

    attention: AttentionSpec
    feed_forward: DenseSpec | ExpertsSpec
    norm: NormSpec = NormSpec()
    norms: str = "before"
    dropout: float = 0.0
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.residual_scale != 1.0 and self.norms != "before":
            raise ValueError(f"residual_scale={self.residual_scale} needs norms='before', not {self.norms!r}")

    @property
    def stream_scale(self) -> float:
        """What goes through the layers is multiplied by it."""
        return 1.0 / self.residual_scale

    @property
    def input_eps(self) -> float:
        """The eps of a norm that reads what goes through the layers."""
        return self.norm.eps * self.stream_scale**2


@dataclass(frozen=True)
class ModelSpec:
    """A decoder model.

    hidden: width of a token between the layers. vocabulary: rows of the embedding and of the head. layers: one
    LayerSpec each. norm: the one after the last layer. positions: the longest sequence. learned_positions: whether an
    embedding of so many positions is added. tied: the head is the embedding. embedding_scale: what embedded tokens are
    multiplied by. logit_scale: what the head's logits are multiplied by. logit_softcap: as AttentionSpec's, of the
    head's logits. initializer_range: standard deviation of new weights.
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
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    initializer_range: float = 0.02

    @cached_property
    def layer(self) -> LayerSpec:
        """The first layer; for who reads what all layers have alike."""
        return self.layers[0]

    @cached_property
    def dense(self) -> DenseSpec | None:
        """What the layers with an MLP have, which all have one of the same sizes; None without such a layer."""
        return next((ff for layer in self.layers if isinstance(ff := layer.feed_forward, DenseSpec)), None)

    @cached_property
    def experts(self) -> ExpertsSpec | None:
        """What the layers with experts have, as `dense`; None without such a layer."""
        return next((ff for layer in self.layers if isinstance(ff := layer.feed_forward, ExpertsSpec)), None)


def spec_of(config: Config) -> ModelSpec:
    """Return the ModelSpec of a configuration in PaddleNLP's words, a dict or a host's object.

    What it leaves out has the default of the family's record in `configs.schema`. Raises ConfigError for a scaling of
    the rotary positions that is not known, and ValueError for a family that is not known.
    """
    words = _Words(config)
    family = words.family
    norm = NormSpec(family.normalization, words(_EPS[family.normalization]), family.zero_centered)
    return ModelSpec(
        family,
        hidden=words("hidden_size"),
        vocabulary=words("vocab_size"),
        layers=_layers(words, norm),
        norm=norm,
        positions=words("max_position_embeddings"),
        learned_positions=family.learned_positions,
        tied=is_tied(config),
        embedding_scale=words("hidden_size") ** 0.5 if family.scaled else words("embedding_multiplier") or 1.0,
        logit_scale=1.0 / (words("logits_scaling") or 1.0),
        logit_softcap=words("final_logit_softcapping"),
        initializer_range=words("initializer_range"),
    )


class _Words:
    """What a configuration says, or else its family's record; None for a key that the family does not have."""

    def __init__(self, config: Config) -> None:
        self.config, self.family = config, family_of(config)
        keys = fields(SCHEMAS[self.family.model_type])
        self._defaults = {key.name: None if key.default is MISSING else key.default for key in keys}

    def __call__(self, name: str) -> Any:
        return value(self.config, name, self._defaults[name]) if name in self._defaults else None


def _layers(words: _Words, norm: NormSpec) -> tuple[LayerSpec, ...]:
    dropout, sliding = words("hidden_dropout_prob") or 0.0, _sliding(words)
    kinds = [(is_sliding, _is_sparse(words, number)) for number, is_sliding in enumerate(sliding)]
    layers = {}
    for is_sliding, sparse in dict.fromkeys(kinds):
        feed_forward = _experts(words) if sparse else _dense(words)
        attention = _attention(words, is_sliding)
        scale = words("residual_multiplier") or 1.0
        layers[is_sliding, sparse] = LayerSpec(attention, feed_forward, norm, words.family.norms, dropout, scale)
    return tuple(layers[kind] for kind in kinds)


def _sliding(words: _Words) -> list[bool]:
    """Return whether a token of each layer sees the last ones only."""
    layers = words("num_hidden_layers")
    if types := words("layer_types"):
        return [words.family.window and kind == "sliding_attention" for kind in types]
    pattern = words("sliding_window_pattern") or layers + 1
    return [words.family.window and (number + 1) % pattern > 0 for number in range(layers)]


def _window(words: _Words, sliding: bool) -> int | None:
    """Return how many tokens are seen; None for one that no sequence is longer than, as Phi-4-mini's."""
    window = words("sliding_window") if sliding else None
    return window if window and window < longest_sequence(words.config) else None


def _attention(words: _Words, sliding: bool) -> AttentionSpec:
    heads, scalar = words("num_attention_heads"), words("query_pre_attn_scalar")
    biases = words.family.biases
    if words.family.latent:
        return _latent_attention(words)
    return AttentionSpec(
        heads,
        words("num_key_value_heads") or heads,
        words("head_dim") or words("hidden_size") // heads,
        rotation=None if words.family.learned_positions else _rotation(words, sliding),
        qk_norm=words.family.qk_norm,
        window=_window(words, sliding),
        qkv_bias=biases in ("qkv", "all"),
        proj_bias=biases == "all",
        scale=words("attention_multiplier") or scalar and scalar**-0.5,
        softcap=words("attn_logit_softcapping"),
        dropout=words("attention_probs_dropout_prob") or 0.0,
        sinks=words.family.sinks,
    )


def _latent_attention(words: _Words) -> AttentionSpec:
    heads, rotated = words("num_attention_heads"), words("qk_rope_head_dim")
    latent = LatentSpec(words("kv_lora_rank"), rotated, words("v_head_dim"), words("q_lora_rank"))
    head_dim = words("qk_nope_head_dim") + rotated
    return AttentionSpec(heads, heads, head_dim, _rotation(words, sliding=False), latent=latent)


def _rotation(words: _Words, sliding: bool) -> RotationSpec:
    if sliding and (theta := words("rope_local_base_freq")):  # not scaled: the window is short
        return RotationSpec(theta)
    scaling = (scaling_of(words.config) or {}).items()
    hashable = tuple((name, tuple(said) if isinstance(said, list) else said) for name, said in scaling)
    said = value(words.config, "rope_parameters") or {}  # of transformers 5
    fraction = said.get("partial_rotary_factor") or words("partial_rotary_factor") or 1.0
    return RotationSpec(theta_of(words.config), hashable, fraction, words.family.interleaved)


def _activation(words: _Words) -> str:
    if words.family.activation:
        return words.family.activation
    said = words("hidden_activation") or words("hidden_act")
    return _GATED.get(said, said) if words.family.gated else said


def _dense(words: _Words) -> DenseSpec:
    ffn, family = words("intermediate_size") or 4 * words("hidden_size"), words.family
    return DenseSpec(ffn, _activation(words), family.gated, family.biases == "all")


def _number_of_experts(words: _Words) -> int:
    """Return how many experts a layer that has some has; 0 for a model without."""
    return words("num_experts") or words("num_local_experts") or words("n_routed_experts") or 0


def _is_sparse(words: _Words, number: int) -> bool:
    """Return whether a layer has experts: each decoder_sparse_step-th does, unless it is one of mlp_only_layers."""
    step, others = words("decoder_sparse_step") or 1, words("mlp_only_layers") or ()
    later = number >= (words("first_k_dense_replace") or 0) and not number % (words("moe_layer_freq") or 1)
    return bool(_number_of_experts(words)) and not (number + 1) % step and number not in others and later


def experts_width(family: Family) -> str:
    """Return the key of config.json, in PaddleNLP's words, for the width of an expert."""
    own = "moe_intermediate_size"
    return own if hasattr(SCHEMAS[family.model_type], own) else "intermediate_size"


def _experts(words: _Words) -> ExpertsSpec:
    if words.family.names == "deepseek":
        return _deepseeks_experts(words)
    shared, normed = words("shared_expert_intermediate_size"), words("norm_topk_prob")
    return ExpertsSpec(
        _number_of_experts(words),
        words("num_experts_per_tok"),
        words(experts_width(words.family)),
        _activation(words),
        words.family.gated,
        words.family.biases == "all",
        router_bias=words.family.has_bias("router"),
        shared_ffn=shared or None,
        shared_gate=bool(shared),  # Qwen2's, the only family here that has shared experts
        pre_softmax=normed is False,  # Mixtral has no such key, and takes the softmax of the chosen experts' logits
        aux_loss_coeff=words.family.aux_loss and words("router_aux_loss_coef") or 0.0,
    )


def _deepseeks_experts(words: _Words) -> ExpertsSpec:
    """Return DeepSeek-V2's and V3's, which choose experts by softmax, or by sigmoid and a bias."""
    ffn, sigmoid = words("moe_intermediate_size"), words("scoring_func") == "sigmoid"
    groups, best = words("n_group"), words("topk_group")
    limited = words("topk_method") != "greedy" and groups and best and best < groups
    return ExpertsSpec(
        _number_of_experts(words),
        words("num_experts_per_tok"),
        ffn,
        _activation(words),
        shared_ffn=ffn * (words("n_shared_experts") or 0) or None,
        score="sigmoid" if sigmoid else "softmax",
        pre_softmax=not sigmoid,
        groups=groups if limited else None,
        group_topk=best if limited else None,
        group_best=(2 if sigmoid else 1) if limited else None,
        scaling=words("routed_scaling_factor"),
        expert_bias=sigmoid,
        aux_loss_coeff=words("aux_loss_alpha"),
        by_sequence=words("seq_aux"),
    )
