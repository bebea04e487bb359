#!/usr/bin/env python3
"""Compiles the nvgpu plug-in for the Paddle of this Python, without installing it (pip install ./nvgpu does both).

    python nvgpu/build.py --runtime host     g++ alone
    python nvgpu/build.py --runtime cuda     nvcc as well: a CUDA 13 toolkit's, or that of NVIDIA's pip packages

The last line printed is the folder to put into CUSTOM_DEVICE_ROOT. A build whose sources, flags and Paddle are those of
the last one is not repeated, wherever it lies: a checkout may be copied with its build.
"""

import argparse
import concurrent.futures
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "csrc"
RUNTIMES = ("host", "cuda")
ARCHITECTURES = "80,90"  # machine code for these; newer GPUs translate the PTX of the last one


def paddle_directory() -> Path:
    """Return the installed paddle package, found without importing it."""
    spec = importlib.util.find_spec("paddle")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    # While pip builds in isolation the environment's packages are not on Python's path, but they are there.
    for folder in (sysconfig.get_path("platlib"), sysconfig.get_path("purelib")):
        if Path(folder, "paddle/version/__init__.py").is_file():
            return Path(folder, "paddle")
    sys.exit(f"nvgpu: {sys.executable} has no paddle package to build for: pip install paddlepaddle")


def paddle_version(paddle: Path) -> str:
    """Return "3.3.1 (commit)", as loader.cc reads it when the plug-in is loaded."""
    text = (paddle / "version" / "__init__.py").read_text()
    found = dict(re.findall(r"^(full_version|commit)\s*=\s*'(.*)'", text, re.M))
    return "{full_version} ({commit})".format(**found)


