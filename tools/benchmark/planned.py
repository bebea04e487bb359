"""Train with the planner's first choices, and compare what it computed with what each took.

    python tools/benchmark/planned.py meta-llama/Meta-Llama-3-8B --gpus 2 [--tokens_per_step N] [--only 1 3]

Each choice trains on random tokens through the launcher, without checkpoints, one after another. --dry_run prints what
the launcher would start. Writes benchmarks/planned/<date>_<gpu>x<n>_<what>.json and a table of the same name after each
run.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout, installed or not

from paddle_te import configs  # noqa: E402
from paddle_te.planner.command import by_name  # noqa: E402
from paddle_te.planner.gpus import GPUS, at_hand  # noqa: E402
from paddle_te.planner.layout import extra_arguments, launcher_arguments, row_of, shape  # noqa: E402
from paddle_te.planner.model import Model  # noqa: E402
from paddle_te.planner.plan import Plan  # noqa: E402
from paddle_te.planner.search import search, usual_tokens  # noqa: E402
from tools.benchmark import report  # noqa: E402
from tools.benchmark.measured import as_json  # noqa: E402
from tools.benchmark.parallel import packages  # noqa: E402
from tools.benchmark.throughput import last_error, start  # noqa: E402
from tools.benchmark.trainings import Command, quoted, read_log, step_times  # noqa: E402

DEFINITIONS = [
    "A step's time is the median of those after the first; the first are slower, since cuDNN's plans are built. Memory "
    "is the peak of what Paddle's allocator has handed out on the fullest rank.",
    "The planner's error is what it computed over what was measured, less 1. Its bars: 2 % of memory, 7 % of time.",
]
MEMORY_BAR, TIME_BAR = 0.02, 0.07
STEPS = range(4, 9)  # at least, and at most


@dataclass(frozen=True)
class Choice:
    """A layout in which the planner would train a model.

    name_of_model: a name or folder. number: the layout's place in the planner's list, from 1.
    """

    name_of_model: str
    model: Model
    number: int
    plan: Plan

    @property
    def name(self) -> str:
        layout = self.plan.layout
        return f"{self.number}. {shape(layout)}, {layout.batch} x {layout.micro_batches}, {extra_arguments(layout)}"

    def steps(self, seconds: float) -> int:
        """How many take about so long; an even number, since overlap logs every second one."""
        wanted = round(seconds * 1e3 / self.plan.milliseconds)
        return min(max(wanted + wanted % 2, STEPS.start), STEPS.stop - 1)

    def command(self, folder: Path, arguments: argparse.Namespace) -> Command:
        """The launcher's, which writes into `folder`."""
        layout = self.plan.layout
        extra = f"{extra_arguments(layout)} --save_strategy no --report_to none --warmup_steps 2"
        values = launcher_arguments(layout) | {
            "model_name": self.name_of_model,
            "tokenizer_name": "none",
            "MOCK_DATA": 1,
            "MAX_STEPS": self.steps(arguments.seconds),
            "OUTPUT_BASE": folder,
            "EXP_NAME": "run",
            "DEVICES": ",".join(arguments.devices),
            "EXTRA_ARGS": extra.strip(),
        }
        if arguments.dry_run:
            values |= {"DRY_RUN": 1, "GPU": arguments.gpu}
        return Command([sys.executable, "-m", "paddle_te.launch", "pretrain", *by_name(values)])


def choices(arguments: argparse.Namespace) -> list[Choice]:
    """The planner's first ones, and the first with moments in 8 bits where none of these has them."""
    gpu, model = GPUS[arguments.gpu], Model.of(configs.read(arguments.model))
    plans = search(model, gpu, arguments.gpus, arguments.seq, arguments.tokens_per_step, arguments.precision).plans
    numbered = [Choice(arguments.model, model, number, plan) for number, plan in enumerate(plans, 1)]
    first = numbered[: arguments.first]
    if not any(_in_8_bits(choice) for choice in first):
        first += [choice for choice in numbered if _in_8_bits(choice)][:1]
    return [choice for choice in first if choice.number in (arguments.only or [each.number for each in first])]


def _in_8_bits(choice: Choice) -> bool:
    return choice.plan.layout.optim_moments == "int8"


