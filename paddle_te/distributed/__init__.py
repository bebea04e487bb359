"""Tensor and sequence parallelism."""

from paddle_te.distributed.tensor_parallel import TensorParallel

__all__ = ["TensorParallel"]
