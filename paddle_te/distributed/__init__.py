"""Tensor and sequence parallelism, and recompute."""

from paddle_te.distributed.recompute import recompute
from paddle_te.distributed.tensor_parallel import TensorParallel

__all__ = ["TensorParallel", "recompute"]
