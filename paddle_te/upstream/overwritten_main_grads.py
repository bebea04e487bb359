"""Keep stage 1 with split_param from clearing main gradients that te's GEMMs write anew.

The main gradients lie in buffers that stay. Those of te's GEMMs are overwritten by the next step's first micro-batch;
Paddle clears them first, only to have them added to (8 bytes of memory traffic for each weight).
"""

from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)

from paddle_te.upstream.replacement import Replacement, Replacements, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Sharding stage 1 spends milliseconds of each step on clearing gradients that are overwritten."


def _clear_grad(self: Theirs, set_to_zero: bool = True) -> None:
    kept = []
    for param in self._parameter_list:
        # False: written in this step, so te writes it
        if set_to_zero and getattr(param, "overwrite_main_grad", None) is False and param.main_grad is not None:
            kept.append((param, param.main_grad))
            param.main_grad = None  # which leaves it out
    try:
        _clearing.original(self, set_to_zero)
    finally:
        for param, main_grad in kept:
            param.main_grad = main_grad
            param.overwrite_main_grad = True


def _reduce_gradients(self: Theirs, parameter_list: Theirs, hcg: Theirs) -> None:
    """Do as Paddle's, before which a gradient that nothing has overwritten, the last step's, becomes zero."""
    for param in self._parameter_list:
        if getattr(param, "overwrite_main_grad", False):
            param.main_grad.zero_()
            param.overwrite_main_grad = False
    _reducing.original(self, parameter_list, hcg)


_clearing = Replacement(DygraphShardingOptimizerV2, "clear_grad", _clear_grad)
_reducing = Replacement(DygraphShardingOptimizerV2, "reduce_gradients", _reduce_gradients)
_replacements = Replacements(_clearing, _reducing)
apply, undo = _replacements.apply, _replacements.undo
