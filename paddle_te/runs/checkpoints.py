"""Find the Trainer's checkpoint folders: which of them are complete, and which one to resume from.

A checkpoint is complete when its mark is there. The mark comes last, when every file of every rank and the manifest are
on the disk, and goes first, before a file is overwritten or removed: a run that is killed at any moment leaves none
that looks complete and is not. A complete one is good when it agrees with its manifest, too: a disk, a copy or a hand
may have damaged it since. Knows neither Paddle nor PaddleNLP.
"""

import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Protocol

from paddle_te.folders import checkpoint_folder, checkpoints_in, weights_in
from paddle_te.host import PADDLEFORMERS, PADDLENLP
from paddle_te.manifest import COMPLETE_MARK, CheckpointDamaged, damage, sync

PADDLEFORMERS_STATE = "trainer_state.bin"  # PaddleNLP's is trainer_state.json
# in output_dir: training was asked to stop, saved and ended before its last step, whose number it holds
STOPPED_MARK = "stopped"
MERGED = "merged"  # in output_dir: a folder of the model with the adapter in its weights

NOT_COMPLETE = "not complete: training stopped while it was written"


class OutputArguments(Protocol):
    """The fields of a host's TrainingArguments that say whether a new run may begin in a folder."""

    output_dir: str
    do_train: bool


class CheckpointNotSaved(OSError):
    """A checkpoint could not be written, for want of space or otherwise; the message says which ones there are."""


def not_saved(folder: str | Path, error: Exception) -> CheckpointNotSaved:
    """Return the CheckpointNotSaved that says why, which checkpoints there are, and what to do."""
    output_dir = Path(folder).parent
    steps = saved_steps(output_dir) or "none"
    return CheckpointNotSaved(
        f"{folder} could not be saved: {error}. Complete checkpoints in {output_dir}, untouched: {steps}. "
        "Make room and go on with --resume_from_checkpoint auto"
    )


def is_complete(folder: str | Path) -> bool:
    """Return whether a checkpoint's mark is there."""
    return (Path(folder) / COMPLETE_MARK).is_file()


def host_of(folder: str | Path) -> str:
    """Return the host whose Trainer saved a checkpoint, by the file that holds the Trainer's state."""
    return PADDLEFORMERS if (Path(folder) / PADDLEFORMERS_STATE).is_file() else PADDLENLP


def complete_checkpoints(output_dir: str | Path) -> list[tuple[int, Path]]:
    """Return [(step, folder)] of the complete checkpoints below output_dir, oldest first."""
    return [(step, folder) for step, folder in checkpoints_in(output_dir) if is_complete(folder)]


def saved_steps(output_dir: str | Path) -> str:
    """Return the steps of the complete checkpoints, for messages: "10, 20"; "" without any."""
    return ", ".join(str(step) for step, _ in complete_checkpoints(output_dir))


def check_new_run(args: OutputArguments) -> None:
    """Raise ValueError where training would start anew in an output_dir with checkpoints.

    It would overwrite some, and the next resume would take the others for its own.
    """
    there = saved_steps(args.output_dir)
    if there and args.do_train:
        raise ValueError(
            f"--output_dir {args.output_dir} holds checkpoints (steps {there}): go on with --resume_from_checkpoint "
            "auto or a step, or give another folder"
        )


def flush(folder: str | Path) -> None:
    """Write a folder and all files in it through to the disk."""
    for path in filter(Path.is_file, Path(folder).rglob("*")):
        sync(path)
    flush_names(folder)


def flush_names(folder: str | Path) -> None:
    """Write the names of a folder's files, and its own, through to the disk."""
    folder = Path(folder)
    for path in (*filter(Path.is_dir, folder.rglob("*")), folder, folder.parent):
        sync(path)


def remove_checkpoint(folder: str | Path) -> None:
    """Remove a checkpoint, if it is there: first its mark, then its files."""
    mark = Path(folder) / COMPLETE_MARK
    if mark.exists():
        mark.unlink(missing_ok=True)  # another node's process may be faster
        sync(folder)
    shutil.rmtree(folder, ignore_errors=True)


