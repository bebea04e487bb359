"""An embedding's gradient, added to the float32 main gradient directly.

Paddle makes a gradient of the whole table in the weights' type, fills it with zeros, and adds all of it to the main
gradient. A micro-batch has gradients for the rows of its few thousand tokens only. Here those alone are added, and they
are not rounded on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te import device


class _Lookup(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, forward: Callable[[Tensor], Tensor], first: int, padding: int
    ) -> Tensor:
        ctx.saved = weight, weight.shape, ids, first, padding
        weight.read_in_backward = False  # as te's GEMMs leave it (ops/te/program.py)
        return forward(ids)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:  # type: ignore[override]  # Paddle takes None, too
        (weight, shape, ids, first, padding), ctx.saved = ctx.saved, None
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            main_grad = paddle.zeros(shape, "float32")
        elif getattr(weight, "overwrite_main_grad", False):
            main_grad.zero_()
        device.nvgpu_operator("nvgpu_embedding_wgrad_accumulation", main_grad, ids, dy.contiguous(), first, padding)
        weight.main_grad, weight.overwrite_main_grad = main_grad, False  # as te's GEMMs leave it (ops/te/program.py)
        return None


def adds_to_main_grad(weight: Tensor) -> bool:
    """Say whether `embedding` can: on nvgpu, which has a kernel for it, where the weight is trained."""
    return not weight.stop_gradient and paddle.is_grad_enabled() and device.kind(weight.place) == "nvgpu"


def embedding(
    weight: Tensor, ids: Tensor, forward: Callable[[Tensor], Tensor], first: int = 0, padding: int | None = None
) -> Tensor:
    """Return forward(ids), with the gradient of weight [vocabulary, width] added to weight.main_grad (float32).

    That is made where it is not there, and overwritten where weight.overwrite_main_grad is set, which is set back.

    Args:
        weight: bfloat16, float16 or float32; on nvgpu.
        ids: int64 or int32.
        forward: the lookup, without a gradient: [*ids.shape, width].
        first: the vocabulary's number of the weight's first row. What lies outside of the rows has no gradient.
        padding: the token that has no gradient, or None.
    """
    return _Lookup.apply(weight, ids, forward, first, -1 if padding is None else padding)
