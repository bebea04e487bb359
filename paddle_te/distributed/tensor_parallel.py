"""Megatron's tensor and sequence parallelism (Shoeybi et al., 2019; Korthikanti et al., 2022) over one group.

A column-parallel GEMM is entered through `TensorParallel.enter`, a row-parallel one left through `leave`:

|                     | forward        | backward       |
|---------------------|----------------|----------------|
| enter               | identity       | all-reduce     |
| leave               | all-reduce     | identity       |
| enter, sequence par.| all-gather     | reduce-scatter |
| leave, sequence par.| reduce-scatter | all-gather     |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.distributed import fleet
from paddle.distributed.communication.group import Group


@dataclass
class Pending:
    """A collective on a stream of its own, which runs at the same time as what is computed before `wait`.

    result, source: the tensors that it writes and reads; task: Paddle's, None for one that is done.
    """

    result: paddle.Tensor
    source: paddle.Tensor | None = None  # as long as it may be read
    task: Any = None

    def wait(self) -> Tensor:
        """Return the result, for what is launched from now on."""
        if self.task is not None:
            self.task.wait()
        return self.result

    def data_ptr(self) -> int:
        """Return the result's address, also before the result is there."""
        return self.result.data_ptr()


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that share one layer's weights.

    group: Paddle's communication group; rank, size: this process's place in it.
    sequence_parallel: activations outside the GEMMs are split over the group along axis 0 ([tokens/size, h]).
    """

    group: Group
    rank: int
    size: int
    sequence_parallel: bool = False

    @classmethod
    def from_fleet(cls, sequence_parallel: bool = False) -> TensorParallel | None:
        """Return the model-parallel group of fleet's hybrid topology; None where fleet has none or it has one rank.

        Raises ValueError for sequence parallelism without tensor parallelism.
        """
        # fleet offers no question whether it was initialised; its own layers look at this attribute as well
        hcg = getattr(fleet.fleet, "_hcg", None)
        if hcg is None or hcg.get_model_parallel_world_size() == 1:
            if sequence_parallel:
                raise ValueError("sequence_parallel=True needs tensor_parallel_degree > 1")
            return None
        group = hcg.get_model_parallel_group()
        return cls(group, hcg.get_model_parallel_rank(), group.nranks, sequence_parallel)

    def __deepcopy__(self, memo: object) -> TensorParallel:
        """Return itself: a copied layer is of the same ranks."""
        return self

    # Collectives without gradients

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the group in place and return it."""
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return [n·size, ...] on all ranks, of [n, ...] on each."""
        out = self._room_for_all(x)
        dist.stream.all_gather(out, x.contiguous(), group=self.group, use_calc_stream=True)
        return out

    def start_all_gather(self, x: Tensor) -> Pending:
        """Do `all_gather` as a Pending."""
        x, out = x.contiguous(), self._room_for_all(x)
        return Pending(out, x, dist.stream.all_gather(out, x, group=self.group, sync_op=False))

    def _room_for_all(self, x: Tensor) -> Tensor:
        return paddle.empty([x.shape[0] * self.size, *x.shape[1:]], x.dtype)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's [n/size, ...] of the sum of [n, ...] on each rank."""
        out = self._room_for_own(x)
        dist.stream.reduce_scatter(out, x.contiguous(), group=self.group, use_calc_stream=True)
        return out

    def _room_for_own(self, x: Tensor) -> Tensor:
        return paddle.empty(self.scattered_shape(x.shape), x.dtype)

    def scattered_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of a rank's part. Raises ValueError where the parts would not be equal."""
        if shape[0] % self.size:
            raise ValueError(f"{shape[0]} tokens cannot be scattered over {self.size} sequence-parallel ranks")
        return [shape[0] // self.size, *shape[1:]]

    def all_to_all(self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Return the rows that all ranks send here, in the ranks' order.

        sent, received: rows of x for each rank, and from each; None: as many for each.
        """
        out = paddle.empty([x.shape[0] if received is None else sum(received), *x.shape[1:]], x.dtype)
        dist.stream.alltoall_single(out, x.contiguous(), received, sent, self.group, True, True)
        return out

    def start_exchange(self, x: Tensor) -> Pending:
        """Return a Pending of what the other ranks send here, in their order, while each gets its share of x.

        x: as many rows for each of the others, in their order.
        """
        x, out = x.contiguous(), paddle.empty(x.shape, x.dtype)
        rows = [0 if rank == self.rank else x.shape[0] // (self.size - 1) for rank in range(self.size)]
        task = dist.stream.alltoall_single(out, x, rows, rows, group=self.group, sync_op=False)
        return Pending(out, x, task)

    def reduce_output(self, y: Tensor) -> Tensor:
        """Return the sum of a row-parallel GEMM's partial sums. y is overwritten without sequence parallelism."""
        return self.reduce_scatter(y) if self.sequence_parallel else self.all_reduce(y)

    def start_reduce_output(self, y: Tensor) -> Pending:
        """Do `reduce_output` as a Pending."""
        if not self.sequence_parallel:
            return Pending(y, y, dist.stream.all_reduce(y, group=self.group, sync_op=False))
        y, out = y.contiguous(), self._room_for_own(y)
        return Pending(out, y, dist.stream.reduce_scatter(out, y, group=self.group, sync_op=False))

    # The same with gradients

    def enter(self, x: Tensor) -> Tensor:
        """Return x as the input of a column-parallel GEMM, differentiable."""
        return _Enter.apply(x, self)

    def sum_gradient(self, parameter: Tensor) -> Tensor:
        """Return a parameter whose gradient is the sum over the ranks.

        All ranks have it, and each uses it for other heads or tokens.
        """
        return _Enter.apply(parameter, replace(self, sequence_parallel=False))

    def sum_over(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks on each of them, differentiable: each rank's gradient must be whole."""
        return _Leave.apply(x, replace(self, sequence_parallel=False))

    def leave(self, y: Tensor) -> Tensor:
        """Return a row-parallel GEMM's result from its partial sums y, differentiable."""
        return _Leave.apply(y, self)


class _Enter(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        # a view: a PyLayer may not return its input, which may be a leaf
        return tp.all_gather(x) if tp.sequence_parallel else x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return ctx.tp.reduce_output(dx if ctx.tp.sequence_parallel else dx.clone())


class _Leave(PyLayer):
    @staticmethod
    def forward(ctx: Any, y: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return tp.reduce_output(y if tp.sequence_parallel else y.clone())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return ctx.tp.all_gather(dy) if ctx.tp.sequence_parallel else dy
