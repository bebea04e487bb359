"""manifest.json: what a checkpoint consists of and which run saved it, so that it is believed only when it agrees.

    {"version": 1,
     "files": {"model_state.pdparams": {"size": bytes, "xxh3_128": checksum}, …},
     "run": {"model": …, "layout": …, "step": …, "data": …}}    what runs/identity.py says of the run

The manifest is written when all files of all ranks are on the disk, and before the checkpoint's mark. The mark holds
the manifest's own checksum, so that neither can be damaged or lost unseen; an empty mark is that of a version without
manifests. The checksums are XXH3's of 128 bits: they find damage, at the speed of memory (13 GB/s a core here, where
zlib's CRC-32 makes 1.5), and do not protect from somebody who forges a whole checkpoint. Knows no Paddle and
no NumPy: the launcher reads manifests, too.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from paddle_te import typed
from paddle_te.files import open_file, read_file, real_path
from paddle_te.folders import step_of

MANIFEST = "manifest.json"
VERSION = 1
# PaddleNLP's name for the mark of a complete checkpoint
COMPLETE_MARK = ".checkpoint_done"
# A run may load any file with such an ending, so one that the manifest does not name makes a checkpoint a bad one.
STATE_SUFFIXES = (".pdparams", ".pdopt", ".safetensors", ".pth")
BLOCK = 2**20  # bytes that are read at a time; they stay in the processor's cache
THREADS = min(8, os.cpu_count() or 1)


class CheckpointDamaged(ValueError):
    """A checkpoint that does not agree with its manifest; the message says in what."""


@dataclass(frozen=True)
class FileRecord:
    """One file: its size in bytes and its checksum, 32 hexadecimal digits."""

    size: int = typed.at_least(0)
    xxh3_128: str  # type: ignore[misc]  # at_least(0) gives no default, which mypy cannot know


@dataclass(frozen=True)
class Run:
    """What a manifest says of the run that saved a checkpoint, topic by topic; None for what it does not say.

    script: pretrain, finetune, dpo or kto. model, layout, data: as `runs.identity` makes them. step: how many updates
    are done. samples: of the data, by whose number their order was made. gradient_norm: the last one, where the update
    clips by it. in_16_bits: the numbers of the decoder layers that have left fp8 by --fp8_fallback.
    """

    script: str | None = None
    model: dict[str, Any] | None = None
    layout: dict[str, bool | int | str] | None = None
    step: int | None = typed.at_least(0, None)
    data: dict[str, Any] | None = None
    samples: int | None = typed.at_least(1, None)
    gradient_norm: float | None = None
    in_16_bits: list[int] | None = None


@dataclass(frozen=True)
class Manifest:
    """files: {name relative to the folder: FileRecord}; run: {topic: what a manifest says of the run about it}."""

    files: dict[str, FileRecord]
    run: dict[str, Any]

    def text(self) -> bytes:
        """Return the content of manifest.json, as bytes."""
        files = {name: asdict(record) for name, record in sorted(self.files.items())}
        return (json.dumps({"version": VERSION, "files": files, "run": self.run}, indent=1) + "\n").encode()


@dataclass(frozen=True)
class _Content:
    """manifest.json."""

    version: int
    files: dict[str, FileRecord]
    run: Run


def seal(text: bytes) -> str:
    """Return what the mark of a complete checkpoint says of its manifest's bytes."""
    return xxhash.xxh3_128(text).hexdigest()


def record(path: str | Path, copy: BinaryIO | None = None) -> FileRecord:
    """Read a file once and return its FileRecord. copy: an open binary file that gets what is read."""
    digest, size, block = xxhash.xxh3_128(), 0, memoryview(bytearray(BLOCK))
    with open_file(path) as file:
        while count := file.readinto(block):  # type: ignore[attr-defined]  # BinaryIO's stub lacks it
            digest.update(block[:count])
            size += count
            if copy is not None:
                copy.write(block[:count])
    return FileRecord(size, digest.hexdigest())


def file_names(folder: str | Path) -> list[str]:
    """Return the names of a checkpoint's files relative to its folder, in order, without the manifest and marks."""
    folder = Path(folder)
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST and not name.startswith("."))


def records(folder: str | Path, names: Iterable[str], threads: int = THREADS) -> dict[str, FileRecord]:
    """Return {name: FileRecord} of some of a folder's files."""
    from concurrent.futures import ThreadPoolExecutor  # here, since only what checks many files needs it

    names = list(names)
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(names, pool.map(lambda name: record(Path(folder) / name), names), strict=True))