def train(choice: Choice, arguments: argparse.Namespace, folder: Path) -> dict:
    """The choice's row: {"status": "ok", …} or {"status": "failed", "reason"}."""
    command, log, plan = choice.command(folder, arguments), folder / "screen", choice.plan
    folder.mkdir()
    row = {"model": as_json(choice.model), "layout": row_of(plan.layout)}
    row |= {"command": quoted(command.words).replace(str(folder), "FOLDER")}
    row |= {"planned": {"ms": plan.milliseconds, "bytes": plan.memory.total, "times": dict(plan.times)}}
    status = start(command, log, arguments.timeout)
    records = read_log(folder / "run/output") if status == 0 else []
    if len(records) < 2:
        ending = f"not done after {arguments.timeout:g} s" if status is None else f"exit status {status}"
        return row | {"status": "failed", "reason": f"{last_error(log.read_text(errors='replace'))} ({ending})"}
    losses = [records[0]["loss"], records[-1]["loss"]]
    times = step_times(records[1:]) | {"all": step_times(records)["all"]}  # the first one is shown, and not counted
    found = {"step_ms": times, "peak_bytes": records[-1]["peak_memory_bytes"], "loss": losses}
    return row | {"status": "ok"} | found


def errors(row: dict) -> tuple[float, float]:
    """The planner's, of memory and of time, each as a share of what was measured."""
    planned = row["planned"]
    return planned["bytes"] / row["peak_bytes"] - 1, planned["ms"] / row["step_ms"]["median"] - 1


def markdown(result: dict) -> str:
    """The readable table of a result."""
    lines = report.heading("The planner's first choices", result)
    return "\n".join(lines + report.rows(HEADER, result["rows"], lambda _, row: _cells(row)))


HEADER = ["choice", "planned ms", "ms", "error", "planned GB", "GB", "error", "within the bars"]


def _cells(row: dict) -> list[str]:
    memory, time = errors(row)
    within = "yes" if abs(memory) <= MEMORY_BAR and abs(time) <= TIME_BAR else "no"
    times = [f"{row['planned']['ms']:,.0f}", f"{row['step_ms']['median']:,.0f}", f"{time:+.1%}"]
    return [
        *times,
        *(f"{value / 1e9:.1f}" for value in (row["planned"]["bytes"], row["peak_bytes"])),
        f"{memory:+.1%}",
        within,
    ]


def parse_arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name, or folder with config.json")
    parser.add_argument("--gpus", type=int, default=1, help="how many train (default %(default)s)")
    parser.add_argument("--gpu", choices=GPUS, default=at_hand(), help="their kind; default: this machine's")
    parser.add_argument("--devices", nargs="+", help="numbers of the GPUs; default: the first")
    parser.add_argument("--seq", type=int, default=8192, help="tokens of a sequence (default %(default)s)")
    parser.add_argument("--tokens_per_step", type=int, help="default: what paddle-te plan takes")
    parser.add_argument("--precision", choices=("fp8", "bf16"), default="fp8", help="default %(default)s")
    parser.add_argument("--first", type=int, default=3, help="how many of the choices train (default %(default)s)")
    parser.add_argument("--only", type=int, nargs="+", help="numbers among these")
    parser.add_argument("--seconds", type=float, default=50, help="of a run's steps (default %(default)s)")
    parser.add_argument("--timeout", type=float, default=180, help="seconds of a run (default %(default)s)")
    parser.add_argument("--dry_run", action="store_true", help="print what the launcher would start")
    report.add_destination(parser, "planned")
    arguments = parser.parse_args(argv)
    arguments.devices = arguments.devices or [str(number) for number in range(arguments.gpus)]
    arguments.tokens_per_step = arguments.tokens_per_step or usual_tokens(arguments.gpus, arguments.seq)
    return arguments


def main(argv=None):
    arguments = parse_arguments(argv)
    if arguments.dry_run:
        for choice in choices(arguments):
            start(choice.command(Path("FOLDER"), arguments), "/dev/stdout", arguments.timeout)
        return
    result = report.header("planned", argv, DEFINITIONS) | {"versions": packages(), "libraries": {}, "rows": {}}
    result["hardware"]["gpus"] = arguments.gpus
    path = report.destination(result, arguments, f"{Path(arguments.model).name} {arguments.tokens_per_step} tokens")
    with tempfile.TemporaryDirectory() as folder:
        for choice in choices(arguments):
            result["rows"][choice.name] = train(choice, arguments, Path(folder, str(choice.number)))
            report.write(result, path, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
