"""Keep off the screen what Paddle's C++ code says of the first operation of a kind that mixes two types.

It says so once for each kind of operation and cannot be told not to, but by hiding all warnings. So each kind is run
once here on two numbers, and what Paddle says of it goes to the log. The mixing is Paddle's and PaddleNLP's own: bf16
gradients are added to main gradients in float32, and PaddleNLP's RMSNorm multiplies bf16 by float32.
"""

import paddle
from paddle.base.framework import _dygraph_place_guard

from paddle_te.runs import noise

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "A line 'Got different data type, run type promotion automatically' stands among a run's first steps."
OPERATIONS = ("add", "subtract", "multiply", "divide", "add_", "subtract_", "multiply_", "divide_")

_said = False  # in this process, or in the one that it was forked from


@paddle.no_grad()
def apply() -> None:
    global _said
    if _said:
        return
    _said = True
    # A device is chosen later: until then each rank's would be the first GPU, on which a context takes memory.
    with _dygraph_place_guard(paddle.CPUPlace()), noise.kept_out_of_descriptor(2):
        one = paddle.to_tensor([1.0])
        half = one.astype("bfloat16")
        for operation in OPERATIONS:
            getattr(paddle.Tensor, operation)(one.clone(), half)


def undo() -> None:
    """Do nothing: what was said stays said."""
