"""The norms of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paddle import Tensor

if TYPE_CHECKING:
    from paddle_te.ops.interface import Ranks


class Norm(NamedTuple):
    """x / sqrt(mean(x²) + eps) · weight, RMSNorm (Zhang and Sennrich, 2019).

    With a bias x loses its mean before, and gets the bias afterwards: LayerNorm (Ba et al., 2016).
    weight, bias: tensors [hidden]. zero_centered_gamma: 1 + weight in the weight's place. recompute: where a GEMM reads
    the output, backward computes it again instead of keeping it.
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    zero_centered_gamma: bool = False
    recompute: bool = False


def norm_tensors(norm: Norm | None) -> tuple[Tensor | None, Tensor | None]:
    """Return (weight, bias) of a norm; None for what there is not."""
    return (None, None) if norm is None else (norm.weight, norm.bias)


class QKNorm(NamedTuple):
    """RMSNorm of each head of q and k before they are rotated, as in Qwen3.

    q_weight, k_weight: tensors [d], of all heads of q and of k. zero_centered_gamma: as Norm's. over_all: the norms are
    of all heads together, as in OLMo-2; the weights are then [num_heads · d] and [num_kv_heads · d]. ranks: the
    `interface.Ranks` that then share the heads, or None.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    zero_centered_gamma: bool = False
    over_all: bool = False
    ranks: Ranks | None = None
