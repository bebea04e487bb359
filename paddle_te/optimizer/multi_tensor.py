"""Call nvgpu's operators that take many tensors at once, for what a step does to each of its weights.

A call of Paddle's costs the host 5 to 100 microseconds, which a small weight's work on the device does not last. The
kernels run in few launches (nvgpu/csrc/math/launch.h), and each tensor's result has the bits of a call of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import paddle
from paddle import Tensor

from paddle_te import device

if TYPE_CHECKING:
    from paddle_te.optimizer.adamw import Step


def adamw(steps: Sequence[Step]) -> None:
    """Update the weights of Steps of AdamW (adamw.py), all at once.

    The weights lie on one nvgpu. The Steps have the same factor, learning rate, betas, epsilon and noise_key. Either
    all have a master weight or none has; the same goes for greatest second moments.
    """
    one = steps[0]

    def each(name: str) -> list[Any]:
        return [getattr(step, name) for step in steps]

    device.nvgpu_operator(
        "nvgpu_multi_tensor_adamw",
        *(each("param"), each("grad"), one.factor, one.learning_rate, each("moment1"), each("moment2")),
        each("moment2_max") if one.moment2_max is not None else None,
        *(each("beta1_power"), each("beta2_power")),
        each("master") if one.master is not None else None,
        *(one.beta1, one.beta2, one.epsilon, each("rate_ratio"), each("decay"), one.noise_key, each("noise_first")),
    )


def deferred_adamw(calls: list[list[Step]]) -> Callable[[], None]:
    """Return a function without arguments that makes an `adamw` of each list of Steps.

    All but the launches is done before it returns: Paddle takes half a millisecond over the thousand tensors of a small
    model's call, in which the device may still compute their gradients. So the function is for the same thread, once,
    before the next `deferred_adamw`, and no tensor may be replaced or moved until then.
    """
    with device.nvgpu_section("defer"):
        for steps in calls:
            adamw(steps)

    def run() -> None:
        device.run_deferred()
        calls.clear()  # until here the tensors had to live

    return run


def squared_norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the sums of the squares of dense tensors on one nvgpu: a tensor [count] for each of their types.

    As Paddle's squared_l2_norm, it rounds a tensor's sum to its type. The types are in the order of their names.
    """
    by_type = defaultdict(list)
    for tensor in tensors:
        by_type[id(tensor.dtype)].append(tensor)  # a dtype's hash takes longer than all the rest
    in_order = sorted(by_type.values(), key=lambda alike: str(alike[0].dtype))
    return [device.nvgpu_operator("nvgpu_multi_tensor_squared_l2_norm", alike)[0] for alike in in_order]


def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of the squares of all their elements, float32 []; zero without tensors.

    As ClipGradByGlobalNorm has it, the sums of the tensors of one type are added up in that type.
    """
    sums = [squares.sum().astype("float32") for squares in squared_norms(tensors)]
    return paddle.stack(sums).sum() if sums else paddle.zeros([])
