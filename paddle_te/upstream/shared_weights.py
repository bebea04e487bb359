"""Count a weight that pipeline stages share (tied embeddings) once in the global norm, when gradients are clipped.

Paddle's clipping skips weights whose `is_firstly_shared` is False, but its PipelineLayer marks none: it looks for the
name of the attribute ("embedding_weight") among the names of the parameters. Sharding stage 1 with split_param clips
slices of the weights, to which Paddle does not hand the mark on.
"""

from paddle import Tensor
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel import PipelineLayer

from paddle_te.upstream.replacement import Replacement, Replacements, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Under pipeline parallelism the gradient norm of a model with tied embeddings is too large, so it clips more."
MARK = "is_firstly_shared"


def _synchronize_and_mark(self: Theirs) -> None:
    _marking.original(self)
    for shared in self.shared_comm.values():
        for name in shared["weight_attr"]:
            setattr(getattr(shared["layer"], name), MARK, self.global_rank == min(shared["ranks"]))


def _create_marked_slice(self: Theirs, param: Tensor) -> Tensor:
    made: Tensor = _slicing.original(self, param)
    if hasattr(param, MARK):
        setattr(made, MARK, getattr(param, MARK))
    return made


_marking = Replacement(PipelineLayer, "_synchronize_shared_weights", _synchronize_and_mark)
_slicing = Replacement(DygraphShardingOptimizerV2, "_create_slice_param", _create_marked_slice)
_replacements = Replacements(_marking, _slicing)
apply, undo = _replacements.apply, _replacements.undo
