"""Losses that do not come from a model's output."""

from __future__ import annotations

from typing import Any, ClassVar

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer


class MoEAuxLossAutoScaler(PyLayer):
    """Train a loss that the model does not return, as Megatron-Core does.

    An activation passes through, and backward gives the loss its gradient, main_loss_backward_scale.

    `set_loss_scale` says what the main loss is multiplied with before backward: a gradient scaler's factor, and a
    micro-batch's share of the step.
    """

    main_loss_backward_scale: ClassVar[float | Tensor] = 1.0

    @staticmethod
    def forward(ctx: Any, activation: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.dtype, loss.shape
        return activation.view(activation.shape)  # itself would be taken for an in-place result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        dtype, shape = ctx.loss
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        if isinstance(scale, paddle.Tensor):
            return gradient, scale.astype(dtype).reshape(shape)
        return gradient, paddle.full(shape, scale, dtype)

    @staticmethod
    def set_loss_scale(scale: float | Tensor) -> None:
        """Set the gradient of all such losses: a number, or a tensor of one, for which the host does not wait."""
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale
