"""Several pieces of memory in one allocation, in which what is used one after the other overlaps."""

import math
from typing import NamedTuple

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
    """A piece of memory of so many bytes, with the numbers of the first and the last call that use it."""

    size: int
    index: int
    first: int
    last: int


class Packing(NamedTuple):
    """One allocation of `size` bytes; offsets: [(index, offset)] of the blocks in it. Nothing: 0 and []."""

    size: int = 0
    offsets: tuple = ()


def byte_count(shape, dtype):
    """Bytes of a tensor."""
    return math.prod(shape) * SIZES[dtype]


def pack(blocks):
    """The Packing of Blocks: the largest is placed first, each as low as what is in use at the same time lets it.

    An empty Packing where that is more than JOINED bytes.
    """
    placed = []  # (offset, end, Block)
    for block in sorted(blocks, reverse=True):
        size, offset = -(-block.size // ALIGNMENT) * ALIGNMENT, 0
        for begin, end, other in sorted(placed):
            in_use_together = block.first <= other.last and other.first <= block.last
            if in_use_together and begin < offset + size and offset < end:
                offset = end
        placed.append((offset, offset + size, block))
    size = max([end for _, end, _ in placed], default=0)
    if size > JOINED:
        return Packing()
    return Packing(size, tuple([(block.index, offset) for offset, _, block in placed]))
