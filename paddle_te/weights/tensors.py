"""Tensors that stay in their files until they are read, and the error of this package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from paddle_te.files import open_file

Array: TypeAlias = npt.NDArray[Any]  # of any dtype of STORAGE, which only the file tells
Dtype: TypeAlias = np.dtype[Any]
Shape: TypeAlias = tuple[int, ...]
# Weights are moved as bits: bfloat16, which numpy does not have, is held as uint16, as Paddle does.
NUMBERS: dict[str, Dtype] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
# What may stand in files: weights, remainders of master weights, moments in 8 bits (optimizer/compact_states.py), and
# what weights in MXFP4 (`mxfp4`), or in fp8 by blocks (`float8`), are made of
STORAGE: dict[str, Dtype] = NUMBERS | {
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "float8_e4m3": np.dtype("u1"),
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, converted or written; the message names the file and what to do."""


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file of a checkpoint. Raises CheckpointError where it cannot be read, or is no regular file."""
    try:
        with open_file(path) as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


class StoredTensor(Protocol):
    """A tensor that stays in its files until it is read. dtype: one of STORAGE, or uint64 for moments in blocks."""

    @property
    def path(self) -> Path: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Shape: ...

    def read(self) -> Array:
        """Return the tensor. Raises CheckpointError for a file that cannot be read, or has become shorter."""
        ...


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a file: the offset of its first byte, its dtype (of STORAGE), shape and order."""

    path: Path
    offset: int
    dtype: str
    shape: Shape
    order: Literal["C", "F"] = "C"

    def read(self) -> Array:
        """Return the tensor as an array of the storage dtype.

        Raises CheckpointError for a file that cannot be read, or has become shorter.
        """
        with opened(self.path) as file:
            array = np.fromfile(file, STORAGE[self.dtype], prod(self.shape), offset=self.offset)
        if array.size != prod(self.shape):
            raise CheckpointError(f"{self.path}: truncated while it was being read")
        return array.reshape(self.shape, order=self.order)

    def item(self, index: int) -> TensorRef:
        """Return the ref of what the tensor has at an index of its first axis. Raises ValueError in Fortran's order."""
        if self.order != "C":
            raise ValueError("the numbers of an item do not lie one behind the other")
        size = prod(self.shape[1:]) * np.dtype(STORAGE[self.dtype]).itemsize
        return replace(self, offset=self.offset + index * size, shape=self.shape[1:])


def cast(array: Array, spec: TensorSpec) -> Array:
    """Return an array in the dtype of the TensorSpec that it is written as, rounded to the nearest even.

    Its own dtype is another of STORAGE.

    Raises CheckpointError for a finite number that would become infinite.
    """
    if array.dtype == STORAGE[spec.dtype]:
        return array
    wide = in_float32(array)
    with np.errstate(over="ignore"):  # asked about below
        narrow = in_bfloat16(wide) if spec.dtype == "bfloat16" else wide.astype(STORAGE[spec.dtype])
    overflowed = np.isinf(in_float32(narrow)) & np.isfinite(wide)
    if overflowed.any():
        largest = np.abs(wide[overflowed]).max()
        raise CheckpointError(f"{spec.name!r} has numbers up to {largest:g}, which are too large for {spec.dtype}")
    return narrow


_FLOATS_AT_ONCE = 2**22


def all_finite(array: Array, dtype: str) -> bool:
    """Return whether an array holds neither NaN nor infinity. dtype: its name in STORAGE."""
    if dtype not in NUMBERS:
        return True
    rows = max(1, _FLOATS_AT_ONCE // max(1, array[:1].size))
    blocks = (array[start : start + rows] for start in range(0, len(array), rows))
    if dtype == "bfloat16":  # all bits of the exponent
        return not any(((block & 0x7F80) == 0x7F80).any() for block in blocks)
    return all(np.isfinite(block).all() for block in blocks)


def in_float32(array: Array) -> npt.NDArray[np.float32]:
    """Return an array of a dtype of NUMBERS in float32; uint16 are bfloat16's bits. float32 is not copied."""
    if array.dtype == STORAGE["bfloat16"]:
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype("<f4", copy=False)


def in_bfloat16(wide: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of float32 numbers rounded to bfloat16, which is their upper half."""
    bits = wide.view("<u4")
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    return (np.where(np.isnan(wide), bits | 0x400000, rounded) >> 16).astype("<u2")  # NaNs stay NaNs


def same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two stored tensors are one, saved twice: dtype, shape and every bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (ref.read().view(f"u{STORAGE[ref.dtype].itemsize}") for ref in (one, other))
    return np.array_equal(first, second)


@dataclass(frozen=True)
class SlicedRef:
    """A tensor whose elements, in C order, lie in slices one after another, with padding by zeros behind the last."""

    slices: tuple[StoredTensor, ...]
    shape: Shape

    @property
    def path(self) -> Path:
        """The file of the first slice."""
        return self.slices[0].path

    @property
    def dtype(self) -> str:
        """The dtype of the first slice."""
        return self.slices[0].dtype

    def read(self) -> Array:
        """Return the tensor. Raises CheckpointError where the slices are too few, or not one tensor's."""
        flat, size = np.concatenate([ref.read().reshape(-1) for ref in self.slices]), prod(self.shape)
        if flat.size < size or flat[size:].any():
            raise CheckpointError(
                f"{self.path}: slices of {flat.size} elements in all are no tensor of shape {list(self.shape)} with "
                "zeros behind it"
            )
        return flat[:size].reshape(self.shape)


@dataclass(frozen=True)
class StackedRef:
    """A tensor that lies in several files, each with some of its rows of axis 0, such as some of a layer's experts."""

    parts: tuple[StoredTensor, ...]

    @property
    def path(self) -> Path:
        """The file of the first part."""
        return self.parts[0].path

    @property
    def dtype(self) -> str:
        """The dtype of the first part."""
        return self.parts[0].dtype

    @property
    def shape(self) -> Shape:
        """The shape of the whole."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def read(self) -> Array:
        """Return the whole tensor. Raises CheckpointError where its parts do not fit together."""
        if len({(part.dtype, part.shape[1:]) for part in self.parts}) > 1:
            raise CheckpointError(f"{self.path}: other files have experts of other shapes or dtypes")
        return np.concatenate([part.read() for part in self.parts])


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * STORAGE[self.dtype].itemsize


# A transposed matrix is written in tiles: numpy's own transposing copy is 5 to 20 times slower, and takes a whole copy.
_BLOCK_ROWS, _TILE_COLUMNS = 256, 128


def write_array(file: BinaryIO, array: Array) -> None:
    """Write an array's bytes in C order. At most _BLOCK_ROWS rows of one that lies otherwise are copied at a time."""
    if array.ndim < 2 or array.flags.c_contiguous:
        file.write(np.ascontiguousarray(array).data.cast("B"))
        return
    for row in range(0, array.shape[0], _BLOCK_ROWS):
        block = array[row : row + _BLOCK_ROWS]
        rows = np.empty(block.shape, block.dtype)
        for column in range(0, block.shape[1], _TILE_COLUMNS):
            rows[:, column : column + _TILE_COLUMNS] = block[:, column : column + _TILE_COLUMNS]
        file.write(rows.data.cast("B"))


def sync_file(file: IO[Any]) -> None:
    """Flush a file to the disk itself."""
    file.flush()
    os.fsync(file.fileno())
