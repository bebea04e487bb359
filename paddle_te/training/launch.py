"""The launcher behind llm/llama/scripts/llama_single_node_interactive.sh.

Checks every argument, chooses the devices, builds the one command that trains, prints it and runs it:

    python -m paddle_te.training.launch --model_name=llama-125m --TP=2 ... --training_script=llm/llama/run_pretrain.py

A wrong argument or an impossible combination is one line that names it and what it may be, exit status 2, before
anything starts or is written. Arguments in capitals below `KNOBS` are read from the environment.

Imports neither paddle nor paddlenlp, which take seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paddle_te.training.background import STAGING_DIR, remove_leftovers
from paddle_te.training.checks import (
    LaunchError,
    check_data,
    check_layout,
    check_model,
    check_output,
    check_precision,
    check_start,
    check_tokenizer,
    configs,
)
from paddle_te.training.machines import Devices, Nodes, find_devices, find_nodes, has_nvgpu

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------------------------------------- arguments


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


def device_list(text):
    ids = text.split(",")
    if not all(re.fullmatch(r"\d+", i) for i in ids) or len(set(ids)) != len(ids):
        raise argparse.ArgumentTypeError(f"{text!r} must be different device numbers with commas between, as 0,1,2,3")
    return ids


# name, default, type, help: in the order of the script's positional arguments.
ARGUMENTS = [
    ("model_name", "meta-llama/Llama-2-7b", str, "known name, or folder with config.json"),
    ("tokenizer_name", "meta-llama/Llama-2-7b", str, "known name, folder, or none with MOCK_DATA=1"),
    ("batch_size_per_device", "2", positive_int, "sequences a device takes at a time (micro-batch)"),
    ("FSDP", "1", positive_int, "devices that share optimizer state, gradients, weights (see sharding_stage)"),
    ("TP", "2", positive_int, "tensor parallel degree"),
    ("PP", "1", positive_int, "pipeline parallel degree"),
    ("VP", "1", positive_int, "virtual pipeline stages of a device"),
    ("GA", "8", positive_int, "gradient accumulation: micro-batches of a step"),
    ("SP", "false", boolean, "sequence parallel: true, false"),
    ("max_seqlen", "4096", positive_int, "tokens of a sequence"),
    ("sharding_stage", "stage2", one_of("stage1", "stage2", "stage3"), "what FSDP shards; ignored with FSDP 1"),
    ("backend", "none", one_of("none", "te", "pd"), "layers: PaddleNLP's, Transformer Engine's, te's in plain Paddle"),
    ("precision", "bf16", one_of("bf16", "fp8", "fp32"), "bf16, fp8 (with te), fp32"),
    ("recompute", "none", one_of("none", "core_attn", "full"), "what backward computes again"),
    ("resume_step", "none", step, "none, auto (latest checkpoint) or the number of a saved step"),
    ("init_weight", "none", str, "folder with the weights to start from, or none"),
    ("nsys_profile", "false", boolean, "wrap the run in nsys: true, false"),
]

# Likewise, from the environment. An empty variable counts as not set.
KNOBS = [
    ("DEVICE", None, one_of("gpu", "nvgpu", "cpu"), "kind of device; found if not given"),
    ("DEVICES", None, device_list, "devices to use, as 0,1,2,3; found if not given"),
    ("OUTPUT_BASE", "./outputs", str, "where the experiment's folder is made"),
    ("EXP_NAME", None, str, "name of the experiment's folder; made from the arguments if not given"),
    ("DATA_PATH", None, str, "folder with .bin and .idx files (default /dataset)"),
    ("MOCK_DATA", "0", switch, "1: synthetic tokens instead of DATA_PATH"),
    ("MAX_STEPS", "20000", positive_int, "optimizer steps"),
    ("SAVE_STEPS", "10000", positive_int, "steps between checkpoints"),
    ("LOGGING_STEPS", "1", positive_int, "steps between log lines"),
    ("LEARNING_RATE", "3e-05", positive_float, "greatest learning rate; the least is a tenth of it"),
    ("EXTRA_ARGS", "", str, "appended to run_pretrain's arguments, quoted as in a shell"),
    ("OVERWRITE", "0", switch, "1: start anew in a folder that holds checkpoints, which move to output/earlier-N"),
    ("DRY_RUN", "0", switch, "1: print the command and stop"),
    ("NNODES", "1", positive_int, "nodes (default SLURM_JOB_NUM_NODES, else 1)"),
    ("NODE_RANK", None, index, "this node's rank, from 0 (default SLURM_NODEID)"),
    ("MASTER", None, str, "address:port of the node of rank 0 (default: the first of IP_STR)"),
    ("MASTER_PORT", None, positive_int, "where MASTER has no port (default 6070; under Slurm by the job's number)"),
    ("IP_STR", None, str, "the nodes' addresses in the order of their ranks, with commas between"),
    ("PROFILER", "none", one_of("none", "paddle"), "paddle: Paddle's profiler, where there is no nsys"),
    ("PROFILE_START_STEP", "3", positive_int, "first step a profiler records"),
    ("PROFILE_STOP_STEP", "3", positive_int, "last step a profiler records"),
    ("PROFILE_EMIT_NVTX", "1", switch, "0: without NVTX ranges"),
]

# Slurm's variables, where ours are not set.
FALLBACKS = {"NNODES": "SLURM_JOB_NUM_NODES", "NODE_RANK": "SLURM_NODEID"}


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        message = re.sub(r"^argument --(\w+): ", r"\1: ", message)
        raise LaunchError(re.sub(r"^unrecognized arguments: ", "unknown or too many arguments: ", message))


def parse(argv: list[str] | None, environ: Mapping[str, str]) -> argparse.Namespace:
    """Arguments and knobs, typed.

    Raises:
        LaunchError: one of them is not what it may be.
    """
    parser = _Parser(
        prog="python -m paddle_te.training.launch",
        description="Pretrain Llama. Arguments in capitals from DEVICE on may also stand in the environment.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    # argparse types string defaults too, so an environment variable is checked like an argument.
    for name, default, kind, text in ARGUMENTS:
        parser.add_argument(f"--{name}", default=default, type=kind, help=text, metavar="VALUE")
    for name, default, kind, text in KNOBS:
        value = environ.get(name) or environ.get(FALLBACKS.get(name, "")) or default
        parser.add_argument(f"--{name}", default=value, type=kind, help=text, metavar="VALUE")
    script = ROOT / "llm/llama/run_pretrain.py"
    parser.add_argument("--training_script", default=str(script), type=str, help="what each process runs")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------------------------------- command


@dataclass(frozen=True)
class Plan:
    """One node's part of the job."""

    command: list[str]
    env: dict[str, str]  # added to the environment
    unset: list[str]  # taken from it
    script: str
    processes: int  # of the training script, on this node
    logs: Path
    output: Path  # of checkpoints
    nodes: Nodes
    folders: list[Path] = field(default_factory=list)  # to make before the start

    def shell(self) -> str:
        """The command as a line for a shell."""
        unset = [word for name in self.unset for word in ("-u", name)]
        return shlex.join(["env", *unset, *(f"{key}={value}" for key, value in self.env.items()), *self.command])


