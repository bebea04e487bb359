"""Tell how long weights and checkpoints took to be read or written, for the log and for what a run shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


def bytes_of(folder: str | Path) -> int:
    """Return the size of all files in a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


@dataclass(frozen=True)
class Transfer:
    """One save or load of a folder.

    kind: "load" or "save". size: bytes of the files. seconds: as the training waited for it. note: whether the bytes
    were compared with a manifest, in words. verified: the same as a number, for a curve.
    """

    kind: str
    folder: Path
    size: int
    seconds: float
    note: str
    verified: bool

    def line(self) -> str:
        """Return the line of the log."""
        done = {"load": "loaded from", "save": "saved in"}[self.kind]
        rate = f", {self.size / self.seconds / 1e9:.2f} GB/s" if self.seconds else ""
        return f"{self.size / 1e9:,.3f} GB {done} {self.folder} in {self.seconds:.1f} s{rate}; {self.note}"

    def values(self) -> dict[str, float]:
        """Return what VisualDL shows of it."""
        names = {"bytes": self.size, "seconds": round(self.seconds, 3), "verified": int(self.verified)}
        return {f"{self.kind}_{name}": value for name, value in names.items()}
