"""Finding and loading: every missing condition is listed with its remedy, and nothing raises but `load`."""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_te import native
from paddle_te.native import BackendUnavailable, Problem, choice, library


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """A machine with no Transformer Engine, no CUDA packages, no driver, and nothing loaded before."""
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.delenv(library.LIBRARY_VARIABLE, raising=False)
    monkeypatch.delenv(library.ANY_VERSION_VARIABLE, raising=False)
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.delenv("NVTE_CUDA_INCLUDE_DIR", raising=False)
    monkeypatch.setattr(library, "nvidia_folders", list)
    monkeypatch.setattr(library, "_is_loaded", lambda soname: False)
    monkeypatch.setattr(library, "_find", lambda soname: None)
    monkeypatch.setattr(library, "include_folder", lambda cuda: None)
    real = library.importlib.util.find_spec
    monkeypatch.setattr(
        library.importlib.util, "find_spec", lambda name: None if name == "transformer_engine" else real(name)
    )

    def no_driver():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(library, "driver", no_driver)
    return tmp_path


def install(folder, version="2.20.2", cuda=13):
    """A folder that looks like an installed wheel; returns the library's path."""
    path = folder / "transformer_engine" / "wheel_lib" / "libtransformer_engine.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x7fELF..\0libcublas.so.%d\0libcudart.so.%d\0" % (cuda, cuda))
    if version:
        info = folder / f"transformer_engine_cu{cuda}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: transformer_engine_cu{cuda}\nVersion: {version}\n"
        )
    return path


def gpus(monkeypatch, capabilities, driver_version=13000):
    """A driver with GPUs of these compute capabilities."""

    class Driver:
        def cuDeviceGetCount(self, out):
            out._obj.value = len(capabilities)

        def cuDeviceGetAttribute(self, out, number, device):
            out._obj.value = {75: capabilities[device][0], 76: capabilities[device][1]}[number]

        def cuDriverGetVersion(self, out):
            out._obj.value = driver_version

    monkeypatch.setattr(library, "driver", Driver)


def whats(problems):
    assert all(isinstance(p, Problem) and p.what and p.remedy for p in problems)
    return "\n".join(p.what for p in problems)


def test_nothing_installed(nothing):
    text = whats(native.diagnose())
    assert "libcuda.so.1" in text and "libtransformer_engine.so" in text
    with pytest.raises(BackendUnavailable) as error:
        native.load()
    for problem in native.diagnose():
        assert problem.what in str(error.value) and problem.remedy in str(error.value)
    assert error.value.problems == native.diagnose()
    assert "pip install 'transformer-engine-cu13" in str(error.value)


def test_extension_missing(nothing, monkeypatch):
    real = library.importlib.util.find_spec
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None if "_shim" in name else real(name))
    problem = next(p for p in native.diagnose() if "_shim" in p.what)
    assert "pip install ." in problem.remedy


def test_variable_names_no_file(nothing, monkeypatch):
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(nothing / "absent.so"))
    assert f"{library.LIBRARY_VARIABLE}={nothing}/absent.so is not a file" in whats(native.diagnose())


def test_not_the_library(nothing, monkeypatch):
    path = install(nothing)
    path.write_bytes(b"\x7fELF no such names")
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(path))
    assert "it is not Transformer Engine's library" in whats(native.diagnose())


@pytest.mark.parametrize(
    "version, good",
    [("2.20.0", True), ("2.20.2", True), ("2.20", True), ("2.19.1", False), ("2.2.0", False), ("2.200", False)],
)
def test_version(nothing, monkeypatch, version, good):
    path = install(nothing, version)
    assert library.transformer_engine_version(path) == version
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(path))
    text = whats(native.diagnose())
    assert (f"{path} is Transformer Engine {version}; 2.20.x is needed" in text) is not good
    monkeypatch.setenv(library.ANY_VERSION_VARIABLE, "1")
    assert "is needed" not in whats(native.diagnose())


