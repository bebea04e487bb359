"""Count a weight that pipeline stages share (tied embeddings) once in the global norm, when gradients are clipped.

Paddle's clipping skips weights whose `is_firstly_shared` is False, but its PipelineLayer marks none: it looks for the
name of the attribute ("embedding_weight") among the names of the parameters.
"""

from paddle.distributed.fleet.meta_parallel import PipelineLayer

from paddle_te.upstream.replacement import Replacement, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Under pipeline parallelism the gradient norm of a model with tied embeddings is too large, so it clips more."


def _synchronize_and_mark(self: Theirs) -> None:
    _replacement.original(self)
    for shared in self.shared_comm.values():
        for name in shared["weight_attr"]:
            getattr(shared["layer"], name).is_firstly_shared = self.global_rank == min(shared["ranks"])


_replacement = Replacement(PipelineLayer, "_synchronize_shared_weights", _synchronize_and_mark)
apply, undo = _replacement.apply, _replacement.undo
