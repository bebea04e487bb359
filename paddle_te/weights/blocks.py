"""Moments of AdamW in 8 bits by blocks: how they lie in memory and in files, and how they move between layouts.

Blocks are those of Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861). Each has a
scale of its own, which is called its unit here, so that a large number spoils the precision of its block alone.

A block is BLOCK elements of a row of the weight, or what is left at the row's end. In memory it is the unit, 4 bytes of
a float32, then one byte for each element, then zeros up to a multiple of 4 bytes. So a moment is an int8 tensor with
the weight's shape, except that its last axis has the length `row_bytes`. optimizer/compact_states.py defines what the
bytes mean.

A rank that holds a slice of a flat weight, as sharding has it, divides the slice into blocks from its own beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from paddle_te.weights.tensors import Array, CheckpointError, Shape, StoredTensor

BLOCK = 256
UNIT_BYTES = 4
_INFINITY = 0x7F800000  # bits of float32; greater ones are NaNs


def row_bytes(width: int) -> int:
    """Return the bytes of a moment of a row of `width` elements."""
    return -(-width // 4) * 4 + -(-width // BLOCK) * UNIT_BYTES


def moment_shape(shape: Sequence[int]) -> Shape:
    """Return the shape of the int8 moment of a weight of a shape."""
    return (*shape[:-1], row_bytes(shape[-1])) if len(shape) else (row_bytes(1),)


def _width(size: int) -> int | None:
    """Return the width of the longest row that takes `size` bytes; None where no row does.

    The true width may be up to 3 elements less.
    """
    width = size - -(-size // (BLOCK + UNIT_BYTES)) * UNIT_BYTES
    return width if width >= 0 and row_bytes(width) == size else None


def unpack(moment: Array, width: int) -> npt.NDArray[np.uint64]:
    """Return a moment as elements that can be moved like a weight's: uint64 [..., width].

    moment: int8 [..., row_bytes(width)]. An element is its code and, above that, the bits of its block's unit. One of
    code 0 is 0, whatever its block's unit is.
    """
    blocks = -(-width // BLOCK)
    rows = moment.view("u1").reshape(-1, moment.shape[-1])
    whole = np.zeros((rows.shape[0], blocks * (BLOCK + UNIT_BYTES)), "u1")
    whole[:, : rows.shape[1]] = rows
    whole = whole.reshape(-1, BLOCK + UNIT_BYTES)
    units = np.ascontiguousarray(whole[:, :UNIT_BYTES]).view("<u4").astype("<u8")
    codes = whole[:, UNIT_BYTES:].astype("<u8")
    elements = np.where((codes != 0) | (units >= _INFINITY), units << 8 | codes, 0)
    return np.ascontiguousarray(elements.reshape(-1, blocks * BLOCK)[:, :width]).reshape(*moment.shape[:-1], width)


def pack(elements: npt.NDArray[np.uint64]) -> npt.NDArray[np.int8]:
    """Return a moment, int8 [..., row_bytes(width)], of elements as `unpack` has made them, uint64 [..., width].

    Raises ValueError where elements that come to lie in a block have several units, since the block would not be exact.
    """
    width = elements.shape[-1]
    blocks = -(-width // BLOCK)
    rows = elements.reshape(-1, width)
    padded = np.zeros((rows.shape[0], blocks * BLOCK), "<u8")
    padded[:, :width] = rows
    padded = padded.reshape(-1, BLOCK)
    units = (padded >> 8).max(-1, keepdims=True)
    if ((padded != 0) & (padded >> 8 != units)).any():
        raise ValueError("elements of several blocks would share one")
    whole = np.concatenate([units.astype("<u4").view("u1"), padded.astype("u1")], -1)
    return (
        np.ascontiguousarray(whole.reshape(rows.shape[0], -1)[:, : row_bytes(width)])
        .view("i1")
        .reshape(*elements.shape[:-1], -1)
    )


@dataclass(frozen=True)
class BlocksRef:
    """A moment in a file, stored as int8, as a tensor of elements (see `unpack`) of the weight's shape."""

    moment: StoredTensor
    shape: Shape
    dtype: ClassVar[str] = "uint64"

    @classmethod
    def of_slice(cls, moment: StoredTensor) -> "BlocksRef":
        """Return the int8 moment of a slice; up to 3 zeros may follow its elements. Raises CheckpointError."""
        width = _width(prod(moment.shape))
        if width is None:
            raise CheckpointError(f"{moment.path}: {prod(moment.shape)} bytes are no moment in blocks of {BLOCK}")
        return cls(moment, (width,))

    @property
    def path(self) -> Path:
        """The moment's file."""
        return self.moment.path

    def read(self) -> npt.NDArray[np.uint64]:
        """Return uint64 of the shape. Raises as TensorRef's."""
        return unpack(self.moment.read(), self.shape[-1] if self.shape else 1).reshape(self.shape)
