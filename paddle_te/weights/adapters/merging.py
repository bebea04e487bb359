"""W + scaling · B · A, of a rank's share of a weight at a time."""

import numpy as np

from paddle_te.weights import layout as layouts
from paddle_te.weights.tensors import in_float32

_NUMBERS_AT_ONCE = 2**24  # of a product B · A


def merged(adapter, dims, place, share, weight):
    """float32: a share of a part with an adapter in it, or as it is where the adapter does not change it.

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


def _replacement(adapter, dims, place, share):
    ref, slot, _ = adapter.whole[place]
    return layouts.take_apart(slot, ref.read(), dims.queries, dims.head_dim)[place[1]][share]


def _add(weight, a, b, scaling):
    step = max(1, _NUMBERS_AT_ONCE // weight.shape[1])
    for row in range(0, weight.shape[0], step):
        product = b[row : row + step] @ a
        product *= scaling
        weight[row : row + step] += product
