"""Update experts in sharding stage 1 by ranks that each have some of them: expert parallelism over sharding ranks.

Paddle lays the gradients of a parameter with a color into buckets of their own, and averages them over the color's
group. Of experts these are the ranks that have the same ones (`distributed.expert_parallel`).

- An expert has also seen the tokens of the ranks that have others, each of which divides its loss by its own tokens
  only. The color's "scale" is one over their number; here it multiplies a rank's part of the sums, once a step: 8 bytes
  of memory traffic for each of its experts' weights.
- A bucket of a group of one rank has nothing to gather. Where gathering overlaps with the next forward Paddle asserts
  that every bucket has a task to wait for; here it has one that is done.
"""

from __future__ import annotations

from paddle.distributed.fleet.utils.tensor_fusion_helper import FusedCommBuffer

from paddle_te.upstream.replacement import Replacement, Replacements, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "With expert_parallel_degree experts' gradients are too large by it, and OVERLAP ends in an AssertionError."


class _Done:
    """A task that has ended."""

    def wait(self) -> None:
        """Return at once."""


def _scale_grads(self: Theirs) -> None:
    """Do as Paddle's, and scale what this rank updates."""
    _scaling.original(self)
    color = getattr(self.params[0], "color", None)
    if isinstance(color, dict) and "scale" in color and self.need_reduce_scale_sync():
        size = self.grad_storage._numel() // self._comm_group.nranks
        first = size * max(self._comm_group.rank, 0)
        self.grad_storage._slice(first, first + size).scale_(color["scale"])


def _sync_params(self: Theirs, sync: bool = True, param2task: Theirs = None) -> None:
    """Do as Paddle's; of a group of one rank nothing is gathered."""
    if self._comm_group.nranks == 1:
        self.sync_param_task = _Done()
    else:
        _gathering.original(self, sync, {} if param2task is None else param2task)


_scaling = Replacement(FusedCommBuffer, "scale_grads", _scale_grads)
_gathering = Replacement(FusedCommBuffer, "sync_params", _sync_params)
_replacements = Replacements(_scaling, _gathering)
apply, undo = _replacements.apply, _replacements.undo
