"""A job's arguments to the one command that trains, checked."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddle_te import host
from paddle_te.job import Job
from paddle_te.job.words import job_of, printed
from paddle_te.launch import JobModule
from paddle_te.launch.arguments import ROOT, left_to_planner, parse
from paddle_te.launch.checks import check_here, check_output, check_start
from paddle_te.launch.devices import Devices, find_devices, has_nvgpu
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.flags import (
    check_asked,
    check_known,
    extra_flags,
    extra_words,
    planner_knows,
    ranks_of_a_sequence,
)
from paddle_te.launch.machines import Machines
from paddle_te.launch.names import name_of, script_of
from paddle_te.launch.nodes import Nodes, find_nodes
from paddle_te.launch.paddleformers import recipe as paddleformers
from paddle_te.options.launcher import VARIABLES
from paddle_te.runs.checkpoints import find_checkpoint, host_of

HOSTS = "HOSTS"  # in a command: the nodes' addresses, where only the nodes' meeting tells them


@dataclass(frozen=True)
class Plan:
    """One node's part of the job."""

    command: list[str]
    env: dict[str, str]  # added to the environment
    unset: list[str]  # taken from it
    script: str
    logs: Path
    folder: Path  # of all that it writes
    output: Path  # of checkpoints
    devices: Devices
    nodes: Nodes
    layout: Job | None = None  # the planner's, of a job that it knows: PaddleNLP's with te in 16 bits
    folders: list[Path] = field(default_factory=list)  # to make before the start
    files: dict[Path, str | Path] = field(default_factory=dict)  # to write: a text, or the file to link to

    @property
    def processes(self) -> int:
        """Those of the training script, on this node: one for each device."""
        return len(self.devices.ids)

    def shell(self) -> str:
        """Return the command as a line for a shell."""
        unset = [word for name in self.unset for word in ("-u", name)]
        return shlex.join(["env", *unset, *(f"{key}={value}" for key, value in self.env.items()), *self.command])

    def write_files(self) -> None:
        """Write `files`, over those of an earlier start."""
        for path, content in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(content) if isinstance(content, Path) else path.write_text(content, encoding="utf-8")

    def command_on(self, hosts: list[str] | None) -> list[str]:
        """Return the command with the nodes' addresses; None on a single one."""
        return [",".join(hosts) if hosts and word == HOSTS else word for word in self.command]


def launch_command(machines: Machines, logs: Path) -> list[str]:
    """Python for one process, paddle.distributed.launch for several."""
    command, devices, nodes = [sys.executable, "-u"], machines.devices, machines.nodes
    if machines.world == 1:
        return command
    command += ["-m", "paddle.distributed.launch"]
    # On a plain CPU Paddle's launcher knows no device numbers, only how many processes.
    on_cpu = devices.kind == "cpu"
    command += ["--nproc_per_node", str(len(devices.ids))] if on_cpu else ["--devices", ",".join(devices.ids)]
    if nodes.count > 1:  # rank 0 listens on MASTER's port; a --master would listen too, to whoever comes
        command += ["--ips", HOSTS, "--start_port", nodes.master.rpartition(":")[2]]
    if nodes.host:
        command += ["--host", nodes.host]
    return [*command, "--log_dir", str(logs)]


def make_plan(job: JobModule, words: list[str], environ: Mapping[str, str]) -> tuple[Plan, argparse.Namespace]:
    """Return the checked plan of arguments, and these. Start nothing and write nothing.

    job: a module as `paddle_te.launch` describes it. words: as for `parse`.

    Raises:
        LaunchError: a wrong argument, or a combination that cannot run.
    """
    args = parse(job, words, environ)
    return plan_for(job, args, environ), args


def _folders(job: JobModule, args: argparse.Namespace, machines: Machines) -> tuple[Path, Path]:
    """Return a run's folder and its output's. Raise LaunchError where they do not fit what is started."""
    data_ranks = machines.world // (ranks_of_a_sequence(args) * args.FSDP)
    folder, output = job.folders(args, machines.nodes.count, data_ranks)
    check_output(args, folder, job.OUTPUT_NAME)
    check_start(args, output, job.OUTPUT_NAME)
    _check_checkpoint(args, output)
    return folder, output


def _check_memory(args: argparse.Namespace, config: Any, layout: Job | None, devices: Devices) -> None:
    if devices.kind != "cpu":
        from paddle_te.launch.cards import check_memory  # here, as it imports the planner

        check_memory(args, config, layout)


