"""Compares the runs of several experiments: a table of speed, memory and loss, a picture, compare.json.

    paddle-te compare EXPERIMENT... [--output DIR]

EXPERIMENT: the folder that the launcher made (or its `output`), with the train_log.jsonl and train_summary.json of a
run that ended. The first is the reference of `speedup` and of the losses, which are compared at the steps that both
logged. Speeds leave out the first logging interval (warm-up). Exit status: 0; 1 where DIR could
not be written after all; 2 where a run cannot be read, or for wrong arguments.
`python -m paddle_te.runs.convergence` judges whether loss curves agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_te.folders import OUTPUT, output_of
from paddle_te.options.option import PATH
from paddle_te.outputs import NotWritten, folder_argument, write_file
from paddle_te.runs.convergence import TRAIN_LOG, TRAIN_SUMMARY, max_relative_difference, read_run
from paddle_te.runs.pictures import REMEDY, can_draw, png, subplots


@dataclass
class Experiment:
    """A run's name, its losses (step -> loss) and its train_summary.json."""

    name: str
    losses: dict[int, float]
    summary: dict[str, Any]


def read_experiment(folder: str | Path) -> Experiment:
    """Read a run. Raises FileNotFoundError or ValueError, naming the file, where log or summary is not usable."""
    output = output_of(folder, TRAIN_LOG)
    losses = read_run(output).losses
    path = output / TRAIN_SUMMARY
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found: has the run ended?")
    name = (output.parent if output.name == OUTPUT else output).resolve().name
    try:
        return Experiment(name, losses, json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def compare(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    """Return [{column: value}], a row an experiment; None where a run does not say."""
    first = experiments[0]
    speed = first.summary["tokens_per_second_per_device"]
    rows = []
    for experiment in experiments:
        summary = experiment.summary
        common = experiment.losses.keys() & first.losses.keys()
        losses, reference = ({step: run.losses[step] for step in common} for run in (experiment, first))
        rows.append(
            {
                "run": experiment.name,
                "backend": summary["backend"],
                "devices": summary["devices"],
                "batch": summary["global_batch_size"],
                "seq": summary["seq_length"],
                "step_time": summary["step_time"],
                "tokens_per_second_per_device": summary["tokens_per_second_per_device"],
                "speedup": summary["tokens_per_second_per_device"] / speed,
                "model_tflops_per_device": summary["model_tflops_per_device"],
                "mfu": summary.get("mfu"),
                "peak_memory_bytes": summary["peak_memory_bytes"],
                "steps": summary["steps"],
                "final_loss": summary["final_loss"],
                "loss_difference": max_relative_difference(losses, reference) if common else None,
            }
        )
    return rows


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {  # of the table: key in a row, text
    "run": ("run", str),
    "backend": ("backend", str),
    "devices": ("devices", str),
    "batch": ("batch", str),
    "seq": ("seq", str),
    "step (ms)": ("step_time", lambda seconds: f"{seconds * 1000:.1f}"),
    "tokens/s/device": ("tokens_per_second_per_device", "{:.0f}".format),
    "speedup": ("speedup", "{:.2f}x".format),
    "TFLOP/s/device": ("model_tflops_per_device", lambda rate: f"{rate:.1f}" if rate >= 10 else f"{rate:.2g}"),
    "of peak": ("mfu", "{:.1%}".format),
    "memory (GiB)": ("peak_memory_bytes", lambda size: f"{size / 2**30:.2f}"),
    "steps": ("steps", str),
    "final loss": ("final_loss", "{:.5f}".format),
    "loss diff.": ("loss_difference", "{:.1e}".format),
}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as an aligned Markdown table."""
    table = [list(COLUMNS)]
    for row in rows:
        table.append(["-" if row[key] is None else text(row[key]) for key, text in COLUMNS.values()])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, cells, widths)) + " |" for cells in table]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def plot(experiments: Sequence[Experiment], rows: Sequence[dict[str, Any]]) -> bytes:
    """Return the PNG of loss curves, and of bars of speed and memory."""
    figure, axes = subplots(1, 3, figsize=(14, 4.5), width_ratios=[2, 1, 1])
    colors = [f"C{index}" for index in range(len(rows))]
    for index, experiment in enumerate(experiments):
        steps = sorted(experiment.losses)
        width = 1 + 1.5 * (len(rows) - 1 - index) / len(rows)  # later ones are narrower: coinciding curves are all seen
        axes[0].plot(steps, [experiment.losses[step] for step in steps], label=experiment.name, linewidth=width)
    axes[0].set(xlabel="step", ylabel="training loss")
    figure.legend(loc="outside lower center", fontsize="small")
    labels = [str(index + 1) for index in range(len(rows))]
    speeds = [row["tokens_per_second_per_device"] for row in rows]
    axes[1].bar_label(axes[1].bar(labels, speeds, color=colors), fmt="{:.0f}")
    axes[1].set(title="tokens/s per device", xlabel="run")
    memory = [row["peak_memory_bytes"] / 2**30 for row in rows]
    axes[2].bar_label(axes[2].bar(labels, memory, color=colors), fmt="{:.2f}")
    axes[2].set(title="peak memory (GiB)", xlabel="run")
    return png(figure)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "experiments", type=PATH.argument, nargs="+", metavar="EXPERIMENT", help="folder that the launcher made"
    )
    parser.add_argument("--output", type=folder_argument, help="folder for compare.md, compare.png and compare.json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = make_parser().parse_args(argv)
    if args.output and not can_draw():
        print(f"error: --output draws a picture with matplotlib: {REMEDY}", file=sys.stderr)
        return 2
    try:
        experiments = [read_experiment(folder) for folder in args.experiments]
        rows = compare(experiments)
    except KeyError as error:
        print(f"error: a {TRAIN_SUMMARY} has no {error}: written by another version?", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(rows))
    if args.output:
        try:
            write_file("--output", args.output / "compare.md", markdown(rows) + "\n")
            write_file("--output", args.output / "compare.json", json.dumps(rows, indent=2) + "\n")
            write_file("--output", args.output / "compare.png", plot(experiments, rows))
        except NotWritten as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"wrote compare.md, compare.json and compare.png to {args.output}")
    return 0
