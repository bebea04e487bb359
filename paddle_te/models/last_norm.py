"""The norm after the last decoder layer, which stays a host's in its parameters and computes as those of our layers."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from paddle_te.ops import get_ops
from paddle_te.ops.norms import Norm


class LastNorm:
    """Compute a host's RMSNorm or LayerNorm, into which this is mixed.

    PaddleNLP's RMSNorm is a dozen of Paddle's operations, which took 2.2 ms of a step of Llama-3-8B's size on an H200,
    and PaddleFormers' fused kernel is for paddlepaddle-gpu only. Paddle's LayerNorm runs on nvgpu's host.
    """

    config: Any
    weight: Tensor
    variance_epsilon: float

    def taken_over(self) -> None:
        """Make nothing: the host's constructor makes all."""

    def forward(self, args: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Compute as the host's: of hidden_states, or of a tuple of a pipeline, whose masks end here."""
        hidden_states = args[0] if isinstance(args, tuple) else args
        if self.weight.dtype is not hidden_states.dtype:  # Paddle's O2 keeps LayerNorm in float32 beside float16
            return super().forward(args)  # type: ignore[misc]  # the host's
        epsilon = self._epsilon if hasattr(self, "_epsilon") else self.variance_epsilon
        norm = Norm(self.weight, epsilon, getattr(self, "bias", None))
        with paddle.amp.auto_cast(False):  # float32 inside stays float32
            return get_ops(self.config.transformer_engine_backend).normalize(hidden_states, norm)
