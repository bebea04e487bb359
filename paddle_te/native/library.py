"""Find and load Transformer Engine and the CUDA libraries under it.

One copy of each library per process: kernels launched through a second libcudart silently do nothing, and a second
cuDNN disables fused attention. So each is looked up by SONAME among those already loaded, then in the folders of
PADDLE_TE_CUDA_LIBRARIES (`choice`), then in the `nvidia` pip packages, then where the system's loader finds it.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.metadata
import importlib.util
import mmap
import os
import re
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import TypedDict

from paddle_te.native import choice
from paddle_te.native.errors import BackendUnavailable, Problem

LIBRARY_VARIABLE = "PADDLE_TE_LIBRARY"
ANY_VERSION_VARIABLE = "PADDLE_TE_ANY_VERSION"
SUPPORTED = "2.20"
MIN_CUDNN = 91200
MIN_CAPABILITY, MIN_CAPABILITY_FP8 = (8, 0), (8, 9)

# name: pip package. In loading order: each before those that need it, and all before TE, whose loader would otherwise
# find other copies.
TOOLKIT = {
    "cudart": "nvidia-cuda-runtime",
    "cublasLt": "nvidia-cublas",
    "cublas": "nvidia-cublas",
    "nvrtc": "nvidia-cuda-nvrtc",
}
CUDNN_PARTS = "graph ops cnn adv engines_runtime_compiled engines_precompiled heuristic".split()
OTHERS = {
    **{name: ("nvidia-cudnn", f"lib{name}.so.9") for name in ["cudnn", *(f"cudnn_{part}" for part in CUDNN_PARTS)]},
    "nccl": ("nvidia-nccl", "libnccl.so.2"),
}

_lock = threading.RLock()


class LoadedLibrary(TypedDict):
    """A native library in this process. A duplicate means wrong results sooner or later: remove one of its paths."""

    version: str | None
    paths: list[str]
    duplicate: bool


_loaded: dict[str, ctypes.CDLL] = {}  # name -> ctypes.CDLL, filled by the first load that succeeds


def load(fp8: bool = False) -> ModuleType:
    """Return the extension module `_shim`, bound to the loaded libraries.

    fp8: require GPUs that compute in fp8. Raises BackendUnavailable listing every missing condition.
    """
    problems = diagnose(fp8) if fp8 or not _loaded else []
    if problems:
        raise BackendUnavailable(problems)
    from paddle_te.native import _shim  # type: ignore[attr-defined]  # compiled

    return _shim


def loaded(name: str) -> ctypes.CDLL:
    """Return the library that `load` has loaded, such as "nvrtc"."""
    return _loaded[name]


def cudnn_version() -> tuple[int, int]:
    """Return (major, minor) of the cuDNN that `load` has loaded."""
    number = loaded("cudnn").cudnnGetVersion()
    return number // 10000, number // 100 % 100


def cublas_version() -> tuple[int, int]:
    """Return (major, minor) of the cuBLASLt that `load` has loaded."""
    number = loaded("cublasLt").cublasLtGetVersion()
    return number // 10000, number // 100 % 100


def diagnose(fp8: bool = False) -> list[Problem]:
    """Return every condition that keeps Transformer Engine from running here; none: `load` works.

    Never raises. Loads the libraries when nothing is missing as seen from outside.
    """
    try:
        with _lock:
            problems = _extension_problems() + gpu_problems(fp8)
            if _loaded:
                return problems
            te, te_problems = find_transformer_engine()
            problems += te_problems
            if te:
                cuda = cuda_major(te)
                paths, cuda_problems = find_cuda_libraries(cuda)
                problems += cuda_problems + _header_problems(cuda) + _driver_problems(cuda)
                problems = problems or _open_all(te, paths, cuda)
            return problems
    except Exception as e:  # the environment report must come out whatever is broken
        return [Problem(f"the check itself failed: {type(e).__name__}: {e}", "report this as a bug")]


def report() -> dict[str, LoadedLibrary]:
    """Return the native libraries in this process by name, from /proc/self/maps."""
    pattern = re.compile(r"(/\S*/lib(transformer_engine|cuda|cudart|cublasLt|cublas|nvrtc|nccl|cudnn\w*)\.so\S*)")
    found: dict[str, set[str]] = {}
    with open("/proc/self/maps") as maps:
        for path, name in pattern.findall(maps.read()):
            found.setdefault(name, set()).add(os.path.realpath(path))
    return {
        name: {"version": _version(name, min(paths)), "paths": sorted(paths), "duplicate": len(paths) > 1}
        for name, paths in sorted(found.items())
    }


# ---- Transformer Engine ----------------------------------------------------------------------------------------


def find_transformer_engine() -> tuple[str | None, list[Problem]]:
    """Return the path of libtransformer_engine.so or None, and problems."""
    path = os.environ.get(LIBRARY_VARIABLE)
    if path:
        if not os.path.isfile(path):
            return None, [Problem(f"{LIBRARY_VARIABLE}={path} is not a file", "correct or unset that variable")]
        return path, _te_version_problems(path)
    spec = importlib.util.find_spec("transformer_engine")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for place in ("wheel_lib", ".", ".."):
            for path in sorted(glob.glob(os.path.join(folder, place, "libtransformer_engine*.so"))):
                return path, _te_version_problems(path)
    remedy = f"{_te_remedy()}, or set {LIBRARY_VARIABLE} to the path of libtransformer_engine.so"
    return None, [Problem("Transformer Engine's library (libtransformer_engine.so) is not installed", remedy)]


def _te_remedy() -> str:
    return f"pip install 'transformer-engine-cu13~={SUPPORTED}.0' (-cu12 where Paddle and the driver are CUDA 12's)"


def _te_version_problems(path: str) -> list[Problem]:
    version = transformer_engine_version(path)
    if os.environ.get(ANY_VERSION_VARIABLE) == "1" or (version and re.match(rf"{re.escape(SUPPORTED)}\b", version)):
        return []
    what = f"{path} is Transformer Engine {version}" if version else f"the version of {path} cannot be told"
    remedy = f"{_te_remedy()}; or, if you know that its C interface is the same, set {ANY_VERSION_VARIABLE}=1"
    return [Problem(f"{what}; {SUPPORTED}.x is needed", remedy)]


def transformer_engine_version(path: str) -> str | None:
    """Return the version of the distribution that the library at `path` was installed from, or None."""
    folder = os.path.realpath(path)
    while folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
        for name in ("transformer_engine_cu13", "transformer_engine_cu12", "transformer_engine"):
            for distribution in importlib.metadata.distributions(name=name, path=[folder]):
                return distribution.version
    return None


def cuda_major(te_path: str) -> int:
    """Return the CUDA major version that the library was built for, from the cuBLAS it names.

    Raises OSError if it names none.
    """
    with open(te_path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for major in (12, 13):
            if content.find(b"\0libcublas.so.%d\0" % major) >= 0:
                return major
    raise OSError(f"{te_path} needs neither libcublas.so.12 nor .13: it is not Transformer Engine's library")


# ---- CUDA ------------------------------------------------------------------------------------------------------


def find_cuda_libraries(cuda: int) -> tuple[dict[str, str | None], list[Problem]]:
    """Return {name: path or SONAME} of the libraries that TE built for this CUDA major version needs, and problems."""
    wanted = {name: (package, f"lib{name}.so.{cuda}") for name, package in TOOLKIT.items()} | OTHERS
    paths: dict[str, str | None] = {}
    problems: list[Problem] = []
    missing: dict[str, list[str]] = {}
    for name, (package, soname) in wanted.items():
        other = f"lib{name}.so.{25 - cuda}"
        if name in TOOLKIT and _is_loaded(other) and not _is_loaded(soname):
            remedy = f"install transformer-engine-cu{25 - cuda}, or a Paddle for CUDA {cuda}"
            problems.append(Problem(f"this process has {other}, but Transformer Engine needs {soname}", remedy))
            continue
        paths[name] = _find(soname)
        if paths[name] is None:
            missing.setdefault(package, []).append(soname)
    for package, sonames in missing.items():
        remedy = f"pip install '{_requirement(package, cuda)}', or add its folder to {choice.VARIABLE}"
        problems.append(Problem(f"not found: {', '.join(sonames)}", remedy))
    return paths, problems + _choice_problems({name: soname for name, (_, soname) in wanted.items()})


def _choice_problems(sonames: Mapping[str, str]) -> list[Problem]:
    """Return why the user's choice of libraries, {name: SONAME}, cannot be followed."""
    if not choice.folders():
        return []
    present = {sonames[name]: entry["paths"] for name, entry in report().items() if name in sonames}
    return choice.problems([*sonames.values()], present)


