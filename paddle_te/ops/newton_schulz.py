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
from paddle.nn.clip import _squared_l2_norm

LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315  # a, b, c
LEAST_NORM = 1e-7  # torch.optim.Muon's eps: a matrix of zeros stays one


def normalized(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices of one shape divided by their Frobenius norms, above which no singular value is: [n, out, in]."""
    stacked = paddle.stack([*matrices])
    squares = [_squared_l2_norm(stacked[n].astype("float32")).reshape([1]) for n in range(len(matrices))]
    norms = paddle.sqrt(paddle.concat(squares)).reshape([-1, 1, 1])
    return stacked.divide_(paddle.maximum(norms, paddle.full_like(norms, LEAST_NORM)).astype(stacked.dtype))
