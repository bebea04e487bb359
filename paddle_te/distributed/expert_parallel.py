"""Divide the experts of a layer over ranks, each of which has some of them whole.

| the ranks                   | their tokens                                      | an expert's gradient          |
|-----------------------------|---------------------------------------------------|-------------------------------|
| of tensor parallelism       | the same; parts of them in sequence parallelism   | is whole on its rank          |
| some of the sharding group  | of different samples (--expert_parallel_degree)   | is averaged over the samples  |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed import fleet
from paddle.distributed.communication.group import Group

from paddle_te.distributed.tensor_parallel import TensorParallel

Rows = TypeVar("Rows", bound=Any)  # a NumPy array or a tensor
COLOR = "moe_expert"  # sharding stage 1 lays such gradients into buckets of their own


class Color(dict[str, Any]):
    """Say over which ranks a parameter's gradient is averaged, as Paddle's sharding stage 1 reads it."""

    def __deepcopy__(self, memo: object) -> Color:
        """Return itself: Paddle copies what a parameter knows with it, to save it, and a group cannot be copied."""
        return self


def single_group(group: Group) -> Group:
    """Return a group that knows the place of its only rank, which Paddle says is -1: slices would begin before 0."""
    if group.nranks == 1:
        group._rank_in_group = 0
    return group


def make_groups(degree: int) -> None:
    """Give fleet's topology the groups of PaddleNLP's names: expert_parallel_group and expert_grad_comm_group.

    degree: the ranks in a row of each sharding group that divide the experts. Collective. Raises ValueError where it
    does not divide the sharding group.
    """
    hcg = fleet.get_hybrid_communicate_group()
    mine = dist.get_rank()
    for ranks in hcg.topology().get_comm_list("sharding"):
        if len(ranks) % degree:
            raise ValueError(f"expert_parallel_degree={degree} does not divide the {len(ranks)} sharding ranks")
        dividing = [ranks[first : first + degree] for first in range(0, len(ranks), degree)]
        replicas = [ranks[first::degree] for first in range(degree)]
        for name, parts in (("expert_parallel_group", dividing), ("expert_grad_comm_group", replicas)):
            for part in parts:
                group = single_group(dist.new_group(part))  # all ranks call it for each group
                if mine in part:
                    setattr(hcg, name, group)


def _group() -> Group | None:
    """Return the ranks of `make_groups` that divide the experts; None where there are no several."""
    group: Group | None = getattr(getattr(fleet.fleet, "_hcg", None), "expert_parallel_group", None)
    return None if group is None or group.nranks == 1 else group


def experts_share() -> tuple[int, int]:
    """Return into how many parts `make_groups`' ranks divide the experts, and which of them this process has."""
    group = _group()
    return (1, 0) if group is None else (group.nranks, group.rank)


def own_experts(array: Rows) -> Rows:
    """Return this process's part of all experts' rows."""
    parts, mine = experts_share()
    size = len(array) // parts
    return array[mine * size : (mine + 1) * size]


def all_experts(tensor: Tensor) -> Tensor:
    """Return the rows of all experts, of which each of `make_groups`' ranks has its own. Collective over these."""
    group, parts = _group(), list[Tensor]()
    if group is None:
        return tensor
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return paddle.concat(parts)


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks that divide a layer's experts.

    ranks: their group; `sequence_parallel` says that each has tokens of its own.
    replicas: the ranks that have the same experts and other tokens; None in tensor parallelism.
    """

    ranks: TensorParallel
    replicas: Group | None = None

    @classmethod
    def from_fleet(cls, tp: TensorParallel | None) -> ExpertParallel | None:
        """Return the ranks of fleet's topology: those of `make_groups`, else tensor parallelism's; None without both.

        Raises ValueError for both.
        """
        group = _group()
        if group is None:
            return None if tp is None else cls(tp)
        if tp is not None:
            raise ValueError("tensor parallel ranks divide the experts already: leave expert_parallel_degree out")
        ranks = TensorParallel(group, group.rank, group.nranks, sequence_parallel=True)
        hcg: Any = fleet.get_hybrid_communicate_group()
        return cls(ranks, hcg.expert_grad_comm_group)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.ranks.size

    def local_experts(self, experts: int) -> int:
        """Return how many of the experts this rank has. Raises ValueError where the ranks do not divide them."""
        if experts % self.size:
            raise ValueError(f"num_moe_experts={experts} is not divisible by the {self.size} ranks that divide them")
        return experts // self.size

    def mark(self, parameter: Tensor) -> None:
        """Tell fleet that other ranks have other experts: it may neither copy them nor add up their gradients.

        In tensor parallelism they are parts of a weight that is divided along axis 0.
        """
        if self.replicas is None:
            parameter.is_distributed, parameter.split_axis = True, 0
            return
        parameter.no_sync = True
        # `upstream.expert_buckets` multiplies by the scale: each rank's loss is a mean over its own tokens
        parameter.color = Color(color=COLOR, group=self.replicas, scale=1 / self.size)

    def draw(self, parameter: Tensor, draw: Callable[[Tensor], object]) -> None:
        """Give a parameter that has been drawn other numbers on each rank that has other experts.

        In tensor parallelism it has them. Else ranks may have the same seed: each draws as many numbers as all, and
        keeps those of its place.
        """
        if self.replicas is None:
            return
        for rank in range(1, self.size):
            draw(parameter if rank <= self.ranks.rank else paddle.empty_like(parameter))
        self.same_on_replicas(parameter)

    def same_on_replicas(self, parameter: Tensor) -> None:
        """Give all ranks that have the same experts the first one's numbers."""
        if self.replicas is not None and self.replicas.nranks > 1:
            dist.broadcast(parameter, self.replicas.ranks[0], group=self.replicas)