def plan_for(job: JobModule, args: argparse.Namespace, environ: Mapping[str, str]) -> Plan:
    """Return `make_plan`'s plan of arguments that are parsed."""
    args.HOST = _find_host(args)
    machines = Machines(find_devices(args, environ), find_nodes(args, environ))
    config = _settled(job, args, machines)
    folder, output = _folders(job, args, machines)
    profile, logs = folder / "profile", machines.folder(folder / "logs")
    program = _program(job, args, config, machines, folder, output)
    layout = program.asked if planner_knows(args) else None
    _check_memory(args, config, layout, machines.devices)
    command = [*launch_command(machines, logs), program.script, *program.words]
    _check_restarts(args, machines.nodes)
    env, unset = _environment(args, machines, environ)
    env |= _profiling(args, machines.nodes)
    nsys = env["ENABLE_PROFILE"] == "1" and args.nsys_profile
    return Plan(
        command=[*_nsys(profile / folder.name), *command] if nsys else command,
        env=env,
        unset=unset,
        script=program.script,
        logs=logs,
        folder=folder,
        output=output,
        devices=machines.devices,
        nodes=machines.nodes,
        layout=layout,
        folders=[logs, output, *([profile] if nsys else [])],
        files=program.files,
    )


def _settled(job: JobModule, args: argparse.Namespace, machines: Machines) -> dict[str, Any]:
    """Return the model's configuration, when the arguments are whole and can run here.

    Fills in those that are left to the planner, and FSDP's "all". Raises LaunchError for what cannot run.
    """
    kind, world = machines.devices.kind, machines.world
    if args.HOST == host.PADDLEFORMERS:
        paddleformers.check_arguments(job, args, kind, machines.nodes)
    check_known(job, args)
    config = job.model_config(args)
    if left_to_planner(args):
        from paddle_te.launch.auto import fill  # here, as it imports the planner

        fill(args, config, world)
    if args.FSDP == "all":
        args.FSDP = max(1, world // ranks_of_a_sequence(args))
    check_asked(job, args, kind, world, config)
    check_here(args, kind)
    return config


def _find_host(args: argparse.Namespace) -> str:
    """HOST, or the one that is installed. Where none is, a dry run is for another machine: PaddleNLP's."""
    try:
        if args.HOST is not None or not host.installed():
            return args.HOST or host.PADDLENLP
        return host.find()
    except host.HostError as error:
        raise LaunchError(str(error)) from error


def _check_checkpoint(args: argparse.Namespace, output: Path) -> None:
    """Check that the checkpoint to resume from is the host's own."""
    checkpoint = find_checkpoint(str(args.resume_step), output)
    if checkpoint is None or (saved_by := host_of(checkpoint)) == args.HOST:
        return
    raise LaunchError(
        f"resume_step={args.resume_step}: {checkpoint} was saved by {host.HOSTS[saved_by]}, and the host is "
        f"{host.HOSTS[args.HOST]}; go on with HOST={saved_by}, or start from the weights with init_weight and another "
        "output folder"
    )


@dataclass(frozen=True)
class Program:
    """The command of each process, with its arguments, and the files that it reads."""

    script: str
    words: list[str]
    files: dict[Path, str | Path]
    asked: Job | None = None  # with PaddleNLP


def _program(
    job: JobModule,
    args: argparse.Namespace,
    config: dict[str, Any],
    machines: Machines,
    folder: Path,
    output: Path,
) -> Program:
    """Return the job in its host's words."""
    kind, world = machines.devices.kind, machines.world
    extra, flags = extra_words(args), job.flags(args, kind, world, output)
    script = _training_script(args)
    if args.HOST == host.PADDLENLP:
        words = [*printed(flags), *extra]
        return Program(script, words, {}, job_of(words, script=name_of(job), world=world))
    if Path(script).name != script_of(job):
        raise LaunchError(f"training_script: {script} is for PaddleNLP; PaddleFormers runs a recipe")
    from paddle_te.launch.paddleformers.start import START, start_files  # here, as it imports NumPy

    recipe, start = folder / paddleformers.RECIPE, folder / START
    text = paddleformers.recipe_text(name_of(job), args, flags, extra, kind, start, output)
    files = start_files(args, flags, config, start, kind)
    return Program(str(paddleformers.SCRIPT), ["train", str(recipe)], {recipe: text, **files})


def _check_restarts(args: argparse.Namespace, nodes: Nodes) -> None:
    if args.MAX_RESTARTS and "resume_from_checkpoint" in extra_flags(args):
        raise LaunchError("MAX_RESTARTS: give resume_step instead of --resume_from_checkpoint in EXTRA_ARGS")
    if args.ELASTIC and (nodes.count > 1 or not args.MAX_RESTARTS):
        raise LaunchError("ELASTIC=1 needs MAX_RESTARTS above 0 and one node")


def _training_script(args: argparse.Namespace) -> str:
    script = Path(args.training_script).absolute()
    if not script.is_file():
        raise LaunchError(f"training_script: there is no file {script}")
    return str(script)


# Paddle's variable for the ports in which rank 0 of several processes listens. Its own range, 35100:64000, overlaps
# those that Linux takes connections' ends from (32768 to 60999): one of these may get the port before rank 0 listens on
# it, or a rank that asks too early may reach itself.
PORT_RANGE = "10000:19999"


def _environment(
    args: argparse.Namespace, machines: Machines, environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the variables to add to the environment, and those to remove."""
    env, unset, devices = dict[str, str](), list[str](), machines.devices
    if ROOT.name not in ("site-packages", "dist-packages"):  # which Python finds by itself, after its own modules
        paths = [str(ROOT), *environ.get("PYTHONPATH", "").split(os.pathsep)]
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    if machines.world == 1:
        env |= devices.selected()
    elif machines.nodes.count == 1:
        env["PORT_RANGE"] = environ.get("PORT_RANGE") or PORT_RANGE
    if args.TP > 1 and devices.kind != "cpu":  # the GPU starts a collective before the GEMM during which it runs
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if devices.by_uuid:  # nvidia-smi, by which UUIDs became numbers, counts in this order
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if args.DETERMINISTIC:
        env |= _deterministic(devices.kind, environ)
    if devices.kind == "cpu":  # Paddle's launcher would go by what it sees
        unset = ["CUDA_VISIBLE_DEVICES"] if "CUDA_VISIBLE_DEVICES" in environ else []
        env |= {"CUSTOM_DEVICE_ROOT": ""} if has_nvgpu(environ) else {}
    return env, unset


# What makes equal runs equal to the bit, by kind of device. Transformer Engine's variable has cuDNN compute attention's
# backward without atomics, which add in an order that changes from run to run. Nothing else on nvgpu adds so; in
# paddlepaddle-gpu cuDNN's other operations do, the embedding's gradient, and cuBLAS where streams share its workspace.
DETERMINISTIC = {
    "cpu": {},
    "nvgpu": {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
    "gpu": {
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "FLAGS_cudnn_deterministic": "1",
        "FLAGS_embedding_deterministic": "1",
    },
}


def _deterministic(kind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for DETERMINISTIC=1."""
    for name, value in DETERMINISTIC[kind].items():
        if environ.get(name, value) != value:
            raise LaunchError(
                f"DETERMINISTIC=1 sets {name}={value}, but the environment has {environ[name]!r}: unset it"
            )
    return DETERMINISTIC[kind]


def _profiling(args: argparse.Namespace, nodes: Nodes) -> dict[str, str]:
    """The environment of `profiling.ProfilerCallback`."""
    if args.nsys_profile and args.PROFILER == "paddle":
        raise LaunchError("PROFILER=paddle and nsys_profile=true exclude each other")
    if not (args.nsys_profile or args.PROFILER == "paddle") or nodes.rank > 0:  # one node tells enough
        return {"ENABLE_PROFILE": "0"}
    first, last, steps = args.PROFILE_START_STEP, args.PROFILE_STOP_STEP, args.MAX_STEPS
    if first > last or steps is not None and first >= steps:
        raise LaunchError(
            f"PROFILE_START_STEP, PROFILE_STOP_STEP: {first} to {last} must be a range of steps, from below "
            f"MAX_STEPS={steps} (steps count from 0), or nothing is recorded"
        )
    names = [option.name for option in VARIABLES if option.name.startswith("PROFILE_")]
    settings = {name: str(int(getattr(args, name))) for name in names}
    return {"ENABLE_PROFILE": "1", "PROFILER": "nsys" if args.nsys_profile else "paddle", **settings}


def _nsys(report: Path) -> list[str]:
    if not shutil.which("nsys"):
        raise LaunchError(
            "nsys_profile=true needs nsys (NVIDIA Nsight Systems) on PATH; install it, or use PROFILER=paddle"
        )
    return [
        *("nsys", "profile", "-s", "none", "-c", "cudaProfilerApi", "-t", "cuda,nvtx"),
        *("--force-overwrite", "true", "--capture-range-end=stop", "-o", str(report)),
    ]
