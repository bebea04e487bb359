"""Rotary embedding and fused attention.

Together they are an Op, as training runs them (see paddle_te.ops.te.recording). One by one they are PyLayers that call
the library directly: they serve masks, caches and generation, whose sizes change from call to call, so that a recorded
program would hardly ever be used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.fp8 import has_fp8_backward
from paddle_te.native import Mask, QKVLayout, rope
from paddle_te.native import qk_norm as native_norm
from paddle_te.native.library import cudnn_version
from paddle_te.native.rotation_cast import Float8Heads, rotation_cast
from paddle_te.ops.documents import check_cu_seqlens
from paddle_te.ops.heads import Heads, Scores
from paddle_te.ops.interface import AttentionQuantizers, Ranks
from paddle_te.ops.kept import kept_on
from paddle_te.ops.te import autograd, kernel_choice, runtime
from paddle_te.ops.te.float8_attention import Float8Attention, Float8QKV, deterministic
from paddle_te.ops.te.recording import Op, OpInputs, Placeholder, RecordedQuantizers, RecordedRanks, Recorder
from paddle_te.ops.te.runtime import (
    DTYPES,
    FLOAT32,
    INT32,
    INT64,
    Memory,
    Runtime,
    check_tensor,
    dense,
    dtype_code,
    needs_grad,
)

ANGLES = {paddle.float32: FLOAT32}
PADDLE_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
# q, k and v in three buffers, and in one: of sequences of one length, and of documents (TE's THD)
Views: TypeAlias = tuple[Any, Any, Any]  # native q, k and v
Target: TypeAlias = int | tuple[int, int, int]  # the address of one buffer of q, k and v, or those of three
SEPARATE, PACKED = int(QKVLayout.BSHD_BSHD_BSHD), int(QKVLayout.BS3HD)
THD_SEPARATE, THD_PACKED = int(QKVLayout.THD_THD_THD), int(QKVLayout.T3HD)
HIDDEN = -3e4  # added to the score of a hidden token; finite in float16, too, because a row of -inf gives NaN
# With a mask the number of keys is rounded up to a multiple of this. cuDNN plans anew for each number of keys, which
# takes longer than attention over a growing cache. It also aligns the rows of the mask.
KEY_MULTIPLE = 64
# from here on cuDNN has a softmax with an offset (9.13.1 has one, too), and its gradient over packed documents is right
CUDNN_OFFSET, CUDNN_PACKED_OFFSET = (9, 14), (9, 26)


class _Heads:
    """Sizes of one attention: q [b, s, h, d]; k and v [b, keys, h_kv, d]; code: their dtype for TE.

    value_dim: d of v and of the output, where it is another one; None: it is not.
    of_documents: attention among the tokens of a document, which cu_seqlens tell; TE then counts the tokens of all
    sequences in one, [t, h, d]. out: the output's shape, and context that with an axis for its heads.
    longest: tokens that a sequence or document has at most.
    width: of q, k and v of one token, side by side. packed: whether they may lie so for cuDNN, which through TE takes
    equal heads only; else q, k and v come one after another. layout: TE's name for that; separate: its name for three
    tensors. starts: {layout: elements before k and before v}.
    rope: what rope's kernels take; positions: rows of the angles, s, or b·s where each sequence has its own.
    """

    __slots__ = (
        "q", "kv", "v", "context", "stats", "out", "tokens", "longest", "rope", "dtype", "code", "width", "packed",
        "layout", "separate", "starts", "stats_bytes", "_stats_at", "_bytes",
    )  # fmt: skip

    def __init__(
        self,
        b: int,
        s: int,
        h: int,
        h_kv: int,
        d: int,
        code: int,
        keys: int,
        positions: int,
        of_documents: bool = False,
        value_dim: int | None = None,
    ) -> None:
        if not b * s * keys or h % h_kv:
            sizes = f"{b} sequences of {s} tokens and {keys} keys, {h} heads and {h_kv} key-value heads"
            raise ValueError(f"attention of {sizes}: there must be tokens, and the latter must divide the former")
        d_v = d if value_dim is None else value_dim
        self.tokens, self.out = b * s, [b, s, h * d_v]
        self.longest = self.tokens if of_documents else s
        self.q: tuple[int, ...]
        self.kv: tuple[int, ...]
        self.stats: tuple[int, ...]
        if of_documents:
            self.q, self.kv, self.stats = (b * s, h, d), (b * s, h_kv, d), (b * s, h, 1)
        else:
            self.q, self.kv, self.stats = (b, s, h, d), (b, keys, h_kv, d), (b, h, s, 1)
        self.v, self.context = (*self.kv[:-1], d_v), (*self.q[:-1], d_v)
        self.rope = self.tokens, positions, h, h_kv, d, code
        self.dtype, self.code, self.width = PADDLE_DTYPES[code], code, (h + 2 * h_kv) * d
        self.packed = self.q == self.kv == self.v
        in_one, self.separate = (THD_PACKED, THD_SEPARATE) if of_documents else (PACKED, SEPARATE)
        self.layout = in_one if self.packed else self.separate
        to_k, to_v = h * d, (h + h_kv) * d
        self.starts = {in_one: (to_k, to_v), self.separate: (to_k * self.tokens, to_v * self.tokens)}
        self.stats_bytes = 4 * self.tokens * h
        self._stats_at = -(-2 * self.tokens * self.width // 256) * 256
        self._bytes = self._stats_at + self.stats_bytes

    def views(self, rt: Runtime, base: int) -> Views:
        """Return (q, k, v) as native tensors in one buffer of tokens · width."""
        to_k, to_v = self.starts[self.layout]
        return (
            rt.tensor(base, self.q, self.code),
            rt.tensor(base + 2 * to_k, self.kv, self.code),
            rt.tensor(base + 2 * to_v, self.kv, self.code),
        )

    def whole_view(self, rt: Runtime, base: int) -> Any:
        """Return q, k and v in one buffer as one native tensor."""
        return rt.tensor(base, (self.tokens, self.width), self.code)

    def q_view(self, rt: Runtime, tensor: Memory) -> Any:
        return rt.tensor(tensor.data_ptr(), self.q, self.code)

    def k_view(self, rt: Runtime, tensor: Memory) -> Any:
        return rt.tensor(tensor.data_ptr(), self.kv, self.code)

    def v_view(self, rt: Runtime, tensor: Memory) -> Any:
        return rt.tensor(tensor.data_ptr(), self.v, self.code)

    def context_view(self, rt: Runtime, tensor: Memory) -> Any:
        """Return the output, or its gradient, as a native tensor."""
        return rt.tensor(tensor.data_ptr(), self.context, self.code)

    def new_buffer(self, rt: Runtime) -> Any:
        return rt.empty([self.tokens, self.width], self.dtype)

    def new_stats(self, rt: Runtime) -> Any:
        """Return native statistics in memory of their own."""
        return rt.tensor(rt.empty(list(self.stats), paddle.float32).data_ptr(), self.stats, FLOAT32)

    def new_buffer_and_stats(self, rt: Runtime) -> tuple[Any, Any]:
        """Return (memory, native statistics behind a buffer): backward reads both, and frees them together."""
        memory = rt.empty([self._bytes], paddle.uint8)
        return memory, rt.tensor(memory.data_ptr() + self._stats_at, self.stats, FLOAT32)


def _backward_done(quantizers: AttentionQuantizers | None) -> None:
    if quantizers is not None:
        quantizers[0].forward_pass.backward_done()


class _Sequences:
    """Each token sees its whole sequence, or if causal the tokens before it, at most `window` unless that is -1.

    mask: TE's name for it.
    """

    masks = int(Mask.NONE), int(Mask.CAUSAL)

    def __init__(self, causal: bool, window: int = -1) -> None:
        self.mask, self.window = self.masks[causal], window

    @staticmethod
    def of(cu_seqlens: Memory | None, causal: bool, window: int, longest: int) -> _Sequences:
        """Return those with documents or without.

        A window that covers the `longest` sequence there can be is none: plain causal attention is what cuDNN is tuned
        for.
        """
        window = window if window < longest - 1 else -1
        return _Sequences(causal, window) if cu_seqlens is None else _Documents(cu_seqlens, causal, window)

    def cu_seqlens(self, rt: Runtime) -> Any:
        """Return what both take as cu_seqlens."""
        return None

    def bias(self, rt: Runtime) -> Any:
        """Return what attention_fwd takes as bias."""
        return None

    def bias_and_gradient(self, rt: Runtime) -> tuple[Any, Any]:
        """Return what attention_bwd takes as bias and its gradient."""
        return None, None


class _Documents(_Sequences):
    """The same of documents. boundaries: int32 [documents + 1], see `ops`."""

    masks = int(Mask.PADDING), int(Mask.PADDING_CAUSAL)

    def __init__(self, boundaries: Memory, causal: bool, window: int) -> None:
        super().__init__(causal, window)
        self.boundaries = boundaries

    def cu_seqlens(self, rt: Runtime) -> Any:
        return rt.tensor(self.boundaries.data_ptr(), tuple(self.boundaries.shape), INT32)


class _Bias(_Sequences):
    """Each token sees the keys whose scores get 0 added, not HIDDEN. scores: [b or 1, 1, s, keys]."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__(causal=False)
        self.scores = scores

    def _view(self, rt: Runtime, tensor: Tensor) -> Any:
        return rt.tensor(tensor.data_ptr(), tuple(tensor.shape), dtype_code("attention_mask", tensor))

    def bias(self, rt: Runtime) -> Any:
        return self._view(rt, self.scores)

    def bias_and_gradient(self, rt: Runtime) -> tuple[Any, Any]:
        self.unused = rt.empty(self.scores.shape, self.scores.dtype)  # cuDNN computes it whether wanted or not
        return self.bias(rt), self._view(rt, self.unused)


