"""The steps of q and k between projection and attention: norms of heads, and the rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.native import qk_norm as native_norm
from paddle_te.native import rope
from paddle_te.native.rotation_cast import Float8Heads, rotation_cast
from paddle_te.ops.documents import check_cu_seqlens
from paddle_te.ops.heads import Heads
from paddle_te.ops.interface import Ranks
from paddle_te.ops.te import kernel_choice, runtime
from paddle_te.ops.te.core_attention import (
    AttentionSizes,
    HeadSizes,
    Target,
    sizes_of,
)
from paddle_te.ops.te.float8_attention import Float8QKV
from paddle_te.ops.te.recording import RecordedQuantizers
from paddle_te.ops.te.runtime import (
    FLOAT32,
    Memory,
    Runtime,
    check_tensor,
    dense,
    dtype_code,
)

ANGLES = {paddle.float32: FLOAT32}


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

    def weight_sizes(self, heads: AttentionSizes) -> tuple[int, int]:
        """Return the numbers of q's and k's weights."""
        (*_, h, d), (*_, h_kv, _) = heads.q, heads.kv
        return (h * d, h_kv * d) if self.over_all else (d, d)


@dataclass(slots=True)
class Rotation:
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

    def _geometry(self, heads: AttentionSizes) -> rope.Geometry:
        width = None if self.freqs is None else self.freqs.shape[-1]
        return rope.Geometry(*heads.rope, rope.Turn(width, self.settings.interleaved, self.settings.factor))

    @property
    def _norm(self) -> native_norm.QKNorm:
        addresses = self.q_weight.data_ptr(), self.k_weight.data_ptr()
        eps, zero_centered, _, over_all, ranks, _ = self.settings
        return native_norm.QKNorm(*addresses, eps or 0.0, zero_centered, over_all, ranks)

    def _sums(self, rt: Runtime, heads: AttentionSizes, grads: Target | None, qkv: int) -> Any:
        """Return the memory of what norms over all heads add up first, of all ranks; None for norms of each head."""
        if not self.settings.over_all:
            return None
        sums = rt.empty([heads.tokens, 4], paddle.float32)
        given = grads, qkv, sums.data_ptr(), self._angles, self._geometry(heads)
        self._norm.sums(rt.te, rt.stream, *given)
        return sums if self.tp is None else self.tp.all_reduce(sums)

    def stays(self, heads: AttentionSizes) -> bool:
        """Return whether cuDNN takes q, k and v where the projection has put them."""
        return self.freqs is None and self.q_weight is None and heads.packed

    def forward(self, rt: Runtime, heads: AttentionSizes, qkv: Memory, target: Target) -> None:
        """Write normed and rotated q and k, and v. target: the address of one buffer, or those of three."""
        given = rt.te, rt.stream, qkv.data_ptr()
        if self.q_weight is not None:
            sums = self._sums(rt, heads, None, qkv.data_ptr())
            at = 0 if sums is None else sums.data_ptr()
            self._norm.forward(*given, target, self._angles, self._geometry(heads), at)
        else:
            rope.rotate(*given, target, self._angles, self._geometry(heads))

    def casts(self, heads: AttentionSizes, quantizers: Sequence[RecordedQuantizers]) -> bool:
        """Return whether `forward_in_fp8` is there instead of `forward` and a cast. quantizers: attention's."""
        of_qkv = quantizers[0].input
        counts = of_qkv.statistics_ptr  # which the kernel does not
        at_once = not self.stays(heads) and not self.settings.over_all and not counts
        return at_once and kernel_choice.rotation_cast(of_qkv)

    def forward_in_fp8(self, rt: Runtime, heads: AttentionSizes, qkv: Memory, target: Float8QKV) -> None:
        """Write normed and rotated q and k, and v, in fp8."""
        addresses, (*_, h, d), (*_, h_kv, _) = (target.q, target.k, target.v), heads.q, heads.kv
        strides = (heads.width,) * 3 if heads.packed else (h * d, h_kv * d, h_kv * d)
        _, scale, amax, scale_inv = target.factors
        q, k, v = (native.data_ptr for native in addresses)
        float8 = Float8Heads(q, k, v, strides, scale, amax, scale_inv)
        norm = None if self.q_weight is None else self._norm
        rotation_cast(rt.te, rt.stream, qkv.data_ptr(), float8, norm, self._angles, self._geometry(heads))

    def backward(self, rt: Runtime, heads: AttentionSizes, grads: Target, qkv: Memory, dqkv: Memory) -> tuple[Any, Any]:
        """Fill dqkv, and return the gradients of the norm's weights, or None for what wants none.

        grads: as forward's target; one buffer is dqkv's own. qkv: what forward has read.
        """
        target = dqkv.data_ptr()
        if self.q_weight is not None:
            return self._norm_backward(rt, heads, grads, qkv.data_ptr(), target)
        rope.rotate(rt.te, rt.stream, grads, target, self._angles, self._geometry(heads), True)
        return None, None

    def _norm_backward(self, rt: Runtime, heads: AttentionSizes, grads: Target, qkv: int, dqkv: int) -> tuple[Any, Any]:
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
        heads: AttentionSizes,
        tp: Ranks | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rt, rotation = runtime.current(), Rotation(freqs, q_weight, k_weight, settings, tp)
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


def heads_of(
    qkv: Memory, freqs: Memory | None, num_heads: int, num_kv_heads: int, cu_seqlens: Memory | None = None
) -> AttentionSizes:
    """Return the sizes of attention of a packed projection. Raise ValueError for what does not fit."""
    code, (b, s, width) = dtype_code("qkv", qkv), qkv.shape
    d, rest = divmod(width, num_heads + 2 * num_kv_heads)
    angles = None if freqs is None else list(freqs.shape)
    if rest or angles and angles[-1] > d:
        heads = f"{num_heads} heads and {num_kv_heads} key-value heads"
        raise ValueError(f"angles {angles} for {heads}, {width} numbers wide in all: head sizes differ")
    check_cu_seqlens(cu_seqlens)
    rows = rows_of_angles(freqs, b, s)
    return sizes_of(b, s, HeadSizes(num_heads, num_kv_heads, d), code, s, rows, cu_seqlens is not None)


def rows_of_angles(freqs: Memory | None, b: int, s: int) -> int:
    """Return the rows of angles: s, or b·s where each sequence has positions of its own; freqs: None for no angles.

    Raise ValueError for others, TypeError for what is not float32.
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
    """Split the fused projection into heads, and norm and rotate q and k, in one kernel: see `ops.interface`."""
    angles, sizes = None if freqs is None else dense(freqs), heads_of(qkv, freqs, heads.num_heads, heads.num_kv_heads)
    weights = (None, None) if heads.qk_norm is None else heads.qk_norm[:2]
    settings, tp = RotationSettings.of(heads), heads.qk_norm and heads.qk_norm.ranks
    q_weight, k_weight = weights
    check_norms(sizes, q_weight, k_weight, settings)
    return _RotaryQKV.apply(dense(qkv), angles, *weights, settings, sizes, tp)


def check_norms(
    heads: AttentionSizes, q_weight: Memory | None, k_weight: Memory | None, settings: RotationSettings
) -> None:
    """Raise TypeError or ValueError for weights that do not fit; None for no norms."""
    names = "q_norm's weight", "k_norm's weight"
    for name, weight, size in zip(names, (q_weight, k_weight), settings.weight_sizes(heads), strict=True):
        if weight is not None:
            check_tensor(name, weight, [size], heads.dtype)
