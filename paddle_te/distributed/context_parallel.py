"""Split sequences over ranks, each of which has some of their tokens in all layers but attention.

Transformer Engine and Megatron call this context parallelism. How attention then sees whole sequences has TE's name,
cp_comm_type:

| cp_comm_type | a rank's tokens                 | attention                                                           |
|--------------|---------------------------------|---------------------------------------------------------------------|
| "a2a"        | consecutive ones, by the ranks' | an all-to-all gives each rank all tokens of its share of the heads, |
|              | order                           | and another one takes the result back                               |
| "p2p"        | two pieces of 2·size: the       | keys and values travel around the ranks, and each rank's queries    |
|              | rank-th and the rank-th last    | meet all of them (`layers.ring_attention`)                          |

"a2a" is DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv 2309.14509), which PaddleNLP calls sep, segment parallelism. So
does Paddle's fleet call the group of ranks. "p2p" is ring attention (Liu et al., 2023, arXiv 2310.01889), PaddleNLP's
context parallelism: of causal attention's work a late piece has much and an early one little, so each rank has both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.distributed.communication.group import Group

from paddle_te.distributed.data_groups import sequence_group
from paddle_te.distributed.tensor_parallel import Pending

COMM_TYPES = "a2a", "p2p"


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share sequences.

    group: Paddle's communication group; rank, size: this process's place in it. comm_type: TE's cp_comm_type.
    """

    group: Group
    rank: int
    size: int
    comm_type: str

    @classmethod
    def from_fleet(cls, comm_type: str) -> ContextParallel:
        """Return the ranks of the sep group of fleet's hybrid topology.

        Raises ValueError for another comm_type than the table's, and where fleet has no such group.
        """
        if comm_type not in COMM_TYPES:
            raise ValueError(f"cp_comm_type={comm_type!r}: it may be {' or '.join(map(repr, COMM_TYPES))}")
        group = sequence_group()
        if group is None:
            raise ValueError(f"cp_comm_type={comm_type!r} needs fleet's hybrid topology with a sep_degree above 1")
        return cls(group, group.rank, group.nranks, comm_type)

    def __deepcopy__(self, memo: object) -> ContextParallel:
        """Return itself: a copied layer is of the same ranks."""
        return self

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the group in place and return it."""
        dist.all_reduce(x, group=self.group)
        return x

    def own_tokens(self, x: Tensor, axis: int = 1) -> Tensor:
        """Return this rank's tokens [b, s / size, ...] of whole sequences [b, s, ...], which lie along `axis`.

        Raises ValueError where the pieces cannot be equally long.
        """
        pieces, own = self.size, [self.rank]
        if self.comm_type == "p2p":
            pieces, own = 2 * self.size, [self.rank, 2 * self.size - 1 - self.rank]
        if x.shape[axis] % pieces:
            raise ValueError(f"sequences of {x.shape[axis]} tokens cannot be split into {pieces} equal pieces")
        tokens = x.split(pieces, axis)
        return paddle.concat([tokens[piece] for piece in own], axis)

    def start_shift(self, x: Tensor) -> Pending:
        """Return a Pending of the previous rank's x, while the next rank gets this one's.

        An all-to-all in which each rank has something for the next one only: Paddle's process group of a custom device
        runs a send and a receive one after the other, and large NCCL sends would wait for each other for ever.
        """
        x, shifted = x.contiguous(), paddle.empty(x.shape, x.dtype)
        sent, received = ([0] * self.size for _ in range(2))
        sent[(self.rank + 1) % self.size] = received[(self.rank - 1) % self.size] = x.shape[0]
        task = dist.stream.alltoall_single(shifted, x, received, sent, group=self.group, sync_op=False)
        return Pending(shifted, x, task)

    def heads_for_tokens(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Exchange [b, s / size, w] of this rank's tokens for [b, s, w / size] of all of them, differentiably.

        x holds parts side by side, of which `widths` are the sizes, such as q, k and v; their sum is w. The result has
        this rank's share of the heads in each part.
        """
        return _Exchange.apply(x, partial(self._to_heads, widths=widths), partial(self._to_tokens, widths=widths))

    def tokens_for_heads(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Exchange [b, s, w / size] for [b, s / size, w], differentiably, the way back.

        widths: of the result's parts.
        """
        return _Exchange.apply(x, partial(self._to_tokens, widths=widths), partial(self._to_heads, widths=widths))

    # Without gradients

    def _all_to_all(self, pieces: Tensor) -> Tensor:
        """Exchange [size, ...], the i-th piece for rank i, for the same shape, the i-th piece from rank i."""
        pieces = pieces.contiguous()
        received = paddle.empty(pieces.shape, pieces.dtype)
        dist.stream.alltoall(received, pieces, group=self.group, use_calc_stream=True)
        return received

    def _to_heads(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        b, s, w = x.shape
        parts = [part.reshape([b, s, self.size, -1]) for part in x.split(list(widths), -1)]
        pieces = self._all_to_all(paddle.concat(parts, -1).transpose([2, 0, 1, 3]))
        return _swapped(pieces).reshape([b, s * self.size, w // self.size])

    def _to_tokens(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        b, s, w = x.shape
        pieces = self._all_to_all(_swapped(x.reshape([b, self.size, s // self.size, w])))
        parts = pieces.transpose([1, 2, 0, 3]).split([width // self.size for width in widths], -1)
        return paddle.concat([part.reshape([b, s // self.size, -1]) for part in parts], -1)


def _swapped(x: Tensor) -> Tensor:
    """Return [b, a, ...] of [a, b, ...]; where one of both is 1, as of a single long sequence, nothing is copied."""
    a, b, *others = x.shape
    return x.reshape([b, a, *others]) if 1 in (a, b) else x.transpose([1, 0, *range(2, x.ndim)])


class _Exchange(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return ctx.back(dy)