@dataclass(slots=True)
class _Softmax:
    """Compute softmax(scale · scores) over the tokens that are `seen`.

    dropout: the probability with which each number is dropped. rng_state: `draw_rng_state`'s tensor or its
    Placeholder; None without dropout. offset: float32 [h] or its Placeholder, see `ops.interface`; None: no offset.
    """

    scale: float
    seen: _Sequences
    dropout: float = 0.0
    rng_state: Any = None
    offset: Any = None

    def last_arguments(self, rt: Runtime, others: int, *gradient: Memory) -> tuple[Any, ...]:
        """Return the last arguments of attention_fwd and attention_bwd: window and offset, if any.

        others: the number of preceding arguments that only fp8 uses. gradient: the offset's, which attention_bwd fills.
        """
        window = self.seen.window
        if self.offset is None:
            return () if window < 0 else (*[None] * others, window)
        offsets = [rt.tensor(memory.data_ptr(), tuple(memory.shape), FLOAT32) for memory in (self.offset, *gradient)]
        return *[None] * others, window, *offsets

    def new_gradient(self, rt: Runtime) -> tuple[Any, ...]:
        """Return memory for the offset's gradient, which cuDNN always computes; () without an offset."""
        return () if self.offset is None else (rt.empty(self.offset.shape, paddle.float32),)

    def wanted(self, gradient: tuple[Any, ...]) -> Any:
        """Return the `new_gradient` if the offset is trained, else None."""
        return gradient[0] if gradient and not self.offset.stop_gradient else None

    def dropout_arguments(self, rt: Runtime) -> tuple[float, Any]:
        """Return dropout and rng_state as attention_fwd and attention_bwd take them."""
        if not self.dropout:
            return 0.0, None
        return self.dropout, rt.tensor(self.rng_state.data_ptr(), (2,), INT64)


