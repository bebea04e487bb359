"""Report what this machine has and which backends can run on it: `python -m paddle_te.env [--json] [--save FILE]`.

Nothing here fails because something is missing: what is missing is the report. Exit status 0; 1 where FILE could not
be written.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paddle_te import host, native
from paddle_te.native import Problem
from paddle_te.options import BACKENDS
from paddle_te.outputs import NotWritten, file_argument, write_file
from paddle_te.runs import screen

PRECISIONS = ("fp32", "bf16", "fp8")
PACKAGES = (
    "paddle_te",
    "paddlepaddle",
    "paddlepaddle-gpu",
    "paddlenlp",
    "paddleformers",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
    "numpy",
    "visualdl",
)
# What brings Paddle's CPU wheel and a host, in versions that work together
INSTALL = {
    host.PADDLENLP: "pip install -c constraints.txt '.[cpu,paddlenlp]'",
    host.PADDLEFORMERS: "pip install -c locks/paddleformers/python{}.{}.txt '.[cpu,paddleformers]'".format(
        *sys.version_info[:2]
    ),
}


def package_versions() -> dict[str, str]:
    """Return {distribution: version} of the installed ones among PACKAGES."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def import_problems() -> list[Problem]:
    """Return the problems that keep Paddle and the host that is installed, or PaddleNLP, from being imported."""
    hosts = host.installed() or [host.PADDLENLP]
    for name, remedy in (
        ("paddle", f"{INSTALL[hosts[0]]}, or paddlepaddle-gpu for an NVIDIA GPU"),
        *((f"{each}.transformers", f"{INSTALL[each]}: other versions of what it requires break it") for each in hosts),
    ):
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken package may raise anything
            return [Problem(f"import {name} fails: {type(error).__name__}: {error}", remedy)]
    return []


def training_device() -> str:
    """Return the Paddle device to train on here, as --device takes it: gpu, nvgpu (nvgpu) or cpu.

    Raises ImportError without Paddle.
    """
    import paddle

    if paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count():
        return "gpu"
    # a plug-in may be installed where there is no GPU; Paddle calls a single device "nvgpu", several "nvgpu:0", ...
    available = paddle.device.get_available_custom_device() or []
    return "nvgpu" if any(name.split(":")[0] == "nvgpu" for name in available) else "cpu"


def nvidia_gpus() -> list[dict[str, str]]:
    """Return a dict for each NVIDIA GPU, as nvidia-smi tells; [] without.

    Keys: name, driver_version, memory, compute_capability.
    """
    fields = ["name", "driver_version", "memory.total", "compute_cap"]
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):  # a driver that hangs, too
        return []
    names = ["name", "driver_version", "memory", "compute_capability"]
    return [dict(zip(names, line.split(", "), strict=True)) for line in result.stdout.strip().splitlines()]


def backend_problems(backend: str, precision: str) -> list[Problem]:
    """Say why `backend` cannot train in `precision` on Paddle's present device; an empty list when it can.

    Args:
        backend: none, pd or te.
        precision: fp32, bf16 or fp8 (pd emulates fp8's rounding).
    """
    if backend == "none" and precision == "fp8":
        return [Problem("the host's own layers have no fp8", "use backend te, or pd to emulate fp8's rounding")]
    if backend == "te":
        return _te_problems(precision)
    if precision == "bf16":
        return _bf16_problems()
    return []


def _bf16_problems() -> list[Problem]:
    from paddle_te import device

    if device.bf16_supported():
        return []
    what = f"Paddle cannot train in bf16 on this {device.kind()}"
    return [Problem(what, "train in fp32, or on an NVIDIA GPU (Ampere or newer)")]


def _te_problems(precision: str) -> list[Problem]:
    from paddle_te import device

    problems = []
    if precision == "fp32":
        problems.append(Problem("Transformer Engine's layers compute in bf16 and fp8", "train in bf16"))
    if device.compute_capability() is None:
        remedy = "install paddlepaddle-gpu, or the nvgpu plug-in (pip install ./nvgpu; its README)"
        problems.append(Problem(f"Paddle's device here, {device.kind()}, is no NVIDIA GPU", remedy))
    return problems + native.diagnose(fp8=precision == "fp8")


