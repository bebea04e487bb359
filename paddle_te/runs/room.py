"""Compare what a job's ranks will write with the free bytes of their file systems.

Knows neither Paddle nor PaddleNLP.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, TypeAlias

from paddle_te.files import free_bytes

FileSystem: TypeAlias = tuple[str, int]  # the machine's boot id, and the device


class Room(NamedTuple):
    """What a rank finds where it will write. needed: bytes that it will write. free: bytes that can be written."""

    system: FileSystem
    needed: int
    free: int

    @classmethod
    def of(cls, folder: str | Path, needed: int) -> Room:
        """Return this rank's Room in a folder. Raises OSError where the folder is not there."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls((boot, os.stat(folder).st_dev), needed, free_bytes(folder))


def check_room(ranks: Collection[Room], remedy: str) -> None:
    """Raise OSError where what the ranks of one node write would not fit."""
    for system in dict.fromkeys(rank.system for rank in ranks):
        needed = sum(rank.needed for rank in ranks if rank.system == system)
        free = min(rank.free for rank in ranks if rank.system == system)
        if needed > free:
            raise OSError(
                f"a node's part of a checkpoint takes about {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free. "
                f"{remedy}"
            )