def draw_rng_state(dropout: float) -> Tensor | None:
    """Return 16 random bytes as the seed and the offset of cuDNN's generator; None without dropout.

    Paddle's generator makes them on the device, so the host does not wait. Each call gives other bytes. When the
    generator's state is restored, in recompute or from a checkpoint, they repeat, and so does the dropout mask.
    """
    return paddle.rand([4], "float32") if dropout else None


_sizes = lru_cache(maxsize=64)(_Heads)  # a model has one, its layers' launches are what counts


def _attend(rt: Runtime, heads: _Heads, qkv: Views, stats: Any, softmax: _Softmax, layout: int, train: bool) -> Any:
    """Return out [b, s, h·d] of native q, k, v; fill the softmax statistics, float32 [b, h, s, 1] or [t, h, 1]."""
    out, seen = rt.empty(heads.out, heads.dtype), softmax.seen
    views = *qkv, heads.context_view(rt, out), stats
    # TE drops in training only, and a first forward of recompute, which no backward follows, must drop as the second
    train = train or softmax.dropout > 0
    # by position: keywords take as long as the call itself
    options = softmax.scale, layout, seen.mask, train, rt.stream, *softmax.dropout_arguments(rt)
    rt.te.attention_fwd(*views, *options, seen.cu_seqlens(rt), seen.bias(rt), *softmax.last_arguments(rt, 1))
    return out


def _attend_backward(
    rt: Runtime,
    heads: _Heads,
    qkv: Views,
    out: Memory,
    stats: Any,
    dout: Memory,
    dqkv: Views,
    softmax: _Softmax,
    layout: int,
) -> tuple[Any, ...]:
    """Fill the native dq, dk, dv; return the softmax's `new_gradient`."""
    seen = softmax.seen
    (dropout, rng_state), doffset = softmax.dropout_arguments(rt), softmax.new_gradient(rt)
    rt.te.attention_bwd(
        *qkv,
        heads.context_view(rt, out),
        heads.context_view(rt, dout),
        stats,
        *dqkv,
        softmax.scale,
        layout,
        seen.mask,
        rt.stream,
        dropout,
        deterministic(),
        rng_state,
        seen.cu_seqlens(rt),
        *seen.bias_and_gradient(rt),
        *softmax.last_arguments(rt, 2, *doffset),
    )
    return doffset


class RotationSettings(NamedTuple):
    """The settings of a `Heads` for norms and rotation.

    eps: the norms', None for none. ranks: how many share the heads of norms over all of them. factor: of rotated
    numbers.
    """

    eps: float | None
    zero_centered_gamma: bool
    interleaved: bool
    over_all: bool
    ranks: int
    factor: float

    @classmethod
    def of(cls, heads: Heads) -> RotationSettings:
        norm = heads.qk_norm
        if norm is None:
            return cls(None, False, heads.interleaved, False, 1, heads.rotary_factor)
        ranks = 1 if norm.ranks is None else norm.ranks.size
        of_norm = norm.eps, norm.zero_centered_gamma
        return cls(*of_norm, heads.interleaved, norm.over_all, ranks, heads.rotary_factor)

    def weight_sizes(self, heads: _Heads) -> tuple[int, int]:
        """Return the numbers of q's and k's weights."""
        (*_, h, d), (*_, h_kv, _) = heads.q, heads.kv
        return (h * d, h_kv * d) if self.over_all else (d, d)


