"""AdamW as the trainers of every host have it: with clipping in the same pass, and of all weights in one call.

`training.compact_states`, `training.optimizer_in_backward` and `training.optimizer_offload` build on it.
"""

from paddle_te.optimizer.adamw import (
    FactorAdamW,
    Step,
    clip_factor,
    decay_matrices,
    fuse_clipping,
    gradient_norm,
    multiplied,
)

__all__ = [
    "FactorAdamW",
    "Step",
    "clip_factor",
    "decay_matrices",
    "fuse_clipping",
    "gradient_norm",
    "multiplied",
]
