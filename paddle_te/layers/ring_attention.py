"""Causal attention of sequences that are split over ranks, among which keys and values travel.

This is ring attention (Liu et al., 2023, arXiv 2310.01889) in the form of Transformer Engine (context_parallel.py of
its PyTorch side, cp_comm_type "p2p"): each rank has two pieces of a sequence, so that all have the same work. Rank r of
n has the pieces r and 2n-1-r. In step i it has the keys and values of rank r-i:

- In the first step they are its own, and its queries see them causally.
- From a lower rank all its queries see the first piece.
- From a higher rank the queries of its second piece see both pieces.

Each step's attention gives its output and lse, the logarithm of the sum of its scores' exponentials. The merged output
is the sum of the outputs, each times exp(its lse - the lse of all), in float32 (Dao et al., 2022, arXiv 2205.14135,
section 3.1). Backward computes a step's gradients with the merged output and lse, so its probabilities are those of
the whole. The gradients of keys and values follow them around the ring, one step behind, back to their rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.distributed import ContextParallel
from paddle_te.ops.interface import Ops

OWN, LOWER, HIGHER = "own", "lower", "higher"


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, cp: ContextParallel, ops: Ops) -> Tensor:
    """Attend causally in whole sequences: softmax(q·kᵀ·scale)·v per head, [b, s, h·d], of this rank's tokens.

    q: [b, s, h, d]; k, v: [b, s, h_kv, d], rotated, of this rank's tokens, s even. cp: a `distributed.ContextParallel`
    of comm_type "p2p". ops: the backend's.
    """
    return _RingAttention.apply(q, k, v, scale, cp, ops)


class _RingAttention(PyLayer):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, cp: ContextParallel, ops: Ops) -> Tensor:
        for whose, kv in _rounds(cp, _in_pieces(k, v, 2)):
            keys, values = _joined(kv[:1] if whose == LOWER else kv)
            part, part_lse = ops.attention_with_lse(_queries(q, whose), keys, values, scale=scale, causal=whose == OWN)
            part, part_lse = part.astype("float32"), part_lse.transpose([0, 2, 1, 3])
            if whose == OWN:
                out, lse = part, part_lse
            elif whose == LOWER:
                out, lse = _merged(out, lse, part, part_lse)
            else:
                (first, second), (first_lse, second_lse) = out.chunk(2, 1), lse.chunk(2, 1)
                second, second_lse = _merged(second, second_lse, part, part_lse)
                out, lse = paddle.concat([first, second], 1), paddle.concat([first_lse, second_lse], 1)
        out = out.astype(q.dtype)
        ctx.saved = q, k, v, out, lse, scale, cp, ops
        return out.reshape([*q.shape[:2], -1])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (q, k, v, out, lse, scale, cp, ops), ctx.saved = ctx.saved, None
        of_queries = q, out, lse, dout.reshape(q.shape)
        rounds = _rounds(cp, _in_pieces(k, v, 2))
        dq, dkv = _gradients(ops, scale, of_queries, *next(rounds))
        arriving = cp.start_shift(dkv)
        for whose, kv in rounds:
            dqueries, dseen = _gradients(ops, scale, of_queries, whose, kv)
            if whose == LOWER:
                dq, dkv = dq + dqueries, arriving.wait()
                dkv = paddle.concat([dkv[:1] + dseen, dkv[1:]])
            else:
                first, second = dq.chunk(2, 1)
                dq, dkv = paddle.concat([first, second + dqueries], 1), arriving.wait() + dseen
            arriving = cp.start_shift(dkv)
        dk, dv = _joined(arriving.wait())
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _gradients(
    ops: Ops, scale: float, of_queries: tuple[Tensor, Tensor, Tensor, Tensor], whose: str, kv: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a step's gradients of the queries that see such keys, and of those keys and values, in float32.

    of_queries: q, out, lse and dout of all queries. kv: as `_rounds` yields it.
    """
    seen = kv[:1] if whose == LOWER else kv
    q, out, lse, dout = (_queries(tensor, whose) for tensor in of_queries)
    dq, dk, dv = ops.attention_with_lse_backward(
        q, *_joined(seen), out, lse.transpose([0, 2, 1, 3]), dout, scale=scale, causal=whose == OWN
    )
    return dq.astype("float32"), _in_pieces(dk, dv, len(seen)).astype("float32")


def _rounds(cp: ContextParallel, kv: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (whose, keys and values) of each step; the next step's are on their way while one is computed."""
    *but_last, last = [OWN, *[LOWER] * cp.rank, *[HIGHER] * (cp.size - 1 - cp.rank)]
    for whose in but_last:
        arriving = cp.start_shift(kv)
        yield whose, kv
        kv = arriving.wait()
    yield last, kv


def _queries(x: Tensor, whose: str) -> Tensor:
    """Return what of [b, s, ...] belongs to the queries that see the keys of such a rank."""
    return x.chunk(2, 1)[1] if whose == HIGHER else x


def _in_pieces(k: Tensor, v: Tensor, pieces: int) -> Tensor:
    """Return k and v [b, s, h, d] as [pieces, 2, b, s / pieces, h, d]."""
    b, s, *head = k.shape
    kv = paddle.stack([k, v]).reshape([2, b, pieces, s // pieces, *head])
    return kv.transpose([2, 0, 1, 3, 4, 5]).contiguous()


def _joined(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `_in_pieces`: (k, v)."""
    pieces, _, b, tokens, *head = kv.shape
    kv = kv.transpose([1, 2, 0, 3, 4, 5]).reshape([2, b, pieces * tokens, *head])
    return kv[0], kv[1]


def _merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention to some keys with that to more: (out, lse), float32 [b, s, h, d] and [b, s, h, 1]."""
    greatest = paddle.maximum(lse, more_lse)
    total = greatest + ((lse - greatest).exp() + (more_lse - greatest).exp()).log()
    return out + (more - out) * (more_lse - total).exp(), total
