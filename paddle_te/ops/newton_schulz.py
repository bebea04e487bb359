"""Newton–Schulz in both backends: the steps that bring all singular values of a matrix near 1.

A step makes a·X + (b·A + c·A²)·X of X, where A = X·Xᵀ. The coefficients are Jordan's
(kellerjordan.github.io/posts/muon), which Moonlight has, too (Liu et al. 2025, arXiv:2502.16982): five steps bring
singular values to between 0.7 and 1.2, unless they were very small. The same comes of X times the polynomial of
A = Xᵀ·X. Backends take the smaller A of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor

LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315  # a, b, c
LEAST_NORM = 1e-7  # torch.optim.Muon's eps: a matrix of zeros stays one


def joined(matrices: Sequence[Tensor]) -> Tensor:
    """Return a copy of matrices [out, in] and stacks of them [n, out, in], one behind the other: [N, out, in]."""
    return paddle.concat([each.reshape([-1, *each.shape[-2:]]) for each in matrices])
