"""Where the training processes run: the devices of this machine, the nodes of the job.

Imports neither paddle nor paddlenlp, which take seconds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class LaunchError(ValueError):
    """What is wrong, by the argument's name, and what it may be: one line."""


def _gpu_listing() -> list[str]:
    """A line for each NVIDIA GPU of this machine, and each part of one, by the driver's own tool; [] without it."""
    if not shutil.which("nvidia-smi"):
        return []
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []


def count_gpus(listing: list[str] | None = None) -> int:
    """NVIDIA GPUs of this machine; listing: what `nvidia-smi -L` says, None: to be asked for."""
    return sum(line.startswith("GPU ") for line in (_gpu_listing() if listing is None else listing))


def gpu_names() -> list[str]:
    """What the driver calls each NVIDIA GPU of this machine."""
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", "\n".join(_gpu_listing()), re.MULTILINE)


def _cuda_devices(chosen: str) -> list[str]:
    """The devices that CUDA shows of those that CUDA_VISIBLE_DEVICES names: up to the first one that is not there.

    All of them where the driver's tool shows no GPU, so that nobody can tell.
    """
    named, listing = [] if chosen == "-1" else _split(chosen), _gpu_listing()
    gpus, identifiers = count_gpus(listing), re.findall(r"UUID: ([\w-]+)", "\n".join(listing))

    def is_there(name):  # an identifier may be cut short
        return int(name) < gpus if name.isdigit() else any(each.startswith(name) for each in identifiers)

    return [*itertools.takewhile(is_there, named)] if gpus else named


