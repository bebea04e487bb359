"""The settings of layers: frozen records under Transformer Engine's names, checked when they are made.

A class under TE's name `takes` its record: the record's fields as arguments, or the record itself. Layers hand records
to the layers inside them (`part`), so that an argument, its default, its meaning and what is refused stand here once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from paddle import nn

from paddle_te.fp8.scaling import MXFP8_BLOCK
from paddle_te.layers.checks import check_length, one_of, probability, refuse
from paddle_te.layers.masks import is_causal, keys_before
from paddle_te.ops.activations import EXPERTS_FC1_WIDTHS, FC1_WIDTHS
from paddle_te.options.layers import RECOMPUTE_MODULES, FuseWgrad

PARALLEL_MODES = (None, "column", "row")
NORMALIZATIONS = ("RMSNorm", "LayerNorm")
NORMS = ("before", "after", "both")
SOFTMAX_TYPES = ("vanilla", "learnable")
QK_NORM_TYPES, QK_NORMS_OVER, INPUT_FORMATS = (None, "RMSNorm"), ("head", "all"), ("bshd", "sbhd")

Arguments = ParamSpec("Arguments")
Record = TypeVar("Record")


def takes(
    record: Callable[Arguments, Record],
) -> Callable[[Callable[[Any, Record], None]], Callable[Concatenate[Any, Arguments], None]]:
    """Let a constructor that takes a record of this class take the record's fields as arguments, too."""

    def decorate(construct: Callable[[Any, Record], None]) -> Callable[Concatenate[Any, Arguments], None]:
        @wraps(construct)
        def __init__(self: Any, *args: Any, **named: Any) -> None:
            whole = len(args) == 1 and not named and isinstance(args[0], record)  # type: ignore[arg-type]  # a class
            construct(self, args[0] if whole else record(*args, **named))

        own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        __init__.__signature__ = signature(record).replace(  # type: ignore[attr-defined]  # wraps sets one, too
            parameters=[own, *signature(record).parameters.values()], return_annotation=None
        )
        return cast("Callable[Concatenate[Any, Arguments], None]", __init__)

    return decorate


def part(record: Callable[..., Record], whole: Any, **others: Any) -> Record:
    """Return a record of a part: the fields that it shares with the whole, another record or object, and the others."""
    names = [field.name for field in fields(record) if hasattr(whole, field.name)]  # type: ignore[arg-type]  # a dataclass
    return record(**{name: getattr(whole, name) for name in names} | others)


class Checked:
    """A record that is checked when it is made."""

    def __post_init__(self) -> None:
        """Raises ValueError for what does not fit."""


@dataclass(frozen=True, kw_only=True)
class Common(Checked):
    """The arguments of every layer with parameters.

    sequence_parallel: split tokens over fleet's model-parallel group.
    params_dtype: dtype of the parameters; None is Paddle's default dtype.
    backend: "transformer_engine" or "paddle".
    """

    sequence_parallel: bool = False
    params_dtype: Any = None
    backend: str = "transformer_engine"


@dataclass(frozen=True)
class NormSettings(Common):
    """The arguments of a norm.

    eps: added to the mean square.
    zero_centered_gamma: the norm multiplies by 1 + weight, and the weight is 0 at first.
    sequence_parallel: each rank has other tokens, so gradients must be summed over the ranks.
    """

    hidden_size: int
    eps: float = 1e-5
    zero_centered_gamma: bool = False


@dataclass(frozen=True, kw_only=True)
class GemmSettings(Common):
    """The arguments of a layer with a GEMM.

    init_method: the weight's initializer; None is Normal(0, 0.02).
    fuse_wgrad_accumulation: True: GEMMs add weight gradients to `parameter.main_grad` (float32). Where
        `parameter.overwrite_main_grad` is set they overwrite it instead, and reset the flag. "grad": where an earlier
        backward has left a `parameter.grad`, GEMMs add to it, which no hook of the parameter sees. Not for paddle.grad.
    bias: the GEMM has a bias.
    """

    init_method: nn.initializer.Initializer | None = None
    fuse_wgrad_accumulation: FuseWgrad = False
    bias: bool = False

    @property
    def weight_init(self) -> nn.initializer.Initializer:
        """The initializer of the weight, or of the first GEMM's."""
        return self.init_method or nn.initializer.Normal(0.0, 0.02)