def test_version_unknown(nothing, monkeypatch):
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(install(nothing, version=None)))
    assert "cannot be told" in whats(native.diagnose())


@pytest.mark.parametrize("cuda", [12, 13])
def test_every_missing_library_is_listed(nothing, monkeypatch, cuda):
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(install(nothing, cuda=cuda)))
    problems = native.diagnose()
    text = whats(problems)
    for name in ("cudart", "cublasLt", "cublas", "nvrtc"):
        assert f"lib{name}.so.{cuda}" in text
    for soname in ("libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn_heuristic.so.9", "libnccl.so.2", "cuda_runtime.h"):
        assert soname in text
    remedies = "\n".join(p.remedy for p in problems)
    wanted = {
        12: ["nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-nccl-cu12"],
        13: ["nvidia-cuda-runtime==13.*", "nvidia-cublas==13.*", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"],
    }
    assert all(f"'{package}'" in remedies for package in wanted[cuda])


def test_process_has_the_other_cuda(nothing, monkeypatch):
    """Paddle for CUDA 12 and Transformer Engine for CUDA 13 do not go together."""
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(install(nothing, cuda=13)))
    monkeypatch.setattr(library, "_is_loaded", lambda soname: soname == "libcudart.so.12")
    problem = next(p for p in native.diagnose() if "libcudart.so.12" in p.what)
    assert "libcudart.so.13" in problem.what and "transformer-engine-cu12" in problem.remedy


def test_found_in_the_packages(nothing, monkeypatch):
    """`_find` prefers what is loaded, then the user's choice, then the nvidia packages' file."""
    monkeypatch.undo()
    folder = nothing / "nvidia"
    target = folder / "cudnn" / "lib" / "libcudnn.so.9"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"")
    monkeypatch.setattr(library, "nvidia_folders", lambda: [str(folder)])
    assert library._find("libcudnn.so.9") == str(target) or library._is_loaded("libcudnn.so.9")
    chosen = [nothing / "first" / "libother.so.1", nothing / "second" / target.name]
    for path in chosen:
        path.parent.mkdir()
        path.write_bytes(b"")
    monkeypatch.setenv(choice.VARIABLE, os.pathsep.join(str(path.parent) for path in chosen))
    assert library._find("libcudnn.so.9") == str(chosen[1]) or library._is_loaded("libcudnn.so.9")
    assert library._find("libc.so.6") == "libc.so.6"
    assert library._find("libno_such_thing.so.1") is None
    (folder / "cu13" / "include").mkdir(parents=True)
    (folder / "cu13" / "include" / "cuda_runtime.h").write_text("")
    monkeypatch.delenv("NVTE_CUDA_INCLUDE_DIR", raising=False)
    assert library.include_folder(13) == str(folder / "cu13" / "include")


def test_a_choice_that_cannot_be_followed(nothing, monkeypatch):
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(install(nothing)))
    monkeypatch.setenv(choice.VARIABLE, str(nothing))
    assert f"{choice.VARIABLE} names {nothing}, which holds none of libcudart.so.13" in whats(native.diagnose())
    path = nothing / "libcublas.so.13"
    path.write_bytes(b"")
    monkeypatch.setattr(library, "report", lambda: {"cublas": {"paths": ["/old/libcublas.so.13"], "duplicate": False}})
    assert f"chooses {path}, but this process has already loaded /old/libcublas.so.13" in whats(native.diagnose())
    monkeypatch.setattr(library, "report", lambda: {"cublas": {"paths": [str(path)], "duplicate": False}})
    assert choice.VARIABLE not in whats(native.diagnose())


@pytest.mark.parametrize(
    "capabilities, fp8, message",
    [
        ([], False, "no NVIDIA GPU is visible"),
        ([(7, 0)], False, "compute capability 7.0, Transformer Engine needs 8.0"),
        ([(9, 0), (7, 5)], False, "7.5"),
        ([(8, 6)], True, "compute capability 8.6, fp8 needs 8.9"),
    ],
)
def test_gpu_too_old(nothing, monkeypatch, capabilities, fp8, message):
    gpus(monkeypatch, capabilities)
    assert message in whats(native.diagnose(fp8))