@dataclass(slots=True)
class _Rotation:
    """The steps of q and k between projection and attention: a norm of each head, and the rotation.

    freqs: angles, or None for no rotation. q_weight, k_weight: the norm's, or None for no norm. tp: the ranks that
    share the heads of a norm over all, or None.
    """

    freqs: Any
    q_weight: Any
    k_weight: Any
    settings: RotationSettings
    tp: Any = None

    @property
    def _angles(self) -> int:
        return 0 if self.freqs is None else self.freqs.data_ptr()

    def _geometry(self, heads: _Heads) -> rope.Geometry:
        width = None if self.freqs is None else self.freqs.shape[-1]
        return rope.Geometry(*heads.rope, rope.Turn(width, self.settings.interleaved, self.settings.factor))

    @property
    def _norm(self) -> native_norm.QKNorm:
        addresses = self.q_weight.data_ptr(), self.k_weight.data_ptr()
        eps, zero_centered, _, over_all, ranks, _ = self.settings
        return native_norm.QKNorm(*addresses, eps or 0.0, zero_centered, over_all, ranks)

    def _sums(self, rt: Runtime, heads: _Heads, grads: Target | None, qkv: int) -> Any:
        """Return the memory of what norms over all heads add up first, of all ranks; None for norms of each head."""
        if not self.settings.over_all:
            return None
        sums = rt.empty([heads.tokens, 4], paddle.float32)
        given = grads, qkv, sums.data_ptr(), self._angles, self._geometry(heads)
        self._norm.sums(rt.te, rt.stream, *given)
        return sums if self.tp is None else self.tp.all_reduce(sums)

    def stays(self, heads: _Heads) -> bool:
        """Return whether cuDNN takes q, k and v where the projection has put them."""
        return self.freqs is None and self.q_weight is None and heads.packed

    def forward(self, rt: Runtime, heads: _Heads, qkv: Memory, target: Target) -> None:
        """Write normed and rotated q and k, and v. target: the address of one buffer, or those of three."""
        given = rt.te, rt.stream, qkv.data_ptr()
        if self.q_weight is not None:
            sums = self._sums(rt, heads, None, qkv.data_ptr())
            at = 0 if sums is None else sums.data_ptr()
            self._norm.forward(*given, target, self._angles, self._geometry(heads), at)
        else:
            rope.rotate(*given, target, self._angles, self._geometry(heads))

    def casts(self, heads: _Heads, quantizers: Sequence[RecordedQuantizers]) -> bool:
        """Return whether `forward_in_fp8` is there instead of `forward` and a cast. quantizers: attention's."""
        of_qkv = quantizers[0].input
        counts = of_qkv.statistics_ptr  # which the kernel does not
        at_once = not self.stays(heads) and not self.settings.over_all and not counts
        return at_once and kernel_choice.rotation_cast(of_qkv)

    def forward_in_fp8(self, rt: Runtime, heads: _Heads, qkv: Memory, target: Float8QKV) -> None:
        """Write normed and rotated q and k, and v, in fp8."""
        addresses, (*_, h, d), (*_, h_kv, _) = (target.q, target.k, target.v), heads.q, heads.kv
        strides = (heads.width,) * 3 if heads.packed else (h * d, h_kv * d, h_kv * d)
        _, scale, amax, scale_inv = target.factors
        q, k, v = (native.data_ptr for native in addresses)
        float8 = Float8Heads(q, k, v, strides, scale, amax, scale_inv)
        norm = None if self.q_weight is None else self._norm
        rotation_cast(rt.te, rt.stream, qkv.data_ptr(), float8, norm, self._angles, self._geometry(heads))

    def backward(self, rt: Runtime, heads: _Heads, grads: Target, qkv: Memory, dqkv: Memory) -> tuple[Any, Any]:
        """Fill dqkv, and return the gradients of the norm's weights, or None for what wants none.

        grads: as forward's target; one buffer is dqkv's own. qkv: what forward has read.
        """
        target = dqkv.data_ptr()
        if self.q_weight is not None:
            return self._norm_backward(rt, heads, grads, qkv.data_ptr(), target)
        rope.rotate(rt.te, rt.stream, grads, target, self._angles, self._geometry(heads), True)
        return None, None

    def _norm_backward(self, rt: Runtime, heads: _Heads, grads: Target, qkv: int, dqkv: int) -> tuple[Any, Any]:
        weights, sizes = (self.q_weight, self.k_weight), self.settings.weight_sizes(heads)
        trained = any([not weight.stop_gradient for weight in weights])
        sums = self._sums(rt, heads, grads, qkv)
        partials = rt.empty([native_norm.partial_bytes(heads.tokens, sum(sizes))], paddle.uint8) if trained else None
        at, of_sums = (0 if memory is None else memory.data_ptr() for memory in (partials, sums))
        given = grads, qkv, dqkv, at, self._angles, self._geometry(heads), of_sums
        self._norm.backward(rt.te, rt.stream, *given)
        if not trained:
            return None, None
        dq, dk = (rt.empty([size], heads.dtype) for size in sizes)
        outputs = dq.data_ptr(), dk.data_ptr()
        native_norm.weight_gradients(rt.te, rt.stream, at, *outputs, heads.tokens, sizes, heads.code)
        return None if self.q_weight.stop_gradient else dq, None if self.k_weight.stop_gradient else dk


class _RotaryQKV(PyLayer):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        freqs: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        settings: RotationSettings,
        heads: _Heads,
        tp: Ranks | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rt, rotation = runtime.current(), _Rotation(freqs, q_weight, k_weight, settings, tp)
        q = rt.empty(list(heads.q), heads.dtype)
        k, v = (rt.empty(list(heads.kv), heads.dtype) for _ in range(2))
        rotation.forward(rt, heads, qkv, (q.data_ptr(), k.data_ptr(), v.data_ptr()))
        # without a norm backward reads nothing of qkv
        ctx.saved = rotation, heads, not qkv.stop_gradient, None if q_weight is None else qkv
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> Any:
        (rotation, heads, needs, qkv), ctx.saved = ctx.saved, None
        given = [tensor is not None for tensor in (rotation.freqs, rotation.q_weight, rotation.k_weight)]
        gradients: list[Tensor | None] = [None, None, None, None]
        if needs or qkv is not None:
            rt = runtime.current()
            b, s = heads.q[:2]
            dqkv = rt.empty([b, s, heads.width], heads.dtype)
            grads = [dense(grad) for grad in (dq, dk, dv)]
            at = grads[0].data_ptr(), grads[1].data_ptr(), grads[2].data_ptr()
            of_weights = rotation.backward(rt, heads, at, qkv, dqkv)
            gradients = [dqkv if needs else None, None, *of_weights]
        found = [gradient for gradient, there in zip(gradients, (True, *given), strict=True) if there]
        return found[0] if len(found) == 1 else tuple(found)


class _DotProductAttention(PyLayer):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offset: Tensor | None,
        softmax: _Softmax,
        heads: _Heads,
        train: bool,
        quantizers: AttentionQuantizers | None,
    ) -> Tensor:
        """offset: the softmax's, here for its gradient."""
        rt = runtime.current()
        views = heads.q_view(rt, q), heads.k_view(rt, k), heads.v_view(rt, v)
        memory = rt.empty(list(heads.stats), paddle.float32)
        stats = rt.tensor(memory.data_ptr(), heads.stats, FLOAT32)
        if quantizers is None:
            out = _attend(rt, heads, views, stats, softmax, heads.separate, train)
        else:
            out = Float8Attention(rt, heads, heads.separate, softmax.scale, quantizers, stats).forward(rt, views, train)
        if train:
            # detached: with its graph the output would keep this ctx, and itself, alive
            ctx.saved = q, k, v, memory, views, out.detach(), stats, softmax, heads, quantizers
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        rt = runtime.current()
        (q, k, v, _memory, views, out, stats, softmax, heads, quantizers), ctx.saved = ctx.saved, None
        dq, dk, dv = (rt.empty(tensor.shape, heads.dtype) for tensor in (q, k, v))
        grads = heads.q_view(rt, dq), heads.k_view(rt, dk), heads.v_view(rt, dv)
        doffset = _attend_backward(rt, heads, views, out, stats, dense(dout), grads, softmax, heads.separate)
        _backward_done(quantizers)
        pairs = (q, dq), (k, dk), (v, dv)
        found = tuple(None if tensor.stop_gradient else grad for tensor, grad in pairs)
        return found if softmax.offset is None else (*found, softmax.wanted(doffset))


