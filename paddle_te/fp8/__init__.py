"""fp8: recipes, autocast, the scaling state and its place in checkpoints, and an emulation of its rounding.

A layer holds `self.fp8 = ModuleScaling(num_gemms, self.ops.amax_and_scale_update)` and starts each forward with
`quantizers = self.fp8.begin_forward(self.training, is_first_microbatch)`; a backend's op reads the quantizers and
calls `quantizers.forward_pass.backward_done()` at the end of its backward.
"""

from paddle_te.fp8.autocast import (
    AutocastState,
    autocast_state,
    fp8_autocast,
    fp8_model_init,
    get_autocast_state,
    get_fp8_group,
    get_fp8_recipe,
    is_fp8_enabled,
    microbatch,
)
from paddle_te.fp8.checkpoint import (
    check_file,
    load,
    name_modules,
    named_tensors,
    reduce_amax,
    save,
    set_state_dict,
    state_dict,
)
from paddle_te.fp8.module import GemmQuantizers, ModuleScaling, bind_model, has_fp8_backward
from paddle_te.fp8.recipe import RECIPES, DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from paddle_te.fp8.scaling import BlockScaling, GemmScalings, StoredScaling, TensorScaling
from paddle_te.fp8.state import Quantizer, amax_and_scale_update, drop_step, new_step
from paddle_te.fp8.stored import StoredWeight, stored_scaling

__all__ = [
    "AutocastState",
    "BlockScaling",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "GemmQuantizers",
    "GemmScalings",
    "ModuleScaling",
    "Quantizer",
    "RECIPES",
    "StoredScaling",
    "StoredWeight",
    "TensorScaling",
    "amax_and_scale_update",
    "autocast_state",
    "bind_model",
    "check_file",
    "drop_step",
    "fp8_autocast",
    "fp8_model_init",
    "get_autocast_state",
    "get_fp8_group",
    "get_fp8_recipe",
    "has_fp8_backward",
    "is_fp8_enabled",
    "load",
    "microbatch",
    "name_modules",
    "named_tensors",
    "new_step",
    "reduce_amax",
    "save",
    "set_state_dict",
    "state_dict",
    "stored_scaling",
]
