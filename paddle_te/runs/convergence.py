"""Compares the loss curves of several runs: a table, a picture, summary.json, and an exit status.

python -m paddle_te.runs.convergence RUN_DIR… [--tolerance 1e-5] [--output DIR]

Each RUN_DIR holds a train_log.jsonl (and a train_summary.json with the run's name) as `training.throughput` writes
them. The first run is the reference. Exit status: 0 all curves agree, 1 some curve parts, 2 nothing to compare, or the
folder cannot be written.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from paddle_te.options.option import NOT_NEGATIVE, PATH, STEPS
from paddle_te.outputs import NotWritten, folder_argument, write_file
from paddle_te.runs.pictures import png, subplots
from paddle_te.table import in_columns

# What a run leaves in its output_dir (`training.throughput` writes them).
TRAIN_LOG = "train_log.jsonl"
TRAIN_SUMMARY = "train_summary.json"


@dataclass
class Run:
    """One run: its name, the loss at each logged step, and its speed without the first interval (warm-up)."""

    name: str
    losses: dict[int, float]  # step -> loss
    tokens_per_second: float


class Summary(TypedDict):
    """The content of summary.json. backends: names in order, the reference first; the others by these names.

    max_relative_difference: the greatest of all backends. losses: one for each of `steps`.
    """

    backends: list[str]
    max_relative_difference: float
    relative_difference: dict[str, float]
    tolerance: float
    smoothing: int
    agree: bool
    tokens_per_second: dict[str, float]
    steps: list[int]
    losses: dict[str, list[float]]


def read_run(folder: str | Path) -> Run:
    """Read a run. Raises FileNotFoundError or ValueError with the file's name where there is no usable log."""
    folder = Path(folder)
    log = folder / TRAIN_LOG
    if not log.is_file():
        raise FileNotFoundError(f"{log} not found: is {folder} the --output_dir of a run of run_pretrain.py?")
    losses, speeds = {}, []
    for number, line in enumerate(log.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            losses[int(record["step"])] = float(record["loss"])
            speeds.append(float(record["tokens_per_second"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{log}, line {number}: not a record of a training log ({error!r})") from error
    if not losses:
        raise ValueError(f"{log} is empty: the run stopped before its first log")
    summary = folder / TRAIN_SUMMARY
    name = json.loads(summary.read_text())["backend"] if summary.is_file() else folder.name
    return Run(name, losses, statistics.harmonic_mean(speeds[1:] or speeds))


def relative_difference(loss: float, reference: float) -> float:
    """Return |loss − reference| / |reference|; infinite where one is not finite, or only the reference is 0."""
    if loss == reference and math.isfinite(loss):
        return 0.0
    if not (math.isfinite(loss) and math.isfinite(reference)) or reference == 0:
        return math.inf
    return abs(loss - reference) / abs(reference)


def max_relative_difference(losses: Mapping[int, float], reference: Mapping[int, float]) -> float:
    """Return the greatest `relative_difference` of the steps.

    Raises ValueError unless both have the same steps: a run that stopped early is no agreement.
    """
    if losses.keys() != reference.keys():
        odd = sorted(losses.keys() ^ reference.keys())
        raise ValueError(f"the runs logged different steps; first step that only one has: {odd[0]}")
    return max(relative_difference(losses[step], reference[step]) for step in reference)


def smoothed(losses: Mapping[int, float], window: int) -> dict[int, float]:
    """Return each loss replaced by the mean of the `window` steps that end with it (fewer at the start)."""
    steps = sorted(losses)
    values = [losses[step] for step in steps]
    return {step: statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i, step in enumerate(steps)}


def compare(folders: Sequence[str | Path], tolerance: float, smoothing: int = 1) -> Summary:
    """Compare the runs in `folders` with the first one. smoothing: see `smoothed`; 1 leaves the losses as they are."""
    runs = [read_run(folder) for folder in folders]
    runs = [replace(run, losses=smoothed(run.losses, smoothing)) for run in runs]
    if len({run.name for run in runs}) < len(runs):
        runs = [
            Run(Path(folder).name, run.losses, run.tokens_per_second) for folder, run in zip(folders, runs, strict=True)
        ]
    if len({run.name for run in runs}) < len(runs):
        raise ValueError(f"two runs have the same name and folder name: {[run.name for run in runs]}; rename a folder")
    reference = runs[0]
    differences = {run.name: max_relative_difference(run.losses, reference.losses) for run in runs}
    worst = max(differences.values())
    return {
        "backends": [run.name for run in runs],
        "max_relative_difference": worst,
        "relative_difference": differences,
        "tolerance": tolerance,
        "smoothing": smoothing,
        "agree": worst <= tolerance,
        "tokens_per_second": {run.name: run.tokens_per_second for run in runs},
        "steps": sorted(reference.losses),
        "losses": {run.name: [run.losses[step] for step in sorted(run.losses)] for run in runs},
    }


def format_table(summary: Summary) -> str:
    """Return the comparison as text: backend, loss at the steps 1, 10 and last, difference, tokens/s."""
    steps = summary["steps"]
    shown = [step for step in dict.fromkeys([1, 10, steps[-1]]) if step in steps]
    header = ["backend", *(f"loss@{step}" for step in shown), "max rel. diff.", "tokens/s"]
    rows = [
        [
            name,
            *(f"{summary['losses'][name][steps.index(step)]:.6f}" for step in shown),
            f"{summary['relative_difference'][name]:.1e}" if name != summary["backends"][0] else "reference",
            f"{summary['tokens_per_second'][name]:.0f}",
        ]
        for name in summary["backends"]
    ]
    return "\n".join(in_columns([header, *rows], rule=True))


def plot(summary: Summary) -> bytes:
    """Return the PNG of the loss curves and, below, each one's relative difference from the first."""
    steps, (reference, *others) = summary["steps"], summary["backends"]
    figure, (top, bottom) = subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=[3, 1])
    for index, name in enumerate(summary["backends"]):
        # Later curves are narrower: where they coincide each one is still seen.
        width = 1 + 1.5 * (len(summary["backends"]) - 1 - index)
        top.plot(steps, summary["losses"][name], label=name, linewidth=width, marker="." if len(steps) < 2 else None)
    top.set_ylabel("training loss")
    top.legend(title="backend")
    for index, name in enumerate(others, 1):
        differences = map(relative_difference, summary["losses"][name], summary["losses"][reference])
        bottom.plot(steps, list(differences), color=f"C{index}")
    bottom.axhline(summary["tolerance"], color="grey", linestyle="--", linewidth=1, label="tolerance")
    bottom.set_yscale("symlog", linthresh=(summary["tolerance"] or 1e-5) / 1000)
    bottom.set_ylabel(f"rel. diff. from {reference}")
    bottom.set_xlabel("step")
    bottom.legend()
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    return png(figure)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paddle_te.runs.convergence",
        description="Compare the loss curves of several runs with the first one's.",
        epilog="Exit status: 0 all agree, 1 some curve parts by more than the tolerance, 2 nothing to compare, "
        "or the folder cannot be written.",
    )
    parser.add_argument(
        "runs", type=PATH.argument, nargs="+", metavar="RUN_DIR", help=f"--output_dir of a run, holds {TRAIN_LOG}"
    )
    parser.add_argument(
        "--tolerance", type=NOT_NEGATIVE.argument, default=1e-5, help="greatest relative difference (default: 1e-5)"
    )
    parser.add_argument(
        "--smoothing",
        type=STEPS.argument,
        default=1,
        help="compare moving averages over so many steps (default: 1, none)",
    )
    parser.add_argument("--output", type=folder_argument, help="folder for loss.png and summary.json (default: none)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if len(args.runs) < 2:
        parser.error("two or more runs are needed")
    try:
        summary = compare(args.runs, args.tolerance, args.smoothing)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_table(summary))
    if args.output:
        try:
            write_file("--output", args.output / "summary.json", json.dumps(summary, indent=2) + "\n")
            write_file("--output", args.output / "loss.png", plot(summary))
        except NotWritten as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(f"wrote {args.output / 'loss.png'} and {args.output / 'summary.json'}")
    if summary["agree"]:
        print(f"the curves agree: {summary['max_relative_difference']:.1e} <= {args.tolerance:g}")
        return 0
    print(
        f"error: the curves part: greatest relative difference {summary['max_relative_difference']:.1e}, "
        f"tolerance {args.tolerance:g}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