@dataclass(frozen=True)
class LinearSettings(GemmSettings):
    """The arguments of Linear.

    parallel_mode: the axis on which ranks split the weight: "column", "row" or None.
    """

    in_features: int
    out_features: int
    parallel_mode: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(PARALLEL_MODES, parallel_mode=self.parallel_mode)


@dataclass(frozen=True, kw_only=True)
class BehindNorm(GemmSettings):
    """The arguments of a layer that begins with a norm.

    set_parallel_mode: split weights over fleet's model-parallel group.
    normalization: "RMSNorm" or "LayerNorm"; None: no norm.
    zero_centered_gamma: the norm multiplies by 1 + weight, and the weight is 0 at first.
    recompute_modules: parts that backward computes again, so that their results take no memory until then. Megatron's
        names: "layernorm", the outputs of both norms; "core_attn", rotation and attention; "mlp", all of the MLP that
        its second GEMM needs; "mlp_act", only the MLP's activation.
    """

    set_parallel_mode: bool = False
    normalization: str | None = "RMSNorm"
    zero_centered_gamma: bool = False
    recompute_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of((*NORMALIZATIONS, None), normalization=self.normalization)
        object.__setattr__(self, "recompute_modules", tuple(self.recompute_modules or ()))
        for name in self.recompute_modules:
            one_of(RECOMPUTE_MODULES, recompute_modules=name)
        if {"mlp", "mlp_act"} <= {*self.recompute_modules}:
            raise ValueError("recompute_modules: 'mlp' computes the activation again, too; leave 'mlp_act' out")

    @property
    def norm_again(self) -> bool:
        """Whether backward computes the norm's output again."""
        return "layernorm" in self.recompute_modules

    @property
    def core_again(self) -> bool:
        """Whether backward computes rotation and attention again."""
        return "core_attn" in self.recompute_modules

    @property
    def keeps_less(self) -> bool:
        """Whether backward gets less than the outputs of norm and activation."""
        return self.norm_again

    def check_norm_kept(self, whose: str) -> None:
        """Raise ValueError where backward is to compute the norm's output again, which a kind of layer keeps."""
        if self.norm_again:
            raise ValueError(f"recompute_modules: {whose} keeps its norm's output; leave 'layernorm' out")

    def check_lora_dropout(self) -> None:
        """Raise ValueError where dropout before LoRA's A does not fit what is kept for backward."""
        if self.keeps_less:
            raise ValueError(
                "lora_dropout with recompute_modules or activation_func_fp8_input_store: norm and activation are "
                "operations of their own before dropout, and keep what they give; leave one of them out"
            )


@dataclass(frozen=True)
class LayerNormLinearSettings(BehindNorm):
    """The arguments of LayerNormLinear. It uses "layernorm" of recompute_modules."""

    in_features: int
    out_features: int
    eps: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class HalfOptions(BehindNorm):
    """The arguments of a half of a layer, which adds its output to its input.

    bias: each GEMM has a bias.
    init_method, output_layer_init_method: initializers of the first and of the second GEMM's weight. None is
        Normal(0, 0.02), for the second GEMM the first one's.
    hidden_dropout: the probability with which each number of the output is dropped in training; TE's default is 0.1.
    norms: "before" the half, "after" it, over its output (OLMo-2), or "both" (Gemma 3).
    """

    output_layer_init_method: nn.initializer.Initializer | None = None
    hidden_dropout: float = 0.0
    norms: str = "before"

    def __post_init__(self) -> None:
        super().__post_init__()
        probability(hidden_dropout=self.hidden_dropout)
        one_of(NORMS, norms=self.norms)

    @property
    def norm_before(self) -> str | None:
        """The normalization before the half; None without that norm."""
        return None if self.norms == "after" else self.normalization

    def norm_after(self, size: int, eps: float) -> NormSettings | None:
        """Return the arguments of the norm over the half's output; None without that norm."""
        return None if self.norms == "before" else part(NormSettings, self, hidden_size=size, eps=eps)

    @property
    def output_init(self) -> nn.initializer.Initializer:
        """The initializer of the second GEMM's weight."""
        return self.output_layer_init_method or self.weight_init