def experiment_name(args: argparse.Namespace, nodes: int, dp: int) -> str:
    """The original's name of a run, with a model name that makes no folders of its own."""
    model = configs.canonical(args.model_name)
    if model is None or (Path(args.model_name).expanduser() / "config.json").is_file():
        model = Path(args.model_name).expanduser().absolute().name
    return (
        f"N{nodes}_DP{dp}_TP{args.TP}_PP{args.PP}_VP{args.VP}_GA{args.GA}_SP{str(args.SP).lower()}_FSDP{args.FSDP}"
        f"_MBS{args.batch_size_per_device}_{args.backend}_{args.precision}_{args.recompute}"
        f"_{re.sub(r'[^A-Za-z0-9._-]', '_', model)}"
    )


def training_flags(args: argparse.Namespace, device: str, world: int, output: Path) -> dict[str, object]:
    """run_pretrain's arguments, in PaddleNLP's names; None leaves one out."""
    te = {"none": "none", "te": "transformer_engine", "pd": "paddle"}[args.backend]
    resume = output / f"checkpoint-{args.resume_step}" if isinstance(args.resume_step, int) else args.resume_step
    half = args.precision != "fp32"
    # PaddleNLP takes "nvgpu:0" for a GPU with CUDA kernels, so what needs those is said here.
    cuda = int(device == "gpu")
    return {
        "model_name_or_path": configs.resolve(args.model_name),
        "tokenizer_name_or_path": check_tokenizer(args),
        "input_dir": check_data(args),
        "mock_data": 1 if args.MOCK_DATA else None,
        "output_dir": output,
        "split": "949,50,1",
        "max_seq_length": args.max_seqlen,
        "per_device_train_batch_size": args.batch_size_per_device,
        "per_device_eval_batch_size": args.batch_size_per_device,
        "gradient_accumulation_steps": args.GA,
        "tensor_parallel_degree": args.TP,
        "sharding_parallel_degree": args.FSDP,
        "sharding": args.sharding_stage if args.FSDP > 1 else None,
        "pipeline_parallel_degree": args.PP,
        "virtual_pp_degree": args.VP,
        "sequence_parallel": int(args.SP),
        "pipeline_parallel_config": "disable_partial_send_recv" if args.SP else None,
        "transformer_engine_backend": te,
        "use_fp8": 1 if args.precision == "fp8" else None,
        "bf16": int(half),
        "fp16_opt_level": "O2" if half else None,
        "amp_master_grad": 1 if half and world > 1 and device == "nvgpu" else None,  # PreTrainingArguments says why
        "recompute": int(args.recompute != "none"),
        "recompute_granularity": None if args.recompute == "none" else args.recompute,
        "resume_from_checkpoint": None if resume == "none" else resume,
        "te_init_weight_path": None if args.init_weight == "none" else Path(args.init_weight).expanduser().absolute(),
        "use_flash_attention": cuda,
        "use_fused_rope": cuda,
        "use_fused_rms_norm": 0,
        "fuse_attention_qkv": 0,
        "fuse_attention_ffn": 1,
        "learning_rate": f"{args.LEARNING_RATE:g}",
        "min_learning_rate": f"{args.LEARNING_RATE / 10:g}",
        "warmup_steps": 30,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "max_steps": args.MAX_STEPS,
        "save_steps": args.SAVE_STEPS,
        "logging_steps": args.LOGGING_STEPS,
        "eval_steps": 1000,
        "dataloader_num_workers": 1,
        "report_to": "visualdl",
        "disable_tqdm": int(world > 1),  # a progress bar is for a screen; several processes write to log files
        "do_train": 1,
        "continue_training": 0,
        "device": device,
    }