@pytest.mark.parametrize(
    "capabilities, fp8", [([(8, 0)], False), ([(8, 9)], True), ([(9, 0)] * 8, True), ([(10, 0)], True)]
)
def test_gpu_good(nothing, monkeypatch, capabilities, fp8):
    gpus(monkeypatch, capabilities)
    assert library.gpu_problems(fp8) == []
    assert library.gpus() == capabilities


def test_driver_too_old(nothing, monkeypatch):
    gpus(monkeypatch, [(9, 0)], driver_version=12040)
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(install(nothing, cuda=13)))
    problem = next(p for p in native.diagnose() if "the driver supports" in p.what)
    assert "12.4" in problem.what and "13.0" in problem.what and "cu12" in problem.remedy


def test_diagnose_never_raises(nothing, monkeypatch):
    def broken(fp8):
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(library, "gpu_problems", broken)
    assert "ZeroDivisionError: odd" in whats(native.diagnose())


def shared_library(gxx, folder, name, code):
    source = folder / f"{name}.cpp"
    source.write_text(code)
    path = folder / f"lib{name}.so"
    subprocess.run([gxx, "-shared", "-fPIC", "-fno-lto", f"-Wl,-soname,lib{name}.so", source, "-o", path], check=True)
    return str(path)


NVRTC = """#include <dlfcn.h>
extern "C" int compiles() { return dlopen("libnvrtc-builtins.so.13.0", RTLD_LAZY) != nullptr; }
"""


def test_nvrtc_finds_its_builtins(gxx, tmp_path):
    """In pip's packages they lie beside it, where the loader does not look. NVRTC 13.0's own fails alike."""
    for name, code in (("nvrtc.so.13", NVRTC), ("nvrtc-builtins.so.13.0", "int x;")):
        (tmp_path / "code.cpp").write_text(code)
        flags = ["-shared", "-fPIC", f"-Wl,-soname,lib{name}", "-o", str(tmp_path / f"lib{name}")]
        subprocess.run([gxx, str(tmp_path / "code.cpp"), *flags, "-ldl"], check=True)
    program = f"""if True:
        import ctypes
        from paddle_te.native import library
        library._open_nvrtc_builtins()  # nothing to do
        nvrtc = ctypes.CDLL({str(tmp_path / "libnvrtc.so.13")!r})
        before = nvrtc.compiles()
        library._open_nvrtc_builtins()
        print(before, nvrtc.compiles())
    """
    environ = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    result = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert result.stdout == "0 1\n"


def test_open_all(nothing, monkeypatch, gxx):
    """What is checked after loading: libraries that do not load, an old cuDNN, missing entry points, duplicates."""
    gpus(monkeypatch, [(9, 0)])
    monkeypatch.setattr(library, "include_folder", lambda cuda: "/usr/include")
    monkeypatch.setenv("NVTE_CUDA_INCLUDE_DIR", "/usr/include")
    te = shared_library(gxx, nothing, "te_without_functions", "int x;")
    old = shared_library(gxx, nothing, "old", 'extern "C" int cudnnGetVersion() { return 90800; }')
    new = shared_library(gxx, nothing, "new", 'extern "C" int cudnnGetVersion() { return 91900; }')

    text = whats(library._open_all(te, {"cudnn": str(nothing / "absent.so")}, 13))
    assert "absent.so cannot be loaded" in text
    text = whats(library._open_all(te, {"cudnn": old, "cudart": old}, 13))
    assert "cuDNN 9.8.0 is too old, 9.12.0 is needed" in text
    monkeypatch.setattr(
        library, "report", lambda: {"cudart": {"paths": ["/a/libcudart.so", "/b/libcudart.so"], "duplicate": True}}
    )
    text = whats(library._open_all(te, {"cudnn": new, "cudart": new}, 13))
    assert "libcudart is in this process more than once: /a/libcudart.so, /b/libcudart.so" in text
    both = {name: {"paths": [f"/{name}/lib{name}.so.13"], "duplicate": False} for name in ("cublas", "cublasLt")}
    monkeypatch.setattr(library, "report", lambda: both)
    text = whats(library._open_all(te, {"cudnn": new, "cudart": new}, 13))
    assert "different places: /cublas/libcublas.so.13, /cublasLt/libcublasLt.so.13" in text
    assert library._loaded == {}