@dataclass(frozen=True, kw_only=True)
class MLPOptions(HalfOptions):
    """The arguments of an MLP.

    activation: "swiglu" or "geglu", which are gated, "gelu" (its tanh form) or "relu". Experts may also have gpt-oss's
        "clamped_swiglu" (`ops.activations`).
    activation_func_fp8_input_store: the MLP keeps its first GEMM's output in fp8 for backward (MXFP8: blocks of 32
        numbers that share a power of 2). Backward computes the activation and its gradient from that.
        ffn_hidden_size / tp must be a multiple of 32. Not with "mlp" or mlp_chunk_tokens, which do not keep it.
    mlp_chunk_tokens: the most tokens that the MLP's GEMMs take at a time; 0: all tokens. Backward computes each chunk
        again, so the tensors between the GEMMs take the memory of one chunk. In fp8 a multiple of 16, with block
        scaling of 128, for each rank of sequence parallelism; hidden_size must be a multiple of 8.
    """

    activation: str = "swiglu"
    activation_func_fp8_input_store: bool = False
    mlp_chunk_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(EXPERTS_FC1_WIDTHS, activation=self.activation)
        if self.activation_func_fp8_input_store:
            refuse(
                {"recompute_modules 'mlp'": self.mlp_again == "mlp", "mlp_chunk_tokens": self.mlp_chunk_tokens},
                "activation_func_fp8_input_store with {}, with which the activation's input is not kept at all; leave "
                "one of them out",
            )

    @property
    def mlp_again(self) -> str | None:
        """The part of the MLP that backward computes again, as recompute_modules names it, or None."""
        return next((name for name in ("mlp", "mlp_act") if name in self.recompute_modules), None)

    @property
    def norm_again(self) -> bool:
        return super().norm_again and self.mlp_again != "mlp"  # which computes it again anyhow

    @property
    def keeps_less(self) -> bool:
        return super().keeps_less or self.mlp_again is not None or self.activation_func_fp8_input_store

    def input_store(self, ffn: int) -> bool:
        """Return whether the activation's input is kept in fp8.

        ffn: columns of the activation's output on this rank. Raises ValueError if blocks do not divide them.
        """
        if self.activation_func_fp8_input_store and ffn % MXFP8_BLOCK:
            raise ValueError(
                f"activation_func_fp8_input_store keeps blocks of {MXFP8_BLOCK} numbers, into which ffn_hidden_size, "
                f"{ffn} on this rank, does not divide; leave it out, or take another size"
            )
        return self.activation_func_fp8_input_store


@dataclass(frozen=True)
class MLPSettings(MLPOptions):
    """The arguments of LayerNormMLP. It uses all of recompute_modules but "core_attn"."""

    hidden_size: int
    ffn_hidden_size: int
    eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(FC1_WIDTHS, activation=self.activation)


@dataclass(frozen=True, kw_only=True)
class CoreOptions(Checked):
    """The arguments that attention and the half around it share.

    window_size: (left, 0): a query sees itself and at most `left` tokens before it; (-1, 0) and None: all of them.
    softmax_scale: multiplies the scores before the softmax; None is 1 / √d, with d the size of one head.
    attention_dropout: the probability with which each number of the softmax is dropped; TE's default is 0.1.
    layer_number: the layer's place in the model. Nothing here depends on it.
    attn_logit_softcapping: c: scores become c · tanh(scores / c) (Gemma 2), in backend paddle; 0: no cap.
    softmax_type: "learnable" adds a learnt score of each head, a sink, to the softmax's denominator (gpt-oss);
        "vanilla" has none.
    """

    window_size: tuple[int, int] | None = None
    softmax_scale: float | None = None
    attention_dropout: float = 0.0
    layer_number: int | None = None
    attn_logit_softcapping: float = 0.0
    softmax_type: str = "vanilla"

    def __post_init__(self) -> None:
        super().__post_init__()
        probability(attention_dropout=self.attention_dropout)
        one_of(SOFTMAX_TYPES, softmax_type=self.softmax_type)