def _one_process(devices: Devices, nodes: Nodes) -> bool:
    return len(devices.ids) == 1 and nodes.count == 1


def launch_command(devices: Devices, nodes: Nodes, logs: Path) -> list[str]:
    """Python for one process, paddle.distributed.launch for several."""
    command = [sys.executable, "-u"]
    if _one_process(devices, nodes):
        return command
    command += ["-m", "paddle.distributed.launch"]
    # On a plain CPU Paddle's launcher knows no device numbers, only how many processes.
    on_cpu = devices.kind == "cpu"
    command += ["--nproc_per_node", str(len(devices.ids))] if on_cpu else ["--devices", ",".join(devices.ids)]
    if nodes.count > 1:
        command += ["--master", nodes.master, "--nnodes", str(nodes.count), "--rank", str(nodes.rank)]
    if nodes.host:
        command += ["--host", nodes.host]
    return [*command, "--log_dir", str(logs)]


def _rendezvous(nodes: Nodes, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What to add to the environment and to take from it so that Paddle's launchers find each other.

    They do over HTTP, with a client (httpx) that obeys these variables, and try again for ever, without a word, when it
    fails: for a proxy that does not know the nodes, or for certificates that a container has elsewhere than its host.
    """
    if nodes.count == 1:
        return {}, []
    address = nodes.master.split(":")[0]
    direct = ",".join(filter(None, [environ.get("no_proxy") or environ.get("NO_PROXY"), address]))
    certificates = [name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if not os.path.exists(environ.get(name) or "/")]
    return {"no_proxy": direct, "NO_PROXY": direct}, certificates


def _environment(devices: Devices, nodes: Nodes, environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What to add to the environment and what to take from it."""
    paths = [str(ROOT), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    meeting, unset = _rendezvous(nodes, environ)
    env = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths))), **meeting}
    if _one_process(devices, nodes):
        env |= devices.selected()
    if devices.kind == "cpu":  # Paddle's launcher would go by what it sees
        unset += ["CUDA_VISIBLE_DEVICES"] if "CUDA_VISIBLE_DEVICES" in environ else []
        env |= {"CUSTOM_DEVICE_ROOT": ""} if has_nvgpu(environ) else {}
    return env, unset


