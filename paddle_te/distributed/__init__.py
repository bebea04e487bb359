"""Tensor and sequence parallelism, recompute, weights of overlapping sharding."""

from paddle_te.distributed.fp8_group import fp8_group
from paddle_te.distributed.recompute import recompute
from paddle_te.distributed.sharding import gather_weights
from paddle_te.distributed.tensor_parallel import Pending, TensorParallel

__all__ = ["Pending", "TensorParallel", "fp8_group", "gather_weights", "recompute"]
