"""DotProductAttention and MultiHeadAttention."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_te.distributed import ContextParallel, TensorParallel, random_numbers, recompute
from paddle_te.fp8 import ModuleScaling, has_fp8_backward
from paddle_te.layers.base import BackendLayer, local_size, mark_split
from paddle_te.layers.checks import refuse
from paddle_te.layers.context import Context, KeyValue, takes_context
from paddle_te.layers.dropout import add_to_residual
from paddle_te.layers.linear import LayerNormLinear, Linear
from paddle_te.layers.masks import additive_mask
from paddle_te.layers.norm import RMSNorm, norm_of
from paddle_te.layers.ring_attention import ring_attention
from paddle_te.layers.settings import AttentionSettings, CoreSettings, LayerSettings, takes
from paddle_te.ops.heads import Attention, AttentionQuantizers, Heads, Scores
from paddle_te.ops.norms import Norm, QKNorm

_MASK, _CACHE = "attention mask (padding)", "key-value cache (generation)"


class DotProductAttention(BackendLayer):
    """Compute dropout(softmax(q·kᵀ / √d))·v; in fp8 under a recipe with fp8_dpa.

    Parameters: with softmax_type "learnable" softmax_offset [heads of this rank], zeros at first.
    Arguments: CoreSettings'.
    """

    @takes(CoreSettings)
    def __init__(self, settings: CoreSettings) -> None:
        super().__init__(settings.backend)
        self.attn_mask_type, self.causal, self.window = settings.attn_mask_type, settings.causal, settings.window
        self.layer_number, self.dropout_in_training = settings.layer_number, settings.attention_dropout
        self.tp = TensorParallel.from_fleet() if settings.set_parallel_mode else None
        self.channels, self.scale = settings.channels, settings.scale
        self.softcap, self.softmax_type = settings.attn_logit_softcapping, settings.softmax_type
        self.softmax_offset = self._create_offset(settings) if self.softmax_type == "learnable" else None
        self._scores = Scores(self.scale, self.causal, self.window, self.dropout_in_training, self.softcap)
        self._scores_in_evaluation = self._scores._replace(dropout=0.0)
        self.fp8 = ModuleScaling.of_attention(self.ops.amax_and_scale_update)
        self._checked: set[tuple[bool, float]] = set()  # what `ops.check_attention` has let pass

    def _create_offset(self, settings: CoreSettings) -> Tensor:
        heads = local_size(settings.num_attention_heads or 0, self.tp, "num_attention_heads")
        zeros, dtype = nn.initializer.Constant(0.0), settings.params_dtype or paddle.get_default_dtype()
        offset = self.create_parameter([heads], dtype=dtype, default_initializer=zeros)
        if self.tp is not None:
            mark_split(offset, 0)
        return offset

    def attention(self, cu_seqlens: Tensor | None = None, quantizers: AttentionQuantizers | None = None) -> Attention:
        """Return what the operations read besides q, k, v and a mask."""
        scores = self._scores if self.training else self._scores_in_evaluation
        return Attention(scores, self._parameters.get("softmax_offset"), cu_seqlens, quantizers)

    def random_numbers(self) -> AbstractContextManager[None]:
        """Return the context of dropout: each rank draws its own numbers, because it holds other heads."""
        return random_numbers(self.tp if self.dropout else None, own=True)

    def additive_mask(self, attention_mask: Tensor | None, cu_seqlens: Tensor | None, queries: int) -> Tensor | None:
        """Return the mask that is added to the scores of so many queries, or None: see `masks`."""
        return additive_mask(self.attn_mask_type, attention_mask, cu_seqlens, queries)

    def begin_forward(
        self, sequence: int, masked: bool, cached: bool, is_first_microbatch: bool | None = None, packed: bool = False
    ) -> AttentionQuantizers | None:
        """Return attention's quantizers, None where it is not in fp8.

        Call it before the first kernel. sequence: number of tokens. masked, cached, packed: whether there are an
        attention mask, keys of earlier tokens, or cu_seqlens.

        Raises ValueError for packed documents with a mask or a cache. With fp8_dpa it also does so for any of the
        three, for a window, dropout or another mask type than causal, and if the backend has no such attention.
        """
        if packed and (masked or cached):
            raise ValueError(f"cu_seqlens: packed documents have no {_MASK if masked else _CACHE}; give one of the two")
        case = masked or cached, self.dropout
        if packed and self.softmax_type != "vanilla":
            self.ops.check_packed_attention(self.softmax_type)
        if case not in self._checked:  # asked once: neither the layer nor the GPU changes
            head_dim, value_dim = self.channels
            self.ops.check_attention(head_dim, self.window, *case, self.softcap, self.softmax_type, value_dim)
            self._checked.add(case)
        quantizers = self.fp8.begin_forward(self.training, is_first_microbatch)
        if quantizers is not None:
            self._check_fp8(masked, cached, packed)
            # in training also without gradients: recompute's first forward
            backward = (self.training or paddle.is_grad_enabled()) and has_fp8_backward(quantizers)
            self.ops.check_fp8_attention(self.channels[0], sequence, backward)
        return quantizers

    def _check_fp8(self, masked: bool, cached: bool, packed: bool) -> None:
        lacking = {
            _MASK: masked,
            _CACHE: cached,
            "packed documents (cu_seqlens)": packed,
            "sliding window (window_size)": self.window >= 0,
            "dropout (attention_dropout)": self.dropout > 0,
            "soft cap (attn_logit_softcapping)": self.softcap > 0,
            f"softmax_type={self.softmax_type!r}": self.softmax_type != "vanilla",
            f"attn_mask_type={self.attn_mask_type!r}": not self.causal,
        }
        refuse(lacking, "fp8_dpa: attention in fp8 is plainly causal and has no {}; leave fp8_dpa out")

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        is_first_microbatch: bool | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Compute query_layer [b, s, h, d], key_layer and value_layer [b, s_kv, h_kv, d] -> [b, s, h·d].

        With two sizes in kv_channels d is the first of queries and keys, and the second of values and the result.
        attention_mask: additive, [b or 1, 1, s, s_kv], which says by itself what is seen, whatever attn_mask_type; with
        a padding type also bool, [b, 1, 1, s_kv], True for padding, as TE has it. is_first_microbatch: matters in fp8
        only. cu_seqlens: int32 [documents + 1], where the documents in the b·s tokens begin and end (`ops.documents`):
        attention is within each. Without a mask then, and as many keys as queries.
        """
        attention_mask = self.additive_mask(attention_mask, cu_seqlens, query_layer.shape[1])
        sequence, keys = query_layer.shape[1], key_layer.shape[1]
        masked, packed = attention_mask is not None, cu_seqlens is not None
        quantizers = self.begin_forward(sequence, masked, keys != sequence, is_first_microbatch, packed)
        attention = self.attention(cu_seqlens, quantizers)
        return self.attend(query_layer, key_layer, value_layer, attention, attention_mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attention: Attention, mask: Tensor | None) -> Tensor:
        """Compute what comes after `begin_forward`. attention: with its quantizers. mask: additive."""
        with self.random_numbers():
            return self.ops.dot_product_attention(q, k, v, attention, mask)


