"""Compares the planner with what throughput.py measured, and predicts Llama-3 8B and 70B on 8 to 512 H200s.

    python tools/benchmark/scaling_model.py [--throughput FILE ...] [--output FILE.md]
    python tools/benchmark/scaling_model.py --predict RUN ... [--gpu h100] [--output FILE.md]

The second form writes what the planner computes for runs of throughput.py, before they are measured.

The model of a step's time and memory is the package's (`paddle_te.planner`). Without --throughput it is compared with
all that benchmarks/ has (measured.py). Prints Markdown: the numbers of the GPU, predictions compared with what was
measured, and predictions for more GPUs.
"""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout, installed or not

from paddle_te import configs  # noqa: E402
from paddle_te.outputs import file_argument, write_file  # noqa: E402
from paddle_te.planner.gpus import GPUS  # noqa: E402
from paddle_te.planner.layout import shape  # noqa: E402
from paddle_te.planner.memory import memory_of_step  # noqa: E402
from paddle_te.planner.model import Model  # noqa: E402
from paddle_te.planner.plan import Plan  # noqa: E402
from paddle_te.planner.search import search  # noqa: E402
from paddle_te.planner.speed import time_of_step  # noqa: E402
from tools.benchmark import measured  # noqa: E402
from tools.benchmark.throughput import FINETUNING_RUNS, OUR_RUNS  # noqa: E402

NAMES = {"8B": "meta-llama/Meta-Llama-3-8B", "70B": "meta-llama/Meta-Llama-3-70B"}
MODELS = {title: Model.of(configs.read(name)) for title, name in NAMES.items()}
SEQUENCE = 8192
H200 = GPUS["h200"]
PREDICTABLE = OUR_RUNS | FINETUNING_RUNS
NUMBERS_OF_GPUS = (8, 16, 32, 64, 128, 256, 512)


def predicted(model, layout, gpu=H200):
    """The Plan of a Job on such GPUs."""
    return Plan(layout, memory_of_step(model, layout), time_of_step(model, layout, gpu))


def numbers_table():
    rows = [f"| {each.name} | {getattr(H200, each.name):g} | {each.metadata['what']} |" for each in fields(H200)[3:]]
    return ["| GB, GB/s, µs, TFLOP/s, bytes | value | |", "|---|---|---|", *rows]


def check_table(points):
    """Predicted and measured times and memory, with the relative errors."""
    if not points:
        return ["No measured points: no result of throughput.py was given (--throughput). Nothing below is checked."]
    header = ["run", "commit", "GPUs", "layout", "ms", "measured", "error", "GB", "measured", "error"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for point in points:
        plan = measured.expected(point)
        cells = [point.name, point.commit, f"{point.layout.world} {GPUS[point.gpu].title}", shape(point.layout)]
        cells += _compared(plan.milliseconds, point.ms, 1) + _compared(plan.memory.total, point.memory, 1e9)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _compared(said, found, unit):
    """Cells of what was predicted and measured, the latter empty where it was not."""
    return [f"{said / unit:.1f}", *((f"{found / unit:.1f}", f"{said / found - 1:+.1%}") if found else ("", ""))]


def runs_table(names, gpu):
    """Predicted time and memory of runs of throughput.py, by name."""
    lines = ["| run | ms | tokens/s per GPU | GB | by part |", "|---" * 5 + "|"]
    for name in names:
        plan = predicted(*measured.of_run(PREDICTABLE[name].described), gpu)
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
        cells = [gpus, shape(best.layout), f"{total:.0f}", f"{speed:.0f}", f"{speed / first:.3f}"]
        cells += [f"{best.memory.total / 1e9:.0f}", shares]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return ["| GPUs | layout | step ms | tokens/s per GPU | of the first row | GB | parts |", "|---" * 7 + "|", *rows]


def markdown(points, sources):
    lines = ["# Llama-3 on 8 to 512 H200s: predicted", ""]
    lines += [*numbers_table(), "", "## Predicted and measured", "", f"From {sources}.", ""]
    lines += [*check_table(points), ""]
    for title, model in MODELS.items():
        for precision in ("fp8", "bf16"):
            what = f"{precision}, sequences of {SEQUENCE}, one a GPU and step"
            lines += [f"## Llama-3-{title}, {what}", "", *prediction_table(model, precision), ""]
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--throughput", type=Path, nargs="*", metavar="FILE", help="of throughput.py; default: all of benchmarks/"
    )
    parser.add_argument(
        "--predict", nargs="+", choices=PREDICTABLE, metavar="RUN", help="these runs of throughput.py alone"
    )
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="that these train on; default: %(default)s")
    parser.add_argument("--output", type=file_argument, help="Markdown file (default: print alone)")
    arguments = parser.parse_args(argv)
    files = arguments.throughput
    if missing := [str(path) for path in files or () if not path.is_file()]:
        parser.error(f"there is no file {', '.join(missing)}; --throughput names others")
    if arguments.predict:
        gpu = GPUS[arguments.gpu]
        title = f"# Runs of throughput.py on {gpu.title}s: predicted"
        text = "\n".join([title, "", *runs_table(arguments.predict, gpu)])
    elif files is None:
        text = markdown(measured.all_points(), "all of benchmarks/")
    else:
        points = [point for path in files for point in measured.points_of(json.loads(path.read_text()))]
        sources = ", ".join(f"{path.parent.name}/{path.name}" for path in files)
        text = markdown(points, sources or "no files")
    print(text)
    if arguments.output:
        write_file("--output", arguments.output, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
