"""Shared by all tests: Paddle on the CPU, a seed that a failing test prints, small models, GPU tests' skip."""

import ctypes
import faulthandler
import fcntl
import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from paddle_te.upstream import deferred_imports
from tests import processes, seeds
from tests.nvgpu_processes import build_host
from tests.sizes import TINY

GPU_TESTS = Path(__file__).parent / "gpu"
WARM_STARTS = "PYTEST_WARM_STARTS"  # a folder that pytest's workers share: children/warm_start.py's servers, the demo


def missing_gpu():
    """Why tests that need an NVIDIA GPU cannot run here; None when they can."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver ({error})"
    if status := driver.cuInit(0):
        return f"the NVIDIA driver finds no usable GPU (cuInit returned {status})"
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return None if count.value else "the NVIDIA driver finds no GPU"


def pytest_configure(config):
    gc.disable()  # until all tests are imported, with Paddle
    # a shell's background job ignores it, and so would the children that tests interrupt
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.terminal_stderr = os.dup(2)  # nothing is captured yet
    if importlib.util.find_spec("paddlenlp"):
        deferred_imports.apply()  # as our commands do: PaddleNLP is there in a third of the time
    processes.environment_of_children(os.environ)
    seeds.settle(os.environ)
    if WARM_STARTS not in os.environ:
        config.warm_starts = tempfile.mkdtemp(prefix="warm-starts-", dir="/tmp")  # sockets' paths must be short
        os.environ[WARM_STARTS] = config.warm_starts


def pytest_unconfigure(config):
    if folder := getattr(config, "warm_starts", None):
        del os.environ[WARM_STARTS]
        shutil.rmtree(folder, ignore_errors=True)  # which ends the servers; a killed test's processes may still come


def pytest_collection_modifyitems(items):
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := missing_gpu()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """Python's collections pass over what is there now: those of Paddle and of the tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _cpu(pytestconfig):
    """Tests compute on the CPU unless they choose a device themselves."""
    import paddle

    paddle.set_device("cpu")
    # Paddle's handler has taken the place of pytest's, and what it prints pytest captures and loses
    faulthandler.disable()
    paddle.disable_signal_handler()
    faulthandler.enable(pytestconfig.terminal_stderr)


@pytest.fixture(scope="session")
def demo_data():
    """What tools/prepare_data.py --demo makes, once for all workers; where a copy lies, it finds nothing to do."""
    folder, partial = (Path(os.environ[WARM_STARTS]) / name for name in ("demo", "demo.partial"))
    tool = Path(__file__).parents[1] / "tools/prepare_data.py"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(partial, ignore_errors=True)
            processes.run([sys.executable, tool, "--demo", partial], check=True)
            partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def nvgpu_host():
    """The environment of processes that use nvgpu's host runtime, built once."""
    return dict(CUSTOM_DEVICE_ROOT=build_host())


@pytest.fixture(scope="session")
def warm_start():
    """The environment of processes that begin with Paddle imported, for tests of what they do afterwards."""
    return dict(WARM_STARTS=os.environ[WARM_STARTS])


@pytest.fixture(scope="session")
def warm_host(nvgpu_host, warm_start):
    """`nvgpu_host` and `warm_start`."""
    return nvgpu_host | warm_start


@pytest.fixture(autouse=True)
def seed(request):
    """A seed, set everywhere: each test's own, which follows from its name and PADDLE_TE_SEED (a number, or fresh)."""
    value = seeds.seed_of(request.node.nodeid)
    print(f"{seeds.VARIABLE}={os.environ[seeds.VARIABLE]}")
    seeds.set_seed(value)
    return value


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """A module's fixtures draw the same whichever test asks first; a session's only start programs."""
    if fixturedef.scope not in ("class", "module", "package"):
        return (yield)
    with seeds.drawing_for(f"{request.node.nodeid}::{fixturedef.argname}"):
        return (yield)


@pytest.fixture
def tiny_config():
    """Makes PaddleNLP LlamaConfigs of a model that trains a step in milliseconds; keywords override."""
    from paddlenlp.transformers import LlamaConfig

    def make(**overrides):
        return LlamaConfig(**(TINY | dict(seq_length=32, use_flash_attention=False) | overrides))

    return make
