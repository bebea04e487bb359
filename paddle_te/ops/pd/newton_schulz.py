"""Newton–Schulz in Paddle's operations: the reference of te's."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor
from paddle.nn.clip import _squared_l2_norm

from paddle_te.ops.newton_schulz import CUBIC, LEAST_NORM, LINEAR, QUINTIC, joined


def newton_schulz(matrices: Sequence[Tensor], steps: int, factor: float) -> Tensor:
    """See `Ops.newton_schulz`."""
    with paddle.no_grad():
        x = _normalized(matrices)
        wide = x.shape[1] <= x.shape[2]
        for step in range(steps):
            of_this_step = factor if step == steps - 1 else 1.0
            gram = paddle.matmul(x, x, transpose_x=not wide, transpose_y=wide)
            polynomial = CUBIC * gram + QUINTIC * paddle.matmul(gram, gram)
            product = paddle.matmul(polynomial, x) if wide else paddle.matmul(x, polynomial)
            x = (of_this_step * LINEAR) * x + of_this_step * product
        return x


def _normalized(matrices: Sequence[Tensor]) -> Tensor:
    """Return the matrices divided by their Frobenius norms, above which no singular value is: [N, out, in]."""
    x, norms = joined(matrices), paddle.sqrt(paddle.concat([_squares(each) for each in matrices])).reshape([-1, 1, 1])
    return x.divide_(paddle.maximum(norms, paddle.full_like(norms, LEAST_NORM)).astype(x.dtype))


def _squares(matrices: Tensor) -> Tensor:
    """Return the sum of squares of a matrix, or of each matrix of a stack: float32 [n]."""
    wide = matrices.astype("float32")
    return _squared_l2_norm(wide).reshape([1]) if wide.ndim == 2 else wide.square().sum([1, 2])