def run(command: Sequence[object]) -> None:
    """Run a command in the folder of the sources, whose names in the command are relative."""
    result = subprocess.run([str(word) for word in command], cwd=SOURCE, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")


@dataclass(frozen=True)
class Job:
    """One compiler call: the source, relative to csrc/; the command; and the runtime, or "shared" by both."""

    source: Path
    command: tuple[str, ...]
    of: str

    def object(self, out: Path) -> Path:
        return out / "objects" / self.of / "_".join(self.source.with_suffix(".o").parts)


def jobs(runtime: str, paddle: Path, architectures: Sequence[str]) -> Iterator[Job]:
    """Yield all compiler calls of a runtime, the slowest first."""

    def each(pattern: str, of: str, *command: str) -> Iterator[Job]:
        for path in sorted(SOURCE.glob(pattern)):
            source = path.relative_to(SOURCE)
            yield Job(source, (*command, "-c", str(source)), of)

    common = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-I.")
    cxx = (os.environ.get("CXX", "g++"), "-Wall", *common)
    paddles = ("-DPADDLE_WITH_CUSTOM_DEVICE", f"-I{paddle}/include", f"-I{paddle}/include/third_party")
    more: list[str] = []
    if runtime == "cuda":
        newest = architectures[-1]
        codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures[:-1]]
        codes.append(f"-gencode=arch=compute_{newest},code=[sm_{newest},compute_{newest}]")
        device = (nvcc(), "-O2", *codes, "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "-I.")
        more.append(f"-I{cuda_home()}/include")
    else:
        device = (*cxx, "-O2", "-x", "c++")
    yield from each("math/*.cu", runtime, *device)
    yield from each("kernels/*.cc", "shared", *cxx, "-O1", *paddles)
    yield from each("plugin.cc", "shared", *cxx, "-O1", *paddles)
    yield from each("profiler.cc", "shared", *cxx, "-O2")
    yield from each(f"{runtime}/*.cc", runtime, *cxx, "-O2", *more)
    definitions = f'-DNVGPU_PADDLE_VERSION="{paddle_version(paddle)}"', f'-DNVGPU_RUNTIME="{runtime}"'
    yield from each("loader.cc", runtime, *cxx, "-O2", *definitions)


def cuda_home() -> Path:
    """Return the toolkit with CUDA's headers and libraries; nvcc on PATH may be a script outside of it."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), Path(nvcc()).resolve().parent.parent]
    for path in [*candidates, "/usr/local/cuda"]:
        if path and (Path(path) / "include" / "cuda_runtime_api.h").is_file():
            return Path(path)
    sys.exit("nvgpu: no cuda_runtime_api.h found; set CUDA_HOME to the CUDA toolkit")


def find_nvcc() -> str | None:
    """Return CUDA_HOME's nvcc, else that of NVIDIA's pip packages beside Paddle, else PATH's; None without."""
    packaged = paddle_directory().parent / "nvidia" / "cu13" / "bin"
    homes = [f"{os.environ['CUDA_HOME']}/bin"] if "CUDA_HOME" in os.environ else []
    for folder in [*homes, packaged, None, "/usr/local/cuda/bin"]:
        if found := shutil.which("nvcc", path=folder and str(folder)):
            return found
    return None


def nvcc() -> str:
    return find_nvcc() or sys.exit(
        "nvgpu: the CUDA runtime needs nvcc: pip install 'nvidia-cuda-nvcc>=13,<14' 'nvidia-cuda-cccl>=13,<14', or a "
        "CUDA 13 toolkit in CUDA_HOME or on PATH"
    )


def digest(paddle: Path, *parts: object) -> str:
    """Return a digest of the parts and of the Paddle, wherever it lies."""
    text = repr((paddle_version(paddle), parts)).replace(str(paddle), "paddle")
    return hashlib.sha256(text.encode()).hexdigest()


def up_to_date(mark: Path, wanted: str) -> bool:
    return mark.is_file() and mark.read_text() == wanted


def sources_of(dependencies: Path) -> list[Path]:
    """Return our own files among those that a compiler wrote down as read (make's format)."""
    names = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    read = {(SOURCE / name).resolve() for name in names}
    return sorted(path for path in read if path.is_relative_to(SOURCE))


def compile_object(job: Job, paddle: Path, out: Path) -> Path:
    """Compile one file unless the command, Paddle's version and all files that it read are the last time's."""
    target = job.object(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    mark, dependencies = target.with_suffix(".from"), target.with_suffix(".d")

    def state() -> str:
        files = sources_of(dependencies) if dependencies.is_file() else []
        return digest(paddle, job, [path.read_bytes() if path.is_file() else None for path in files])

    if not up_to_date(mark, state()):
        mark.unlink(missing_ok=True)
        run([*job.command, "-MMD", "-MF", dependencies, "-o", target])
        mark.write_text(state())
    return target


def build(runtime: str, out: str | Path = HERE / "build", architectures: str = ARCHITECTURES) -> Path:
    """Build the folder out/<runtime> with the compiled libraries. RuntimeError: the compiler's own words."""
    out = Path(out).resolve()
    paddle, built = paddle_directory(), out / runtime
    mark = built / "built_from"
    sources = [path.read_bytes() for path in [Path(__file__), *sorted(SOURCE.rglob("*.*"))]]
    todo = list(jobs(runtime, paddle, architectures.split(",")))
    wanted = digest(paddle, todo, sources)
    built.mkdir(parents=True, exist_ok=True)
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may build at once
        if not up_to_date(mark, wanted):
            mark.unlink(missing_ok=True)
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(lambda job: compile_object(job, paddle, out), todo))
            link(runtime, paddle, objects, built)
            mark.write_text(wanted)
    return built


def link(runtime: str, paddle: Path, objects: Sequence[Path], built: Path) -> None:
    libraries = [f"-L{paddle}/libs", "-l:libphi_core.so", "-l:libphi.so", "-l:libcommon.so", "-ldl", "-lpthread"]
    if runtime == "cuda":
        libraries += [f"-L{cuda_home()}/lib64", f"-L{cuda_home()}/lib", "-l:libcudart.so.13"]
    loader = [path for path in objects if path.stem == "loader"]
    (built / "plugin").mkdir(exist_ok=True)
    plugin = [path for path in objects if path not in loader]
    link_library(plugin, "plugin.map", built / "plugin" / f"libnvgpu_{runtime}.so", libraries)
    link_library(loader, "loader.map", built / "libnvgpu.so", ["-ldl"])


def link_library(objects: Sequence[Path], exports: str, library: Path, needed: Sequence[str]) -> None:
    """Link a library. exports: the linker's script, in csrc/, which says what the library shows to others."""
    compiler = os.environ.get("CXX", "g++")
    run([compiler, "-shared", f"-Wl,--version-script={exports}", *objects, "-o", library, *needed])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=RUNTIMES, required=True)
    parser.add_argument(
        "--out", default=HERE / "build", help="the folder of <runtime>/; default: build beside this file"
    )
    parser.add_argument(
        "--architectures", default=ARCHITECTURES, help="of the GPUs, for the CUDA runtime; default: %(default)s"
    )
    arguments = parser.parse_args()
    try:
        print(build(arguments.runtime, arguments.out, arguments.architectures))
    except RuntimeError as error:
        sys.exit(f"nvgpu: the build failed:\n{error}")


if __name__ == "__main__":
    main()
