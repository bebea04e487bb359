"""Tensor, sequence, context and expert parallelism, random numbers, recompute, weights of sharding, objects."""

from paddle_te.distributed.context_parallel import ContextParallel
from paddle_te.distributed.data_groups import row_groups, sequence_group
from paddle_te.distributed.expert_parallel import ExpertParallel
from paddle_te.distributed.fp8_group import fp8_group
from paddle_te.distributed.objects import gather_objects
from paddle_te.distributed.random_numbers import random_numbers
from paddle_te.distributed.recompute import recompute
from paddle_te.distributed.sharding import gather_weights
from paddle_te.distributed.tensor_parallel import Pending, TensorParallel

__all__ = [
    "ContextParallel",
    "ExpertParallel",
    "Pending",
    "TensorParallel",
    "fp8_group",
    "gather_objects",
    "gather_weights",
    "random_numbers",
    "recompute",
    "row_groups",
    "sequence_group",
]
