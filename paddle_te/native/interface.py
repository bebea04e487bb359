"""Type the extension module `_shim` as this package's Python sees it; tests put an emulation in its place.

Addresses are ints, of device memory or host memory.
"""

from __future__ import annotations

from typing import Protocol


class Stream(Protocol):
    """A CUDA stream with its scratch memory. capability: of its GPU, (major, minor)."""

    @property
    def capability(self) -> tuple[int, int]: ...


class Event(Protocol):
    """The work that a CopyStream had been given when `mark` made this."""

    def hold(self, stream: Stream) -> None:
        """Let a stream wait for it."""

    def wait(self) -> None:
        """Wait for it here."""


class CopyStream(Protocol):
    """A CUDA stream of its own, for copies that run beside other streams' work."""

    def copy(self, destination: int, source: int, bytes: int) -> None: ...

    def follow(self, before: Stream | Event) -> None:
        """Let what comes next wait for a stream or an Event."""

    def mark(self) -> Event: ...


class HostMemory(Protocol):
    """Pinned memory of the host."""

    @property
    def bytes(self) -> int: ...

    def data_ptr(self) -> int: ...


class Shim(Protocol):
    """The entry points that this package's Python calls by itself."""

    def launch(self, kernel: int, grid: int, block: int, shared_bytes: int, stream: Stream, /, *args: int) -> None: ...

    def CopyStream(self) -> CopyStream: ...  # noqa: N802, a class

    def HostMemory(self, bytes: int, /) -> HostMemory: ...  # noqa: N802, a class
