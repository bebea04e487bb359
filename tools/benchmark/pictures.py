"""Draws the README's picture of speed from the results in benchmarks/.

    python tools/benchmark/pictures.py [--output docs/images/speed.svg]

The results are named below, so that a new one is drawn when it takes an old one's place there, and not by chance.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEP = "step/2026-11-22_h200x1_te-pytorch-prototype.json"
ONE_GPU = "throughput/2026-11-22_h200x1_torchtitan-prototype.json"
TWO_GPUS = "throughput/2026-11-22_h200x2_torchtitan-prototype.json"
NAMES = {"paddle_te": "paddle_te (this project)", "te_torch": "TE's PyTorch layers", "torchtitan": "torchtitan"}
COLORS = {"paddle_te": "#3b6fd4", "te_torch": "#9aa5b1", "torchtitan": "#9aa5b1"}


@dataclass(frozen=True)
class Bar:
    """A contestant's tokens per second and GPU."""

    peer: str
    precision: str
    speed: float

    @property
    def label(self):
        return f"{NAMES[self.peer]}, {self.precision}"


@dataclass(frozen=True)
class Panel:
    """Contestants that ran in turn on the same GPUs, the fastest last."""

    title: str
    bars: list


def read_panel(title, result, **wanted):
    """The rows of a result in benchmarks/ that have the wanted values.

    Raises ValueError where no row of paddle_te, or none of a peer, has them.
    """
    rows = json.loads((ROOT / "benchmarks" / result).read_text())["rows"]
    chosen = [row for row in rows if row["peer"] in NAMES and all(row[key] == value for key, value in wanted.items())]
    bars = [Bar(row["peer"], row["precision"], _speed(row)) for row in chosen]
    if len({bar.peer for bar in bars}) < 2:
        raise ValueError(f"benchmarks/{result} has no two contestants with {wanted}")
    return Panel(title, sorted(bars, key=lambda bar: bar.speed))


def _speed(row):
    return row["tokens_per_second" if "tokens_per_second" in row else "tokens_per_second_per_gpu"]


def panels():
    return [
        read_panel("Pretraining, 16 layers, one H200", ONE_GPU, layers=16),
        read_panel("Pretraining, all 32 layers, two H200s", TWO_GPUS, layers=32),
        read_panel("A training step alone, 16 layers, one H200", STEP, micro_batches=4, what=""),
    ]


def draw(panels, path):
    """One row of bars for each contestant, all panels on the same scale from 0."""
    import matplotlib

    matplotlib.use("Agg")
    # the same file from the same numbers: no date, and names that do not change
    matplotlib.rcParams["svg.hashsalt"] = "paddle_te"
    from matplotlib import pyplot

    heights = [len(panel.bars) for panel in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, sharex=True, figsize=(9, 0.42 * sum(heights) + 1.6), height_ratios=heights, layout="constrained"
    )
    for panel, axis in zip(panels, axes, strict=True):
        bars = axis.barh(
            [bar.label for bar in panel.bars],
            [bar.speed for bar in panel.bars],
            color=[COLORS[bar.peer] for bar in panel.bars],
        )
        axis.bar_label(bars, [f"{bar.speed:,.0f}" for bar in panel.bars], padding=4)
        axis.set_title(panel.title, loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    axes[-1].set_xlabel("tokens per second and GPU; Llama-3-8B's dimensions, sequences of 8192 tokens")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / "docs/images/speed.svg"
    parser.add_argument("--output", type=Path, default=default, help="SVG or PNG file; default %(default)s")
    path = parser.parse_args(argv).output
    draw(panels(), path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
