"""Compare what is read from a checkpoint's folder with the folder's manifest, or say that it was not compared.

Training's initial weights, fine-tuning, evaluation, the converter and LoRA's adapters come through `Verification`; only
a resumed run, which reads the optimizer's states too, looks at whole checkpoints (`runs.verify`).
"""

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from paddle_te import manifest
from paddle_te.manifest import Manifest
from paddle_te.options.training import LEVELS
from paddle_te.weights.contents import TRAINER_STATE
from paddle_te.weights.files import CHECKSUMS
from paddle_te.weights.tensors import CheckpointError

# Files that only a Trainer reads, to go on: who takes the weights does not wait until they are compared
_TRAINING = re.compile(
    r"(optimizer|master_weights)\b.*|saved_signal_\d+|scheduler\.pdparams|scaler\.pdparams|rng_state.*\.pth|"
    rf"training_args\.bin|{re.escape(TRAINER_STATE)}"
)
FULL, SIZE, NONE = LEVELS
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Verified:
    """What was compared: so many files and bytes, in so many seconds, and the result in words."""

    words: str
    files: int = 0
    size: int = 0
    seconds: float = 0.0
    compared: bool = False


@dataclass
class Comparison:
    """A comparison beside a block that reads; verified: what it found, once the block is over."""

    verified: Verified | None = None

    @property
    def result(self) -> Verified:
        """What it found. The block must be over."""
        assert self.verified is not None
        return self.verified


@dataclass(frozen=True)
class Verification:
    """How a reader compares files with a manifest.

    level: "full" compares sizes and checksums, "size" sizes only, "none" nothing. rank, ranks: of so many processes
    this one reads its share of the files. gather: takes what this process found, and returns what all of them found.
    tell: takes a line for the user where not everything was compared.
    """

    level: str = FULL
    rank: int = 0
    ranks: int = 1
    gather: Callable[[list[str]], list[list[str]]] = lambda mine: [mine]
    tell: Callable[[str], None] = lambda line: None

    def check(self, folder: str | Path, names: Iterable[str] | None = None) -> Verified:
        """Compare files of a folder with its manifest: those named, or all that belong to a model.

        All processes call it. Raises CheckpointError for a file that differs.
        """
        with self.beside(folder, names) as comparison:
            pass
        return comparison.result

    @contextmanager
    def beside(self, folder: str | Path, names: Iterable[str] | None = None) -> Iterator["Comparison"]:
        """Compare while the block reads the files: check sizes before it, and checksums in threads during it.

        All processes enter it. Its Comparison has `verified` once the block is over. Raises CheckpointError before the
        block for another size and after it for another checksum. A block that fails on such a file raises it, too.
        """
        folder = Path(folder)
        if (reason := self._nothing_to_compare(folder)) is not None:
            if reason and self.rank == 0:
                self.tell(f"{folder}: {reason}")
            yield Comparison(Verified(reason or "without a manifest"))
            return
        saved, sizes = self._compare_sizes(folder, names)
        mine = manifest.share(sizes, self.rank, self.ranks) if self.level == FULL else []
        with ThreadPoolExecutor(1) as pool:
            compared = pool.submit(_timed, _wrong_checksums, folder, mine, saved)
            comparison = Comparison()
            try:
                yield comparison
            except Exception as error:
                # The other processes may never come to compare: this one looks at their files, too.
                others = sizes.keys() - mine if self.level == FULL else ()
                if wrong := compared.result()[0] + _wrong_checksums(folder, others, saved):
                    raise _damaged(folder, wrong) from error
                raise
            wrong, seconds = compared.result()
            if found := [line for lines in self.gather(wrong) for line in lines]:
                raise _damaged(folder, found)
        words = f"{'sizes' if self.level == SIZE else 'sizes and checksums'} agree with its manifest"
        comparison.verified = Verified(words, len(sizes), sum(sizes.values()), seconds, compared=True)

    def _nothing_to_compare(self, folder: Path) -> str | None:
        """Say why nothing is compared: "" without any manifest, None where there is something to compare."""
        has_manifest, has_mark = ((folder / name).is_file() for name in (manifest.MANIFEST, manifest.COMPLETE_MARK))
        if not has_manifest and not (has_mark and (folder / manifest.COMPLETE_MARK).stat().st_size):
            sums = f"not compared with its {CHECKSUMS}; paddle-te convert --verify does so"
            return sums if (folder / CHECKSUMS).is_file() else ""
        if self.level == NONE:
            return f"not compared with its {manifest.MANIFEST} (--verify_checkpoint none)"
        if not has_mark:
            raise CheckpointError(
                f"{folder}: has a {manifest.MANIFEST}, and not its mark {manifest.COMPLETE_MARK}: it was not saved to "
                "the end, or copied without the files whose names begin with a dot; copy the mark too, or take the "
                "folder as it is with --verify_checkpoint none"
            )
        return None

    def _compare_sizes(self, folder: Path, names: Iterable[str] | None) -> tuple[Manifest, dict[str, int]]:
        """Return the folder's Manifest and {name: size} of the files to compare.

        Raises CheckpointError for what differs.
        """
        try:
            there = manifest.file_names(folder)
            names = [name for name in there if not _TRAINING.fullmatch(name)] if names is None else list(names)
            saved = manifest.read(folder)
            assert saved is not None  # `_nothing_to_compare` has seen the manifest, or a mark that names one
            wrong = [*_wrong_sizes(folder, names, saved), *manifest.contradiction(manifest.steps(folder, saved))]
        except (OSError, manifest.CheckpointDamaged) as error:
            raise _damaged(folder, [str(error)]) from error
        if wrong:
            raise _damaged(folder, wrong)
        return saved, {name: saved.files[name].size for name in names if name in saved.files}


def _damaged(folder: Path, lines: Iterable[str]) -> CheckpointError:
    found = list(dict.fromkeys(lines))
    more = f"; and {len(found) - 3} more" * (len(found) > 3)
    return CheckpointError(
        f"{folder} is damaged, or was changed after it was saved: {'; '.join(found[:3])}{more}; "
        "--verify_checkpoint none would take it as it is"
    )


def _timed(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> tuple[T, float]:
    """Return a function's result, and the seconds that it took."""
    start = time.perf_counter()
    return function(*arguments, **options), time.perf_counter() - start


def _wrong_checksums(folder: Path, names: Iterable[str], saved: Manifest) -> list[str]:
    """Return a line for each of the files whose checksum is another, or that cannot be read."""
    try:
        found = manifest.records(folder, names)
    except OSError as error:
        return [str(error)]
    return [f"{name} has another checksum" for name in names if found[name] != saved.files[name]]


def _wrong_sizes(folder: Path, names: Collection[str], saved: Manifest) -> Iterator[str]:
    there = set(manifest.file_names(folder))
    for name in names:
        if name not in saved.files:
            if name.endswith(manifest.STATE_SUFFIXES) or name == "config.json":
                yield f"{name} was not saved with it"
        elif name not in there:
            yield f"{name} is missing"
        elif (size := (folder / name).stat().st_size) != saved.files[name].size:
            yield f"{name} has {size:,} bytes instead of {saved.files[name].size:,}"
    for name in saved.files:
        if name not in there and not _TRAINING.fullmatch(name) and name not in names:
            yield f"{name} is missing"
