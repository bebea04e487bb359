"""Gather a layer's weights in the same order on all ranks, where sharding stage 1 gathers during the next forward.

Before a layer computes, Paddle's hook goes through the buckets that have weights of the layer, and gathers those that
nobody has asked for yet. It goes through a set, whose order follows from addresses in memory and differs between ranks.
Where several buckets are left, one rank gathers the first while another gathers the second: their collectives do not
match, and each bucket gets numbers of the other. Experts' weights are such: their buckets come behind all others in the
order in which Paddle gathers ahead. Here the hook goes through the buckets in the order of the layer's weights.
"""

from __future__ import annotations

from collections.abc import Callable

from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.utils.tensor_fusion_helper import FusedCommBuffer

from paddle_te.upstream.replacement import Replacement, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "With OVERLAP in sharding stage 1 experts that several ranks have become NaN, or the ranks wait for ever."
Status = FusedCommBuffer.Status


def _make_forward_hook(self: Theirs) -> Callable[[Theirs, Theirs], None]:
    """Do as Paddle's, in the order of the layer's weights."""

    def wait_for_weights(layer: Theirs, inputs: Theirs) -> None:
        weights = layer.parameters(include_sublayers=False)
        for bucket in dict.fromkeys(bucket for weight in weights for bucket in self.param2bucket[weight.name]):
            if bucket.status == Status.SHARDED:
                self._try_start_bucket_param_sync([bucket])
            if bucket.status == Status.SYNCING:
                bucket.sync_param_task.wait()
                bucket.status = Status.READY
        self._try_start_bucket_param_sync()

    return wait_for_weights


_hooks = Replacement(DygraphShardingOptimizerV2, "make_forward_hook", _make_forward_hook)
apply, undo = _hooks.apply, _hooks.undo
