"""Says which checkpoints are good: whether they are complete, agree with their manifests and hold nothing but numbers.

python -m paddle_te.runs.verify FOLDER… [--level full|size]

Each FOLDER is a checkpoint, or the folder of a run or its `output`, whose checkpoints are all looked at. A table goes
to the standard output. Exit status: 0 all are good, 1 one is not, 2 there is nothing to look at.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paddle_te import manifest
from paddle_te.folders import OUTPUT, checkpoints_in, step_of
from paddle_te.host import PADDLEFORMERS
from paddle_te.options.option import PATH
from paddle_te.runs.checkpoints import NOT_COMPLETE, PADDLEFORMERS_STATE, host_of, is_complete
from paddle_te.table import in_columns
from paddle_te.weights.contents import TRAINER_STATE, check_contents, read_object, read_state
from paddle_te.weights.run_states import check_run_state
from paddle_te.weights.tensors import CheckpointError


def damage(folder: str | Path, level: str = "full", rank: int = 0, ranks: int = 1) -> list[str]:
    """Return a line for each thing that is wrong with a complete checkpoint; [] for a good one, which runs no code.

    In a checkpoint without a manifest it finds only what cannot be read at all. Arguments as `manifest.damage`'s.
    """
    folder = Path(folder)
    wrong = manifest.damage(folder, level, rank, ranks)
    if wrong:
        return wrong
    names = manifest.file_names(folder)
    if TRAINER_STATE not in names and host_of(folder) != PADDLEFORMERS:
        return [f"{TRAINER_STATE} is missing"]
    mine = manifest.share({name: (folder / name).stat().st_size for name in names}, rank, ranks)
    return [line for name in sorted(mine) if (line := _unreadable(folder / name))] or _other_step(folder)


def _other_step(folder: Path) -> list[str]:
    """Return [why] where a checkpoint's name, manifest and Trainer's state are not of one step; [] where they agree."""
    steps = manifest.steps(folder, manifest.read(folder))
    if (folder / TRAINER_STATE).is_file():
        steps[TRAINER_STATE] = read_state(folder).global_step
    return manifest.contradiction(steps)


def _unreadable(path: Path) -> str:
    """Say why a file of a checkpoint cannot be loaded; "" where it can."""
    try:
        check_contents(path)
        check_run_state(path)
        if path.suffix == ".json":
            read_object(path)
        if path.name == TRAINER_STATE:
            read_state(path.parent)
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Verdict:
    """The facts about one checkpoint: the lines that say what is wrong, its files, bytes and the seconds."""

    folder: Path
    wrong: list[str]
    note: str
    files: int
    size: int
    seconds: float

    def row(self) -> list[str]:
        """Return the table's cells."""
        state = "damaged" if self.wrong else "good"
        return [
            str(self.folder),
            state,
            str(self.files),
            f"{self.size / 1e6:,.1f} MB",
            f"{self.seconds:.1f} s",
            "; ".join(self.wrong) or self.note,
        ]


def verify(folder: Path, level: str = "full") -> Verdict:
    """Return the Verdict on one checkpoint's folder."""
    start = time.perf_counter()
    names = manifest.file_names(folder)
    size = sum((folder / name).stat().st_size for name in names)
    note = ""
    if not is_complete(folder):
        wrong = [NOT_COMPLETE]
    else:
        wrong = damage(folder, level)
        if not wrong and manifest.read(folder) is None:
            note = "no manifest: saved by an older version; it can be read, and no more is known"
        elif not wrong and host_of(folder) == PADDLEFORMERS:
            note = f"PaddleFormers': {PADDLEFORMERS_STATE} is a pickle, which is not looked into"
    return Verdict(folder, wrong, note, len(names), size, time.perf_counter() - start)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that an argument means. Raises FileNotFoundError where there is none."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if is_complete(folder) or step_of(folder) is not None:
        return [folder]
    there = [checkpoint for _, checkpoint in checkpoints_in(folder) or checkpoints_in(folder / OUTPUT)]
    if not there:
        raise FileNotFoundError(f"{folder}: neither a checkpoint nor a run's folder with checkpoint-N in it")
    return there


def format_table(verdicts: Iterable[Verdict]) -> str:
    """Return the verdicts as text, a line each."""
    rows = [["checkpoint", "state", "files", "size", "time", "remarks"], *(verdict.row() for verdict in verdicts)]
    return "\n".join(in_columns(rows))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Say which checkpoints are complete, agree with their manifests and hold nothing but numbers.",
        epilog="Exit status: 0 all are good, 1 one is not, 2 there is nothing to look at.",
    )
    parser.add_argument(
        "folders", nargs="+", type=PATH.argument, metavar="FOLDER", help="a checkpoint, or a run's folder"
    )
    parser.add_argument(
        "--level", choices=("full", "size"), default="full", help="sizes and checksums, or sizes only (default: full)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = make_parser().parse_args(argv)
    try:
        verdicts = [
            verify(checkpoint, args.level) for folder in args.folders for checkpoint in _checkpoints(Path(folder))
        ]
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_table(verdicts))
    return 1 if any(verdict.wrong for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