def sync(path: str | Path) -> None:
    """Write a file, or a folder's list of names, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_through(path: Path, content: bytes) -> None:
    """Write a small file that is there whole or not at all."""
    partial = path.with_name(f".{path.name.lstrip('.')}.partial")
    partial.write_bytes(content)
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def mark_complete(folder: str | Path, manifest: Manifest) -> None:
    """Write the Manifest of a checkpoint whose files are all on the disk, and then its mark."""
    folder, text = Path(folder), manifest.text()
    write_through(folder / MANIFEST, text)
    write_through(folder / COMPLETE_MARK, seal(text).encode())


def read(folder: str | Path) -> Manifest | None:
    """Return the folder's Manifest; None for a checkpoint of a version that wrote none.

    Raises CheckpointDamaged where the manifest is not the one that the mark names.
    """
    path, mark = Path(folder) / MANIFEST, Path(folder) / COMPLETE_MARK
    named = read_file(mark).decode(errors="replace").strip()
    if not path.is_file():
        if named:
            raise CheckpointDamaged(f"{MANIFEST} is missing")
        return None
    text = read_file(path)
    if seal(text) != named:
        raise CheckpointDamaged(f"{MANIFEST} is not the one that {COMPLETE_MARK} names: one of them is damaged")
    try:
        return _parse(json.loads(text))
    except CheckpointDamaged:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{MANIFEST}: {error}") from error


def _parse(content: Any) -> Manifest:
    """The Manifest in what manifest.json holds. Raises ValueError for what is none."""
    version = typed.read(dict, content).get("version")
    if type(version) is int and version > VERSION:
        raise CheckpointDamaged(
            f"{MANIFEST} is of version {version}, this paddle_te reads {VERSION}: use a newer paddle_te"
        )
    files = typed.read(_Content, content).files
    if version != VERSION:
        raise ValueError(f"version is {version}: it must be {VERSION}")
    return Manifest(files, content["run"])


def damage(folder: str | Path, level: str = "full", rank: int = 0, ranks: int = 1) -> list[str]:
    """Return a line for each difference between a complete checkpoint and its manifest.

    The list is empty for a good checkpoint, and for one without a manifest.

    level: "full" compares sizes and checksums; "size" looks for missing files and other sizes; "none" asks of the
        manifest only that it is whole.
    rank, ranks: of so many processes this one reads its share of the files; all look at the sizes.
    """
    folder = Path(folder)
    try:
        manifest = read(folder)
        if manifest is None or level == "none":
            return []
        wrong = _wrong_sizes(folder, manifest)
        return _wrong_checksums(folder, manifest, rank, ranks) if level == "full" and not wrong else wrong
    except (OSError, CheckpointDamaged) as error:
        return [str(error)]


def _wrong_sizes(folder: Path, manifest: Manifest) -> list[str]:
    there, wrong = set(file_names(folder)), []
    for name, entry in manifest.files.items():
        if name not in there:
            wrong.append(f"{name} is missing")
        elif (size := (folder / name).stat().st_size) != entry.size:
            wrong.append(f"{name} has {size:,} bytes instead of {entry.size:,}")
    foreign = sorted(name for name in there - manifest.files.keys() if name.endswith(STATE_SUFFIXES))
    return wrong + [f"{name} was not saved with it" for name in foreign]


def steps(folder: str | Path, manifest: Manifest | None) -> dict[str, int]:
    """Return the step of a checkpoint as {what says so: step}.

    These are its folder's name, the name of the folder where a link leads, and its Manifest.
    """
    found: dict[str, int] = {}
    for what, path in (
        ("its folder's name", Path(folder).absolute()),
        ("the folder that it links to", real_path(folder)),
    ):
        if (step := step_of(path)) is not None and step not in found.values():
            found[what] = step
    if manifest and manifest.run.get("step") is not None:
        found[MANIFEST] = manifest.run["step"]
    return found


def contradiction(steps: Mapping[str, int]) -> list[str]:
    """Return [a line] where the results of `steps` are not all one step; [] where they are."""
    if len({*steps.values()}) < 2:
        return []
    said = ", ".join(f"{name} says step {step}" for name, step in steps.items())
    return [f"{said}: give a folder that was renamed the name that it had"]


def share(sizes: Mapping[str, int], rank: int, ranks: int) -> list[str]:
    """Return those names of {name: size} that one of several processes reads; each gets about as many bytes."""
    return sorted(sizes, key=lambda name: (-sizes[name], name))[rank::ranks]


def _wrong_checksums(folder: Path, manifest: Manifest, rank: int, ranks: int) -> list[str]:
    mine = share({name: entry.size for name, entry in manifest.files.items()}, rank, ranks)
    found = records(folder, mine)
    return [
        f"{name} has another checksum than when it was saved" for name in mine if found[name] != manifest.files[name]
    ]
