"""Draws the pictures of the README and of benchmarks/README.md from the results in benchmarks/.

    python tools/benchmark/pictures.py [--folder docs/images]

The results are named below and nowhere else, so that a new one is drawn when it takes an old one's place there, and not
by chance.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout, installed or not

from paddle_te.planner.layout import layout as layout_of  # noqa: E402
from tools.benchmark import scaling_model  # noqa: E402

# Results of step.py and throughput.py. Peers of one panel ran in turn.
STEP_PEERS = "step/2026-11-25_h200x1_te-pytorch.json"
TITAN_ONE = "throughput/2026-11-24_h200x1_torchtitan.json"
TITAN_TWO = "throughput/2026-11-22_h200x2_torchtitan.json"
LAYER = "layer/2026-11-22_h200x1_all-sizes.json"
STEP = "step/2026-11-22_h200x1_8b.json"
FOUR_GPUS = {  # precision: (result, run)
    "fp8": ("throughput/2026-11-28_h200x4_llama-3-8b-and-torchtitan.json", "8b-x4"),
    "bf16": ("throughput/2026-11-22_h200x4_layouts.json", "8b-x4-bf16"),
}
LARGEST_BATCH = "throughput/2026-11-22_h200x1_largest-batch.json"

OURS, THEIRS = "#3b6fd4", "#9aa5b1"
FRAMEWORKS = {
    "paddle_te": "paddle_te (this project)",
    "te_torch": "TE's PyTorch layers",
    "torchtitan": "torchtitan",
}
NAMES = {  # attention in fp8, with which no long run lasts, is not drawn
    "hf_bf16": "Hugging Face, bf16",
    "torch_compile_bf16": "torch.compile, bf16",
    "te_torch_bf16": "TE's PyTorch, bf16",
    "te_torch_fp8": "TE's PyTorch, fp8",
    "te_torch_fp8_delayed": "TE's PyTorch, fp8",
    "te_torch_fp8_head": "TE's PyTorch, fp8 with head",
    "paddle_te_bf16": "paddle_te, bf16",
    "paddle_te_fp8": "paddle_te, fp8",
    "paddle_te_fp8_delayed": "paddle_te, fp8",
    "paddle_te_fp8_head": "paddle_te, fp8 with head",
}
COUNTS = {1: "one", 2: "two", 4: "four"}
PARTS = {
    "decoder layers": (("layers forward", "layers backward"), OURS),
    "head, loss, embedding": (
        ("head and loss forward", "head and loss backward", "embedding forward", "embedding backward"),
        "#e0913c",
    ),
    "clipping, optimizer": (("clipping", "optimizer"), "#5aa469"),
}


def load(result):
    return json.loads((ROOT / "benchmarks" / result).read_text())


# ------------------------------------------------------------------------------------------------ bars of contestants


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    ours: bool


@dataclass(frozen=True)
class Panel:
    """Contestants that ran in turn on the same GPUs, the best last, so on top."""

    title: str
    bars: list


@dataclass(frozen=True)
class Speed:
    """One contestant's row of a result. precision: in words. tokens: a second and GPU."""

    framework: str
    precision: str
    gpus: int
    layers: int
    micro_batches: int
    tokens: float

    @property
    def label(self):
        return f"{FRAMEWORKS[self.framework]}, {self.precision}"


def speeds(result):
    """[Speed] of each row that ran in a result of step.py or of throughput.py."""
    read = next(read for key, read in READERS.items() if key in result)
    return list(read(result))


def _steps(result):
    for size in result["sizes"].values():
        for name, row in size["peers"].items():
            framework = next((framework for framework in FRAMEWORKS if name.startswith(framework)), None)
            if framework and name in NAMES and row["status"] == "ok":
                precision = NAMES[name].partition(", ")[2]
                tokens = size["tokens"] / row["step_ms"]["median"] * 1e3
                yield Speed(framework, precision, 1, size["layers"], size["micro_batches"], tokens)


