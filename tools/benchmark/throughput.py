"""Measures training end to end: starts llm/llama/run_pretrain.py or run_finetune.py through its launcher, and reads
what it logs. Pretraining's peer is torchtitan's own trainer, with torch.compile and torchao's float8. Runs whose names
begin with formers train the same in PaddleFormers.

    python tools/benchmark/throughput.py [--runs 8b-x4 titan-8b-l16-x1 ...] [--largest_batch 8b-l16-x1] [--output FILE]

Each run trains a model from random weights on random tokens for a few steps, without checkpoints or evaluation. Runs
follow each other in the order in which they are named; without --runs all of run_pretrain.py's that the GPUs suffice
for. Writes benchmarks/throughput/<date>_<gpu>x<n>_<what>.json and a table of the same name, anew after each run. A run
that fails, or whose framework is not there, keeps its row with the reason.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from string import Template
from threading import Condition, Lock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout, installed or not

from paddle_te.launch.devices import visible_devices  # noqa: E402
from paddle_te.launch.overlap import LOGGING_STEPS, OVERLAP_IN_PIPELINES, OVERLAPS, PIPELINE_OVERLAP  # noqa: E402
from tools.benchmark import finetuning, preferences, report, step, timeline  # noqa: E402
from tools.benchmark.formers import FormersRun  # noqa: E402
from tools.benchmark.parallel import packages  # noqa: E402
from tools.benchmark.problem import GPT, QWEN2, SIZES, Dims  # noqa: E402
from tools.benchmark.titan import TitanRun  # noqa: E402
from tools.benchmark.trainings import Conditions, Run, python_path, quoted, step_times  # noqa: E402

LLAMA_1B_2K = replace(step.LLAMA_1B, sequence=2048)
MODELS = {  # of runs.toml
    "llama-3-8b": replace(step.SIZES["8b-s8192"], layers=32),
    "llama-3-70b": step.Size(Dims(1, 4096, 8192, 28672, 64, 8, 500000.0), 128256, layers=80),
    "llama-3.2-1b": replace(step.SIZES["1b-s1024"], dims=LLAMA_1B_2K, tied=True),
    "llama-3.2-3b": step.Size(Dims(1, 4096, 3072, 8192, 24, 8, 500000.0), 128256, layers=28, tied=True),
    "llama-2-7b": replace(step.SIZES["7b-s4096"], layers=32),
    "llama-2-13b": step.Size(Dims(1, 4096, 5120, 13824, 40, 40, 10000.0), 32000, layers=40),
    "qwen2.5-7b": step.SIZES["qwen2.5-7b-s4096"],  # 16 layers
    "qwen3-8b": replace(step.SIZES["qwen3-8b-s4096"], layers=36),
    "qwen3-30b": replace(
        step.SIZES["qwen3-30b-s4096"], dims=replace(step.SIZES["qwen3-30b-s4096"].dims, batch=1), layers=48
    ),
    "qwen2.5-3b": step.Size(
        Dims(1, 8192, 2048, 11008, 16, 2, 1e6, variant=QWEN2), 151936, layers=36, family="qwen2", tied=True
    ),
    "gpt-1.3b": step.Size(
        Dims(1, 2048, 2048, 8192, 16, 16, None, variant=GPT), 50304, layers=24, family="gpt", tied=True
    ),
    "gpt-5b": step.Size(SIZES["gpt-5b"], 50304, layers=24, family="gpt"),  # without dropout
}
DATA = tomllib.loads(Path(__file__).with_name("runs.toml").read_text())
# Gradients are reduced and scattered during backward, weights gathered during the next forward, for which Paddle wants
# the loss to be read not in each step. Stage 2 likewise: reduced during backward, broadcast during forward.
# Stage 1 between pipelines has words of its own.
OVERLAPPING = {f"OVERLAP_{stage}": shlex.quote(OVERLAPS[f"stage{stage}"]) for stage in (1, 2)}
OVERLAPPING |= {"OVERLAP_PP": f"{OVERLAP_IN_PIPELINES} --pipeline_parallel_config {PIPELINE_OVERLAP}"}
WORDS = DATA["flags"] | {
    name: f"{DATA['flags']['MAIN_GRADS']} --logging_steps {LOGGING_STEPS} --sharding_parallel_config {config}"
    for name, config in OVERLAPPING.items()
}


def run_of(kind, model, layers=None, sequence=None, micro_batches=None, flags="", **fields):
    """A run of runs.toml. kind: its class."""
    size = MODELS[model]
    size = replace(
        size,
        dims=replace(size.dims, sequence=sequence or size.dims.sequence),
        layers=layers or size.layers,
        micro_batches=micro_batches or size.micro_batches,
    )
    return kind(size, flags=Template(flags).substitute(WORDS), **fields)


def runs_of(table, kind):
    """{name: run} of a table of runs.toml."""
    return {name: run_of(kind, **said) for name, said in DATA[table].items()}


OUR_RUNS = runs_of("pretraining", Run)
TITAN_RUNS = runs_of("torchtitan", TitanRun)  # the same sizes and tokens a step as ours of like names
FORMERS_RUNS = runs_of("paddleformers", FormersRun)  # the same as ours of like names, in another host
FINETUNING_RUNS = runs_of("finetuning", finetuning.Finetuning)
PREFERENCE_RUNS = runs_of("preferences", preferences.Preferences) | runs_of("answers", preferences.SingleAnswers)
TRL_RUNS = runs_of("trl", preferences.TrlRun)  # on the same pairs as ours of like names
RUNS = OUR_RUNS | FORMERS_RUNS | FINETUNING_RUNS | PREFERENCE_RUNS | TITAN_RUNS | TRL_RUNS
TRY_STEPS = 3  # of each try for the largest batch: the second step has all optimizer states, a third shows it stays

DEFINITIONS = [
    "Runs of paddle_te are llm/llama/run_pretrain.py with all that belongs to it: Trainer, data loading, clipping, "
    "AdamW with float32 master weights, logging. Random tokens and weights; per-GPU batches of `batch` sequences.",
    "ms: median of the steady steps' wall time as the run logs it (with overlap: mean of two steps); range: the "
    "least and the greatest. TFLOP/s: 6 per token and weight multiplied, and attention's products, halved by the "
    "causal mask; recomputation not counted. Scaling: tokens/s per GPU over those of the run it names.",
    "Peak GB: of the first rank, by Paddle's allocator. Loss: first and last that was logged. Start: seconds of the "
    "run that were not steps.",
]
TITAN_DEFINITION = (
    "Runs of torchtitan are its own trainer with torch.compile, and FSDP on several GPUs, on as many random tokens. "
    "fp8 is torchao's float8 for all linear layers but lm_head, scaled by the current values of a tensor or row. Not "
    "like for like: torchtitan keeps its weights in float32, paddle_te in bf16 with float32 master weights. "
    "torchtitan's times are means of two steps; compiling counts for its first step, so not for start. Its peak GB "
    "are what PyTorch's allocator had reserved, hence somewhat more than what its tensors took."
)

FORMERS_DEFINITION = (
    "Runs of paddle_te in PaddleFormers are its own Trainer and recipe with our decoder layers, on random tokens in an "
    "indexed corpus of one document. It waits for the loss in each step before it updates the weights."
)


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", choices=RUNS, metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--steps", type=int, default=12, help="of a run; default %(default)s")
    parser.add_argument("--layers", type=int, help="of every run's model; default: each run's own")
    parser.add_argument("--warmup", type=int, default=4, help="steps left out at its beginning; default %(default)s")
    parser.add_argument(
        "--largest_batch",
        choices=[name for name, run in RUNS.items() if run.gpus == 1],
        metavar="NAME",
        help="also find this run's largest batch for each recompute mode",
    )
    parser.add_argument("--at_once", action="store_true", help="as many runs at the same time as there are GPUs for")
    parser.add_argument(
        "--profile",
        type=int,
        default=0,
        metavar="STEPS",
        help="further steps, whose time (but the first's) is accounted for by parts of the model, communication and "
        "gaps (timeline.py)",
    )
    parser.add_argument(
        "--torchtitan",
        type=Path,
        metavar="FOLDER",
        help="folder with torchtitan, torchao and what they import besides PyTorch, searched in place of PYTHONPATH; "
        "default: where Python finds them by itself",
    )
    parser.add_argument("--trl", type=Path, metavar="FOLDER", help="the same, with TRL and what it imports")
    parser.add_argument(
        "--paddleformers",
        type=Path,
        metavar="PYTHON",
        help="the interpreter of an environment with PaddleFormers, for the runs in that host",
    )
    parser.add_argument("--timeout", type=float, default=180, help="seconds for a run; default %(default)s")
    report.add_destination(parser, "throughput")
    parser.add_argument("--logs", type=Path, help="folder to keep the runs' outputs and logs in (default: not kept)")
    parser.add_argument("--tiny", action="store_true", help="all runs with two small layers of pd in bf16")
    return parser


def parse_arguments(argv=None):
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.warmup <= arguments.steps - 2:
        parser.error(f"--warmup {arguments.warmup} leaves no two of --steps {arguments.steps}")
    for peer in ("torchtitan", "trl"):
        if (folder := getattr(arguments, peer)) and not folder.is_dir():
            parser.error(f"--{peer}: there is no folder {folder}")
        setattr(arguments, peer, folder and folder.resolve())  # processes may change theirs
    if arguments.paddleformers and not os.access(arguments.paddleformers, os.X_OK):
        parser.error(f"--paddleformers: {arguments.paddleformers} is no program")
    arguments.paddleformers = arguments.paddleformers and arguments.paddleformers.absolute()  # a venv's is a link
    arguments.devices = visible_devices("nvgpu", os.environ)
    needed = max((RUNS[name].gpus for name in arguments.runs or ()), default=1)
    if needed > len(arguments.devices):
        parser.error(f"--runs need {needed} GPUs; visible here: {len(arguments.devices)}")
    if arguments.runs is None:
        arguments.runs = [name for name, run in OUR_RUNS.items() if run.gpus <= len(arguments.devices)]
    return arguments


def start(command, log, timeout):
    """Exit status of the Command, whose output goes to the file `log`; None if it had to be ended at its timeout."""
    environment = os.environ | {"PYTHONPATH": python_path()} | command.environment
    with open(log, "w") as output:
        process = subprocess.Popen(command.words, env=environment, stdout=output, stderr=output)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # the launchers end all that they have started
            process.wait()
            return None


ERROR = re.compile(r"(?:\w+Error\b|error:|ERROR\]).*", re.IGNORECASE)


def last_error(text):
    """The line that says best why a run failed: memory, else the last error, else its last words."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for pattern in (report.OUT_OF_MEMORY, ERROR):
        if found := [match[0] for line in lines if (match := pattern.search(line))]:
            return found[-1][:300]
    return lines[-1][:300] if lines else "no output"


