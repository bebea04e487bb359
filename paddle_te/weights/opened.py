"""Checkpoints that a run asks for at several places, opened once: to judge, to divide, and to load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path

from paddle_te.weights.folder import Checkpoint, open_checkpoint
from paddle_te.weights.optimizer import open_optimizer


class Opened:
    """A checkpoint folder whose names, shapes and places are read when somebody asks first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Return `open_checkpoint`'s."""
        return open_checkpoint(self.folder)

    @cached_property
    def optimizer(self) -> Mapping[str, Checkpoint]:
        """Return `open_optimizer`'s."""
        return open_optimizer(self.checkpoint)


def opened(folder: str | Path) -> Opened:
    """Return the Opened of a folder, the same one as long as none of its files changes.

    Its properties raise CheckpointError as `open_checkpoint` and `open_optimizer`.
    """
    folder = Path(folder)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return _opened(folder, tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=2)  # a run resumes from one folder, and may end with the best one's weights
def _opened(folder: Path, files: tuple[tuple[str, int, int], ...]) -> Opened:
    return Opened(folder)
