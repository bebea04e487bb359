"""Tell the ranks of each other's objects, besides tensors."""

from typing import TypeVar

import paddle.distributed as dist

T = TypeVar("T")


def gather_objects(mine: T, world_size: int) -> list[T]:
    """Return every rank's object, in the order of the ranks; [mine] where there is one rank. A collective.

    mine: an object that can be pickled. world_size: the number of ranks.
    """
    if world_size == 1:
        return [mine]
    everyone: list[T] = []
    dist.all_gather_object(everyone, mine)
    return everyone