def execute(run, conditions):
    """Trains, and returns the run's row: {"status": "ok", …} or {"status": "failed" or "missing", "reason"}."""
    row = {"run": run.described, "seconds": 0.0, "versions": run.packages(conditions)}
    if missing := [name for name, version in row["versions"].items() if version is None]:
        return row | {"status": "missing", "reason": f"not installed here: {', '.join(missing)}; {run.remedy}"}
    conditions.folder.mkdir(parents=True, exist_ok=True)
    command, began = run.command(conditions), time.monotonic()
    status = start(command, conditions.log, conditions.timeout)
    row |= {"seconds": round(time.monotonic() - began, 1), "command": quoted(command.words)}
    if status != 0:
        ending = f"exit status {status}" if status else f"not done after {conditions.timeout:g} s"
        words = last_error(conditions.log.read_text(errors="replace"))
        return row | {"status": "failed", "reason": f"{words} ({ending})"}
    try:
        row |= {"status": "ok"} | measured(run, run.records(conditions), conditions.warmup, row["seconds"])
    except ValueError as error:
        return row | {"status": "failed", "reason": str(error)}
    return row | ({"timeline": run.account(conditions)} if conditions.profiled else {})


def measured(run, records, warmup, seconds):
    """Speeds, memory and losses from a training's records, of those that come after `warmup` steps.

    Raises ValueError where there are none.
    """
    before = [0] + [record["step"] for record in records]
    steady = [record for record, first in zip(records, before, strict=False) if first >= warmup]
    if not steady:
        raise ValueError(f"its log has no steps behind the first {warmup}")
    times = step_times(steady)
    all_steps = sum(
        (record["step"] - first) * record["step_time"] for record, first in zip(records, before, strict=False)
    )
    speeds = run.speeds(times["median"], steady)
    return {
        "step_ms": times,
        **speeds,
        "tokens_per_second_per_gpu": speeds["tokens_per_second"] / run.gpus,
        "peak_bytes": records[-1]["peak_memory_bytes"],
        "loss": [records[0]["loss"], records[-1]["loss"]],
        "start_seconds": round(seconds - all_steps, 1),
    }


