"""The devices that a job's processes run on, on this machine.

Imports neither paddle nor paddlenlp, which take seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paddle_te.launch.errors import LaunchError
from paddle_te.runs import nvidia
from paddle_te.runs.nvidia import listing as _gpu_listing


def count_gpus(listing: list[str] | None = None) -> int:
    """NVIDIA GPUs of this machine; listing: what `nvidia-smi -L` says, None: to be asked for."""
    return sum(line.startswith("GPU ") for line in (_gpu_listing() if listing is None else listing))


def gpu_names() -> list[str]:
    """Return what the driver calls each NVIDIA GPU of this machine."""
    return nvidia.names(_gpu_listing())


def _place(name: str, listing: list[str]) -> int | None:
    """Return the GPU of a listing, counted from 0, that a number or a UUID names; None for none, or several.

    The UUID may be cut short. A part of a GPU (MIG-…) has its GPU's place.
    """
    gpus = count_gpus(listing)
    if name.isdigit():
        return int(name) if int(name) < gpus else None
    places, gpu = {}, -1  # {UUID: place}
    for line in listing:
        gpu += line.startswith("GPU ")
        if uuid := re.search(r"UUID: ([\w-]+)", line):
            places[uuid[1]] = gpu
    found = [place for uuid, place in places.items() if uuid.startswith(name)]
    return places.get(name, found[0] if len(found) == 1 else None)


def _cuda_devices(chosen: str, listing: list[str] | None = None) -> list[str]:
    """The devices that CUDA shows of those that CUDA_VISIBLE_DEVICES names: up to the first one that is not there.

    All of them where the driver's tool shows no GPU, so that nobody can tell.
    """
    named, listing = [] if chosen == "-1" else words_of(chosen), _gpu_listing() if listing is None else listing
    is_there = lambda name: _place(name, listing) is not None  # noqa: E731
    return [*itertools.takewhile(is_there, named)] if count_gpus(listing) else named


def _has_paddle_gpu() -> bool:
    from importlib import metadata  # here, as it imports what reads e-mail

    try:
        return bool(metadata.version("paddlepaddle-gpu"))
    except metadata.PackageNotFoundError:
        return False


def has_nvgpu(environ: Mapping[str, str]) -> bool:
    """Whether Paddle loads the nvgpu plug-in: from CUSTOM_DEVICE_ROOT, or, unless that is set, as it is installed."""
    root = environ.get("CUSTOM_DEVICE_ROOT")
    if root is not None:
        return bool(root)
    paddle = importlib.util.find_spec("paddle")
    if paddle is None or paddle.origin is None:  # a mere folder of that name has no origin
        return False
    return (Path(paddle.origin).parents[1] / "paddle_custom_device/libnvgpu.so").is_file()


def words_of(text: str | None) -> list[str]:
    """Return what commas or spaces part."""
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
        return _cuda_devices(chosen) if kind == "gpu" else [] if chosen == "-1" else words_of(chosen)
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
    """The devices of this node that a job runs on, by the numbers that `visible_devices` gives them."""

    kind: str  # gpu, nvgpu or cpu: what --device gets
    ids: list[str]
    visible: list[str]  # all that a process can see, the job's among them
    by_uuid: tuple[str, ...] = ()  # DEVICES, where it has UUIDs

    def selected(self) -> dict[str, str]:
        """Return how Paddle is told one process's device: its place among the visible ones."""
        place = self.visible.index(self.ids[0]) if self.ids[0] in self.visible else self.ids[0]
        return {} if self.kind == "cpu" else {f"FLAGS_selected_{self.kind}s": str(place)}