class AttentionSettings(NamedTuple):
    """num_heads, num_kv_heads: of this rank.

    scores: a Scores. backward_in_fp8: attention's backward too. deterministic: as the environment asked for when
    the call was made; it decides on the calls too.
    """

    num_heads: int
    num_kv_heads: int
    rotation: RotationSettings
    scores: Scores
    backward_in_fp8: bool
    deterministic: bool

    @classmethod
    def of(cls, heads: Heads, scores: Scores, quantizers: AttentionQuantizers | None) -> AttentionSettings:
        """quantizers: attention's three GemmQuantizers, or None."""
        in_fp8, of_rotation = has_fp8_backward(quantizers), RotationSettings.of(heads)
        return cls(heads.num_heads, heads.num_kv_heads, of_rotation, scores, in_fp8, deterministic())


@dataclass(slots=True)
class _In16Bits:
    """Hold what a backward in 16 bits reads. qkv: native q, k and v, rotated. out: attention's output."""

    qkv: Views
    out: Placeholder
    stats: Any


@dataclass(slots=True)
class _SavedAttention:
    """Hold what backward reads. in_fp8: the Float8Attention, if its backward is in fp8; else in_16_bits."""

    heads: _Heads
    qkv: Placeholder
    rotation: _Rotation
    softmax: _Softmax
    in_fp8: Float8Attention | None = None
    in_16_bits: _In16Bits | None = None


def _rotary_attention_forward(
    rt: Recorder, inputs: OpInputs, settings: AttentionSettings
) -> tuple[Placeholder, _SavedAttention]:
    given = *inputs.tensors, [each for each in inputs.quantizers if each], inputs.train, settings, inputs.tp
    return rotary_attention_forward(rt, *given)


def rotary_attention_forward(
    rt: Recorder,
    qkv: Placeholder,
    freqs: Placeholder | None,
    cu_seqlens: Placeholder | None,
    rng_state: Placeholder | None,
    q_weight: Placeholder | None,
    k_weight: Placeholder | None,
    softmax_offset: Placeholder | None,
    quantizers: Sequence[RecordedQuantizers],
    train: bool,
    settings: AttentionSettings,
    tp: RecordedRanks | None = None,
) -> tuple[Placeholder, _SavedAttention]:
    """Return (out, _SavedAttention). q, k and v stay in one buffer; in fp8 they take one cast.

    cu_seqlens: of documents, or None. rng_state: `draw_rng_state`'s. q_weight, k_weight: of the norms, or None.
    softmax_offset: float32, or None.
    quantizers: attention's three, or none. settings: AttentionSettings. tp: of norms over all heads, or None.
    """
    scale, causal, window, dropout, _ = settings.scores  # `check_attention` refuses a soft cap
    heads = _heads_of(qkv, freqs, settings.num_heads, settings.num_kv_heads, cu_seqlens)
    seen = _Sequences.of(cu_seqlens, causal, window, heads.longest)
    softmax = _Softmax(scale, seen, dropout, rng_state, softmax_offset)
    _check_offset(heads, softmax_offset)
    _check_norms(heads, q_weight, k_weight, settings.rotation)
    rotation = _Rotation(freqs, q_weight, k_weight, settings.rotation, tp)
    saved = _SavedAttention(heads, qkv, rotation, softmax)
    stays, stats = rotation.stays(heads), None
    if settings.backward_in_fp8 and rotation.casts(heads, quantizers):
        saved.in_fp8 = Float8Attention(rt, heads, heads.layout, scale, quantizers)
        rotation.forward_in_fp8(rt, heads, qkv, saved.in_fp8.qkv)
        return saved.in_fp8.forward(rt, None, train), saved
    if settings.backward_in_fp8:
        memory = qkv if stays else heads.new_buffer(rt)
    elif stays:
        memory, stats = qkv, heads.new_stats(rt)
    else:
        memory, stats = heads.new_buffer_and_stats(rt)
    views = heads.views(rt, memory.data_ptr())
    if not stays:
        rotation.forward(rt, heads, qkv, _addresses(heads, views))
    whole = heads.whole_view(rt, memory.data_ptr())
    if settings.backward_in_fp8:
        saved.in_fp8 = Float8Attention(rt, heads, heads.layout, scale, quantizers)
        return saved.in_fp8.forward(rt, (whole,), train), saved
    if quantizers:
        out = Float8Attention(rt, heads, heads.layout, scale, quantizers, stats).forward(rt, (whole,), train)
    else:
        out = _attend(rt, heads, views, stats, softmax, heads.layout, train)
    saved.in_16_bits = _In16Bits(views, out, stats)
    return out, saved