@dataclass(frozen=True)
class CoreSettings(CoreOptions):
    """The arguments of DotProductAttention.

    kv_channels: d, the size of one head; or two sizes, for queries and keys, and for values.
    num_attention_heads: of the whole layer; needed with softmax_type "learnable".
    params_dtype: dtype of the sinks of softmax_type "learnable".
    attn_mask_type: the tokens that a token sees: "causal" those before it, "no_mask" all, "padding" all but padding,
        "padding_causal" those before it but padding.
    set_parallel_mode: fleet's model-parallel ranks share the heads, and each draws its own dropout.
    """

    kv_channels: int | tuple[int, int]
    backend: str = "transformer_engine"
    set_parallel_mode: bool = False
    attn_mask_type: str = "causal"
    num_attention_heads: int | None = None
    params_dtype: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.softmax_type == "learnable" and not self.num_attention_heads:
            raise ValueError("softmax_type='learnable' needs num_attention_heads, each of which has a number")

    @property
    def causal(self) -> bool:
        """Whether a token sees no later token."""
        return is_causal(self.attn_mask_type)

    @property
    def window(self) -> int:
        """The number of keys before its own that a query sees; -1: all."""
        return keys_before(self.window_size, self.causal)

    @property
    def channels(self) -> tuple[int, int]:
        """The size of a head of queries and keys, and of one of values."""
        return self.kv_channels if isinstance(self.kv_channels, tuple) else (self.kv_channels, self.kv_channels)

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.channels[0] ** -0.5 if self.softmax_scale is None else self.softmax_scale


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(CoreOptions, HalfOptions):
    """The arguments of the attention half.

    add_qkv_bias: only the projection to q, k and v has a bias (Megatron-Core's name).
    kv_channels: the size of one head; None is hidden_size / num_attention_heads.
    qk_norm_type: "RMSNorm" norms q and k; None: no such norm.
    qk_norm_eps: added to the mean square.
    qk_norm_before_rope: norm before rotation (Qwen3) instead of after.
    qk_norm_zero_centered_gamma: these norms multiply by 1 + weight (Gemma 3).
    qk_norm_over: "head": each head by itself, with one weight that all heads of q share, and one for k. "all": all
        heads of q together, and all of k, with a weight for each number (OLMo-2), before rotation.
    rotary_pos_interleaved: numbers 2i and 2i + 1 of a head are rotated together (GLM-4), not i and i + half. The
        number of rotated numbers follows from the angles.
    rotary_factor: multiplies the rotated numbers (LongRoPE of a part of each head, as in Phi-4-mini).
    attn_input_format: "bshd" for activations [b, s, h], "sbhd" for [s, b, h], which costs two copies in attention.
    cp_comm_type: how attention sees whole sequences whose tokens are split over fleet's sep group; TE's name, see
        `distributed.context_parallel`. None: sequences are whole. max_sequence_length counts whole sequences.
    """

    add_qkv_bias: bool = False
    kv_channels: int | None = None
    qk_norm_type: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_before_rope: bool = False
    qk_norm_zero_centered_gamma: bool = False
    qk_norm_over: str = "head"
    rotary_pos_interleaved: bool = False
    rotary_factor: float = 1.0
    attn_input_format: str = "bshd"
    cp_comm_type: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(QK_NORM_TYPES, qk_norm_type=self.qk_norm_type)
        one_of(QK_NORMS_OVER, qk_norm_over=self.qk_norm_over)
        if self.qk_norm_type and self.qk_norm_over == "all" and not self.qk_norm_before_rope:
            raise ValueError("qk_norm_over='all' with qk_norm_before_rope=False: these norms come before the rotation")
        one_of(INPUT_FORMATS, attn_input_format=self.attn_input_format)
        if self.softmax_type == "learnable" and self.cp_comm_type:
            raise ValueError(
                "softmax_type='learnable' with cp_comm_type: ranks that share sequences have no sinks; leave "
                "cp_comm_type (sep_parallel_degree, context_parallel_degree) out"
            )