CUBLAS = """const int version[] = {13, 6, 2};
extern "C" int cublasGetProperty(int part, int* value) { return *value = version[part], 0; }
extern "C" unsigned long cublasLtGetVersion() { return 130602; }
"""


def test_the_choice_is_loaded_and_reported(gxx, tmp_path):
    """By paddle_te and by nvgpu alike, whatever LD_LIBRARY_PATH says. In processes of their own: libraries stay."""
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        for name in ("cublas", "cublasLt"):
            path = shared_library(gxx, tmp_path / folder, name, CUBLAS)
            os.rename(path, f"{path}.13")
    (tmp_path / "nvgpu.cpp").write_text(
        '#include "libraries.h"\nextern "C" void open_library(const char* name) { nvgpu::OpenLibrary(name); }'
    )
    nvgpu = str(tmp_path / "nvgpu.so")
    sources = Path(__file__).parents[3] / "nvgpu" / "csrc"
    subprocess.run(
        [gxx, "-std=c++17", "-shared", "-fPIC", f"-I{sources}", tmp_path / "nvgpu.cpp", "-o", nvgpu], check=True
    )
    program = f"""if True:
        import ctypes, json, sys
        from paddle_te.native import library
        for name in ("libcublasLt.so.13", "libcublas.so.13"):
            if sys.argv[1] == "nvgpu":
                ctypes.CDLL({nvgpu!r}).open_library(name.encode())
            else:
                ctypes.CDLL(library._find(name))
        print(json.dumps(library.report()))
    """
    environ = {**os.environ, choice.VARIABLE: str(tmp_path / "new"), "LD_LIBRARY_PATH": str(tmp_path / "old")}
    for loader in ("paddle_te", "nvgpu"):
        command = [sys.executable, "-c", program, loader]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        for name, entry in json.loads(done.stdout).items():
            path = str(tmp_path / "new" / f"lib{name}.so.13")
            assert entry == {"version": "13.6.2", "paths": [path], "duplicate": False}


def test_report(gxx, tmp_path):
    """Paths from /proc/self/maps, a second copy flagged. In a process of its own: libraries stay loaded."""
    paths = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        paths.append(
            shared_library(gxx, tmp_path / folder, "cudnn", 'extern "C" int cudnnGetVersion() { return 91905; }')
        )
    program = (
        "import ctypes, sys, json\n"
        "from paddle_te import native\n"
        "before = native.report()\n"
        f"a = ctypes.CDLL({paths[0]!r}); one = native.report()\n"
        f"b = ctypes.CDLL({paths[1]!r}); two = native.report()\n"
        "print(json.dumps([before, one, two]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    before, one, two = json.loads(output.stdout.splitlines()[-1])
    assert "cudnn" not in before
    assert one["cudnn"] == {"version": "9.19.5", "paths": [paths[0]], "duplicate": False}
    assert two["cudnn"]["paths"] == sorted(paths) and two["cudnn"]["duplicate"] is True


def test_import_is_light():
    """`native` imports neither Paddle nor NumPy."""
    program = "import sys, paddle_te.native; print([m for m in ('paddle', 'numpy') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


def test_real_machine():
    """Here and now: either everything works, or `load` says the same as `diagnose`."""
    problems = native.diagnose()
    if problems:
        with pytest.raises(BackendUnavailable) as error:
            native.load()
        assert error.value.problems == problems
    else:
        assert ctypes.sizeof(ctypes.c_void_p) == 8 and native.load().SIZES["NVTEShape"] == 128