def rotary_attention_backward(
    rt: Recorder, saved: _SavedAttention, dout: Placeholder
) -> tuple[Placeholder, None, None, None, Any, Any, Any]:
    """Return (dqkv, None for angles, documents and random state, the gradients of norms' weights and offset)."""
    heads, attention, doffset = saved.heads, saved.in_16_bits, ()
    dqkv = rt.empty(saved.qkv.shape, heads.dtype)
    buffer = dqkv if heads.packed else heads.new_buffer(rt)
    grads = heads.views(rt, buffer.data_ptr())
    if saved.in_fp8:
        saved.in_fp8.backward(rt, dout, (heads.whole_view(rt, buffer.data_ptr()),))
    else:
        assert attention is not None  # where the backward is not in fp8
        of_forward = attention.qkv, attention.out, attention.stats
        doffset = _attend_backward(rt, heads, *of_forward, dout, grads, saved.softmax, heads.layout)
    of_weights = None, None
    if not saved.rotation.stays(heads):
        of_weights = saved.rotation.backward(rt, heads, _addresses(heads, grads), saved.qkv, dqkv)
    return dqkv, None, None, None, *of_weights, saved.softmax.wanted(doffset)


def _addresses(heads: _Heads, views: Views) -> Target:
    """Return where native q, k and v lie: the address of the buffer that they share, or those of three."""
    q, k, v = (view.data_ptr for view in views)
    return q if heads.packed else (q, k, v)


def _rotary_attention_backward(
    rt: Recorder, saved: _SavedAttention, dout: Placeholder
) -> tuple[Placeholder | None, ...]:
    dqkv, *others = rotary_attention_backward(rt, saved, dout)
    return None if saved.qkv.stop_gradient else dqkv, *others  # norms' weights and offset may want gradients then


_ROTARY_ATTENTION = Op(_rotary_attention_forward, _rotary_attention_backward)


class _Float8DotProductAttention(PyLayer):
    """_DotProductAttention in fp8, backward too."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax: _Softmax,
        heads: _Heads,
        train: bool,
        quantizers: AttentionQuantizers,
    ) -> Tensor:
        rt = runtime.current()
        views = heads.q_view(rt, q), heads.k_view(rt, k), heads.v_view(rt, v)
        attention = Float8Attention(rt, heads, heads.separate, softmax.scale, quantizers)
        out = attention.forward(rt, views, train)
        if train:
            ctx.saved = attention, [not tensor.stop_gradient for tensor in (q, k, v)]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        rt = runtime.current()
        (attention, needs), ctx.saved = ctx.saved, None
        heads = attention.heads
        dq, dk, dv = (rt.empty(list(shape), heads.dtype) for shape in (heads.q, heads.kv, heads.v))
        views = heads.q_view(rt, dq), heads.k_view(rt, dk), heads.v_view(rt, dv)
        attention.backward(rt, dense(dout), views)
        _backward_done(attention.quantizers)
        return tuple(grad if needed else None for grad, needed in zip((dq, dk, dv), needs, strict=True))


def _heads_of(
    qkv: Memory, freqs: Memory | None, num_heads: int, num_kv_heads: int, cu_seqlens: Memory | None = None
) -> _Heads:
    code, (b, s, width) = dtype_code("qkv", qkv), qkv.shape
    d, rest = divmod(width, num_heads + 2 * num_kv_heads)
    angles = None if freqs is None else list(freqs.shape)
    if rest or angles and angles[-1] > d:
        heads = f"{num_heads} heads and {num_kv_heads} key-value heads"
        raise ValueError(f"angles {angles} for {heads}, {width} numbers wide in all: head sizes differ")
    check_cu_seqlens(cu_seqlens)
    rows = rows_of_angles(freqs, b, s)
    return _sizes(b, s, num_heads, num_kv_heads, d, code, s, rows, cu_seqlens is not None)


def rows_of_angles(freqs: Memory | None, b: int, s: int) -> int:
    """s, or b·s where each sequence has positions of its own; freqs: None for no angles.

    Raises ValueError for others, TypeError for what is not float32.
    """
    if freqs is None:
        return s
    dtype_code("rotary_pos_emb", freqs, ANGLES)
    angles = list(freqs.shape)
    own = len(angles) == 3
    if angles[:2] != [b, s] if own else len(angles) != 2 or angles[0] < s:
        raise ValueError(f"angles {angles} for {b} sequences of {s} tokens: they must be [≥ s, d] or [b, s, d]")
    return b * s if own else s


def rotary_qkv(qkv: Tensor, freqs: Tensor | None, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the fused projection into heads, and norms and rotates q and k, in one kernel: see `ops.interface`."""
    angles, sizes = None if freqs is None else dense(freqs), _heads_of(qkv, freqs, heads.num_heads, heads.num_kv_heads)
    weights = (None, None) if heads.qk_norm is None else heads.qk_norm[:2]
    settings, tp = RotationSettings.of(heads), heads.qk_norm and heads.qk_norm.ranks
    q_weight, k_weight = weights
    _check_norms(sizes, q_weight, k_weight, settings)
    return _RotaryQKV.apply(dense(qkv), angles, *weights, settings, sizes, tp)


def _check_norms(heads: _Heads, q_weight: Memory | None, k_weight: Memory | None, settings: RotationSettings) -> None:
    """Raise TypeError or ValueError for weights that do not fit; None for no norms."""
    names = "q_norm's weight", "k_norm's weight"
    for name, weight, size in zip(names, (q_weight, k_weight), settings.weight_sizes(heads), strict=True):
        if weight is not None:
            check_tensor(name, weight, [size], heads.dtype)


def _check_offset(heads: _Heads, softmax_offset: Memory | None) -> None:
    """Raise TypeError or ValueError for one that does not fit; None for none."""
    if softmax_offset is not None:
        check_tensor("softmax_offset", softmax_offset, [heads.q[-2]], paddle.float32)


def in_float32(softmax_offset: Tensor | None) -> Tensor | None:
    """Return what cuDNN takes."""
    return None if softmax_offset is None else softmax_offset.astype("float32")