@dataclass(frozen=True)
class AttentionSettings(AttentionOptions):
    """The arguments of MultiHeadAttention.

    hidden_size, num_attention_heads: of the whole layer, not of one rank.
    num_gqa_groups: key and value heads; None is num_attention_heads.
    layernorm_epsilon: the norm's eps.
    max_sequence_length: s; needed under sequence parallelism, where activations arrive as [b·s/tp, h].
    attn_mask_type: as CoreSettings'.
    """

    hidden_size: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    layernorm_epsilon: float = 1e-5
    max_sequence_length: int | None = None
    attn_mask_type: str = "causal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.kv_channels and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be divisible by num_attention_heads={self.num_attention_heads}; "
                "or give the size of a head as kv_channels"
            )
        if self.num_attention_heads % self.groups:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be divisible by num_gqa_groups={self.groups}"
            )
        check_length(self.sequence_parallel, self.max_sequence_length)

    @property
    def groups(self) -> int:
        """Heads of the keys, and of the values."""
        return self.num_gqa_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """The size of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def qkv(self) -> LayerNormLinearSettings:
        """The arguments of the projection to q, k and v."""
        return part(
            LayerNormLinearSettings,
            self,
            in_features=self.hidden_size,
            out_features=(self.num_attention_heads + 2 * self.groups) * self.head_dim,
            eps=self.layernorm_epsilon,
            bias=self.bias or self.add_qkv_bias,
            normalization=self.norm_before,
        )

    @property
    def proj(self) -> LinearSettings:
        """The arguments of the projection behind attention."""
        return part(
            LinearSettings,
            self,
            in_features=self.num_attention_heads * self.head_dim,
            out_features=self.hidden_size,
            parallel_mode="row" if self.set_parallel_mode else None,
            init_method=self.output_init,
        )

    @property
    def core(self) -> CoreSettings:
        """The arguments of attention itself."""
        return part(CoreSettings, self, kv_channels=self.head_dim)

    def qk_norm(self, heads: int) -> NormSettings | None:
        """Return the arguments of the norm of q or of k with so many heads on this rank; None without it."""
        if self.qk_norm_type is None:
            return None
        size = self.head_dim * (heads if self.qk_norm_over == "all" else 1)
        of_norm = size, self.qk_norm_eps, self.qk_norm_zero_centered_gamma
        return NormSettings(*of_norm, params_dtype=self.params_dtype, backend=self.backend)


@dataclass(frozen=True)
class LayerSettings(AttentionOptions, MLPOptions):
    """The arguments of TransformerLayer.

    hidden_size, ffn_hidden_size, num_attention_heads: of the whole layer, not of one rank.
    num_gqa_groups, max_sequence_length: as AttentionSettings'. layernorm_epsilon: of both norms.
    self_attn_mask_type: as CoreSettings' attn_mask_type.
    attention_half: makes the half with attention from these settings; None is MultiHeadAttention.
    feed_forward: makes the half behind attention from these settings; None is LayerNormMLP, see `FeedForward`.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    layernorm_epsilon: float = 1e-5
    max_sequence_length: int | None = None
    self_attn_mask_type: str = "causal"
    attention_half: Callable[[LayerSettings], Any] | None = None
    feed_forward: Callable[[LayerSettings], Any] | None = None

    @property
    def attention(self) -> AttentionSettings:
        """The arguments of the attention half."""
        return part(AttentionSettings, self, attn_mask_type=self.self_attn_mask_type)

    @property
    def mlp(self) -> MLPSettings:
        """The arguments of the MLP half."""
        return part(MLPSettings, self, eps=self.layernorm_epsilon)
