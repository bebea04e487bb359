"""Gather each weight before a layer reads it, in one order on all ranks, where stage 1 gathers in the next forward.

Before a layer computes, Paddle's hook goes through the buckets that have weights of the layer, and gathers those that
nobody has asked for yet.

- It goes through a set, whose order follows from addresses in memory and differs between ranks. Where several buckets
  are left, one rank gathers the first while another gathers the second: their collectives do not match, and each bucket
  gets numbers of the other. So it was with experts' weights, whose buckets Paddle gathers ahead last. Here the hook
  goes through the buckets in the order of the layer's weights.
- Weights that a layer reads from sublayers which it does not call, such as the norms of queries and keys, are awaited
  only where another weight in their bucket is. Here the layer names such sublayers, `uncalled`, and waits for them.
- Weights that are not trained are in no bucket, and the hook ends in a KeyError. Here it passes over them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.utils.tensor_fusion_helper import FusedCommBuffer

from paddle_te.upstream.replacement import Replacement, Replacements, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = (
    "With OVERLAP in sharding stage 1 experts that several ranks have become NaN, norms of q and k are old, and a run "
    "with --freeze or LoRA ends in a KeyError."
)
Status = FusedCommBuffer.Status


def _weights(layer: Theirs) -> list[Theirs]:
    """Return the weights that the layer itself reads."""
    uncalled = [weight for sublayer in getattr(layer, "uncalled", ()) for weight in sublayer.parameters()]
    return [*layer.parameters(include_sublayers=False), *uncalled]


def _make_forward_hook(self: Theirs) -> Callable[[Theirs, Theirs], None]:
    """Do as Paddle's, in the order of the layer's weights."""

    def wait_for_weights(layer: Theirs, inputs: Theirs) -> None:
        of_weights = [self.param2bucket.get(weight.name, ()) for weight in _weights(layer)]
        for bucket in dict.fromkeys(chain.from_iterable(of_weights)):
            if bucket.status == Status.SHARDED:
                self._try_start_bucket_param_sync([bucket])
            if bucket.status == Status.SYNCING:
                bucket.sync_param_task.wait()
                bucket.status = Status.READY
        self._try_start_bucket_param_sync()

    return wait_for_weights


def _register_hooks(self: Theirs) -> None:
    """Register the hook of each layer that reads weights, and of each without sublayers, as Paddle does."""
    for layer in self._layers.sublayers():
        if not layer.sublayers() or _weights(layer):
            layer.register_forward_pre_hook(self.make_forward_hook())


_hooks = Replacement(DygraphShardingOptimizerV2, "make_forward_hook", _make_forward_hook)
_registering = Replacement(DygraphShardingOptimizerV2, "_register_pre_forward_hooks", _register_hooks)
_replacements = Replacements(_hooks, _registering)
apply, undo = _replacements.apply, _replacements.undo
