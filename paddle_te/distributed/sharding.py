"""Gather the weights of sharding that overlaps with computing."""

from typing import Any

import paddle
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.utils.tensor_fusion_helper import FusedCommBuffer


def gather_weights(optimizer: Any) -> None:
    """End what overlapping sharding leaves for the next forward. A collective.

    Call it before weights are read in another way, as when they are saved. optimizer: the outermost one.

    Stage 1 with split_param gathers a bucket of weights when the first of its layers is called; until then the other
    ranks' parts of it are those of the step before (with Paddle 3.3 and PaddleNLP alone such weights are saved). Other
    stages' broadcasts may be under way.
    """
    while optimizer is not None:
        if vars(optimizer).get("_broadcast_overlap"):
            paddle.device.synchronize()
        if isinstance(optimizer, DygraphShardingOptimizerV2) and optimizer._all_gather_overlap_forward:
            for bucket in optimizer._comm_buffer_list:
                _gather_bucket(optimizer, bucket)
        optimizer = vars(optimizer).get("_inner_opt")


def _gather_bucket(optimizer: DygraphShardingOptimizerV2, bucket: FusedCommBuffer) -> None:
    """Do what Paddle's hook before a layer's forward does."""
    if bucket.status == FusedCommBuffer.Status.SHARDED:
        optimizer._try_start_bucket_param_sync([bucket])
    if bucket.status == FusedCommBuffer.Status.SYNCING:
        if bucket.sync_param_task is not None:  # None: it is frozen
            bucket.sync_param_task.wait()
        bucket.status = FusedCommBuffer.Status.READY
