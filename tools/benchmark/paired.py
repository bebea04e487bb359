#!/usr/bin/env python3
"""Tells whether the loss of one kind of run is another's but for chance, from pairs of runs that begin with the same
weights and data, each pair with others.

    python tools/benchmark/paired.py A1 B1 A2 B2 … [--last 100] [--output pairs.json]

A1, B1, …: folders with a train_log.jsonl each. Of each pair it shows by how much A's mean loss over the last steps is
above B's, and of all pairs the mean of that with its standard error. Two runs that compute alike but for rounding part
by chance while the loss falls fast, and what they have parted by they keep: one pair says little about a cause.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from paddle_te.outputs import file_argument, write_file  # noqa: E402
from paddle_te.runs.convergence import read_run  # noqa: E402
from paddle_te.table import in_columns  # noqa: E402


def last_mean(folder, last):
    """The mean loss over a run's last steps."""
    losses = read_run(folder).losses
    return statistics.fmean(losses[step] for step in sorted(losses)[-last:])


def compare(folders, last):
    """{"pairs": [{"runs", "losses", "difference"}], "mean", "standard_error"} of the folders A1, B1, A2, …; differences
    are relative. With one pair the standard error is NaN.

    Raises ValueError for an odd number of folders, and what `read_run` raises.
    """
    if len(folders) % 2:
        raise ValueError("an even number of folders is needed: A1 B1 A2 B2 …")
    pairs = []
    for runs in zip(map(str, folders[::2]), map(str, folders[1::2]), strict=True):
        a, b = (last_mean(folder, last) for folder in runs)
        pairs.append(dict(runs=runs, losses=(a, b), difference=a / b - 1))
    differences = [pair["difference"] for pair in pairs]
    spread = statistics.stdev(differences) if len(pairs) > 1 else math.nan
    error = spread / math.sqrt(len(pairs))
    return dict(pairs=pairs, mean=statistics.fmean(differences), standard_error=error, last=last)


def format_table(found):
    """The comparison as text."""
    rows = [["A", "B", "loss of A", "loss of B", "A above B"]]
    for pair in found["pairs"]:
        names = [Path(run).name for run in pair["runs"]]
        rows.append([*names, *(f"{loss:.4f}" for loss in pair["losses"]), f"{pair['difference']:+.2%}"])
    table = "\n".join(in_columns(rows, rule=True))
    return f"{table}\nmean {found['mean']:+.2%}, standard error {found['standard_error']:.2%}"


def main(argv=None):
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="DIR")
    parser.add_argument("--last", type=int, default=100, help="steps whose mean loss is compared (default: 100)")
    parser.add_argument("--output", type=file_argument, help="JSON file for the numbers")
    args = parser.parse_args(argv)
    try:
        found = compare(args.runs, args.last)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(format_table(found))
    if args.output:
        write_file("--output", args.output, json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
