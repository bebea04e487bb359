"""Sharding's buckets of weights, of which small models would fill a single one."""

from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)


def several_buckets():
    """Stage 1 lays weights together in buckets of 256 MB, of which these models fill one: nothing would be gathered
    while another one's layers compute."""
    original = DygraphShardingOptimizerV2._build_comm_buffers
    DygraphShardingOptimizerV2._build_comm_buffers = lambda self, steps, size, free=False: original(
        self, steps, 2**14, free
    )
