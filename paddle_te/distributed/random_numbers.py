"""Choose the source of dropout's random numbers, for the ranks that share a layer's weights.

As in Megatron (`megatron/core/tensor_parallel/random.py`): what ranks hold parts of is dropped by numbers of each
rank's own, what all of them hold by the same numbers. Paddle's tracker of random states has both. Trainer checkpoints
hold it, and recompute restores it, so that a mask is the same again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from paddle.distributed.fleet.layers.mpu.random import MODEL_PARALLEL_RNG, get_rng_state_tracker

from paddle_te.distributed.tensor_parallel import TensorParallel


def random_numbers(tp: TensorParallel | None, own: bool) -> AbstractContextManager[None]:
    """Return a context in which random numbers are the same on all ranks of a TensorParallel, or each rank's own.

    tp: None for one rank, whose numbers come from its device's generator, which a checkpoint of any Trainer holds.
    PaddleNLP's set_seed gives ranks a state for each kind. With fleet alone each has one of its own, and what is shared
    comes from the generators, which fleet.init seeds alike.
    """
    if tp is None:
        return nullcontext()
    tracker = get_rng_state_tracker()
    if own:
        return tracker.rng_state("local_seed" if "local_seed" in tracker.states_ else MODEL_PARALLEL_RNG)
    return tracker.rng_state("global_seed") if "global_seed" in tracker.states_ else nullcontext()
