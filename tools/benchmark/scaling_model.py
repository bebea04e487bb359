"""Compares the planner with what throughput.py measured, and predicts Llama-3 8B and 70B on 8 to 512 H200s.

    python tools/benchmark/scaling_model.py [--throughput FILE ...] [--output FILE.md]
    python tools/benchmark/scaling_model.py --predict RUN ... [--output FILE.md]

The second form writes what the planner computes for runs of throughput.py, before they are measured.

The model of a step's time and memory is the package's (`paddle_te.planner`). The results that are taken where none is
given are named below: THROUGHPUT. Prints Markdown: the numbers of the GPU, predictions compared with what was measured,
and predictions for more GPUs.
"""

import argparse
import json
import sys
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout, installed or not

from paddle_te import configs  # noqa: E402
from paddle_te.options.scripts import OPTIMIZER_DEFAULTS  # noqa: E402
from paddle_te.planner import GPUS, Layout, Model, Plan, memory_of_step, search, time_of_step  # noqa: E402
from tools.benchmark import finetuning  # noqa: E402
from tools.benchmark.throughput import FINETUNING_RUNS, OUR_RUNS  # noqa: E402

H200 = GPUS["h200"]
NAMES = {"8B": "meta-llama/Meta-Llama-3-8B", "70B": "meta-llama/Meta-Llama-3-70B"}
MODELS = {title: Model.of(configs.read(name)) for title, name in NAMES.items()}
SEQUENCE = 8192
BENCHMARKS = ROOT / "benchmarks"
THROUGHPUT = [
    BENCHMARKS / "throughput" / f"{name}.json"
    for name in (
        "2026-11-22_h200x4_layouts",
        "2026-11-22_h200x2_8b-stage2",
        "2026-11-22_h200x1_timeline",
        "2026-11-22_h200x1_largest-batch",
        "2026-11-23_h200x1_torchtitan",
        "2026-11-23_h200x1_8b-whole",
        "2026-11-23_h200x2_8b-accumulated-13b",
        "2026-11-23_h200x2_64k",
    )
]
# LoRA trains other weights than those that the planner counts.
PREDICTABLE = OUR_RUNS | {name: run for name, run in FINETUNING_RUNS.items() if run.method == "full"}
NUMBERS_OF_GPUS = (8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Point:
    """A run that was measured. ms: of a step, None where too few were timed. memory: peak, in bytes."""

    name: str
    model: Model
    layout: Layout
    ms: float | None
    memory: float


def measured_points(results):
    """[Point] of our own pretraining runs that are ok in results of throughput.py.

    Its tries for the largest batch have two timed steps on a cool GPU, so that their memory alone counts.
    """
    points = []
    for result in results:
        for rows, timed in ((result["runs"], True), (result.get("tries", {}), False)):
            for name, row in rows.items():
                ours = row["run"].get("framework", "paddle_te") == "paddle_te" and "method" not in row["run"]
                if row["status"] == "ok" and ours:
                    ms = row["step_ms"]["median"] if timed else None
                    points.append(Point(name, *_run(row["run"]), ms, row["peak_bytes"]))
    return points


def _run(run):
    """(Model, Layout) of what a row says that it has run."""
    size, dims, flags = run["size"], run["size"]["dims"], run["flags"]
    model = Model.of(
        {
            "model_type": size.get("family", "llama"),  # older rows do not say it, nor the next but one
            "hidden_size": dims["hidden"],
            "intermediate_size": dims["ffn"],
            "num_hidden_layers": size["layers"],
            "num_attention_heads": dims["heads"],
            "num_key_value_heads": dims["kv_heads"],
            "vocab_size": size["vocabulary"],
            "max_position_embeddings": dims["sequence"],
            "tie_word_embeddings": size.get("tied", False),
        }
    )
    layout = Layout(
        run["gpus"],
        dims["sequence"],
        tp=run["tp"],
        sep=run.get("sep", 1),
        cp=run.get("cp", 1),
        sharding=run["sharding"],
        stage=int(run["stage"][-1]),
        batch=run["batch"],
        micro_batches=size.get("micro_batches", 1),
        precision=run["precision"],
        recompute=run["recompute"],
        recompute_modules=_values(flags, "--recompute_modules"),
        mlp_chunk_tokens=int(_value(flags, "--mlp_chunk_tokens", 0)),
        overlap="overlap" in flags,
        loss_in_chunks="--use_fused_linear_cross_entropy true" in flags,
        fp8_head="--fp8_lm_head true" in flags,
        fp8_attention="--fp8_dpa true" in flags,
        main_grads="--amp_master_grad true" in flags,
        release_grads="--release_grads true" in flags,
        **{name: _value(flags, f"--{name}", default) for name, default in OPTIMIZER_DEFAULTS.items()},
        offload_activations=int(_value(flags, "--offload_activations", 0)),
        offload_optimizer=float(_value(flags, "--offload_optimizer", 0)),
    )
    if run.get("packed"):
        layout = _of_documents(layout)
    return model, layout


def _of_documents(layout):
    """A layout of packed rows, as one of sequences that have as many tokens and as much attention as the documents."""
    lengths = finetuning.lengths_of_samples(layout.sequence) - 1.0
    length = (lengths**2).sum() / lengths.sum()
    return replace(layout, sequence=length, batch=layout.batch * layout.sequence / length)


def _value(flags, name, default):
    return next(iter(_values(flags, name)), default)


def _values(flags, name):
    """What stands behind a flag, up to the next one."""
    words = flags.split()
    behind = words[words.index(name) + 1 :] if name in words else ()
    return tuple(takewhile(lambda word: not word.startswith("--"), behind))


def predicted(model, layout):
    """The Plan of a Layout on H200s."""
    return Plan(layout, memory_of_step(model, layout), time_of_step(model, layout, H200))


def numbers_table():
    rows = [f"| {each.name} | {getattr(H200, each.name):g} | {each.metadata['what']} |" for each in fields(H200)[2:]]
    return ["| GB, GB/s, µs, TFLOP/s, bytes | value | |", "|---|---|---|", *rows]


def check_table(points):
    """Predicted and measured times and memory, with the relative errors."""
    if not points:
        return ["No measured points: no result of throughput.py was given (--throughput). Nothing below is checked."]
    header = ["run", "GPUs", "layout", "ms", "measured", "error", "GB", "measured", "error"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for point in points:
        plan = predicted(point.model, point.layout)
        cells = [point.name, point.layout.gpus, point.layout]
        cells += _compared(plan.milliseconds, point.ms, 1) if point.ms else ["", "", ""]
        cells += _compared(plan.memory.total, point.memory, 1e9)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _compared(said, measured, unit):
    return [f"{said / unit:.1f}", f"{measured / unit:.1f}", f"{said / measured - 1:+.1%}"]


def runs_table(names):
    """Predicted time and memory of runs of throughput.py, by name."""
    lines = ["| run | ms | tokens/s per GPU | GB | by part |", "|---" * 5 + "|"]
    for name in names:
        plan = predicted(*_run(PREDICTABLE[name].described))
        parts = ((part.name.replace("_", " "), getattr(plan.memory, part.name) / 1e9) for part in fields(plan.memory))
        bill = ", ".join(f"{part} {size:.1f}" for part, size in parts if size >= 0.05)
        cells = [name, f"{plan.milliseconds:.1f}", f"{plan.tokens_per_second:,.0f}", f"{plan.memory.total / 1e9:.1f}"]
        lines.append("| " + " | ".join([*cells, bill]) + " |")
    return lines


def prediction_table(model, precision):
    """The best layout on each number of GPUs, with one sequence for each."""
    rows, first = [], None
    for gpus in NUMBERS_OF_GPUS:
        found = search(model, H200, gpus, SEQUENCE, gpus * SEQUENCE, precision).plans
        plans = [plan for plan in found if not plan.layout.offloads]  # whose speed nothing has shown yet
        if not plans:
            rows.append(f"| {gpus} | none fits | | | | | |")
            continue
        best = plans[0]
        speed, total = best.tokens_per_second, best.milliseconds
        first = first or speed
        shares = ", ".join(f"{part} {ms / total:.0%}" for part, ms in best.times.items() if ms / total >= 0.005)
        cells = [gpus, best.layout, f"{total:.0f}", f"{speed:.0f}", f"{speed / first:.3f}"]
        cells += [f"{best.memory.total / 1e9:.0f}", shares]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return ["| GPUs | layout | step ms | tokens/s per GPU | of the first row | GB | parts |", "|---" * 7 + "|", *rows]


def markdown(results, sources):
    lines = ["# Llama-3 on 8 to 512 H200s: predicted", ""]
    lines += [*numbers_table(), "", "## Predicted and measured", "", f"From {sources or 'no files'}.", ""]
    lines += [*check_table(measured_points(results)), ""]
    for title, model in MODELS.items():
        for precision in ("fp8", "bf16"):
            what = f"{precision}, sequences of {SEQUENCE}, one a GPU and step"
            lines += [f"## Llama-3-{title}, {what}", "", *prediction_table(model, precision), ""]
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--throughput", type=Path, nargs="*", default=THROUGHPUT, help="of throughput.py; default %(default)s"
    )
    parser.add_argument(
        "--predict", nargs="+", choices=PREDICTABLE, metavar="RUN", help="these runs of throughput.py alone"
    )
    parser.add_argument("--output", type=Path, help="Markdown file (default: print alone)")
    arguments = parser.parse_args(argv)
    if missing := [str(path) for path in arguments.throughput if not path.is_file()]:
        parser.error(f"there is no file {', '.join(missing)}; --throughput names others")
    results = [json.loads(path.read_text()) for path in arguments.throughput]
    sources = ", ".join(f"{path.parent.name}/{path.name}" for path in arguments.throughput)
    predictions = ["# Runs of throughput.py: predicted", "", *runs_table(arguments.predict or [])]
    text = "\n".join(predictions) if arguments.predict else markdown(results, sources)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