def rotary_attention(
    qkv: Tensor,
    freqs: Tensor | None,
    heads: Heads,
    scores: Scores,
    *,
    softmax_offset: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    quantizers: AttentionQuantizers | None = None,
) -> Tensor:
    """dot_product_attention(*rotary_qkv(qkv, …), …) without q, k and v in between."""
    weights = (None, None) if heads.qk_norm is None else heads.qk_norm[:2]
    tensors = qkv, freqs, cu_seqlens, draw_rng_state(scores.dropout), *weights, in_float32(softmax_offset)
    settings = AttentionSettings.of(heads, scores, quantizers)
    tp = heads.qk_norm and heads.qk_norm.ranks
    return autograd.apply(_ROTARY_ATTENTION, tensors, settings, quantizers=quantizers or (), tp=tp)


def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    *,
    softmax_offset: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    quantizers: AttentionQuantizers | None = None,
) -> Tensor:
    """See `ops.interface`; through cuDNN's fused attention.

    What a mask becomes is kept on it for the next layers: one that changes in place must do so by an operation that
    Paddle counts (`inplace_version`; set_value and copy_ are none). It gets no gradient: ValueError if it wants one.
    Raises TypeError and ValueError for tensors that do not fit each other.
    A mask, or s_kv ≠ s, costs memory of b·s·s_kv numbers (twice that in backward), which other attention spares.
    In fp8 (quantizers) there is neither.
    """
    scale, causal, window, dropout, _ = scores  # `check_attention` refuses a soft cap
    (b, s, h, d), (_, keys, h_kv, _), value_dim = q.shape, k.shape, v.shape[-1]
    code = dtype_code("query_layer", q)
    check_cu_seqlens(cu_seqlens)
    if softmax_offset is not None and s == 1 and cu_seqlens is None:
        return _attend_twice(q, k, v, scores, softmax_offset, attention_mask)
    for name, tensor, width in ("key_layer", k, d), ("value_layer", v, value_dim):
        check_tensor(name, tensor, [b, keys if cu_seqlens is None else s, h_kv, width], q.dtype)
    if cu_seqlens is not None or quantizers is not None or attention_mask is None and keys == s:
        seen = _Sequences.of(cu_seqlens, causal, window, q.shape[1] if cu_seqlens is None else q.shape[0] * q.shape[1])
    else:
        padding = -keys % KEY_MULTIPLE
        seen = _Bias(_additive(attention_mask, s, keys, padding, q.dtype, causal, window))
        k, v = (_longer(tensor, padding) for tensor in (k, v))
    heads = _sizes(b, s, h, h_kv, d, code, k.shape[1], s, cu_seqlens is not None, value_dim)
    offset = in_float32(softmax_offset)
    _check_offset(heads, offset)
    softmax, of_heads = _Softmax(scale, seen, dropout, draw_rng_state(dropout), offset), (dense(q), dense(k), dense(v))
    if has_fp8_backward(quantizers):
        return _Float8DotProductAttention.apply(*of_heads, softmax, heads, needs_grad(q, k, v), quantizers)
    wanted = needs_grad(*of_heads, *([] if offset is None else [offset]))
    return _DotProductAttention.apply(*of_heads, offset, softmax, heads, wanted, quantizers)


def _attend_twice(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, softmax_offset: Tensor, attention_mask: Tensor | None
) -> Tensor:
    """Attend with an offset for one token, as generation with a cache has it: TE's library takes it for two or more.

    The token is there twice. The second of them, the last query, sees what one would.
    """
    mask = None if attention_mask is None else kept_on(attention_mask, _of_two_queries)
    q = paddle.concat([q, q], 1)
    return dot_product_attention(q, k, v, scores, softmax_offset=softmax_offset, attention_mask=mask)[:, 1:]


def _of_two_queries(mask: Tensor) -> Tensor:
    """Return the mask of a query for two."""
    return paddle.concat([mask, mask], 2)


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(softmax(q·kᵀ·scale)·v, the logarithm of the sum of the scores' exponentials): see `ops`."""
    rt, heads = runtime.current(), _heads_of_three(q, k)
    q, k, v = (dense(tensor) for tensor in (q, k, v))
    lse = rt.empty(list(heads.stats), paddle.float32)
    views = heads.q_view(rt, q), heads.k_view(rt, k), heads.v_view(rt, v)
    stats = rt.tensor(lse.data_ptr(), heads.stats, FLOAT32)
    softmax = _Softmax(scale, _Sequences(causal))
    return _attend(rt, heads, views, stats, softmax, heads.separate, True).reshape(q.shape), lse


def attention_with_lse_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv): cuDNN's backward, for which it is one whether out and lse are of these keys or of more."""
    rt, heads = runtime.current(), _heads_of_three(q, k)
    q, k, v, out, lse, dout = (dense(tensor) for tensor in (q, k, v, out, lse, dout))
    views = heads.q_view(rt, q), heads.k_view(rt, k), heads.v_view(rt, v)
    dq, dk, dv = (rt.empty(tensor.shape, heads.dtype) for tensor in (q, k, v))
    grads = heads.q_view(rt, dq), heads.k_view(rt, dk), heads.v_view(rt, dv)
    stats, softmax = rt.tensor(lse.data_ptr(), heads.stats, FLOAT32), _Softmax(scale, _Sequences(causal))
    _attend_backward(rt, heads, views, out, stats, dout, grads, softmax, heads.separate)
    return dq, dk, dv


def _heads_of_three(q: Tensor, k: Tensor) -> _Heads:
    (b, s, h, d), (_, keys, h_kv, _) = q.shape, k.shape
    return _sizes(b, s, h, h_kv, d, dtype_code("query_layer", q), keys, s)