class MultiHeadAttention(BackendLayer):
    """Compute x + dropout(proj(attention(rope(layernorm_qkv(x))))), a layer's first half with the residual.

    Parameters: layernorm_qkv.{ln_weight, weight}, proj.weight; LayerNorm's layernorm_qkv.ln_bias; with add_qkv_bias or
    bias layernorm_qkv.bias, with bias proj.bias; with qk_norm_type q_norm.weight, k_norm.weight; with softmax_type
    "learnable" core_attention.softmax_offset; with norms "after" or "both" post_norm.weight, with norms "after" no
    ln_weight. The fused weight is q, k, v stacked on out: [(num_attention_heads + 2 · num_gqa_groups) · d,
    hidden_size], each part split over the ranks by heads; the bias likewise.
    Arguments: AttentionSettings'.
    """

    @classmethod
    def of_layer(cls, settings: LayerSettings) -> MultiHeadAttention:
        """Make the attention half of a TransformerLayer."""
        return cls.of(settings.attention)

    @takes(AttentionSettings)
    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__(settings.backend)
        self.settings, self.dropout_in_training = settings, settings.hidden_dropout
        self.max_sequence_length, self._core_again = settings.max_sequence_length, settings.core_again
        self._sequences_first = settings.attn_input_format == "sbhd"
        self.layernorm_qkv = LayerNormLinear.of(settings.qkv)
        self.proj = Linear.of(settings.proj)
        self.core_attention = DotProductAttention.of(settings.core)
        after = settings.norm_after(settings.hidden_size, settings.layernorm_epsilon)
        self.post_norm = norm_of(after, settings.normalization)
        self.scale = self.core_attention.scale
        tp = self.layernorm_qkv.tp
        self._token_shards = tp.size if tp is not None and settings.sequence_parallel else 1
        self.num_heads = local_size(settings.num_attention_heads, tp, "num_attention_heads")
        self.num_kv_heads = local_size(settings.groups, tp, "num_gqa_groups")
        self.q_norm, self.k_norm = (self._head_norm(heads, tp) for heads in (self.num_heads, self.num_kv_heads))
        self._norms_after_rope = self.q_norm is not None and not settings.qk_norm_before_rope
        self._as_one = not self._norms_after_rope and not self._sequences_first and settings.norms == "before"
        comm_type = settings.cp_comm_type
        self.cp = ContextParallel.from_fleet(comm_type) if comm_type else None
        self._sequence_shards = self.cp.size if self.cp else 1
        self._exchange = self.cp if comm_type == "a2a" else None
        self._ring = self.cp if comm_type == "p2p" else None
        if self._exchange:
            self._share_heads(settings.head_dim)
        if self._ring:
            self._check_ring()
        turn = settings.rotary_pos_interleaved, settings.rotary_factor
        self._plain_heads = Heads(self.num_heads, self.num_kv_heads, None, *turn)

    def _head_norm(self, heads: int, tp: TensorParallel | None) -> RMSNorm | None:
        """Make the norm of q or of k, or None."""
        settings = self.settings.qk_norm(heads)
        if settings is None:
            return None
        norm = RMSNorm.of(settings)
        if self._norms_all and tp is not None:
            mark_split(norm.weight, 0)
        return norm

    @property
    def uncalled(self) -> list[nn.Layer]:
        """Return the sublayers whose weights forward hands to operations: hooks before their forward see no use."""
        return [layer for layer in (self.q_norm, self.k_norm, self.core_attention) if layer is not None]

    @property
    def _norms_all(self) -> bool:
        return self.settings.qk_norm_over == "all"

    def _share_heads(self, head_dim: int) -> None:
        """Take a share of the heads in attention, for all tokens."""
        q, kv = self.num_heads * head_dim, self.num_kv_heads * head_dim
        self._qkv_widths, self._context_widths = (q, kv, kv), (q,)
        self._heads_of_own_tokens = self.num_heads, self.num_kv_heads
        self.num_heads = local_size(self.num_heads, self.cp, "num_attention_heads of a rank")
        self.num_kv_heads = local_size(self.num_kv_heads, self.cp, "num_gqa_groups of a rank")

    def _check_ring(self) -> None:
        core = self.core_attention
        lacking = {
            "window_size": core.window >= 0,
            "attention_dropout": core.dropout_in_training > 0,
            "attn_logit_softcapping": core.softcap > 0,
            f"attn_mask_type={core.attn_mask_type!r}": core.attn_mask_type != "causal",
        }
        refuse(lacking, "{}: ring attention (cp_comm_type='p2p') is plainly causal; 'a2a' has it")

    @takes_context("rotary_pos_emb", "attention_mask")
    def forward(self, x: Tensor, context: Context) -> Tensor | tuple[Tensor, KeyValue | None]:
        """Compute the attention half of a layer: x -> the same shape.

        x: [b, s, h], with attn_input_format sbhd [s, b, h], or under sequence parallelism [b·s/tp, h], tokens in that
        order. With cp_comm_type x has this rank's tokens of each sequence; all else is of whole sequences. The other
        arguments are Context's; with use_cache the result is (output, (k, v)).

        Raises ValueError for flat x that is no whole number of sequences, and for a cache of sequences that are split
        over ranks.
        """
        layers = self._sub_layers  # see layers.base.ParallelLayer
        context, attention = self._begin(x, context)
        dropout, first = self.dropout, context.is_first_microbatch
        if not dropout and self._is_plain(context, attention) and self._is_whole(layers):
            return self._forward_at_once(layers, x, context, attention)
        qkv, residual = layers["layernorm_qkv"](x, first)
        flat, qkv = qkv.ndim == 2, self._batch_first(qkv)
        if self._exchange:
            qkv = self._exchange.heads_for_tokens(self._normed_over_all(qkv), self._qkv_widths)
        attended, key_value = self._attended(qkv, context, attention)
        if self._exchange:
            attended = self._exchange.tokens_for_heads(attended, self._context_widths)
        post_norm = layers.get("post_norm")
        at_once = not dropout and post_norm is None
        out = layers["proj"](self._as_given(attended, flat), residual if at_once else None, first)
        if not at_once:
            out = add_to_residual(out, residual, post_norm, dropout, layers["proj"].tp)
        return (out, key_value) if context.use_cache else out

    def _begin(self, x: Tensor, context: Context) -> tuple[Context, Attention]:
        """Return the context with the additive mask and whether to compute attention again, and its Attention.

        Raises ValueError where attention cannot be computed so, before the first kernel.
        """
        core, packed = self._sub_layers["core_attention"], context.cu_seqlens is not None
        if context.with_cache and self.cp:
            raise ValueError("past_key_value, use_cache: a cache needs whole sequences; leave cp_comm_type out")
        sequence = self._sequence_length(x)
        mask = core.additive_mask(context.attention_mask, context.cu_seqlens, sequence)
        masked = mask is not None
        quantizers = core.begin_forward(sequence, masked, context.with_cache, context.is_first_microbatch, packed)
        if self._ring and (masked or packed or quantizers is not None):
            what = _MASK if masked else "packed documents (cu_seqlens)" if packed else "fp8 (fp8_dpa)"
            raise ValueError(f"ring attention (cp_comm_type='p2p') is plainly causal and has no {what}; 'a2a' has")
        again = self.training and (context.recompute_core_attention or self._core_again)
        context = context._replace(attention_mask=mask, recompute_core_attention=again)
        return context, core.attention(context.cu_seqlens, quantizers)

    def _is_plain(self, context: Context, attention: Attention) -> bool:
        """Say whether attention is training's usual one: of whole sequences, without a cache, a mask or dropout."""
        wanted = context.with_cache or context.attention_mask is not None or context.recompute_core_attention
        return not (wanted or attention.scores.dropout or self.cp)

    def _normed_over_all(self, qkv: Tensor) -> Tensor:
        """Return q and k normed over all heads, which a rank has only before the exchange, and v; else qkv itself."""
        if not self._norms_all:
            return qkv
        parts = self.ops.rotary_qkv(qkv, None, Heads(*self._heads_of_own_tokens, self._qk_norm()))
        return paddle.concat([part.flatten(2) for part in parts], -1)

    def _attended(self, qkv: Tensor, context: Context, attention: Attention) -> tuple[Tensor, KeyValue | None]:
        """Return (attention's output [b, s, h·d], (k, v) of all tokens so far where there is a cache)."""
        if context.with_cache:
            return self._attend_with_cache(qkv, context, attention)
        if context.recompute_core_attention:
            # by its name, as its offset, a parameter, is no argument of which `recompute` returns the gradient
            return recompute(self._attend, qkv, context, attention=attention), None
        return self._attend(qkv, context, attention), None

    def _sequence_length(self, x: Tensor) -> int:
        """Return that of a whole sequence."""
        shape = x.shape
        if len(shape) != 2:
            return shape[0 if self._sequences_first else 1] * self._sequence_shards
        s, tokens = self.max_sequence_length, shape[0] * self._token_shards * self._sequence_shards
        if not s or tokens % s:
            raise ValueError(f"{tokens} tokens, flat, are no whole number of sequences of max_sequence_length={s}")
        return s

    def _batch_first(self, qkv: Tensor) -> Tensor:
        """Return the projection's output as [b, s, …]."""
        if qkv.ndim == 2:
            assert self.max_sequence_length is not None  # `_sequence_length` has checked it
            s = self.max_sequence_length // self._sequence_shards
            qkv = qkv.reshape([*((s, -1) if self._sequences_first else (-1, s)), qkv.shape[-1]])
        return qkv.transpose([1, 0, 2]) if self._sequences_first else qkv

    def _as_given(self, attended: Tensor, flat: bool) -> Tensor:
        """Undo `_batch_first`."""
        if self._sequences_first:
            attended = attended.transpose([1, 0, 2])
        return attended.reshape([-1, attended.shape[-1]]) if flat else attended

    def _is_whole(self, layers: Mapping[str, nn.Layer]) -> bool:
        """Say whether nothing stands between the layers.

        That would be a norm of rotated q and k, another order of tokens, LoRA's dropout, or a hook such as those of
        sharding stage 3.
        """
        if not self._as_one:
            return False
        qkv, proj = layers["layernorm_qkv"], layers["proj"]
        hooks = qkv._forward_pre_hooks or qkv._forward_post_hooks or proj._forward_pre_hooks or proj._forward_post_hooks
        return not (hooks or qkv.drops or proj.drops)

    def _forward_at_once(self, layers: Mapping[str, Any], x: Tensor, context: Context, attention: Attention) -> Tensor:
        """Compute training's case, for which backends have one operation."""
        layernorm_qkv, first = layers["layernorm_qkv"], context.is_first_microbatch
        (qkv,), (proj,) = layernorm_qkv.projections(first), layers["proj"].projections(first)
        return self.ops.self_attention(
            x,
            layernorm_qkv.norm(),
            qkv,
            context.rotary_pos_emb,
            self._heads_of_rank(),
            attention,
            proj,
            max_sequence_length=self.max_sequence_length,
            tp=layernorm_qkv.tp,
        )

    def _heads_of_rank(self) -> Heads:
        """Say what the projection's output is made of.

        Ranks that share the heads have the same weights of norms.
        """
        if self.q_norm is None or self._norms_after_rope or self._norms_all and self._exchange:
            return self._plain_heads
        return self._plain_heads._replace(qk_norm=self._qk_norm())

    def _qk_norm(self) -> QKNorm | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        tp, weights = self.layernorm_qkv.tp, (self.q_norm.weight, self.k_norm.weight)
        q_weight, k_weight = weights if tp is None or self._norms_all else map(tp.sum_gradient, weights)
        ranks = tp if self._norms_all else None
        return QKNorm(q_weight, k_weight, self.q_norm.eps, self.q_norm.zero_centered_gamma, self._norms_all, ranks)

    def _attend(self, qkv: Tensor, context: Context, attention: Attention) -> Tensor:
        """Rotate and attend, for which backends have one operation where nothing else is wanted."""
        if self._ring:
            angles = context.rotary_pos_emb
            if angles is not None:
                angles = self._ring.own_tokens(angles, axis=angles.ndim - 2)
            return ring_attention(*self._heads(qkv, angles), scale=self.scale, cp=self._ring, ops=self.ops)
        core = self.core_attention
        if context.attention_mask is not None or self._norms_after_rope:
            return core.attend(*self._heads(qkv, context.rotary_pos_emb), attention, context.attention_mask)
        with core.random_numbers():
            return self.ops.rotary_attention(qkv, context.rotary_pos_emb, self._heads_of_rank(), attention)

    def _attend_with_cache(self, qkv: Tensor, context: Context, attention: Attention) -> tuple[Tensor, KeyValue]:
        """Return (attention's output, (k, v) of all tokens so far)."""
        q, k, v = self._heads(qkv, context.rotary_pos_emb)
        k, v = context.behind_past(k, v)
        return self.core_attention.attend(q, k, v, attention, context.attention_mask), (k, v)

    def _heads(self, qkv: Tensor, rotary_pos_emb: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, rotated and normed."""
        q, k, v = self.ops.rotary_qkv(qkv, rotary_pos_emb, self._heads_of_rank())
        norms = self._qk_norm() if self._norms_after_rope else None
        if norms is not None:
            pairs, options = ((q, norms.q_weight), (k, norms.k_weight)), (None, norms.zero_centered_gamma)
            q, k = (self.ops.normalize(x, Norm(weight, norms.eps, *options)) for x, weight in pairs)
        return q, k, v
