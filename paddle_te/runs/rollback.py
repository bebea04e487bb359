"""End runs because of their numbers, and take them back: to the last good checkpoint and past what broke the run.

A rollback takes two processes. The first ends with status ROLLED_BACK and leaves a record in output_dir; the second,
started as for a resume, leaves out the batches of the steps between the checkpoint and the bad step. Steps keep their
numbers and batches: step 30 reads the same batch with a rollback before it as without. Knows neither Paddle nor
PaddleNLP.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from paddle_te.manifest import write_through
from paddle_te.runs.checkpoints import complete_checkpoints

# exit status: "start me again with --resume_from_checkpoint auto"; EX_TEMPFAIL of sysexits.h
ROLLED_BACK = 75
RECORD = "rollbacks.json"
MOST = 10  # to one checkpoint


class ResumeArguments(Protocol):
    """The fields of PaddleNLP's TrainingArguments that a rollback reads and sets, and ours: rollbacks."""

    output_dir: str
    resume_from_checkpoint: str | bool | None
    skip_data_intervals: list[list[int]] | None
    rollbacks: list["Rollback"]


class RunEnded(RuntimeError):
    """Training ended before its last step, for a reason that the one line of its message tells.

    status: the process's exit status.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class UnsoundStep(RuntimeError):
    """All ranks agree that a step's numbers, or what would be saved after it, must not be used.

    step: its number; reason: what was wrong, such as "the gradient norm is nan".
    """

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(f"step {step}: {reason}")
        self.step, self.reason = step, reason


@dataclass(frozen=True)
class Rollback:
    """From step `bad` back to the checkpoint of step `good` (0: the beginning)."""

    good: int
    bad: int
    reason: str

    @property
    def left_out(self) -> list[int]:
        """[first, last] step whose batches are left out from now on."""
        return [self.good + 1, self.bad]


def read_rollbacks(output_dir: str | Path) -> list[Rollback]:
    """Return the Rollbacks of the run in output_dir, oldest first. Raises ValueError for a record that is damaged."""
    path = Path(output_dir) / RECORD
    try:
        return [Rollback(**record) for record in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): it says which batches are left out; remove it to train on all of them"
        ) from error


def write_rollbacks(output_dir: str | Path, rollbacks: Iterable[Rollback]) -> None:
    """Replace the record, through to the disk."""
    text = json.dumps([asdict(rollback) for rollback in rollbacks], indent=2) + "\n"
    write_through(Path(output_dir) / RECORD, text.encode())


def leave_out_broken_batches(args: ResumeArguments) -> list[Rollback]:
    """Let a run that resumes leave out the batches of its rollbacks, and return these.

    Sets `rollbacks` and skip_data_intervals of the Trainer's arguments. A new run in the same folder reads all batches.
    """
    resumes = args.resume_from_checkpoint not in (None, "none", False)
    args.rollbacks = read_rollbacks(args.output_dir) if resumes else []
    intervals = [rollback.left_out for rollback in args.rollbacks]
    args.skip_data_intervals = [*(args.skip_data_intervals or []), *intervals] or None
    return args.rollbacks


def last_good(output_dir: str | Path) -> tuple[int, Path | None]:
    """Return (step, folder) of the newest complete checkpoint; (0, None) without any."""
    return next(reversed(complete_checkpoints(output_dir)), (0, None))


def stopped(error: UnsoundStep, output_dir: str | Path) -> RunEnded:
    """Return the RunEnded of a run that stops at an UnsoundStep."""
    _, folder = last_good(output_dir)
    where = f"the last good checkpoint is {folder}" if folder else f"there is no checkpoint in {output_dir}"
    return RunEnded(f"{error}. Training ends and nothing was saved of it; {where}")


def rolled_back(
    error: UnsoundStep, output_dir: str | Path, before: Iterable[Rollback]
) -> tuple[RunEnded, Rollback | None]:
    """Return the end of a run at an UnsoundStep where it means a rollback.

    before: the run's Rollbacks so far.
    Returns (RunEnded, the Rollback to write into the record or None where there were MOST to this checkpoint).
    """
    good, folder = last_good(output_dir)
    if sum(rollback.good == good for rollback in before) >= MOST:
        ended = stopped(error, output_dir)
        return RunEnded(f"{ended}; {MOST} rollbacks to it have not helped"), None
    back = Rollback(good, error.step, error.reason)
    first, last = back.left_out
    message = (
        f"{error}. Back to {folder or 'the beginning'}, past the batches of steps {first} to {last}: the launcher goes "
        f"on from there; without it, start again with --resume_from_checkpoint auto (exit status {ROLLED_BACK})"
    )
    return RunEnded(message, ROLLED_BACK), back
