"""AdamW as the trainers of every host have it: with clipping in the same pass, and of all weights in one call.

`compact_states`, `in_backward` and `offloaded_states` build on it, each for flags of the scripts. `holding` says which
states a rank has.
"""

from paddle_te.optimizer.adamw import (
    FactorAdamW,
    Step,
    clip_factor,
    decay_matrices,
    fuse_clipping,
    gradient_norm,
    guard_updates,
    multiplied,
)

__all__ = [
    "FactorAdamW",
    "Step",
    "clip_factor",
    "decay_matrices",
    "fuse_clipping",
    "gradient_norm",
    "guard_updates",
    "multiplied",
]
