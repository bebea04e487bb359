"""The norm after the last decoder layer, which stays a host's in its parameters and computes as those of our layers."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor

from paddle_te.configs.spec import spec_of
from paddle_te.models.backend import ops_of
from paddle_te.ops.norms import Norm


class LastNorm:
    """Compute a host's RMSNorm or LayerNorm, into which this is mixed.

    PaddleNLP's RMSNorm is a dozen of Paddle's operations, which took 2.2 ms of a step of Llama-3-8B's size on an H200,
    and PaddleFormers' fused kernel is for paddlepaddle-gpu only. Paddle's LayerNorm runs on nvgpu's host.
    """

    config: Any
    weight: Tensor
    variance_epsilon: float
    zero_centered = False  # as Norm's zero_centered_gamma
    stream_scale = 1.0  # LayerSpec's
    scale = 1.0  # of its output: the logits', and here because whatever computes logits or their loss reads this

    def taken_over(self) -> None:
        """Read the model's spec, and let a weight that 1 is added to begin at 0; the host's constructor made it 1."""
        model = spec_of(self.config)
        self.zero_centered = model.norm.zero_centered
        self.stream_scale, self.scale = model.layer.stream_scale, model.logit_scale
        if self.zero_centered:
            self.weight.set_value(paddle.zeros_like(self.weight))

    def forward(self, args: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Compute as the host's: of hidden_states, or of a tuple of a pipeline, whose masks end here."""
        hidden_states = args[0] if isinstance(args, tuple) else args
        keeps_dtype = self.weight.dtype is hidden_states.dtype
        if not keeps_dtype and not self.zero_centered:  # Paddle's O2 keeps LayerNorm in float32 beside float16
            return self._scaled(super().forward(args))  # type: ignore[misc]  # the host's
        epsilon = self._epsilon if hasattr(self, "_epsilon") else self.variance_epsilon
        weight = self.weight if keeps_dtype else self.weight.astype(hidden_states.dtype)
        norm = Norm(weight, epsilon * self.stream_scale**2, getattr(self, "bias", None), self.zero_centered)
        with paddle.amp.auto_cast(False):  # float32 inside stays float32
            return self._scaled(ops_of(self.config).normalize(hidden_states, norm))

    def _scaled(self, normed: Tensor) -> Tensor:
        return normed if self.scale == 1.0 else normed * self.scale