def _trainings(result):
    for row in result["runs"].values():
        if row["status"] == "ok" and "--fp8_dpa" not in row["run"]["flags"]:
            run, tokens = row["run"], row["tokens_per_second_per_gpu"]
            precision = run["precision"] + " with head" * ("--fp8_lm_head" in run["flags"])
            framework = run.get("framework", "paddle_te")
            yield Speed(framework, precision, run["gpus"], run["size"]["layers"], run["size"]["micro_batches"], tokens)


READERS = {"sizes": _steps, "runs": _trainings}


def speed_panel(title, result, **wanted):
    """The result's rows that have the wanted values of a Speed.

    title: may name {micro_batches}; of several numbers of them the greatest is drawn. Raises ValueError where not both
    paddle_te and a peer have such a row, and where two rows would have the same name.
    """
    found = [row for row in speeds(load(result)) if all(getattr(row, key) == value for key, value in wanted.items())]
    most = max((row.micro_batches for row in found), default=1)
    found = [row for row in found if row.micro_batches == most]
    if len({row.framework for row in found}) < 2:
        raise ValueError(f"benchmarks/{result} has no two contestants with {wanted}")
    labels = [row.label for row in found]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"benchmarks/{result} has more than one row with {wanted} for {twice[0]}")
    bars = [Bar(row.label, row.tokens, row.framework == "paddle_te") for row in found]
    micro_batches = f"{COUNTS.get(most, most)} micro-batch{'es' if most > 1 else ''}"
    return Panel(title.format(micro_batches=micro_batches), sorted(bars, key=lambda bar: bar.value))


def layer_panel(title, size):
    """ms of one layer's forward and backward."""
    peers = load(LAYER)["sizes"][size]["peers"]
    times = {name: peers[name]["step_ms"]["median"] for name in NAMES if name in peers}
    bars = [Bar(NAMES[name], ms, name.startswith("paddle_te")) for name, ms in times.items()]
    return Panel(title, sorted(bars, key=lambda bar: -bar.value))


def draw_panels(pyplot, panels, number, unit):
    """A figure with a row of bars for each contestant, all panels on the same scale from 0."""
    heights = [len(panel.bars) for panel in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, sharex=True, figsize=(9, 0.42 * sum(heights) + 1.6), height_ratios=heights, layout="constrained"
    )
    for panel, axis in zip(panels, axes, strict=True):
        colors = [OURS if bar.ours else THEIRS for bar in panel.bars]
        bars = axis.barh([bar.label for bar in panel.bars], [bar.value for bar in panel.bars], color=colors)
        axis.bar_label(bars, [format(bar.value, number) for bar in panel.bars], padding=4)
        axis.set_title(panel.title, loc="left", fontsize=11)
        axis.margins(x=0.12)
    axes[-1].set_xlabel(unit)
    return figure


def draw_speed(pyplot):
    panels = [
        speed_panel("Pretraining, 16 layers, one H200", TITAN_ONE, layers=16, gpus=1),
        speed_panel("Pretraining, all 32 layers, two H200s", TITAN_TWO, layers=32, gpus=2),
        speed_panel("A training step alone, 16 layers, {micro_batches}, one H200", STEP_PEERS, layers=16),
    ]
    unit = "tokens per second and GPU; Llama-3-8B's dimensions, sequences of 8192 tokens"
    return draw_panels(pyplot, panels, ",.0f", unit)


def draw_layer(pyplot):
    panels = [
        layer_panel("Llama-2-7B, 4096 tokens", "7b-b1"),
        layer_panel("Llama-3-8B, 8192 tokens", "8b-s8192"),
        layer_panel("Llama-3-70B, 4096 tokens", "70b-b1"),
    ]
    return draw_panels(pyplot, panels, ".2f", "ms for forward and backward of one decoder layer on an H200")


# ------------------------------------------------------------------------------------------------ step, scaling, memory


def step_parts():
    """{contestant: {part: ms}} of a training step."""
    [size] = load(STEP)["sizes"].values()
    found = {}
    for name in NAMES:
        if name in size["peers"]:
            times = size["peers"][name]["parts_ms"]
            found[NAMES[name]] = {part: sum(times[key]["median"] for key in keys) for part, (keys, _) in PARTS.items()}
    return found


