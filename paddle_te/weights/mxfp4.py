"""Weights that are stored in MXFP4 (OCP Microscaling Formats specification, version 1.0), as gpt-oss's experts' are.

A weight NAME [experts, in, out] is stored as its transpose in two tensors: NAME_blocks, bytes [experts, out, in / 32,
16], of which each byte has two e2m1 numbers, the first in its lower half, and NAME_scales, bytes [experts, out, in /
32], each the e8m0 exponent of a block of 32 numbers. A number times its power of 2 is one of bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from paddle_te.weights.tensors import Array, CheckpointError, Shape, StoredTensor

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK, BIAS = 32, 127
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], "<f4")
# the bits in bfloat16 of both numbers of a byte
_BITS = (np.concatenate([_E2M1, -_E2M1]).view("<u4") >> 16).astype("<u2")
_PAIRS = np.stack([np.tile(_BITS, 16), np.repeat(_BITS, 16)], -1).view("<u4")[:, 0]
# 0xffff for each of them that is not 0
_FULL = (np.where(_PAIRS & 0x7FFF, 0xFFFF, 0) | np.where(_PAIRS & 0x7FFF0000, 0xFFFF0000, 0)).astype("<u4")
_LEAST, _MOST = BIAS - 125, BIAS + 125  # of scales with which all numbers are normal ones of bfloat16


@dataclass(frozen=True)
class Mxfp4Ref:
    """A weight [experts, in, out] as bfloat16, from its stored blocks and scales."""

    blocks: StoredTensor
    scales: StoredTensor
    dtype: ClassVar[str] = "bfloat16"

    @property
    def path(self) -> Path:
        """The blocks' file."""
        return self.blocks.path

    @property
    def shape(self) -> Shape:
        """The weight's shape."""
        experts, out, groups, _ = self.blocks.shape
        return experts, groups * BLOCK, out

    def read(self) -> Array:
        """Return bfloat16's bits, exactly the stored numbers. Raises CheckpointError as a TensorRef."""
        blocks, scales = self.blocks.read(), self.scales.read()
        experts, width, out = self.shape
        found = np.empty((experts, out, width), "<u2")
        for number in range(experts):  # the intermediate arrays are an expert's
            found[number] = dequantized(blocks[number], scales[number]).reshape(out, width)
        return found.swapaxes(1, 2)


def dequantized(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Return bfloat16's bits [..., 32] of blocks, uint8 [..., 16], and their scales, uint8 [...]; 255 is NaN.

    Numbers that bfloat16 has none as large as are infinite; all others are exact.
    """
    bits = np.take(_PAIRS, blocks).view("<u2")  # a byte's numbers are neighbours
    if scales.size and (scales.min() < _LEAST or scales.max() > _MOST):
        return _in_float32(bits, scales)
    powers = (((scales.astype("<i4") - BIAS) << 7) & 0xFFFF).astype("<u4")  # added to the exponents of all but zeros
    bits += (np.take(_FULL, blocks) & (powers * np.uint32(0x10001))[..., None]).view("<u2")
    return bits


def _in_float32(bits: npt.NDArray[np.uint16], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    values = (bits.astype("<u4") << 16).view("<f4")
    with np.errstate(over="ignore"):
        values = np.ldexp(values, scales.astype("<i4")[..., None] - BIAS)
    values = np.where(scales[..., None] == 255, np.float32(np.nan), values)
    return (values.view("<u4") >> 16).astype("<u2")


def joined(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return {name: tensor} with one Mxfp4Ref instead of each pair of blocks and scales.

    Raises CheckpointError for one without the other, or of another shape.
    """
    found = dict(tensors)
    for name in [name for name, ref in tensors.items() if ref.dtype == "uint8"]:
        weight = name.removesuffix(BLOCKS).removesuffix(SCALES)
        blocks, scales = tensors.get(f"{weight}{BLOCKS}"), tensors.get(f"{weight}{SCALES}")
        if blocks is None or scales is None:
            other = f"{weight}{SCALES if scales is None else BLOCKS}"
            raise CheckpointError(f"{tensors[name].path}: {name!r} of MXFP4 stands without {other!r}")
        _check(weight, blocks, scales)
        found.pop(name)
        found[weight] = Mxfp4Ref(blocks, scales)
    return found


def _check(weight: str, blocks: StoredTensor, scales: StoredTensor) -> None:
    if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, BLOCK // 2) or scales.dtype != blocks.dtype:
        raise CheckpointError(
            f"{blocks.path}: {weight!r} in MXFP4 has blocks {blocks.dtype} {list(blocks.shape)} and scales "
            f"{scales.dtype} {list(scales.shape)}; they must be uint8 [experts, out, in / 32, 16] and [experts, out, "
            "in / 32]"
        )