def _profiling(args: argparse.Namespace, nodes: Nodes) -> dict[str, str]:
    """The environment of `profiling.ProfilerCallback`."""
    if args.nsys_profile and args.PROFILER == "paddle":
        raise LaunchError("PROFILER=paddle and nsys_profile=true exclude each other")
    if not (args.nsys_profile or args.PROFILER == "paddle") or nodes.rank > 0:  # one node tells enough
        return {"ENABLE_PROFILE": "0"}
    first, last = args.PROFILE_START_STEP, args.PROFILE_STOP_STEP
    if not first <= last or first >= args.MAX_STEPS:
        raise LaunchError(
            f"PROFILE_START_STEP, PROFILE_STOP_STEP: {first} to {last} must be a range of steps, from below "
            f"MAX_STEPS={args.MAX_STEPS} (steps count from 0), or nothing is recorded"
        )
    settings = {name: str(int(getattr(args, name))) for name, *_ in KNOBS if name.startswith("PROFILE_")}
    return {"ENABLE_PROFILE": "1", "PROFILER": "nsys" if args.nsys_profile else "paddle", **settings}


def _extra_arguments(args: argparse.Namespace) -> list[str]:
    try:
        return shlex.split(args.EXTRA_ARGS)
    except ValueError as error:
        raise LaunchError(f"EXTRA_ARGS: {args.EXTRA_ARGS!r} is not quoted as in a shell ({error})") from error


def _training_script(args: argparse.Namespace) -> str:
    script = Path(args.training_script).absolute()
    if not script.is_file():
        raise LaunchError(f"training_script: there is no file {script}")
    return str(script)


