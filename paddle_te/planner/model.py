"""The sizes of a decoder model, as far as memory and time depend on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from paddle_te.configs.spec import ExpertsSpec, LatentSpec, ModelSpec, spec_of
from paddle_te.hosts.paddlenlp.capabilities import has_pipeline
from paddle_te.job import Job

EXCHANGED_ROOM = 9 / 8  # rows of experts that `layers.moe.token_dispatcher` makes room for, over those in balance
MOST_PARAMETERS = 10**13  # 20 TB in 16 bits


class Gemm(NamedTuple):
    """A GEMM of a decoder layer.

    part: "attention" or "mlp". mode: how tensor parallel ranks share its weight, "column" or "row", or "whole" where
    each rank has all of it. inputs: numbers of a token that go in. outputs: numbers that come out, for each of the
    weights that are fused in it.
    """

    part: str
    mode: str
    inputs: int
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A decoder. The defaults are Llama's: RMSNorm, a gated MLP and grouped key-value heads.

    All layers count as alike, by their mean. With experts `ffn` is the width that one token uses, on average over the
    layers.

    tied: embedding and lm_head are one weight. qkv_bias: the projections to q, k and v have biases. bias: all
    projections have biases, and the norms too. gated: the MLP has a gate. positions: number of learned positions.
    windows: for each layer with a sliding window, its tokens. qk_norm, latent: AttentionSpec's. norms: LayerSpec's.
    pipeline: PaddleNLP has a pipeline model of it. spec: the ModelSpec that it was made of, with the weights' names.

    experts: elements of a layer's experts. idle: elements of a layer's experts that a token does not use, and of its
    router. copies: rows of a token in the MLP's first GEMM, one for each of its experts. sparse: share of the layers
    that have experts. outputs: numbers that a router gives for a token. vectors: elements of a layer's sinks, and of
    the biases that a token uses and that qkv_bias and bias do not cover. sinks: attention has sinks.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    qkv_bias: bool = False
    bias: bool = False
    gated: bool = True
    positions: int = 0
    windows: tuple[int, ...] = ()
    qk_norm: str | None = None
    norms: str = "before"
    pipeline: bool = True
    idle: float = 0.0
    copies: float = 1.0
    experts: float = 0.0
    sparse: float = 0.0
    outputs: float = 0.0
    vectors: float = 0.0
    sinks: bool = False
    latent: LatentSpec | None = None
    spec: ModelSpec | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, config: Any) -> Model:
        """Return the Model of a configuration, as `configs.spec.spec_of` takes it."""
        spec = spec_of(config)
        attention, feed_forward = spec.layer.attention, spec.layer.feed_forward
        of_layers = _of_layers(spec)
        return cls(
            spec.hidden,
            of_layers.ffn,
            len(spec.layers),
            attention.heads,
            attention.groups,
            attention.head_dim,
            spec.vocabulary,
            spec.tied,
            attention.qkv_bias,
            feed_forward.bias and spec.norm.kind == "LayerNorm",
            feed_forward.gated,
            spec.positions if spec.learned_positions else 0,
            tuple(window for layer in spec.layers if (window := layer.attention.window)),
            attention.qk_norm,
            spec.layer.norms,
            has_pipeline(spec.family.model_type),
            of_layers.idle,
            of_layers.copies,
            of_layers.experts,
            of_layers.sparse,
            of_layers.outputs,
            _vectors(spec),
            attention.sinks,
            attention.latent,
            spec,
        )

    def of_a_rank(self, ranks: int, by_all_to_all: bool = False) -> Model:
        """Return what each of `ranks` that divide the experts has, as a model whose layers have as much.

        Each gathers the tokens of all, for which te's experts have room as if all of them had their experts here.
        By all-to-all it gets the tokens that have experts here, where these are in balance; as many as those of a rank
        have it has room for, an eighth more.
        """
        if ranks == 1:
            return self
        arrived, room = float(ranks), float(ranks)
        if by_all_to_all:
            arrived, room = ranks * (1 - (1 - 1 / ranks) ** self.topk), EXCHANGED_ROOM
        ffn, row = math.ceil(room * self.ffn), self.mlp_row
        stored = self.mlp_weights - self.experts * (1 - 1 / ranks)
        copies = room * self.copies + arrived
        return replace(self, ffn=ffn, idle=stored - row * ffn, copies=copies, experts=self.experts / ranks)

    def of_a_tensor_rank(self, ranks: int) -> Model:
        """Return what `ranks` that share the experts with all other weights keep, as a model of all of them together.

        Each has all tokens, and room in te's experts as if all of them had their experts here.
        """
        if ranks == 1 or not self.experts:
            return self
        stored, ffn = self.mlp_weights, ranks * self.ffn
        return replace(self, ffn=ffn, idle=stored - self.mlp_row * ffn, copies=ranks * self.copies)

    def room(self, layout: Job) -> float:
        """Return the rows that te's experts have room for, of a rank or of tensor parallel ranks together.

        Over those in balance. Who gathers all ranks' tokens has room for all of these at each of them.
        """
        by_all_to_all = layout.ep > 1 and layout.moe_token_dispatcher_type == "alltoall"
        return EXCHANGED_ROOM if by_all_to_all else float(max(layout.ep, layout.tp))

    @property
    def routed(self) -> float:
        """Rows that a token has in experts, on average over the layers."""
        return self.copies - 1 + self.sparse

    @property
    def number_of_experts(self) -> int:
        """Experts of a layer that has some; 0 without experts."""
        return round(self.outputs / self.sparse) if self.sparse else 0

    @property
    def topk(self) -> float:
        """Experts of a token in a layer that has some; 0 without experts."""
        return self.routed / self.sparse if self.sparse else 0.0

    def seen(self, sequence: int) -> float:
        """Return as how many tokens long a sequence costs attention, on average over the layers.

        All s tokens see s² / 2 others. With a window of w the first w see w² / 2, and each later one sees w.
        """
        shorter = [window * (2 - window / sequence) for window in self.windows if window < sequence]
        return sequence - (len(shorter) * sequence - sum(shorter)) / self.layers

    @cached_property
    def mlp_row(self) -> int:
        """Elements of the MLP's matrices for each number of its activation."""
        return self.hidden * (3 if self.gated else 2)

    @cached_property
    def value_dim(self) -> int:
        """Width of a head of the values."""
        return self.latent.v_head_dim if self.latent else self.head_dim

    @cached_property
    def q(self) -> int:
        """Numbers of a token's queries."""
        return self.heads * self.head_dim

    @cached_property
    def context(self) -> int:
        """Numbers of attention's output for a token."""
        return self.heads * self.value_dim

    @cached_property
    def qkv(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return self.q + self.kv

    @cached_property
    def kv(self) -> int:
        """Numbers of a token's keys and values."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    @cached_property
    def fc1(self) -> int:
        """Numbers of a token's output of the MLP's first GEMM."""
        return self.ffn * (2 if self.gated else 1)

    @cached_property
    def mlp_weights(self) -> float:
        """Elements of the matrices of a layer's MLP, or of all its experts."""
        return self.hidden * (self.fc1 + self.ffn) + self.idle

    @cached_property
    def gemm_weights(self) -> float:
        """Elements of a layer's matrices."""
        return self.active_weights + self.idle

    @cached_property
    def active_weights(self) -> int:
        """Elements of a layer's matrices that multiply a token."""
        return self.attention_weights + self.hidden * (self.fc1 + self.ffn)

    @cached_property
    def attention_weights(self) -> int:
        """Elements of the matrices of a layer's attention."""
        return sum(gemm.inputs * sum(gemm.outputs) for gemm in self.attention_gemms)

    @cached_property
    def gemms(self) -> tuple[Gemm, ...]:
        """The GEMMs of a layer's weights."""
        fc1 = (self.ffn,) * (self.fc1 // self.ffn)
        of_mlp = Gemm("mlp", "column", self.hidden, fc1), Gemm("mlp", "row", self.ffn, (self.hidden,))
        return *self.attention_gemms, *of_mlp

    @cached_property
    def attention_gemms(self) -> tuple[Gemm, ...]:
        """The GEMMs of a layer's attention."""
        proj = Gemm("attention", "row", self.context, (self.hidden,))
        if self.latent is None:
            return Gemm("attention", "column", self.hidden, (self.q, self.kv // 2, self.kv // 2)), proj
        latent, h, shared = self.latent, self.hidden, self.latent.qk_rope_head_dim
        of_heads = self.heads * (self.head_dim - shared + latent.v_head_dim)
        keys = (
            Gemm("attention", "whole", h, (latent.kv_lora_rank + shared,)),
            Gemm("attention", "column", latent.kv_lora_rank, (of_heads,)),
        )
        if latent.q_lora_rank is None:
            return Gemm("attention", "column", h, (self.q,)), *keys, proj
        down = Gemm("attention", "whole", h, (latent.q_lora_rank,))
        return down, Gemm("attention", "column", latent.q_lora_rank, (self.q,)), *keys, proj

    @cached_property
    def latent_ranks(self) -> int:
        """Numbers of a token's normed latent vectors; 0 without latent attention."""
        return 0 if self.latent is None else self.latent.kv_lora_rank + (self.latent.q_lora_rank or 0)

    @cached_property
    def layer_weights(self) -> float:
        """Elements of a layer's weights."""
        all_biases = self.qkv + self.fc1 + (3 + self.copies) * self.hidden  # fc2 of each expert has one
        of_heads = {None: 0, "head": 2 * self.head_dim, "all": self.q + self.kv // 2}[self.qk_norm]
        norms = (4 if self.norms == "both" else 2) * self.hidden + of_heads + self.latent_ranks
        return self.gemm_weights + norms + (all_biases if self.bias else self.qkv * self.qkv_bias) + self.vectors

    @cached_property
    def embedding(self) -> int:
        """Elements of the embedding, and of lm_head."""
        return self.vocabulary * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Elements of all weights."""
        outside = (1 if self.tied else 2) * self.embedding + self.positions * self.hidden
        return round(self.layers * self.layer_weights) + outside + self.hidden * (2 if self.bias else 1)

    @cached_property
    def active_parameters(self) -> int:
        """Elements of the weights that a token goes through."""
        return self.parameters - round(self.layers * self.idle)


class _Layers(NamedTuple):
    ffn: int
    idle: float
    copies: float
    experts: float
    sparse: float
    outputs: float


def _of_layers(spec: ModelSpec) -> _Layers:
    """Return Model's ffn, idle, copies, experts, sparse and outputs, means over the layers."""
    active, stored, copies, of_experts, sparse, outputs = 0, 0, 0, 0, 0, 0
    for layer in spec.layers:
        ff = layer.feed_forward
        experts, topk, shared = (ff.experts, ff.topk, ff.shared_ffn or 0) if isinstance(ff, ExpertsSpec) else (1, 1, 0)
        row = (3 if ff.gated else 2) * spec.hidden  # elements for each number of an activation
        biases = ff.bias * ((2 if ff.gated else 1) * ff.ffn + spec.hidden)  # of one expert
        active += topk * ff.ffn + shared
        beside = (experts if experts > 1 else 0) + (
            isinstance(ff, ExpertsSpec) and ff.shared_gate
        )  # rows of router, gate
        stored += row * (experts * ff.ffn + shared) + spec.hidden * beside + (experts - topk) * biases
        copies += topk
        of_experts += experts * (row * ff.ffn + biases) if experts > 1 else 0
        sparse, outputs = sparse + (experts > 1), outputs + (experts if experts > 1 else 0)
    count, row = len(spec.layers), (3 if spec.layer.feed_forward.gated else 2) * spec.hidden
    ffn = round(active / count)
    means = (each / count for each in (copies, of_experts, sparse, outputs))
    return _Layers(ffn, stored / count - row * ffn, *means)


def _vectors(spec: ModelSpec) -> float:
    """Return Model's vectors, a mean over the layers; 0 for a model whose norms have biases, too."""
    if spec.norm.kind == "LayerNorm":
        return 0.0
    found = 0
    for layer in spec.layers:
        attention, ff = layer.attention, layer.feed_forward
        found += attention.heads * attention.sinks + spec.hidden * attention.proj_bias
        topk, of_router = (ff.topk, ff.experts * ff.router_bias) if isinstance(ff, ExpertsSpec) else (1, 0)
        found += topk * (ff.ffn * (2 if ff.gated else 1) + spec.hidden) * ff.bias + of_router
    return found / len(spec.layers)


def check_size(config: Any, source: str) -> None:
    """Raise ValueError, which begins with `source`, for a model that no machine holds.

    config: as `Model.of` takes it.
    """
    model = Model.of(config)
    if model.parameters > MOST_PARAMETERS:
        raise ValueError(f"{source}: {described(model)}, and no machine holds more than {MOST_PARAMETERS:,}")


def described(model: Model) -> str:
    """Return the line with a Model's parameters and the sizes of config.json that give them."""
    sizes = f"num_hidden_layers={model.layers}, hidden_size={model.hidden}, intermediate_size={model.ffn}"
    return f"{sizes} and vocab_size={model.vocabulary} make {model.parameters:,} parameters"