def next_try(peaks, refused, capacity=None):
    """The batch to try next, given {batch that fits: its peak in bytes} and the least that does not (or None).

    Doubling, then bisection; from two peaks on, where a line through the last two meets the capacity in bytes.
    """
    most = max(peaks, default=0)
    guess = 2 * most if refused is None else (most + refused) // 2
    if len(peaks) > 1 and capacity:
        (b0, p0), (b1, p1) = sorted(peaks.items())[-2:]
        guess = b1 + int((capacity - p1) * (b1 - b0) / (p1 - p0)) if p1 > p0 else guess
    return max(most + 1, guess if refused is None else min(guess, refused - 1))


def find_largest_batch(train, capacity=None):
    """The greatest batch for which train(batch) gives a row that is ok.

    Returns {"status": "ok", "batch" (0: none), "tried": [batches], "best": its row}, or {"status": "failed", "reason"}
    for a failure that is not of memory.
    """
    tries, refused, peaks = {}, None, {}
    while refused != max(peaks, default=0) + 1:
        batch = next_try(peaks, refused, capacity)
        row = tries[batch] = train(batch)
        if row["status"] == "ok":
            peaks[batch] = row["peak_bytes"]
        elif report.OUT_OF_MEMORY.search(row["reason"]):
            refused = batch
        else:
            return {"status": "failed", "reason": f"batch {batch}: {row['reason']}"}
    most = max(peaks, default=0)
    return {"status": "ok", "batch": most, "tried": list(tries), "best": tries.get(most)}


