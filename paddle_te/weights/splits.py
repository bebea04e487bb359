"""Split stored tensors over tensor parallel ranks by the table in `layout`.

A tensor of several parts, stacked on axis 0 (q, k, v or gate, up), is split part by part: each rank has its rows of
every part, stacked again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from paddle_te.weights.dims import Dims, concat
from paddle_te.weights.layout import SPLIT_AXIS, Layout, Place


@dataclass(frozen=True)
class Split:
    """How ranks share a tensor [out, in] or [out], or [experts, …].

    axis: the shared one. sizes: of its parts on it, in the whole.
    """

    axis: int
    sizes: tuple[int, ...]

    def share(self, tensor: Any, degree: int, rank: int) -> Any:
        """Return one rank's share of a whole tensor: a numpy array, a Paddle tensor, or a slice of a safetensors file.

        Raises ValueError where `degree` does not divide a part.
        """
        shares = []
        for start, stop in pairwise((0, *accumulate(self.sizes))):
            width, rest = divmod(stop - start, degree)
            if rest:
                what = "columns" if self.axis else "rows"
                raise ValueError(f"{stop - start} {what} cannot be split over {degree} tensor parallel ranks")
            mine = slice(start + rank * width, start + (rank + 1) * width)
            shares.append(tensor[self._at(mine)])
        return concat(shares, self.axis)

    def whole(self, shares: Sequence[Any]) -> Any:
        """Return the whole tensor from the shares of all ranks in order; the inverse of `share`."""
        parts = []
        for start, stop in pairwise((0, *accumulate(size // len(shares) for size in self.sizes))):
            parts += [share[self._at(slice(start, stop))] for share in shares]
        return concat(parts, self.axis)

    def _at(self, mine: slice) -> tuple[slice, ...]:
        return (*[slice(None)] * self.axis, mine)


def layer_splits(layout: Layout, dims: Dims, layer: int = 0) -> dict[str, Split]:
    """Return {name after the layer's prefix: Split} of the tensors of a decoder layer that ranks share.

    layer: its number. layout: one whose weights are [out, in], with parts stacked one after the other, such as
    Transformer Engine's.
    """
    found = {}
    for slot in layout.slots(dims.spec.layers[layer]):
        axis, parts = SPLIT_AXIS[slot.parts[0]], dims.parts(Place(layer, None, slot))
        if slot.stacked:
            found[slot.name] = Split(0, (len(parts) // len(slot.parts),))  # of experts
        elif axis is not None:
            found[slot.name] = Split(axis, tuple(dims.part_shape(part)[axis] for part in parts))
    return found
