"""Read weights that a folder has in fp8 by blocks, as DeepSeek-V3's: e4m3 numbers and a scale for each 128 x 128.

config.json says so in quantization_config (quant_method fp8, weight_block_size); a weight's scales are a tensor beside
it, of its name and _scale_inv, by which a block's numbers are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paddle_te.weights.tensors import Array, CheckpointError, Shape, StoredTensor, in_bfloat16, in_float32

FLOAT8 = "float8_e4m3"
BLOCK = 128
SCALES = "_scale_inv"


@dataclass(frozen=True)
class BlockScaledRef:
    """A weight in fp8 with its scales, which is read as bfloat16."""

    numbers: StoredTensor
    scales: StoredTensor

    dtype = "bfloat16"

    @property
    def path(self) -> Path:
        """The file of the numbers."""
        return self.numbers.path

    @property
    def shape(self) -> Shape:
        """The weight's."""
        return self.numbers.shape

    def read(self) -> Array:
        """Return the weight in bfloat16. Raises CheckpointError for a file that cannot be read."""
        rows, columns = self.shape
        scales = in_float32(self.scales.read()).repeat(BLOCK, 0)[:rows].repeat(BLOCK, 1)[:, :columns]
        return in_bfloat16(_values()[self.numbers.read()] * scales)


@cache
def _values() -> npt.NDArray[np.float32]:
    """Return the numbers of all bytes as e4m3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022)."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    values = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    values[bits & 127 == 127] = np.nan
    return np.where(bits > 127, -values, values).astype("float32")


def with_scales(tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Return {name: tensor} in which weights in fp8 and their scales are one; the others as they are.

    Raises CheckpointError for such a weight without scales of its blocks.
    """
    quantized = [name for name, ref in tensors.items() if ref.dtype == FLOAT8]
    if not quantized:
        return tensors
    joined, scales = dict(tensors), {name + SCALES for name in quantized}
    for name in quantized:
        joined[name] = _joined(name, tensors)
    return {name: ref for name, ref in joined.items() if name not in scales}


def _joined(name: str, tensors: Mapping[str, StoredTensor]) -> BlockScaledRef:
    numbers, scales = tensors[name], tensors.get(name + SCALES)
    if scales is None:
        raise CheckpointError(
            f"{numbers.path}: {name!r} is in fp8, and the folder has no {name + SCALES!r}, the scales of its blocks; "
            "make bfloat16 weights of it first"
        )
    expected = tuple(-(-size // BLOCK) for size in numbers.shape)
    if len(expected) != 2 or scales.shape != expected:
        raise CheckpointError(
            f"{scales.path}: {name + SCALES!r} has shape {list(scales.shape)}, but {list(expected)} are the blocks of "
            f"{BLOCK} x {BLOCK} of {name!r}, {list(numbers.shape)}"
        )
    return BlockScaledRef(numbers, scales)
