"""Average experts' gradients over all ranks whose tokens they have seen, under expert parallelism over sharding ranks.

Sharding stage 1 averages the gradients of a parameter with a color over the color's group. Of experts these are the
ranks that have the same ones (`distributed.expert_parallel`). An expert has also seen the tokens of the ranks that have
others, each of which divides its loss by its own tokens only; the color's "scale" is one over their number.

It multiplies a rank's part of the sums, once a step: 8 bytes of memory traffic for each of its experts' weights.
"""

from __future__ import annotations

from paddle.distributed.fleet.utils.tensor_fusion_helper import FusedCommBuffer

from paddle_te.upstream.replacement import Replacement, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "With expert_parallel_degree the gradients of experts are too large by that factor."


def _scale_grads(self: Theirs) -> None:
    """Do as Paddle's, and scale what this rank updates."""
    _scaling.original(self)
    color = getattr(self.params[0], "color", None)
    if isinstance(color, dict) and "scale" in color and self.need_reduce_scale_sync():
        size = self.grad_storage._numel() // self._comm_group.nranks
        first = size * max(self._comm_group.rank, 0)
        self.grad_storage._slice(first, first + size).scale_(color["scale"])


_scaling = Replacement(FusedCommBuffer, "scale_grads", _scale_grads)
apply, undo = _scaling.apply, _scaling.undo