def _has_paddle_gpu() -> bool:
    try:
        return bool(importlib.metadata.version("paddlepaddle-gpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


def has_nvgpu(environ: Mapping[str, str]) -> bool:
    """Whether Paddle loads the nvgpu plug-in: from CUSTOM_DEVICE_ROOT, or, unless that is set, as it is installed."""
    root = environ.get("CUSTOM_DEVICE_ROOT")
    if root is not None:
        return bool(root)
    paddle = importlib.util.find_spec("paddle")
    return paddle is not None and (Path(paddle.origin).parents[1] / "paddle_custom_device/libnvgpu.so").is_file()


def _split(text: str | None) -> list[str]:
    return [part for part in re.split(r"[,\s]+", text or "") if part]


HOST_RUNTIME_DEVICES = 8  # how many the nvgpu plug-in's host runtime shows, unless NVGPU_HOST_DEVICES says


def visible_devices(kind: str, environ: Mapping[str, str]) -> list[str]:
    """The devices a process can see, by the numbers paddle.distributed.launch knows them by; [] if there are none.

    Raises:
        LaunchError: NVGPU_HOST_DEVICES is no number.
    """
    if kind == "cpu":
        return ["0"]
    chosen = environ.get("CUDA_VISIBLE_DEVICES" if kind == "gpu" else "NVGPU_VISIBLE_DEVICES", "all")
    if chosen != "all":
        return _cuda_devices(chosen) if kind == "gpu" else [] if chosen == "-1" else _split(chosen)
    host_devices = environ.get("NVGPU_HOST_DEVICES")
    if kind == "nvgpu" and (host_devices or not count_gpus()):
        if host_devices and not host_devices.isdigit():
            raise LaunchError(f"NVGPU_HOST_DEVICES: {host_devices!r} must be a whole number")
        return [str(i) for i in range(int(host_devices or HOST_RUNTIME_DEVICES))]
    shown = environ.get("CUDA_VISIBLE_DEVICES")  # which leaves nvgpu, on CUDA, the numbers 0 to n - 1
    count = count_gpus() if shown is None else len(_cuda_devices(shown))
    return [str(i) for i in range(count)]


@dataclass(frozen=True)
class Devices:
    kind: str  # gpu, nvgpu or cpu: what --device gets
    ids: list[str]
    visible: list[str]

    def selected(self) -> dict[str, str]:
        """How Paddle is told one process's device: its place among the visible ones."""
        place = self.visible.index(self.ids[0]) if self.ids[0] in self.visible else self.ids[0]
        return {} if self.kind == "cpu" else {f"FLAGS_selected_{self.kind}s": str(place)}


def find_devices(args: argparse.Namespace, environ: Mapping[str, str]) -> Devices:
    """DEVICE and DEVICES if given; else paddlepaddle-gpu's GPUs, the nvgpu plug-in's devices, or one CPU.

    Raises:
        LaunchError: the kind asked for has no device here, or DEVICES names one that is not here.
    """
    kind = args.DEVICE
    if kind is None:
        if _has_paddle_gpu() and visible_devices("gpu", environ):
            kind = "gpu"
        elif has_nvgpu(environ) and (environ.get("CUSTOM_DEVICE_ROOT") or count_gpus()):
            kind = "nvgpu"  # installed it may be where there is no GPU
        elif args.DRY_RUN and args.DEVICES and args.precision != "fp32":
            kind = "gpu"  # a dry run for another machine: only accelerators take this precision
        else:
            kind = "cpu"
    visible = visible_devices(kind, environ)
    ids = args.DEVICES or visible
    if kind == "nvgpu" and not args.DEVICES and not environ.get("NVGPU_HOST_DEVICES") and not count_gpus():
        ids = visible[:1]  # the host runtime's devices are made of CPU time: more than one must be asked for
    if not ids:
        raise LaunchError(
            f"DEVICE: no device of kind {kind} found here; name them with DEVICES=0,1,... or set DEVICE=cpu"
        )
    absent = [i for i in ids if i not in visible]
    if absent and kind != "cpu" and not args.DRY_RUN:
        raise LaunchError(f"DEVICES: no {kind} {', '.join(absent)} here; there are {', '.join(visible) or 'none'}")
    return Devices(kind, ids, visible)


@dataclass(frozen=True)
class Nodes:
    count: int = 1
    rank: int = 0
    master: str = ""  # address:port
    host: str = "127.0.0.1"  # this node's address


def find_nodes(args: argparse.Namespace, environ: Mapping[str, str]) -> Nodes:
    """The nodes of the job, from NNODES, NODE_RANK and MASTER, or from Slurm and IP_STR.

    Raises:
        LaunchError: several nodes and one of these is missing or makes no sense.
    """
    addresses = _split(args.IP_STR)
    count, rank = args.NNODES, args.NODE_RANK
    if count == 1:
        return Nodes(host=addresses[0] if addresses else "127.0.0.1")
    if rank is None or rank >= count:
        raise LaunchError(f"NODE_RANK: with {count} nodes it must be 0 to {count - 1} (one a node), not {rank}")
    _check_one_task_a_node(environ)
    if addresses and len(addresses) != count:
        raise LaunchError(f"IP_STR: it must hold {count} addresses, one a node, not {len(addresses)}")
    master = args.MASTER or (addresses[0] if addresses else None)
    if not master:
        raise LaunchError(f"MASTER: with {count} nodes it must be address:port of the node with NODE_RANK 0")
    address, _, port = master.partition(":")
    job = environ.get("SLURM_JOB_ID", "")  # two jobs may share a node's network, so each has its own two ports
    port = port or str(args.MASTER_PORT or (20000 + 2 * (int(job) % 5000) if job.isdigit() else 6070))
    if not port.isdigit() or not 0 < int(port) < 65535:  # the launchers take the next one, too
        raise LaunchError(f"MASTER: {address}:{port} must be address:port, the port from 1 to 65534")
    if not args.DRY_RUN:
        name, address = address, _numeric(address)
        if rank == 0 and address.startswith("127.") and name not in (address, "localhost"):
            raise LaunchError(
                f"MASTER: {name!r} is {address} on this node, where no other node reaches it (/etc/hosts says so on "
                "Debian and Ubuntu); give the address that the other nodes know"
            )
    return Nodes(count, rank, f"{address}:{port}", _own_address(rank, address, addresses))


def _check_one_task_a_node(environ: Mapping[str, str]) -> None:
    """srun --ntasks-per-node=8, usual where tasks are ranks, would start eight launchers on each node."""
    tasks, nodes = (environ.get(f"SLURM_STEP_NUM_{name}") for name in ("TASKS", "NODES"))
    if "NODE_RANK" not in environ and tasks != nodes:
        raise LaunchError(
            f"SLURM_STEP_NUM_TASKS: srun starts this {tasks} times on {nodes} nodes; start it once a node "
            "(--ntasks-per-node=1): it starts a process for each device itself"
        )


def _numeric(name: str) -> str:
    """Paddle's rendezvous server starts where --master equals the node's own address, so names do not do."""
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise LaunchError(f"MASTER: the address of {name!r} cannot be found ({error})") from error


def _own_address(rank: int, master: str, addresses: list[str]) -> str:
    """This node's address as the others reach it; the host name's may be a loopback address (Debian's 127.0.1.1)."""
    if rank == 0:
        return master
    if addresses:
        return addresses[rank]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing; only chooses the route
        except OSError:
            return ""
        address = probe.getsockname()[0]
    if not address.startswith("127."):
        return address
    # nodes of one machine, as in tests: their names tell their loopback addresses, the route 127.0.0.1 for all of them
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return address
