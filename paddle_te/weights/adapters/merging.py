"""Add scaling · B · A to a weight W, a rank's share of it at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from paddle_te.weights import layout as layouts
from paddle_te.weights.tensors import Array, in_float32

if TYPE_CHECKING:
    from paddle_te.weights.adapters.files import Adapter, Place
    from paddle_te.weights.layout import Dims

Floats: TypeAlias = npt.NDArray[np.float32]

_NUMBERS_AT_ONCE = 2**24  # of a product B · A


def merged(adapter: Adapter, dims: Dims, place: Place, share: tuple[slice, ...], weight: Array) -> Floats:
    """Return a share of a part with an adapter in it, in float32; unchanged where the adapter does not change it.

    dims: the model's. place: (layer, part). share: the slices that are this share of the whole part. weight: the share
    without the adapter.
    """
    if place in adapter.whole:
        weight = _replacement(adapter, dims, place, share)
    weight = np.array(in_float32(weight), order="C")
    low_rank = adapter.parts.get(place)
    if low_rank is not None:
        rows, columns = share
        a, b = low_rank.read_a()[:, columns], low_rank.read_b(place[1], dims)[rows]
        _add(weight, np.ascontiguousarray(in_float32(a)), in_float32(b), np.float32(low_rank.scaling))
    return weight


def _replacement(adapter: Adapter, dims: Dims, place: Place, share: tuple[slice, ...]) -> Array:
    ref, slot, _ = adapter.whole[place]
    return layouts.take_apart(slot, ref.read(), dims.queries, dims.head_dim)[place[1]][share]


def _add(weight: Floats, a: Floats, b: Floats, scaling: np.float32) -> None:
    step = max(1, _NUMBERS_AT_ONCE // weight.shape[1])
    for row in range(0, weight.shape[0], step):
        product = b[row : row + step] @ a
        product *= scaling
        weight[row : row + step] += product
