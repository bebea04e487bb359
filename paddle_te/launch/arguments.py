"""Arguments of the jobs, and what they may be."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from pathlib import Path

from paddle_te.launch.machines import LaunchError

ROOT = Path(__file__).resolve().parents[2]


def one_of(*choices):
    def parse(text):
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join(choices)}")
        return text

    return parse


def positive_int(text):
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def index(text):
    if not re.fullmatch(r"\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0")
    return int(text)


def positive_float(text):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def boolean(text):
    return one_of("true", "false")(text) == "true"


def switch(text):
    return one_of("1", "0", "true", "false")(text) in ("1", "true")


def step(text):
    return text if text in ("none", "auto") else _step_number(text)


def _step_number(text):
    if not re.fullmatch(r"\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be none, auto or the number of a saved step")
    return int(text)


def port_range(text):
    first, last = map(int, text.split(":")) if re.fullmatch(r"\d{1,5}:\d{1,5}", text) else (0, 0)
    if not 0 < first < last < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} must be the first and last port of a range, as 10000:19999")
    return text


def device_list(text):
    ids = text.split(",")
    if not all(re.fullmatch(r"\d+", i) for i in ids) or len(set(ids)) != len(ids):
        raise argparse.ArgumentTypeError(f"{text!r} must be different device numbers with commas between, as 0,1,2,3")
    return ids


# {name: (type, help)} of those that several jobs have.
SHARED = {
    "batch_size_per_device": (positive_int, "sequences a device takes at a time (micro-batch)"),
    "FSDP": (positive_int, "devices that share optimizer state, gradients, weights (see sharding_stage)"),
    "TP": (positive_int, "tensor parallel degree"),
    "PP": (positive_int, "pipeline parallel degree"),
    "VP": (positive_int, "virtual pipeline stages of a device"),
    "GA": (positive_int, "gradient accumulation: micro-batches of a step"),
    "SP": (boolean, "sequence parallel: true, false"),
    "max_seqlen": (positive_int, "tokens of a sequence"),
    "sharding_stage": (one_of("stage1", "stage2", "stage3"), "what FSDP shards; ignored with FSDP 1"),
    "backend": (one_of("none", "te", "pd"), "layers: PaddleNLP's, Transformer Engine's, te's in plain Paddle"),
    "precision": (one_of("bf16", "fp8", "fp32"), "bf16, fp8 (te; pd emulates it), fp32"),
    "recompute": (one_of("none", "core_attn", "full"), "what backward computes again"),
    "resume_step": (step, "none, auto (latest checkpoint) or the number of a saved step"),
    "nsys_profile": (boolean, "wrap the run in nsys: true, false"),
}


def shared(**defaults: object) -> list[tuple]:
    """Rows of a job's ARGUMENTS, with its own defaults."""
    return [(name, str(default), *SHARED[name]) for name, default in defaults.items()]


# From the environment, for all jobs: name, default, type, help. An empty variable counts as not set.
KNOBS = [
    ("DEVICE", None, one_of("gpu", "nvgpu", "cpu"), "kind of device; found if not given"),
    ("DEVICES", None, device_list, "devices to use, as 0,1,2,3; found if not given"),
    ("EXTRA_ARGS", "", str, "appended to the training script's arguments, quoted as in a shell"),
    ("OVERWRITE", "0", switch, "1: start anew in a folder that holds checkpoints, which move to its earlier-N"),
    ("DETERMINISTIC", "0", switch, "1: equal runs give equal bits on GPUs, for more memory and a little time"),
    ("DRY_RUN", "0", switch, "1: print the command and stop"),
    ("NNODES", "1", positive_int, "nodes (default SLURM_JOB_NUM_NODES, else 1)"),
    ("NODE_RANK", None, index, "this node's rank, from 0 (default SLURM_NODEID)"),
    ("MASTER", None, str, "address:port of the node of rank 0 (default: the first of IP_STR)"),
    ("MASTER_PORT", None, positive_int, "where MASTER has no port (default 6070; under Slurm by the job's number)"),
    # Paddle's own, 35100:64000, overlaps those that Linux takes connections' ends from (32768 to 60999): one of these
    # may get the port before rank 0 listens on it, or a rank that asks too early may reach itself.
    ("PORT_RANGE", "10000:19999", port_range, "ports, first:last, in which rank 0 of several processes listens"),
    ("IP_STR", None, str, "the nodes' addresses in the order of their ranks, with commas between"),
    ("PROFILER", "none", one_of("none", "paddle"), "paddle: Paddle's profiler, where there is no nsys"),
    ("PROFILE_START_STEP", "3", positive_int, "first step a profiler records"),
    ("PROFILE_STOP_STEP", "3", positive_int, "last step a profiler records"),
    ("PROFILE_EMIT_NVTX", "1", switch, "0: without NVTX ranges"),
]

# Slurm's variables, where ours are not set.
FALLBACKS = {"NNODES": "SLURM_JOB_NUM_NODES", "NODE_RANK": "SLURM_NODEID"}


def by_name(job, words: list[str]) -> list[str]:
    """Positional arguments, of which empty ones have their defaults, as --name=value, beside those that are.

    Raises:
        LaunchError: more than the job has, or one that it has not.
    """
    options = [word for word in words if word.startswith("--") or word == "-h"]
    positional = [word for word in words if word not in options]
    names = [name for name, *_ in job.ARGUMENTS]
    known = {f"--{name}" for name, *_ in job.ARGUMENTS + KNOBS + job.KNOBS} | {"--training_script"}
    for word in options:
        name, equals, _ = word.partition("=")
        if word not in ("-h", "--help") and (name not in known or not equals):
            remedy = "write it as --NAME=VALUE" if name in known else f"EXTRA_ARGS takes {_script(job)}'s flags"
            raise LaunchError(f"unknown argument {word}: {remedy}; --help lists them all")
    if len(positional) > len(names):
        raise LaunchError(
            f"too many arguments: {len(positional)} given, at most {len(names)} (the last is {names[-1]})"
        )
    return options + [f"--{name}={value}" for name, value in zip(names, positional, strict=False) if value]


def _name(job) -> str:
    return job.__name__.rpartition(".")[2]


def _script(job) -> str:
    return f"run_{_name(job)}.py"


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise LaunchError(re.sub(r"^argument --(\w+): ", r"\1: ", message))


def parse(job, words: list[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """A job's arguments and knobs, typed. words: --name=value, or values in the order of `job.ARGUMENTS`.

    Raises:
        LaunchError: one of them is not what it may be.
    """
    parser = _Parser(
        prog=f"python -m paddle_te.launch {_name(job)}",
        description=f"{job.__doc__.splitlines()[0]} Arguments in capitals from DEVICE on may also stand in the "
        "environment.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    # argparse types string defaults too, so an environment variable is checked like an argument.
    for argument, default, kind, text in job.ARGUMENTS:
        parser.add_argument(f"--{argument}", default=default, type=kind, help=text, metavar="VALUE")
    for knob, default, kind, text in KNOBS + job.KNOBS:
        value = environ.get(knob) or environ.get(FALLBACKS.get(knob, "")) or default
        parser.add_argument(f"--{knob}", default=value, type=kind, help=text, metavar="VALUE")
    script = ROOT / "llm/llama" / _script(job)
    parser.add_argument("--training_script", default=str(script), type=str, help="what each process runs")
    parser.set_defaults(**job.FIXED)
    return parser.parse_args(by_name(job, words))
