"""Show how healthy a run's fp8 is: the tensors that fare worst, and a picture of all layers over the steps.

    paddle-te inspect RUN [--step N] [--top 12] [--sort underflows] [--output FILE.png]

RUN: the folder that the launcher made (or its `output`), of a run with --fp8_statistics. The table has the tensors of
one step; the picture, and the text that stands in for it without matplotlib, the worst tensor of each layer in each
step. Exit status: 0; 1 where the picture could not be written; 2 where there is nothing to read, or for wrong
arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paddle_te.folders import output_of
from paddle_te.options.fp8 import LIMITED
from paddle_te.options.option import PATH, STEPS
from paddle_te.outputs import NotWritten, write_file
from paddle_te.runs.fp8_log import FP8_LOG, HEAD, FP8Log
from paddle_te.runs.pictures import REMEDY, can_draw, png, subplots
from paddle_te.table import in_columns

PICTURE = "fp8_statistics.png"
SHADES = " .:-=+*#%@"
WIDTH = 72  # steps that the text has room for
# What a value must reach to be drawn as the worst: a tenth of a tensor is lost, or moves by a fifth
FULL = {"underflows": 0.1, "saturated": 0.01, "relative_error": 0.2}
TITLES = {
    "underflows": "numbers that became 0",
    "saturated": "numbers that were cut off",
    "relative_error": "mean relative error",
}


def worst(log: FP8Log, value: str) -> dict[str, dict[int, float]]:
    """Return {layer: {step: the greatest value of its tensors}}, layers in order, the head last."""
    found: dict[str, dict[int, float]] = {}
    for step, tensors in log.steps.items():
        for name, columns in tensors.items():
            layer = found.setdefault(name.partition(".")[0], {})
            layer[step] = max(layer.get(step, 0.0), columns[value] or 0.0)
    return dict(sorted(found.items(), key=lambda item: (item[0] == HEAD, item[0] != HEAD and int(item[0]))))


def table(log: FP8Log, step: int, value: str, top: int) -> list[str]:
    """Return the lines of the table of a step's tensors with the greatest values."""
    rows = sorted(log.steps[step].items(), key=lambda item: -(item[1][value] or 0.0))[:top]
    header = ["layer", "tensor", "became 0", "cut off", "error", "amax", "scale", "of expected"]
    return in_columns([header, *(_row(name, columns) for name, columns in rows)], rule=True)


def _row(name: str, columns: dict[str, float | None]) -> list[str]:
    layer, _, tensor = name.partition(".")
    least, most = columns["scale_min"], columns["scale_max"]
    scale = _number(least) if least == most else f"{_number(least)} to {_number(most)}"
    shares = [_share(columns[value]) for value in LIMITED]
    spread = columns.get("range")
    return [layer, tensor, *shares, _number(columns["amax"]), scale, "" if spread is None else f"{spread:.2f}"]


def _share(value: float | None) -> str:
    return "not finite" if value is None else "0" if not value else f"{100 * value:.2g} %"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def shades(log: FP8Log, value: str) -> list[str]:
    """Return a value as text: a line for each layer, a character for each step, of many steps the last ones."""
    steps = sorted(log.steps)[-WIDTH:]
    lines = [f"{TITLES[value]}, steps {steps[0]} to {steps[-1]}; {SHADES[-1]}: {_share(FULL[value])} or more"]
    for layer, values in worst(log, value).items():
        marks = [_shade(values.get(step), FULL[value]) for step in steps]
        lines.append(f"{layer:>5} |{''.join(marks)}|")
    return lines


def _shade(value: float | None, full: float) -> str:
    """Return the character of a value; "b" where the layer computes in 16 bits and has none."""
    if value is None:
        return "b"
    return SHADES[min(int(value / full * (len(SHADES) - 1)), len(SHADES) - 1)]


def plot(log: FP8Log) -> bytes:
    """Return the PNG of three maps, a row for each layer, a column for each step; grey: in 16 bits."""
    steps = sorted(log.steps)
    figure, axes = subplots(1, len(LIMITED), figsize=(5 * len(LIMITED), 5), squeeze=False)
    for one, value in zip(axes[0], LIMITED, strict=True):
        layers = worst(log, value)
        rows = [[100 * values.get(step, float("nan")) for step in steps] for values in layers.values()]
        one.set_facecolor("lightgrey")
        image = one.imshow(rows, aspect="auto", cmap="magma_r", vmin=0, vmax=100 * FULL[value], interpolation="none")
        figure.colorbar(image, ax=one, label="%", extend="max")
        shown = range(0, len(steps), max(1, len(steps) // 6))
        one.set_xticks(list(shown), [str(steps[i]) for i in shown])
        every = range(0, len(layers), max(1, len(layers) // 16))
        one.set_yticks(list(every), [[*layers][i] for i in every])
        one.set(title=TITLES[value], xlabel="step", ylabel="layer")
    figure.suptitle("the worst tensor of each layer in fp8; grey: in 16 bits")
    return png(figure)


def switched(log: FP8Log) -> list[str]:
    """Return a line for each layer that has left fp8."""
    return [
        f"layer {layer} is in 16 bits since step {step + 1}: {why}" for layer, (step, why) in log.in_16_bits.items()
    ]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = argparse.ArgumentParser(prog="paddle-te inspect", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=PATH.argument, metavar="RUN", help="folder of a run with --fp8_statistics")
    parser.add_argument("--step", type=STEPS.argument, help="of which the table is (default: the last one)")
    parser.add_argument("--top", type=STEPS.argument, default=12, help="lines of the table (default: %(default)s)")
    parser.add_argument("--sort", choices=LIMITED, default=LIMITED[0], help="by what (default: %(default)s)")
    parser.add_argument("--output", type=PATH.argument, help=f"the picture (default: RUN/{PICTURE})")
    return parser


def _read(run: str) -> tuple[FP8Log, Path]:
    """Return the log of a run, and the folder that it lies in. Raise FileNotFoundError or ValueError."""
    if not Path(run).is_dir():
        raise FileNotFoundError(f"{run}: no such folder")
    folder = output_of(run, FP8_LOG)
    if not (folder / FP8_LOG).is_file():
        raise FileNotFoundError(f"{run} has no {FP8_LOG}: was the run given --fp8_statistics N?")
    log = FP8Log.read(folder / FP8_LOG)
    if not any(log.steps.values()):
        raise ValueError(f"{folder / FP8_LOG} has no tensor in fp8 yet")
    return log, folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = make_parser().parse_args(argv)
    try:
        log, folder = _read(args.run)
        counted = sorted(step for step, tensors in log.steps.items() if tensors)
        step = args.step or counted[-1]
        if step not in counted:
            raise ValueError(f"--step {step}: counted were {', '.join(map(str, counted[-10:]))}")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"step {step}, the {args.top} tensors of {len(log.steps[step])} with most {args.sort}:\n")
    print("\n".join([*table(log, step, args.sort, args.top), "", *switched(log)]))
    if not can_draw():
        print("\n".join(shades(log, args.sort)))
        print(f"for a picture: {REMEDY}")
        return 0
    picture = Path(args.output) if args.output else folder / PICTURE
    try:
        write_file("--output", picture, plot(log))
    except NotWritten as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {picture}")
    return 0
