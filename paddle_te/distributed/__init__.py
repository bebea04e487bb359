"""Tensor and sequence parallelism, recompute, and how ranks meet."""

from paddle_te.distributed.fp8_group import fp8_group
from paddle_te.distributed.pipeline import count_shared_weights_once, group_pipeline_transfers
from paddle_te.distributed.recompute import recompute
from paddle_te.distributed.sharding import gather_weights, prepare_sharding
from paddle_te.distributed.store import use_threaded_store
from paddle_te.distributed.tensor_parallel import Pending, TensorParallel

__all__ = [
    "Pending",
    "TensorParallel",
    "count_shared_weights_once",
    "fp8_group",
    "gather_weights",
    "group_pipeline_transfers",
    "prepare_sharding",
    "recompute",
    "use_threaded_store",
]
