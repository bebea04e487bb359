#!/usr/bin/env python3
"""Builds the nvgpu plug-in for the Paddle of this Python.

    python nvgpu/build.py --runtime host     g++ alone
    python nvgpu/build.py --runtime cuda     nvcc as well: a CUDA 13 toolkit's, or the extra `nvgpu`'s

The last line printed is the folder to put into CUSTOM_DEVICE_ROOT; with --install it is the one that Paddle looks into
by itself. A build whose sources, flags and Paddle are those of the last one is not repeated.
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "src"
ARCHITECTURES = "80,90"  # machine code for these; newer GPUs translate the PTX of the last one


def paddle_directory():
    """The installed paddle package, found without importing it."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        sys.exit(f"nvgpu: {sys.executable} has no paddle package to build for: pip install paddlepaddle")
    return Path(spec.origin).parent


def paddle_version(paddle):
    """ "3.3.1 (commit)", as loader.cc reads it when the plug-in is loaded."""
    text = (paddle / "version" / "__init__.py").read_text()
    version, commit = (re.search(rf"^{name}\s*=\s*'(.*)'", text, re.M).group(1) for name in ("full_version", "commit"))
    return f"{version} ({commit})"


def run(command):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")


def commands(runtime, paddle, architectures):
    """Compiler calls, the slowest first, as (source, command)."""
    common = ["-std=c++17", "-fPIC", "-fvisibility=hidden", f"-I{SOURCE}"]
    version = [f'-DNVGPU_PADDLE_VERSION="{paddle_version(paddle)}"', f'-DNVGPU_RUNTIME="{runtime}"']
    cxx = [os.environ.get("CXX", "g++"), "-Wall", *common]
    with_paddle = [
        *cxx,
        "-O1",
        *version,
        "-DPADDLE_WITH_CUSTOM_DEVICE",
        f"-I{paddle}/include",
        f"-I{paddle}/include/third_party",
    ]
    if runtime == "cuda":
        newest = architectures[-1]
        codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures[:-1]]
        codes.append(f"-gencode=arch=compute_{newest},code=[sm_{newest},compute_{newest}]")
        device = [nvcc(), "-O2", *codes, "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", f"-I{SOURCE}"]
        plain = [*cxx, "-O2", f"-I{cuda_home()}/include"]
    else:
        device = [*cxx, "-O2", "-x", "c++"]
        plain = [*cxx, "-O2"]
    other = "host" if runtime == "cuda" else "cuda"
    for source in sorted(SOURCE.glob("math/*.cu")):
        yield source, [*device, "-c", source]
    for source in [*sorted(SOURCE.glob("kernels/*.cc")), SOURCE / "plugin.cc"]:
        yield source, [*with_paddle, "-c", source]
    for source in [*sorted(SOURCE.glob("*.cc")), *sorted(SOURCE.glob("math/*.cc"))]:
        if source.stem != "plugin" and not source.stem.endswith(f"_{other}"):
            yield source, [*plain, *version, "-c", source]


def cuda_home():
    """The toolkit with CUDA's headers and libraries; nvcc on PATH may be a script outside of it."""
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), Path(nvcc()).resolve().parent.parent]
    for path in [*candidates, "/usr/local/cuda"]:
        if path and (Path(path) / "include" / "cuda_runtime_api.h").is_file():
            return Path(path)
    sys.exit("nvgpu: no cuda_runtime_api.h found; set CUDA_HOME to the CUDA toolkit")


def nvcc():
    """CUDA_HOME's, else that of NVIDIA's pip packages beside Paddle, else PATH's."""
    packaged = paddle_directory().parent / "nvidia" / "cu13" / "bin"
    homes = [f"{os.environ['CUDA_HOME']}/bin"] if "CUDA_HOME" in os.environ else []
    for folder in [*homes, packaged, None, "/usr/local/cuda/bin"]:
        if found := shutil.which("nvcc", path=folder and str(folder)):
            return found
    sys.exit(
        "nvgpu: the CUDA runtime needs nvcc: pip install -c constraints.txt '.[nvgpu]', or a CUDA 13 toolkit "
        "in CUDA_HOME or on PATH"
    )


