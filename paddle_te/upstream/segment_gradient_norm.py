"""Count each gradient once in the norm under tensor parallelism where ranks share sequences (sep).

Paddle 3.3.1 sums the squares of weights that differ between tensor parallel ranks over the group of all ranks but the
data parallel ones. The ranks that share sequences are among them, with the same gradients, which are counted once for
each. With split_norm_comm, its own setting, it sums over the tensor parallel ranks and the pipeline's stages alone.
"""

from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import HybridParallelClipGrad

from paddle_te.upstream.replacement import Replacement, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "With sep_ or context_parallel_degree and tensor_parallel_degree, max_grad_norm clips gradients too much."


def _init(self: Theirs, clip: Theirs, hcg: Theirs, split_norm_comm: bool = False, timers: Theirs = None) -> None:
    """Replace Paddle's constructor, with its arguments."""
    split_norm_comm = split_norm_comm or hcg.get_sep_parallel_world_size() > 1
    _constructor.original(self, clip, hcg, split_norm_comm, timers)


_constructor = Replacement(HybridParallelClipGrad, "__init__", _init)
apply, undo = _constructor.apply, _constructor.undo
