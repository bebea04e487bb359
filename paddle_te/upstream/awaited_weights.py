"""Wait for the weights of layers that have layers, where sharding stage 1 gathers during the next forward.

Paddle lets each layer without sublayers wait for its own weights' gathering before it computes. Weights of a layer that
has sublayers, such as the norm in front of experts, are read whether they are there or not, unless a layer before has
waited for the same bucket. Here such a layer waits, too.
"""

from __future__ import annotations

from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)

from paddle_te.upstream.replacement import Replacement, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "With OVERLAP in sharding stage 1 experts may read the weight of their norm before it has been gathered."


def _sync_parameters(self: Theirs) -> None:
    """Do as Paddle's, and let layers with sublayers wait for weights of their own."""
    _syncing.original(self)
    if not self._all_gather_overlap_forward:
        return
    tasks = {weight.name: buffer.sync_param_task for buffer in self._comm_buffer_list for weight in buffer.params}
    for layer in self._layers.sublayers(include_self=True):
        own = layer.parameters(include_sublayers=False) if layer.sublayers() else []
        awaited = [task for task in (tasks.get(weight.name) for weight in own) if task is not None]
        if awaited:
            hook = layer.register_forward_pre_hook(self._forward_pre_hook_function(awaited))
            self._forward_pre_hook_remove_helper.append(hook)


_syncing = Replacement(DygraphShardingOptimizerV2, "_sharding_sync_parameters", _sync_parameters)
apply, undo = _syncing.apply, _syncing.undo
