"""nvgpu's operators that take many tensors in one call, for what a step does to each of its weights.

A call of Paddle's costs the host 5 to 100 microseconds, which a small weight's work on the device does not last. The
kernels run in few launches (nvgpu/csrc/math/launch.h), and each tensor's result has the bits of a call of its own.
"""

from collections import defaultdict
from functools import cache

import paddle
from paddle import _C_ops
from paddle.base import core

from paddle_te import device


@cache
def _operators():
    """The names of nvgpu's operators (its kernels/training.cc), which Paddle knows afterwards."""
    names, path = ("nvgpu_multi_tensor_adamw", "nvgpu_multi_tensor_squared_l2_norm"), device.nvgpu_library()
    if missing := {*names} - {*core.load_op_meta_info_and_register_op(path)}:
        raise RuntimeError(f"{path} is of another version and lacks {min(missing)}: pip install ./nvgpu")
    return names


def adamw(*arguments):
    """A step of AdamW of many weights: the inputs and attributes of nvgpu's operator, in its order."""
    _C_ops._run_custom_op(_operators()[0], *arguments)


def squared_norms(tensors):
    """The sums of the squares of dense tensors that lie on one nvgpu: for each of their types a tensor [count].

    As Paddle's squared_l2_norm, it rounds a tensor's sum to its type. The types are in the order of their names.
    """
    by_type = defaultdict(list)
    for tensor in tensors:
        by_type[id(tensor.dtype)].append(tensor)  # a dtype's hash takes longer than all the rest
    by_type = sorted(by_type.values(), key=lambda alike: str(alike[0].dtype))
    return [_C_ops._run_custom_op(_operators()[1], alike)[0] for alike in by_type]


def sum_of_squares(tensors):
    """The sum of the squares of all their elements, float32 []; of no tensors zero.

    As ClipGradByGlobalNorm has it, the sums of the tensors of one type are added up in that type.
    """
    sums = [squares.sum().astype("float32") for squares in squared_norms(tensors)]
    return paddle.stack(sums).sum() if sums else paddle.zeros([])
