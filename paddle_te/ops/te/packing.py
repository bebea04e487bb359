"""Several pieces of memory in one allocation, in which what is used one after the other overlaps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import paddle

# Bytes of an element.
SIZES = {
    paddle.uint8: 1,
    paddle.bfloat16: 2,
    paddle.float16: 2,
    paddle.float32: 4,
    paddle.int32: 4,
    paddle.int64: 8,
}
ALIGNMENT = 256  # bytes
# Memory of at most so many bytes in all is one allocation, which takes as long as ten kernels' worth of Python. More is
# allocated and let go piece by piece: there the GPU is busy longer than Python, and memory is what counts.
JOINED = 2**22


class Block(NamedTuple):
    """Describe a piece of memory of so many bytes, with the first and the last call's number that use it."""

    size: int
    index: int  # type: ignore[assignment]  # in the place of tuple.index
    first: int
    last: int


class Packing(NamedTuple):
    """Describe one allocation of `size` bytes; offsets: (index, offset) of the blocks in it. Nothing: 0 and ()."""

    size: int = 0
    offsets: tuple[tuple[int, int], ...] = ()


NOTHING = Packing()


def byte_count(shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of a tensor."""
    return math.prod(shape) * SIZES[dtype]


def pack(blocks: Iterable[Block]) -> Packing:
    """Pack Blocks: the largest is placed first, each as low as what is in use at the same time lets it.

    An empty Packing where that is more than JOINED bytes.
    """
    placed: list[tuple[int, int, Block]] = []  # (offset, end, Block)
    for block in sorted(blocks, reverse=True):
        size, offset = -(-block.size // ALIGNMENT) * ALIGNMENT, 0
        for begin, end, other in sorted(placed):
            in_use_together = block.first <= other.last and other.first <= block.last
            if in_use_together and begin < offset + size and offset < end:
                offset = end
        placed.append((offset, offset + size, block))
    size = max([end for _, end, _ in placed], default=0)
    if size > JOINED:
        return NOTHING
    return Packing(size, tuple([(block.index, offset) for offset, _, block in placed]))
