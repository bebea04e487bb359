"""Add scaling · B · A to a weight W, a rank's share of it at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from paddle_te.weights.tensors import Array, in_float32

if TYPE_CHECKING:
    from paddle_te.weights.adapters.files import Adapter
    from paddle_te.weights.dims import Dims
    from paddle_te.weights.layout import Part

Floats: TypeAlias = npt.NDArray[np.float32]

_NUMBERS_AT_ONCE = 2**24  # of a product B · A


def merged(adapter: Adapter, dims: Dims, part: Part, share: tuple[slice, ...], weight: Array) -> Floats:
    """Return a share of a Part with an adapter in it, in float32; unchanged where the adapter does not change it.

    dims: the model's. share: the slices that are this share of the whole part. weight: the share without the adapter.
    """
    if part in adapter.whole:
        weight = _replacement(adapter, dims, part, share)
    weight = np.array(in_float32(weight), order="C")
    low_rank = adapter.parts.get(part)
    if low_rank is not None:
        rows, columns = share
        a, b = low_rank.read_a()[:, columns], low_rank.read_b(part, dims)[rows]
        _add(weight, np.ascontiguousarray(in_float32(a)), in_float32(b), np.float32(low_rank.scaling))
    return weight


def _replacement(adapter: Adapter, dims: Dims, part: Part, share: tuple[slice, ...]) -> Array:
    ref, place, _ = adapter.whole[part]
    return dims.take_apart(place, ref.read())[part][share]


def _add(weight: Floats, a: Floats, b: Floats, scaling: np.float32) -> None:
    step = max(1, _NUMBERS_AT_ONCE // weight.shape[1])
    for row in range(0, weight.shape[0], step):
        product = b[row : row + step] @ a
        product *= scaling
        weight[row : row + step] += product
