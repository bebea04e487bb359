"""--fuse_sequence_parallel_allreduce sums gradients over the ranks of sequence parallelism in one collective.

It is for weights that all these ranks have, of norms and of row-parallel layers' biases: each rank's tokens give a part
of their gradients. Paddle sums each as soon as backward has it, in 65 small collectives for a step of Llama-3-8B. With
the flag it sums them all after the last one, but its hook takes an argument that Paddle gives to no hook of this kind.
"""

from paddle.distributed.fleet.utils import sequence_parallel_utils

from paddle_te.upstream.replacement import Replacement, Replacements

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "With --fuse_sequence_parallel_allreduce true the first backward ends with a TypeError."


def _make_hook(parameters, accumulation_steps):
    hook = _made.original(parameters, accumulation_steps)
    return lambda: hook(None)


_made = Replacement(sequence_parallel_utils, "create_fused_allreduce_gradient_hook", _make_hook)
_replacements = Replacements(_made)
apply, undo = _replacements.apply, _replacements.undo