class Gpus:
    """Lends devices to runs, which wait until as many as they need are free."""

    def __init__(self, devices):
        self.free, self.changed = list(devices), Condition()

    @contextmanager
    def lend(self, count):
        with self.changed:
            self.changed.wait_for(lambda: len(self.free) >= count)
            lent, self.free = self.free[:count], self.free[count:]
        try:
            yield lent
        finally:
            with self.changed:
                self.free = sorted(self.free + lent, key=int)
                self.changed.notify_all()


def capacity_of(hardware):
    """Bytes of the GPU's memory that tensors may take: a twentieth stays for CUDA, NCCL and gaps. None if unknown."""
    total = re.fullmatch(r"(\d+) MiB", hardware.get("memory.total", ""))
    return int(total[1]) * 2**20 * 0.95 if total else None


def markdown(result):
    """The readable tables of a result."""
    lines = report.heading("Pretraining", result)
    if result["runs"]:
        lines += _runs_table(result["runs"]) + _timelines(result["runs"])
    for name, modes in result["largest_batch"].items():
        lines += [f"## Largest batch: {name}", "", *_batches_table(modes)]
    return "\n".join(lines)


def _runs_table(runs):
    def row(_, found):
        run, ms = found["run"], found["step_ms"]
        size = run["size"]
        peer = [f"{run['framework']} {version}" for version in [*found["versions"].values()][:1]]
        sequences = f"{run['batch']} × {size['dims']['sequence']}"
        sequences = f"{size['micro_batches']} of {sequences}" if size["micro_batches"] > 1 else sequences
        base = runs.get(run["base"], {})
        scaling = found["tokens_per_second_per_gpu"] / base["tokens_per_second_per_gpu"] if "step_ms" in base else None
        return [
            ", ".join(filter(None, [*peer, run["precision"], f"{size['layers']} layers", sequences, run["layout"]])),
            f"{run['gpus']}",
            f"{ms['median']:.1f}",
            f"{ms['min']:.1f} to {ms['max']:.1f}",
            f"{found['tokens_per_second']:.0f}",
            f"{found['tokens_per_second_per_gpu']:.0f}",
            f"{found['samples_per_second']:.2f}",
            f"{found['tflops_per_gpu']:.0f}" if found["tflops_per_gpu"] else "",
            f"{scaling:.3f} of {run['base']}" if scaling else "",
            f"{found['peak_bytes'] / 1e9:.1f}",
            " → ".join(f"{loss:.3f}" for loss in found["loss"]),
            f"{found['start_seconds']:.0f}",
        ]

    header = "run|what|GPUs|ms|range|tokens/s|per GPU|samples/s|TFLOP/s|scaling|peak GB|loss|start s".split("|")
    flags = [f"- {name}: `{row['run']['flags']}`" for name, row in runs.items() if row["run"]["flags"]]
    return report.rows(header, runs, row) + ["Flags besides the launcher's:", "", *flags, ""] * bool(flags)


def _timelines(runs):
    found = {name: row["timeline"] for name, row in runs.items() if "timeline" in row}
    lines = [f"{name}: no timeline, {row['reason']}\n" for name, row in found.items() if row["status"] != "ok"]
    if accounts := {name: row for name, row in found.items() if row["status"] == "ok"}:
        lines += ["## Where the first GPU's time goes, in further steps under the profiler", ""]
        lines += timeline.markdown(accounts)
        for name, row in accounts.items():
            lines += [f"Longest kernels of {name}:", "", *timeline.kernels_table(row)]
    return lines


