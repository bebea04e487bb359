"""A fake libtransformer_engine.so (fake_te.cpp) behind the real extension, for machines with no GPU."""

import ctypes
import importlib.machinery
import importlib.util
import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from paddle_te.native import errors
from tests.unit.native.cuda_on_cpu import OnCPU

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def gxx():
    path = shutil.which("g++")
    if not path:
        pytest.skip("needs g++")
    return path


@pytest.fixture(scope="session")
def kernels_on_cpu(gxx, tmp_path_factory):
    return OnCPU(gxx, tmp_path_factory.mktemp)


@pytest.fixture
def on_cpu(kernels_on_cpu, monkeypatch):
    """Stands for the extension and a stream: our kernels are compiled for the CPU and launched there."""
    kernels_on_cpu.install(monkeypatch)
    return kernels_on_cpu


@pytest.fixture(scope="session")
def fake_library(gxx, tmp_path_factory):
    """The fake as ctypes.CDLL. The name differs from the real library's, so both could be in one process."""
    target = tmp_path_factory.mktemp("fake") / "libfake_te.so"
    shim = Path(errors.__file__).parent / "shim"
    command = [gxx, "-std=c++17", "-O0", "-shared", "-fPIC", f"-I{shim}", HERE / "fake_te.cpp", "-o", target]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(target))
    library.fake_take_log.restype = ctypes.c_char_p
    library.fake_live_tensors.restype = ctypes.c_size_t
    return library


class Fake:
    """The extension bound to the fake: `te` is the module, `calls()` what has been called since the last time."""

    def __init__(self, library, te):
        self.library, self.te = library, te
        self.allocated = []
        self.stream = te.Stream(0x5000, self.allocate)

    def allocate(self, size):
        class Memory:
            def data_ptr(self):
                return 0xA000000

        self.allocated.append(size)
        return Memory()

    def calls(self):
        return [json.loads(line) for line in self.library.fake_take_log().decode().splitlines()]

    def fail(self, name, message, as_int=False):
        self.library.fake_fail(name.encode(), message.encode(), int(as_int))


@pytest.fixture(scope="session")
def unbound_shim(tmp_path_factory):
    """Makes further copies of the extension, bound to nothing: the imported one may hold the real library."""
    spec = importlib.util.find_spec("paddle_te.native._shim")
    if not spec:
        pytest.skip("the extension is not built: python setup.py build_ext --inplace")

    numbers = itertools.count()

    def make():
        copy = shutil.copy(spec.origin, tmp_path_factory.mktemp("shim"))
        name = f"copy{next(numbers)}._shim"  # pybind11 hands out one module a name
        loader = importlib.machinery.ExtensionFileLoader(name, str(copy))
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, copy, loader=loader))
        loader.exec_module(module)
        return module

    return make


@pytest.fixture(scope="session")
def fake_shim(fake_library, unbound_shim):
    module = unbound_shim()
    module.bind(*[fake_library._handle] * 3)
    return module


@pytest.fixture
def fake(fake_library, fake_shim):
    fake = Fake(fake_library, fake_shim)
    fake.calls()
    return fake