def _longer(tensor: Tensor, n: int) -> Tensor:
    """Return [b, keys, h, d] with n keys of zeros appended."""
    if n == 0:
        return tensor
    b, _, h, d = tensor.shape
    return paddle.concat([tensor, paddle.zeros([b, n, h, d], tensor.dtype)], 1)


def _additive(mask: Tensor | None, s: int, keys: int, padding: int, dtype: Any, causal: bool, window: int) -> Tensor:
    """[b or 1, 1, s, keys + padding]: 0 for what is seen, HIDDEN for the rest. Kept on the mask for the next layers."""
    if mask is None:
        mask = paddle.full([1, 1, s, keys], HIDDEN if causal else 0.0, "float32")
        mask = paddle.triu(mask, diagonal=1 + keys - s)
    elif mask.ndim != 4 or mask.shape[1:] != [1, s, keys]:
        raise ValueError(f"attention_mask {mask.shape}: it must be [b or 1, 1, {s}, {keys}]")
    elif needs_grad(mask):
        raise ValueError("backend transformer_engine: attention_mask wants a gradient, which cuDNN has none for")
    return kept_on(mask, _additive_of, padding, dtype, window)


def _additive_of(mask: Tensor, padding: int, dtype: Any, window: int) -> Tensor:
    """Do `_additive` for a mask that may be one."""
    *_, s, keys = mask.shape
    scores = mask.detach().astype("float32")
    if window >= 0:
        scores = scores + paddle.tril(paddle.full([s, keys], HIDDEN, "float32"), diagonal=keys - s - window - 1)
    scores = paddle.clip(scores, min=HIDDEN).astype(dtype)
    if padding:
        hidden = paddle.full([*scores.shape[:3], padding], HIDDEN, dtype)
        scores = paddle.concat([scores, hidden], -1)
    return dense(scores)


def check_attention(
    head_dim: int,
    window: int,
    masked: bool,
    dropout: float,
    softcap: float = 0.0,
    softmax_type: str = "vanilla",
    value_dim: int | None = None,
) -> None:
    """Raises ValueError where cuDNN has no attention in 16 bits as it is called here.

    window, dropout, softcap, softmax_type, value_dim: as `ops` has them. masked: with an additive mask, as with a
    cache.
    As `nvte_get_fused_attn_backend` in TE's common/fused_attn/fused_attn.cpp, for training.
    """
    if softcap:
        raise ValueError(
            f"backend transformer_engine: attn_logit_softcapping={softcap}: its attention has no soft cap; use "
            "backend paddle"
        )
    if softmax_type != "vanilla":
        _check_softmax(softmax_type, CUDNN_OFFSET, "")
    capability = runtime.current().stream.capability
    after_hopper = capability >= (10, 0)
    _check_widths(head_dim, head_dim if value_dim is None else value_dim, capability)
    lacking = {
        "with a sliding window": window >= 0 and not masked,
        "with a mask on GPUs of compute capability 10 and above": masked and after_hopper,
        "with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 on GPUs of compute capability 10 and above": after_hopper
        and deterministic(),
    }
    for what, wanted in lacking.items():
        if dropout and wanted:
            raise ValueError(
                f"backend transformer_engine: cuDNN's attention has no dropout {what}; set attention_dropout=0"
            )


def _check_widths(head_dim: int, value_dim: int, capability: tuple[int, int]) -> None:
    """Raise ValueError for heads that cuDNN does not train: head_dim numbers of q and k, value_dim of v."""
    greatest, after_hopper = 256 if capability == (9, 0) else 128, capability >= (10, 0)
    latent = (head_dim, value_dim) == (192, 128) and (after_hopper or greatest == 256)  # DeepSeek's
    wrong = [size for size in (head_dim, value_dim) if size % 8 or size > greatest]
    if wrong and not latent:
        raise ValueError(
            f"backend transformer_engine: heads have {wrong[0]} numbers; on GPUs of compute capability "
            "{}.{} cuDNN's attention takes multiples of 8 up to {}".format(*capability, greatest)
        )
    if head_dim != value_dim and min(head_dim, value_dim) >= 128 and not latent:
        raise ValueError(
            f"backend transformer_engine: heads of queries and keys have {head_dim} numbers, those of values "
            f"{value_dim}; of different widths from 128 on cuDNN's attention trains 192 with 128 only"
        )


def _check_softmax(softmax_type: str, needed: tuple[int, int], what: str) -> None:
    """Raise ValueError where cuDNN has no softmax of a type, by utils.py of TE's PyTorch side and its C++ file."""
    if deterministic():
        raise ValueError(
            f"backend transformer_engine: softmax_type={softmax_type!r} with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0: the "
            "gradient of cuDNN's softmax offset is not deterministic; leave the variable out"
        )
    if (present := cudnn_version()) < needed:
        raise ValueError(
            "backend transformer_engine: softmax_type={!r}{} needs cuDNN {}.{}, not {}.{}; update it".format(
                softmax_type, what, *needed, *present
            )
        )


def check_packed_attention(softmax_type: str = "vanilla") -> None:
    """Raises ValueError where cuDNN has no attention over documents (TE's THD layouts) as it is called here.

    As `nvte_get_fused_attn_backend` in TE's common/fused_attn/fused_attn.cpp; on compute capability 12 TE lays out the
    softmax statistics otherwise (fused_attn_f16_arbitrary_seqlen.cu).
    """
    capability = runtime.current().stream.capability
    if not (9, 0) <= capability < (12, 0):
        raise ValueError(
            "backend transformer_engine: attention over packed documents needs a GPU of compute capability 9.0 to 11, "
            "not {}.{}".format(*capability)
        )
    if softmax_type != "vanilla":
        _check_softmax(softmax_type, CUDNN_PACKED_OFFSET, " over packed documents")