def _requirement(package: str, cuda: int) -> str:
    """Return the pip requirement: from CUDA 13 on, the toolkit's packages carry the major version in their version."""
    return f"{package}=={cuda}.*" if cuda >= 13 and package in TOOLKIT.values() else f"{package}-cu{cuda}"


def _is_loaded(soname: str) -> bool:
    try:
        return bool(ctypes.CDLL(soname, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
    except OSError:
        return False


def nvidia_folders() -> list[str]:
    """Return the folders of the `nvidia` pip packages on sys.path."""
    spec = importlib.util.find_spec("nvidia")
    return list(spec.submodule_search_locations or []) if spec else []


def _find(soname: str) -> str | None:
    """Return what to pass to dlopen for `soname`, or None."""
    if _is_loaded(soname):
        return soname
    if path := choice.chosen(soname):
        return path
    for folder in nvidia_folders():
        for path in sorted(glob.glob(os.path.join(folder, "*", "lib", soname))):
            return path
    try:
        ctypes.CDLL(soname, mode=os.RTLD_LAZY)  # only the loader knows its cache and LD_LIBRARY_PATH
        return soname
    except OSError:
        path = f"/usr/local/cuda/lib64/{soname}"
        return path if os.path.isfile(path) else None


def include_folder(cuda: int) -> str | None:
    """Return the folder of CUDA's headers, which TE's run-time compiled kernels include; or None."""
    folders = [os.environ.get("NVTE_CUDA_INCLUDE_DIR", "")]
    folders += [os.path.join(f, sub, "include") for f in nvidia_folders() for sub in (f"cu{cuda}", "cuda_runtime")]
    folders += [os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include"), "/usr/local/cuda/include"]
    return next((f for f in folders if os.path.isfile(os.path.join(f, "cuda_runtime.h"))), None)


def _header_problems(cuda: int) -> list[Problem]:
    if include_folder(cuda):
        return []
    remedy = f"pip install '{_requirement('nvidia-cuda-runtime', cuda)}', or set NVTE_CUDA_INCLUDE_DIR to their folder"
    return [Problem("CUDA's headers (cuda_runtime.h), which Transformer Engine's kernels need, are not found", remedy)]


def driver() -> ctypes.CDLL:
    """Return libcuda, initialised. Raises OSError where there is none or it finds no GPU."""
    cuda = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    code = cuda.cuInit(0)
    if code:
        text = ctypes.c_char_p(b"unknown error")
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise OSError(f"cuInit: {(text.value or b'').decode()}")
    return cuda


def gpus() -> list[tuple[int, int]]:
    """Return [(major, minor)]: compute capabilities of the visible GPUs. Raises OSError as `driver` does."""
    cuda, value = driver(), ctypes.c_int()

    def attribute(number: int, device: int) -> int:
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    cuda.cuDeviceGetCount(ctypes.byref(value))
    major, minor = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
    return [(attribute(major, i), attribute(minor, i)) for i in range(value.value)]


def gpu_problems(fp8: bool = False) -> list[Problem]:
    """Return the problems of the driver and of the visible GPUs."""
    try:
        capabilities = gpus()
    except OSError as e:
        remedy = "run on a machine with an NVIDIA GPU, its driver installed and visible to this process"
        return [Problem(f"no usable NVIDIA driver ({e})", remedy)]
    if not capabilities:
        return [Problem("no NVIDIA GPU is visible", "check CUDA_VISIBLE_DEVICES and nvidia-smi")]
    oldest, needed = min(capabilities), MIN_CAPABILITY_FP8 if fp8 else MIN_CAPABILITY
    if oldest >= needed:
        return []
    what = "a visible GPU has compute capability {}.{}, {} needs {}.{}"
    remedy = "choose newer GPUs with CUDA_VISIBLE_DEVICES" + (", or train in bf16" if fp8 else "")
    return [Problem(what.format(*oldest, "fp8" if fp8 else "Transformer Engine", *needed), remedy)]


def _driver_problems(cuda: int) -> list[Problem]:
    """Return the problem of a driver older than the libraries; without any driver `gpu_problems` has said so."""
    try:
        version = ctypes.c_int()
        driver().cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return []
    if version.value >= cuda * 1000:
        return []
    remedy = f"update the driver, or install transformer-engine-cu{version.value // 1000}"
    return [
        Problem(f"the driver supports CUDA {_cuda_dotted(version.value)}, Transformer Engine needs {cuda}.0", remedy)
    ]


# ---- loading ---------------------------------------------------------------------------------------------------


def _extension_problems() -> list[Problem]:
    if importlib.util.find_spec("paddle_te.native._shim"):
        return []
    return [Problem("the compiled extension paddle_te.native._shim is missing", "build it: pip install . (needs g++)")]


def _open_all(te: str, paths: Mapping[str, str | None], cuda: int) -> list[Problem]:
    """Open everything, check what only then can be checked, bind the extension. Return problems."""
    opened = {"cuda": driver()}
    if folder := include_folder(cuda):  # `_header_problems` has said where there is none
        os.environ.setdefault("NVTE_CUDA_INCLUDE_DIR", folder)
    for name, path in [*paths.items(), ("transformer_engine", te)]:
        try:
            # Lazily: TE names functions that cuBLAS has from 13.2 on. Globally: TE looks NVRTC's up that way.
            opened[name] = ctypes.CDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_LAZY)
        except OSError as e:
            return [Problem(f"{path} cannot be loaded: {e}", "reinstall the package it belongs to")]
    _open_nvrtc_builtins()
    present = report()
    problems = [
        Problem(
            f"lib{name} is in this process more than once: {', '.join(entry['paths'])}",
            "uninstall one of them, or take its folder out of LD_LIBRARY_PATH",
        )
        for name, entry in present.items()
        if entry["duplicate"]
    ]
    problems = problems or choice.apart({name: entry["paths"] for name, entry in present.items()})
    cudnn = opened["cudnn"].cudnnGetVersion()
    if cudnn < MIN_CUDNN:
        remedy = f"pip install 'nvidia-cudnn-cu{cuda}>={_dotted(MIN_CUDNN)}'"
        problems.append(Problem(f"cuDNN {_dotted(cudnn)} is too old, {_dotted(MIN_CUDNN)} is needed", remedy))
    if problems:
        return problems
    from paddle_te.native import _shim  # type: ignore[attr-defined]  # compiled

    try:
        _shim.bind(*(opened[name]._handle for name in ("transformer_engine", "cudart", "cuda")))
    except ImportError as e:
        return [Problem(f"{te}: {e}", _te_remedy())]
    _loaded.update(opened)
    return []


def _open_nvrtc_builtins() -> None:
    """Open the library that NVRTC opens by its bare name at its first compilation.

    It would not be found in pip's packages.
    """
    for path in report().get("nvrtc", {"paths": []})["paths"]:
        for builtins in glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so.*")):
            ctypes.CDLL(builtins, mode=os.RTLD_LAZY)


def _dotted(number: int) -> str:
    """Return the version of cuDNN, cuBLASLt or NCCL from their number."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _cuda_dotted(number: int) -> str:
    """Return the version of the CUDA runtime or driver from their number."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _cublas_property(library: ctypes.CDLL, part: int) -> int:
    """Return the major (0), minor (1) or patch (2) number of a cuBLAS, which has no handle yet."""
    number = ctypes.c_int()
    library.cublasGetProperty(part, ctypes.byref(number))
    return number.value


def _version(name: str, path: str) -> str | None:
    """Return the version of the library loaded from `path`, asked of itself where it can say; else None."""
    if name == "transformer_engine":
        return transformer_engine_version(path)
    try:
        library, number, minor = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY), ctypes.c_int(), ctypes.c_int()
        if name in ("cudnn", "cublasLt"):
            return _dotted(library.cudnnGetVersion() if name == "cudnn" else library.cublasLtGetVersion())
        if name == "cublas":
            return ".".join(str(_cublas_property(library, part)) for part in range(3))
        if name == "nvrtc":
            library.nvrtcVersion(ctypes.byref(number), ctypes.byref(minor))
            return f"{number.value}.{minor.value}"
        if name in ("cuda", "cudart"):
            function = library.cuDriverGetVersion if name == "cuda" else library.cudaRuntimeGetVersion
            function(ctypes.byref(number))
            return _cuda_dotted(number.value)
        if name == "nccl":
            library.ncclGetVersion(ctypes.byref(number))
            return _dotted(number.value)
    except (OSError, AttributeError):
        pass
    return None
