"""Tensor and sequence parallelism, recompute, and how ranks meet."""

from paddle_te.distributed.pipeline import group_pipeline_transfers
from paddle_te.distributed.recompute import recompute
from paddle_te.distributed.sharding import allow_tensor_fusion
from paddle_te.distributed.store import use_threaded_store
from paddle_te.distributed.tensor_parallel import TensorParallel

__all__ = ["TensorParallel", "allow_tensor_fusion", "group_pipeline_transfers", "recompute", "use_threaded_store"]