def _kind_here(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Return what DEVICE is where it is not given."""
    if _has_paddle_gpu() and visible_devices("gpu", environ):
        return "gpu"
    if has_nvgpu(environ) and (environ.get("CUSTOM_DEVICE_ROOT") or count_gpus()):
        return "nvgpu"  # installed it may be where there is no GPU
    if args.DRY_RUN and (args.GPU or args.DEVICES and args.precision != "fp32"):
        return "gpu"  # a dry run for another machine, which names its GPUs or a precision that only they take
    return "cpu"


def find_devices(args: argparse.Namespace, environ: Mapping[str, str]) -> Devices:
    """DEVICE and DEVICES if given; else paddlepaddle-gpu's GPUs, the nvgpu plug-in's devices, or one CPU.

    Raises:
        LaunchError: the kind asked for has no device here, or DEVICES names one that is not here.
    """
    kind = _kind_here(args, environ) if args.DEVICE is None else args.DEVICE
    visible = visible_devices(kind, environ)
    ids = _numbers(args, kind, environ) or visible
    if kind == "nvgpu" and not args.DEVICES and not environ.get("NVGPU_HOST_DEVICES") and not count_gpus():
        ids = visible[:1]  # the host runtime's devices are made of CPU time: more than one must be asked for
    if not ids:
        raise LaunchError(
            f"DEVICE: no device of kind {kind} found here; name them with DEVICES=0,1,... or set DEVICE=cpu"
        )
    absent = [i for i in ids if i not in visible]
    if absent and kind != "cpu" and not args.DRY_RUN:
        raise LaunchError(f"DEVICES: no {kind} {', '.join(absent)} here; visible: {', '.join(visible) or 'none'}")
    by_uuid = () if all(map(str.isdigit, args.DEVICES or ())) else tuple(args.DEVICES)
    return Devices(kind, ids, visible, by_uuid)


def has_gpu(uuid: str, environ: Mapping[str, str]) -> bool:
    """Return whether CUDA shows the GPU of this UUID."""
    listing = _gpu_listing()
    return _position(uuid, _shown(environ, listing), listing) is not None


def _shown(environ: Mapping[str, str], listing: list[str]) -> list[str]:
    """The GPUs that CUDA shows, by number or UUID."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    return [str(place) for place in range(count_gpus(listing))] if chosen is None else _cuda_devices(chosen, listing)


def _numbers(args: argparse.Namespace, kind: str, environ: Mapping[str, str]) -> list[str]:
    """DEVICES, as `visible_devices` calls them: UUIDs are looked up in what the driver's tool shows.

    Raises:
        LaunchError: a UUID of no GPU here, of a part of one, or two names for the same.
    """
    names = args.DEVICES or []
    uuids = [name for name in names if not name.isdigit()]
    if not uuids:
        return names
    if kind == "cpu":
        raise LaunchError(f"DEVICES: {uuids[0]} is a GPU's name, and this runs on the CPU; give numbers, or DEVICE=gpu")
    if parts := [name for name in uuids if name.startswith("MIG-")]:
        raise LaunchError(
            f"DEVICES: {parts[0]} is a part of a GPU, with which the processes of a job cannot communicate; name whole "
            "GPUs, or set CUDA_VISIBLE_DEVICES to that part for a job of one process"
        )
    listing = _gpu_listing()
    if not count_gpus(listing) and args.DRY_RUN:
        print("note: no GPU is seen here, so the command counts those of DEVICES from 0", file=sys.stderr)
        return [str(place) for place in range(len(names))]
    here = _shown(environ, listing)
    numbers = [name if name.isdigit() else _number_of(name, here, kind, listing) for name in names]
    if len({*numbers}) < len(numbers):
        raise LaunchError(f"DEVICES: {','.join(names)} names a GPU twice")
    return numbers


def _number_of(uuid: str, here: list[str], kind: str, listing: list[str]) -> str:
    """What `visible_devices` calls the GPU of a UUID. here: `_shown`'s."""
    position = _position(uuid, here, listing)
    if position is None:
        known = re.findall(r"UUID: (GPU-[\w-]+)", "\n".join(listing))
        there = ", ".join(known) or "none"
        raise LaunchError(f"DEVICES: {uuid} is the UUID of no GPU here, or of several; nvidia-smi -L shows {there}")
    return here[position] if kind == "gpu" else str(position)


def _position(uuid: str, here: list[str], listing: list[str]) -> int | None:
    """Where the GPU of a UUID stands among those that CUDA shows, `here`; None where it does not."""
    place, places = _place(uuid, listing), [_place(name, listing) for name in here]
    return places.index(place) if place is not None and place in places else None
