"""cuDNN's attention in 16 bits by TE's library: sizes, the tokens that each one sees, softmax, and the two calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import paddle
from paddle import Tensor

from paddle_te.native import Mask, QKVLayout
from paddle_te.ops.kept import kept_on
from paddle_te.ops.te.float8_attention import deterministic
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


class HeadSizes(NamedTuple):
    """Heads of attention. query, key: how many. dim: of q and k. value_dim: of v and the output; None: the same."""

    query: int
    key: int
    dim: int
    value_dim: int | None = None


class AttentionSizes:
    """Sizes of one attention: q [b, s, h, d]; k and v [b, keys, h_kv, d]; code: their dtype for TE.

    heads: h, h_kv and d, which may be another for v.
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
        heads: HeadSizes,
        code: int,
        keys: int,
        positions: int,
        of_documents: bool = False,
    ) -> None:
        h, h_kv, d, value_dim = heads
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

    def views_of(self, rt: Runtime, q: Memory, k: Memory, v: Memory) -> Views:
        """Return three tensors as native ones."""
        return (
            self.q_view(rt, q),
            rt.tensor(k.data_ptr(), self.kv, self.code),
            rt.tensor(v.data_ptr(), self.v, self.code),
        )

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


class Sequences:
    """Each token sees its whole sequence, or if causal the tokens before it, at most `window` unless that is -1.

    mask: TE's name for it.
    """

    masks = int(Mask.NONE), int(Mask.CAUSAL)

    def __init__(self, causal: bool, window: int = -1) -> None:
        self.mask, self.window = self.masks[causal], window

    @staticmethod
    def of(cu_seqlens: Memory | None, causal: bool, window: int, longest: int) -> Sequences:
        """Return those with documents or without.

        A window that covers the `longest` sequence there can be is none: plain causal attention is what cuDNN is tuned
        for.
        """
        window = window if window < longest - 1 else -1
        return Sequences(causal, window) if cu_seqlens is None else _Documents(cu_seqlens, causal, window)

    def cu_seqlens(self, rt: Runtime) -> Any:
        """Return what both take as cu_seqlens."""
        return None

    def bias(self, rt: Runtime) -> Any:
        """Return what attention_fwd takes as bias."""
        return None

    def bias_and_gradient(self, rt: Runtime) -> tuple[Any, Any]:
        """Return what attention_bwd takes as bias and its gradient."""
        return None, None


class _Documents(Sequences):
    """The same of documents. boundaries: int32 [documents + 1], see `ops`."""

    masks = int(Mask.PADDING), int(Mask.PADDING_CAUSAL)

    def __init__(self, boundaries: Memory, causal: bool, window: int) -> None:
        super().__init__(causal, window)
        self.boundaries = boundaries

    def cu_seqlens(self, rt: Runtime) -> Any:
        return rt.tensor(self.boundaries.data_ptr(), tuple(self.boundaries.shape), INT32)


class Bias(Sequences):
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
class Softmax:
    """Compute softmax(scale · scores) over the tokens that are `seen`.

    dropout: the probability with which each number is dropped. rng_state: `draw_rng_state`'s tensor or its
    Placeholder; None without dropout. offset: float32 [h] or its Placeholder, see `ops.interface`; None: no offset.
    """

    scale: float
    seen: Sequences
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


sizes_of = lru_cache(maxsize=64)(AttentionSizes)  # a model has one, its layers' launches are what counts


def attend(
    rt: Runtime, heads: AttentionSizes, qkv: Views, stats: Any, softmax: Softmax, layout: int, train: bool
) -> Any:
    """Return out [b, s, h·d] of native q, k, v; fill the softmax statistics, float32 [b, h, s, 1] or [t, h, 1]."""
    out, seen = rt.empty(heads.out, heads.dtype), softmax.seen
    views = *qkv, heads.context_view(rt, out), stats
    # TE drops in training only, and a first forward of recompute, which no backward follows, must drop as the second
    train = train or softmax.dropout > 0
    # by position: keywords take as long as the call itself
    options = softmax.scale, layout, seen.mask, train, rt.stream, *softmax.dropout_arguments(rt)
    rt.te.attention_fwd(*views, *options, seen.cu_seqlens(rt), seen.bias(rt), *softmax.last_arguments(rt, 1))
    return out


class Attended(NamedTuple):
    """Hold what a backward in 16 bits reads. qkv: native q, k and v, rotated. out: attention's output."""

    qkv: Views
    out: Any
    stats: Any


def attend_backward(
    rt: Runtime, heads: AttentionSizes, forward: Attended, dout: Memory, dqkv: Views, softmax: Softmax, layout: int
) -> tuple[Any, ...]:
    """Fill the native dq, dk, dv; return the softmax's `new_gradient`."""
    (qkv, out, stats), seen = forward, softmax.seen
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


def check_offset(heads: AttentionSizes, softmax_offset: Memory | None) -> None:
    """Raise TypeError or ValueError for one that does not fit; None for none."""
    if softmax_offset is not None:
        check_tensor("softmax_offset", softmax_offset, [heads.q[-2]], paddle.float32)


def in_float32(softmax_offset: Tensor | None) -> Tensor | None:
    """Return what cuDNN takes."""
    return None if softmax_offset is None else softmax_offset.astype("float32")


def additive(mask: Tensor | None, s: int, keys: int, padding: int, dtype: Any, causal: bool, window: int) -> Tensor:
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
    """Do `additive` for a mask that may be one."""
    *_, s, keys = mask.shape
    scores = mask.detach().astype("float32")
    if window >= 0:
        scores = scores + paddle.tril(paddle.full([s, keys], HIDDEN, "float32"), diagonal=keys - s - window - 1)
    scores = paddle.clip(scores, min=HIDDEN).astype(dtype)
    if padding:
        hidden = paddle.full([*scores.shape[:3], padding], HIDDEN, dtype)
        scores = paddle.concat([scores, hidden], -1)
    return dense(scores)