def draw_step(pyplot):
    found = step_parts()
    figure, axis = pyplot.subplots(figsize=(9, 0.42 * len(found) + 1.9), layout="constrained")
    labels, left = list(found)[::-1], [0.0] * len(found)
    for part, (_, color) in PARTS.items():
        values = [found[label][part] for label in labels]
        bars = axis.barh(labels, values, left=left, color=color, label=part)
        axis.bar_label(bars, [f"{value:.0f}" for value in values], label_type="center", color="white")
        left = [start + value for start, value in zip(left, values, strict=True)]
    axis.set_xlabel("ms of a training step on an H200; Llama-3-8B's dimensions, 16 layers, 8192 tokens")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=len(PARTS), frameon=False)
    return figure


def scaling_points(precision, gpus):
    """(predicted tokens/s per GPU on each number of GPUs, (GPUs, measured tokens/s per GPU)) of Llama-3-8B."""
    model, sequence = scaling_model.MODELS["8B"], scaling_model.SEQUENCE
    shared = dict(precision=precision, overlap=True, main_grads=True)
    plans = [scaling_model.predicted(model, layout_of(n, sequence, sharding=n, **shared)) for n in gpus]
    result, name = FOUR_GPUS[precision]
    row = load(result)["runs"][name]
    return [plan.tokens_per_second for plan in plans], (row["run"]["gpus"], row["tokens_per_second_per_gpu"])


def draw_scaling(pyplot):
    figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
    gpus = (4, *scaling_model.NUMBERS_OF_GPUS)
    for precision, color in (("fp8", OURS), ("bf16", THEIRS)):
        predicted, measured = scaling_points(precision, gpus)
        axis.plot(gpus, predicted, "--", color=color, label=f"{precision}, predicted")
        axis.plot(*measured, "o", color=color, label=f"{precision}, measured")
        axis.annotate(f"{measured[1]:,.0f}", measured, xytext=(8, -14), textcoords="offset points")
    axis.set_xscale("log", base=2)
    axis.set_xticks(gpus, [str(count) for count in gpus])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("H200s; Llama-3-8B, sharding stage 1 with overlap, a sequence of 8192 tokens for each GPU")
    axis.set_ylabel("tokens per second and GPU")
    axis.legend(frameon=False)
    return figure


def memory_points():
    """{recompute: [(sequences, peak GB)]} of all batches that fitted."""
    points = {}
    for row in load(LARGEST_BATCH)["tries"].values():
        if row["status"] == "ok":
            run = row["run"]
            points.setdefault(run["recompute"], []).append((run["batch"], row["peak_bytes"] / 1e9))
    return {mode: sorted(found) for mode, found in points.items()}


def draw_memory(pyplot):
    figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
    points = memory_points()
    for mode, color, height in (("none", THEIRS, 2), ("core_attn", "#e0913c", -10), ("full", OURS, -4)):
        axis.plot(*zip(*points[mode], strict=True), "o-", color=color, label=f"recompute {mode}")
        last = points[mode][-1]
        axis.annotate(f"{last[1]:.0f} GB", last, xytext=(8, height), textcoords="offset points")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("sequences of 8192 tokens on an H200; Llama-3-8B's dimensions, 16 layers, fp8")
    axis.set_ylabel("peak GB")
    axis.legend(frameon=False)
    return figure


PICTURES = {
    "speed": draw_speed,
    "layer": draw_layer,
    "step": draw_step,
    "scaling": draw_scaling,
    "memory": draw_memory,
}


def main(argv=None):
    import matplotlib

    matplotlib.use("Agg")
    # the same file from the same numbers: no date, and names that do not change
    matplotlib.rcParams |= {"svg.hashsalt": "paddle_te", "axes.spines.top": False, "axes.spines.right": False}
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/images", help="default %(default)s")
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw(pyplot)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)
        print(folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