def digest(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def up_to_date(mark, wanted):
    return mark.is_file() and mark.read_text() == wanted


def sources_of(dependencies):
    """Our own files among those that a compiler wrote down as read (make's format)."""
    names = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    return sorted({Path(name).resolve() for name in names if Path(name).resolve().is_relative_to(SOURCE)})


def compile_object(source, command, objects):
    """Compiles one file unless the command and all files that it read are those of the last time."""
    target = objects / "_".join(source.relative_to(SOURCE).with_suffix(".o").parts)
    mark, dependencies = target.with_suffix(".from"), target.with_suffix(".d")

    def state():
        files = sources_of(dependencies) if dependencies.is_file() else []
        return digest(command, [path.read_bytes() if path.is_file() else None for path in files])

    if not up_to_date(mark, state()):
        mark.unlink(missing_ok=True)
        run([*command, "-MMD", "-MF", dependencies, "-o", target])
        mark.write_text(state())
    return target


def build(runtime, out, architectures):
    paddle = paddle_directory()
    mark, objects = out / "built_from", out / "objects"
    sources = [path.read_bytes() for path in [Path(__file__), *sorted(SOURCE.rglob("*.*"))]]
    jobs = list(commands(runtime, paddle, architectures))
    wanted = digest(paddle_version(paddle), jobs, sources)
    objects.mkdir(parents=True, exist_ok=True)
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may build at once
        if up_to_date(mark, wanted):
            return
        mark.unlink(missing_ok=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            made = list(pool.map(lambda job: compile_object(*job, objects), jobs))
        link(runtime, paddle, made, out)
        mark.write_text(wanted)


def link(runtime, paddle, objects, out):
    compiler = os.environ.get("CXX", "g++")
    libraries = [f"-L{paddle}/libs", "-l:libphi_core.so", "-l:libphi.so", "-l:libcommon.so", "-ldl", "-lpthread"]
    if runtime == "cuda":
        libraries += [f"-L{cuda_home()}/lib64", f"-L{cuda_home()}/lib", "-l:libcudart.so.13"]
    loader = [path for path in objects if path.stem == "loader"]
    (out / "plugin").mkdir(exist_ok=True)
    plugin = [path for path in objects if path not in loader]
    run([compiler, "-shared", *plugin, "-o", out / "plugin" / f"libnvgpu_{runtime}.so", *libraries])
    run([compiler, "-shared", *loader, "-o", out / "libnvgpu.so", "-ldl"])


def install(built):
    """Copies the libraries to where Paddle looks when CUSTOM_DEVICE_ROOT is not set. Returns that folder."""
    folder = paddle_directory().parent / "paddle_custom_device"
    (folder / "plugin").mkdir(parents=True, exist_ok=True)
    for library in [*sorted(built.glob("plugin/*.so")), built / "libnvgpu.so"]:
        target = folder / library.relative_to(built)
        fresh = target.with_suffix(f".{os.getpid()}")
        shutil.copy2(library, fresh)
        fresh.replace(target)  # never written over: a process may run it
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", choices=("host", "cuda"), required=True)
    parser.add_argument("--out", type=Path, help="default: build/nvgpu-<runtime> in the repository")
    parser.add_argument(
        "--architectures", default=ARCHITECTURES, help="of the GPUs, for the CUDA runtime; default: %(default)s"
    )
    parser.add_argument(
        "--install", action="store_true", help="also into this Python, which then needs no CUSTOM_DEVICE_ROOT"
    )
    arguments = parser.parse_args()
    out = arguments.out or HERE.parent / "build" / f"nvgpu-{arguments.runtime}"
    try:
        build(arguments.runtime, out.resolve(), arguments.architectures.split(","))
    except RuntimeError as error:
        sys.exit(f"nvgpu: the build failed:\n{error}")
    print(install(out.resolve()) if arguments.install else out.resolve())


if __name__ == "__main__":
    main()