def rotate_checkpoints(
    output_dir: str | Path, limit: int | None, saved: str | Path | None, best: str | Path | None = None
) -> None:
    """Remove older checkpoints, complete or not, except the newest `limit` complete ones.

    Kept besides are `saved`, which this run has just completed, the folder `best` (both may be among the newest), and,
    if files of all these are missing or cut short, the newest one that is whole. limit: None or 0 keeps all.
    """
    there = complete_checkpoints(output_dir)
    if not limit or not there:
        return
    kept = {folder for _, folder in there[-limit:]} | {Path(folder) for folder in (saved, best) if folder}
    if not any(is_complete(folder) and not damage(folder, "size") for folder in kept):
        kept.update([folder for _, folder in there if not damage(folder, "size")][-1:])
    for step, folder in checkpoints_in(output_dir):
        if step < there[-1][0] and folder not in kept:
            remove_checkpoint(folder)


def displaced(output_dir: str | Path, resume_step: str | int) -> list[Path]:
    """Return what a run that starts from `resume_step` moves out of its way, see `set_aside`."""
    found: list[Path] = []
    if resume_step != "auto":
        start = -1 if resume_step == "none" else int(resume_step)
        found += [folder for step, folder in checkpoints_in(output_dir) if step > start]
    if resume_step == "none" or resume_step == "auto" and not saved_steps(output_dir):
        if model := weights_in(output_dir):
            found += [*model, *Path(output_dir).glob(MERGED)]
    return found


def set_aside(output_dir: str | Path, resume_step: str | int) -> Path | None:
    """Move checkpoints of later steps than a run starts from into a folder of their own, output_dir/earlier-N.

    They are another run's, or of a course that is given up. Among this one's, "auto" would resume from them, and
    save_total_limit, which keeps the latest steps, remove this run's instead. A run that starts anew would write over
    the weights of a finished model, so these follow. So does MERGED, which is of that model.
    resume_step: "auto", "none" or a number. Returns that folder, or None if there were none.
    """
    moved = displaced(output_dir, resume_step)
    return move_aside(output_dir, moved) if moved else None


def move_aside(output_dir: str | Path, moved: Sequence[Path]) -> Path:
    """Move files and folders of an output_dir into a new folder of it, output_dir/earlier-N, and return that."""
    output_dir = Path(output_dir)
    kept = next(folder for n in count(1) if not (folder := output_dir / f"earlier-{n}").exists())
    kept.mkdir()
    for path in moved:
        path.rename(kept / path.name)
    return kept


def find_checkpoint(
    resume: str | int | None,
    output_dir: str | Path,
    check: Callable[[Path], list[str]] = lambda folder: [],
    warn: Callable[[str], None] = print,
) -> str | None:
    """Return the folder that `resume` means; None for a start from scratch.

    Args:
        resume: None or "none"; "auto", the newest good checkpoint below output_dir, if there is any; a step; a folder.
        check: takes the folder of a complete checkpoint and says what is wrong with it, a list of lines; without it
            every complete one counts as good.
        warn: takes a line about each newer checkpoint that `auto` passes over.

    Raises FileNotFoundError for a step or folder that is not there or not complete, with the steps there are, and
    CheckpointDamaged for one that is bad; for "auto" only where there are checkpoints and all of them are bad.
    """
    if resume in (None, "none", False):
        return None
    if resume == "auto":
        return _newest_good(output_dir, check, warn)
    folder = checkpoint_folder(output_dir, resume) if str(resume).isdigit() else Path(str(resume))
    if not is_complete(folder):
        state = NOT_COMPLETE if folder.is_dir() else "not there"
        raise FileNotFoundError(
            f"checkpoint {folder} is {state}; complete checkpoints in {output_dir}: {saved_steps(output_dir) or 'none'}"
        )
    if wrong := check(folder):
        raise CheckpointDamaged(
            f"checkpoint {folder} is damaged and is not used: {_in_short(wrong)}; complete checkpoints in "
            f"{output_dir}: {saved_steps(output_dir) or 'none'}; auto takes the newest good one"
        )
    return str(folder)


def _newest_good(output_dir: str | Path, check: Callable[[Path], list[str]], warn: Callable[[str], None]) -> str | None:
    there = complete_checkpoints(output_dir)
    for _, folder in reversed(there):
        wrong = check(folder)
        if not wrong:
            return str(folder)
        warn(f"checkpoint {folder} is damaged and is passed over: {_in_short(wrong)}")
    if there:
        raise CheckpointDamaged(
            f"all complete checkpoints in {output_dir} (steps {saved_steps(output_dir)}) are damaged, the oldest: "
            f"{_in_short(wrong)}; to start anew give another --output_dir"
        )
    return None


def _in_short(lines: Sequence[str]) -> str:
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")
