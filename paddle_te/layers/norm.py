"""RMSNorm and LayerNorm."""

from __future__ import annotations

from typing import ClassVar

from paddle import Tensor

from paddle_te.layers.base import ParallelLayer
from paddle_te.layers.settings import NormSettings, takes
from paddle_te.ops.norms import Norm


class _Norm(ParallelLayer):
    """Compute a norm."""

    normalization: ClassVar[str]

    @takes(NormSettings)
    def __init__(self, settings: NormSettings) -> None:
        super().__init__(settings)
        self.eps, self.zero_centered_gamma = settings.eps, settings.zero_centered_gamma
        self.weight, self.bias = self.create_norm(settings.hidden_size, self.normalization, self.zero_centered_gamma)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute [..., hidden_size] -> the same shape and dtype; residual, if any, is added."""
        return self.ops.normalize(x, Norm(self.weight, self.eps, self.bias, self.zero_centered_gamma), residual)


class RMSNorm(_Norm):
    """Compute y = x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich, 2019).

    Parameters: weight [hidden_size]. Arguments: NormSettings'.
    """

    normalization = "RMSNorm"


class LayerNorm(_Norm):
    """Compute y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias (Ba et al., 2016).

    Parameters: weight and bias [hidden_size]. Arguments: as RMSNorm's.
    """

    normalization = "LayerNorm"


def norm_of(settings: NormSettings | None, normalization: str | None) -> RMSNorm | LayerNorm | None:
    """Make the layer, RMSNorm or LayerNorm; None without settings."""
    if settings is None or normalization is None:
        return None
    return RMSNorm.of(settings) if normalization == "RMSNorm" else LayerNorm.of(settings)