def _batches_table(modes):
    def row(_, found):
        best, tried = found["best"], ", ".join(map(str, found["tried"]))
        if best is None:
            return ["0", "", "", tried]
        return [found["batch"], f"{best['peak_bytes'] / 1e9:.1f}", f"{best['tokens_per_second_per_gpu']:.0f}", tried]

    header = ["recompute", "batch", "peak GB", "tokens/s of two steps", "tried"]
    return report.rows(header, modes, lambda name, found: list(map(str, row(name, found))))


class Measuring:
    """The runs that a command line asks for, each on GPUs of its own; every row is written as it comes."""

    def __init__(self, arguments, result, path, folder):
        self.arguments, self.result, self.path, self.folder = arguments, result, path, folder
        self.gpus, self.writing = Gpus(arguments.devices), Lock()

    def measure(self, name):
        with self.gpus.lend(RUNS[name].gpus) as devices:
            row = self.train(name, RUNS[name], devices)
            self.keep(self.result["runs"], name, row)

    def search(self, mode):
        """Find the largest batch of a run with a mode of recompute."""
        wanted = self.arguments.largest_batch

        def fits(batch):
            run, label = replace(RUNS[wanted], recompute=mode, batch=batch), f"{wanted}-{mode}-b{batch}"
            row = self.train(label, run, devices, steps=TRY_STEPS, warmup=1, profiled=0)
            return self.keep(self.result["tries"], label, row)

        with self.gpus.lend(1) as devices:
            row = find_largest_batch(fits, capacity_of(self.result["hardware"]))
        self.keep(self.result["largest_batch"].setdefault(wanted, {}), mode, row)

    def train(self, name, run, devices, **options):
        arguments = self.arguments
        wanted = dict(steps=arguments.steps, warmup=arguments.warmup, profiled=arguments.profile) | options
        conditions = Conditions(
            Path(self.folder, name),
            devices,
            timeout=arguments.timeout,
            torchtitan=arguments.torchtitan,
            paddleformers=arguments.paddleformers,
            trl=arguments.trl,
            **wanted,
        )
        if arguments.layers:
            run = replace(run, size=replace(run.size, layers=arguments.layers))
        row = execute(run.tiny if arguments.tiny else run, conditions)
        found = f"{row['step_ms']['median']:.1f} ms" if row["status"] == "ok" else row["reason"]
        print(f"{name:32} {row['seconds']:6.1f} s  {found}", flush=True)
        return row

    def keep(self, rows, name, row):
        with self.writing:
            rows[name] = row
            report.write(self.result, self.path, markdown(self.result))
        return row


def main(argv=None):
    arguments = parse_arguments(argv)
    named = {arguments.largest_batch, *arguments.runs}
    definitions = DEFINITIONS + [finetuning.DEFINITION] * bool(named & FINETUNING_RUNS.keys())
    definitions += [preferences.DEFINITION] * bool(named & (PREFERENCE_RUNS | TRL_RUNS).keys())
    definitions += [FORMERS_DEFINITION] * bool(named & FORMERS_RUNS.keys())
    definitions += [TITAN_DEFINITION] * bool(named & TITAN_RUNS.keys())
    result = report.header("throughput", argv, definitions) | {
        "versions": packages(),
        "settings": {"steps": arguments.steps, "warmup": arguments.warmup, "at_once": arguments.at_once},
        "libraries": {},  # of the runs' own processes; paddle_te.env tells
        "runs": {},
        "tries": {},  # for the largest batch
        "largest_batch": {},
    }
    result["hardware"]["gpus"] = max([RUNS[name].gpus for name in arguments.runs], default=1)
    path = report.destination(result, arguments, "runs" if arguments.runs else "largest-batch")

    kept = nullcontext(arguments.logs) if arguments.logs else tempfile.TemporaryDirectory()
    with kept as folder, ThreadPoolExecutor(len(arguments.devices) if arguments.at_once else 1) as pool:
        measuring = Measuring(arguments, result, path, folder)
        list(pool.map(measuring.measure, arguments.runs))  # raises what one has raised
        modes = RUNS[arguments.largest_batch].recomputes if arguments.largest_batch else ()
        list(pool.map(measuring.search, modes))
    print(markdown(result))
    print(f"{path} and {path.with_suffix('.md')}")
    rows = [*result["runs"].values(), *result["largest_batch"].get(arguments.largest_batch, {}).values()]
    return 0 if any(row["status"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