def make_plan(argv: list[str] | None, environ: Mapping[str, str]) -> tuple[Plan, argparse.Namespace]:
    """Arguments to a checked plan. Starts nothing and writes nothing.

    Raises:
        LaunchError: a wrong argument, or a combination that cannot run.
    """
    args = parse(argv, environ)
    try:
        config = configs.read(args.model_name)
    except ValueError as error:
        raise LaunchError(f"model_name: {error}") from error
    devices, nodes = find_devices(args, environ), find_nodes(args, environ)
    world = len(devices.ids) * nodes.count
    check_precision(args, config, devices.kind)
    check_layout(args, world)
    check_model(args, config)

    dp = world // (args.TP * args.PP * args.FSDP)
    experiment = args.EXP_NAME or experiment_name(args, nodes.count, dp)
    folder = Path(args.OUTPUT_BASE).expanduser().absolute() / experiment
    output, profile = folder / "output", folder / "profile"
    logs = folder / "logs" / (f"node{nodes.rank}" if nodes.count > 1 else "")  # nodes share the folder
    check_output(args, folder)
    check_start(args, output)

    flags = training_flags(args, devices.kind, world, output)
    words = [word for key, value in flags.items() if value is not None for word in (f"--{key}", str(value))]
    script = _training_script(args)
    command = [*launch_command(devices, nodes, logs), script, *words, *_extra_arguments(args)]
    env, unset = _environment(devices, nodes, environ)
    env |= _profiling(args, nodes)
    nsys = env["ENABLE_PROFILE"] == "1" and args.nsys_profile
    plan = Plan(
        command=[*_nsys(profile / Path(experiment).name), *command] if nsys else command,
        env=env,
        unset=unset,
        script=script,
        processes=len(devices.ids),
        logs=logs,
        output=output,
        nodes=nodes,
        folders=[logs, output, *([profile] if nsys else [])],
    )
    return plan, args


def _nsys(report: Path) -> list[str]:
    if not shutil.which("nsys"):
        raise LaunchError(
            "nsys_profile=true needs nsys (NVIDIA Nsight Systems) on PATH; install it, or use PROFILER=paddle"
        )
    return [
        *("nsys", "profile", "-s", "none", "-c", "cudaProfilerApi", "-t", "cuda,nvtx"),
        *("--force-overwrite", "true", "--capture-range-end=stop", "-o", str(report)),
    ]


def set_aside(output: Path, resume_step: str | int) -> Path | None:
    """Moves checkpoints of later steps than this run starts from into a folder of their own, output/earlier-N.

    They are another run's, or of a course that is given up. Among this one's, `auto` would resume from them, and
    save_total_limit, which keeps the latest steps, remove this run's instead.

    Returns:
        Path | None: that folder, if there were any.
    """
    if resume_step == "auto":
        return None
    start = -1 if resume_step == "none" else resume_step
    numbered = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in output.iterdir()]
    later = [path for match, path in numbered if match and int(match[1]) > start]
    if not later:
        return None
    number = next(n for n in itertools.count(1) if not (output / f"earlier-{n}").exists())
    kept = output / f"earlier-{number}"
    kept.mkdir()
    for path in later:
        path.rename(kept / path.name)
    return kept


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, the failed process's (128 + n if signal n ended it), or 2 for a wrong argument."""
    try:
        plan, args = make_plan(argv, os.environ)
        if not args.DRY_RUN and importlib.util.find_spec("paddle") is None:
            raise LaunchError(
                f"PYTHON: {sys.executable} has no paddle; make .venv with scripts/quickstart.sh, or set PYTHON"
            )
    except LaunchError as error:
        print(f"error: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    if args.DRY_RUN:
        print(plan.shell())
        return 0
    from paddle_te.training.peers import Peers
    from paddle_te.training.supervise import supervise

    try:
        peers = Peers(plan.nodes) if plan.nodes.count > 1 else None
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"+ {plan.shell()}", file=sys.stderr, flush=True)
    for folder in plan.folders:
        folder.mkdir(parents=True, exist_ok=True)
    if plan.nodes.rank == 0 and (kept := set_aside(plan.output, args.resume_step)):
        print(f"launch: checkpoints of an earlier run, later than this one's start, are now in {kept}", file=sys.stderr)
    env = {key: value for key, value in os.environ.items() if key not in plan.unset} | plan.env
    try:
        return supervise(plan.command, env, script=plan.script, processes=plan.processes, logs=plan.logs, peers=peers)
    finally:
        remove_leftovers(_staging_dir(plan.command))  # ranks that were killed could not


def _staging_dir(command: list[str]) -> str:
    """run_pretrain's flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--staging_dir", default=STAGING_DIR)
    return parser.parse_known_args(command)[0].staging_dir


if __name__ == "__main__":
    sys.exit(main())