def backends() -> dict[str, dict[str, list[Problem]]]:
    """Return {precision: {backend: [Problem, …]}} for all of them; an empty list: usable."""
    if problems := import_problems():
        return {precision: {backend: problems for backend in BACKENDS} for precision in PRECISIONS}
    import paddle

    previous = paddle.device.get_device()
    paddle.set_device(training_device())
    try:
        return {
            precision: {backend: backend_problems(backend, precision) for backend in BACKENDS}
            for precision in PRECISIONS
        }
    finally:
        paddle.set_device(previous)


def usable_backends(precision: str = "fp32") -> list[str]:
    """Return the backends (none, pd, te) that can train in `precision` here, on `training_device()`.

    Raises ValueError for a precision other than fp32, bf16 and fp8.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r}: it may be {', '.join(PRECISIONS)}")
    return [backend for backend, problems in backends()[precision].items() if not problems]


def report() -> dict[str, Any]:
    """Return all of it, as plain data: what --json prints."""
    reasons = backends()
    return {
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        },
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": package_versions(),
        "nvidia_gpus": nvidia_gpus(),
        "native_libraries": native.report(),
        "device": None if import_problems() else training_device(),
        "usable": {
            precision: [backend for backend, problems in of.items() if not problems]
            for precision, of in reasons.items()
        },
        "unusable": {
            precision: {
                backend: [problem._asdict() for problem in problems] for backend, problems in of.items() if problems
            }
            for precision, of in reasons.items()
        },
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def format_report(report: Mapping[str, Any]) -> str:
    """Return the report as text."""
    machine, lines = report["machine"], []

    def section(title: str, rows: Sequence[tuple[str, str]]) -> None:
        lines.extend([title, *(f"  {name:<24} {text}".rstrip() for name, text in rows), ""])

    rows = [("system", machine["system"]), ("processor", f"{machine['processor']}, {machine['cores']} cores")]
    rows.append(("memory", f"{machine['memory_bytes'] / 2**30:.1f} GiB"))
    for number, gpu in enumerate(report["nvidia_gpus"]):
        rows.append(
            (f"GPU {number}", "{name}, {memory}, sm {compute_capability}, driver {driver_version}".format(**gpu))
        )
    section("Machine", rows if report["nvidia_gpus"] else [*rows, ("NVIDIA GPU", "none found (nvidia-smi)")])
    python = report["python"]
    section("Versions", [("python", f"{python['version']}  {python['executable']}"), *report["packages"].items()])
    libraries = [
        (
            name,
            f"{entry['version'] or '?'}  {', '.join(entry['paths'])}"
            + ("  DUPLICATE" if len(entry["paths"]) > 1 else ""),
        )
        for name, entry in report["native_libraries"].items()
    ]
    section("Native libraries in this process", libraries or [("none", "")])
    section(
        f"Backends, training on {report['device'] or 'no device'}",
        [
            (precision, "   ".join(f"{backend}: {_answer(backend, precision, usable)}" for backend in BACKENDS))
            for precision, usable in report["usable"].items()
        ],
    )
    lines.append("Why not")
    for what, remedy, where in _reasons(report["unusable"]):
        lines.append(f"  {where}: {what}\n      remedy: {remedy}")
    return "\n".join(lines)


def _answer(backend: str, precision: str, usable: Sequence[str]) -> str:
    if backend not in usable:
        return "no"
    return "emulated" if (backend, precision) == ("pd", "fp8") else "yes"


def _reasons(unusable: Mapping[str, Mapping[str, Sequence[Mapping[str, str]]]]) -> Iterator[tuple[str, str, str]]:
    """Yield (what, remedy, "te (bf16, fp8), …") with each reason once."""
    places: dict[tuple[str, str], dict[str, list[str]]] = {}
    for precision, backends_ in unusable.items():
        for backend, problems in backends_.items():
            for problem in problems:
                places.setdefault((problem["what"], problem["remedy"]), {}).setdefault(backend, []).append(precision)
    for (what, remedy), of in places.items():
        yield what, remedy, ", ".join(f"{backend} ({', '.join(precisions)})" for backend, precisions in of.items())


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What is here, and which backends run.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--save", type=file_argument, metavar="FILE", help="also write the JSON to FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = make_parser().parse_args(argv)
    screen.before_imports()
    found = report()
    print(json.dumps(found, indent=2) if args.json else format_report(found))
    if args.save:
        try:
            write_file("--save", args.save, json.dumps(found, indent=2) + "\n")
        except NotWritten as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
