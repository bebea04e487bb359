"""The profilers' windows, NVTX ranges on a real model, and the summary of what ran."""

import ctypes
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddlenlp.trainer import Trainer, TrainingArguments

from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.training import profiling
from paddle_te.hosts.paddlenlp.training.profiling import KernelsCallback, ProfilerCallback
from paddle_te.ops.te import counting, runtime
from tests.conftest import missing_gpu


class Run:
    """Drives a callback as the Trainer does, without one."""

    def __init__(self, output_dir, callback=None):
        self.callback, self.control = callback, SimpleNamespace()
        self.state = SimpleNamespace(global_step=0, is_world_process_zero=True)
        self.args, self.model = SimpleNamespace(output_dir=str(output_dir)), paddle.nn.Layer()

    def send(self, event):
        getattr(self.callback, event)(self.args, self.state, self.control, model=self.model)

    def step(self, work=lambda: None):
        self.send("on_step_begin")
        work()
        self.state.global_step += 1
        self.send("on_step_end")


class FakeProfiler:
    """Stands for cudaProfilerStart and cudaProfilerStop."""

    def __init__(self, run):
        self.run, self.calls = run, []

    def start(self):
        self.calls.append(("start", self.run.state.global_step))

    def stop(self):
        self.calls.append(("stop", self.run.state.global_step))


class Nvtx:
    """Stands for the package: a list of what opened and closed, indented."""

    def __init__(self):
        self.lines, self.depth = [], 0

    def push_range(self, name):
        self.lines.append("  " * self.depth + name)
        self.depth += 1

    def pop_range(self):
        self.depth -= 1


@pytest.fixture
def nvtx(monkeypatch):
    """The stand-in, in the package's place."""
    made = Nvtx()
    monkeypatch.setattr(profiling, "_nvtx", lambda: made)
    return made


def profile(tmp_path, environ, steps=6):
    run = Run(tmp_path)
    profiler = FakeProfiler(run)
    run.callback = ProfilerCallback({"ENABLE_PROFILE": "1", **environ}, profiler)
    for _ in range(steps):
        run.step()
    run.send("on_train_end")
    return profiler.calls


@pytest.mark.parametrize(
    "environ, calls",
    [
        ({"PROFILE_START_STEP": "3", "PROFILE_STOP_STEP": "3"}, [("start", 3), ("stop", 4)]),
        ({"PROFILE_START_STEP": "1", "PROFILE_STOP_STEP": "4"}, [("start", 1), ("stop", 5)]),
        ({"PROFILE_START_STEP": "5", "PROFILE_STOP_STEP": "90"}, [("start", 5), ("stop", 6)]),  # training ends first
        ({"PROFILE_START_STEP": "90", "PROFILE_STOP_STEP": "91"}, []),
        ({"PROFILE_START_STEP": "1", "PROFILE_STOP_STEP": "2", "SLURM_NODEID": "1"}, []),
        ({"PROFILE_STOP_STEP": "0", "SLURM_NODEID": "1", "PROFILE_NODEID": "1"}, [("start", 0), ("stop", 1)]),
        ({"ENABLE_PROFILE": "0"}, []),
        ({"ENABLE_PROFILE": ""}, []),
    ],
)
def test_profiler_window(tmp_path, nvtx, environ, calls):
    assert profile(tmp_path, environ) == calls


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"PROFILE_START_STEP": "three"}, "PROFILE_START_STEP='three': must be a whole number"),
        ({"PROFILE_START_STEP": "4", "PROFILE_STOP_STEP": "2"}, "PROFILE_STOP_STEP=2 is before PROFILE_START_STEP=4"),
    ],
)
def test_profiler_refuses_wrong_settings(tmp_path, environ, message):
    with pytest.raises(ValueError, match=message):
        profile(tmp_path, environ)


class Tokens(paddle.io.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"input_ids": np.full(32, index), "labels": np.full(32, index + 1)}


@pytest.fixture
def train(tiny_config, tmp_path):
    """Trains three steps of two micro-batches with the callbacks given."""

    def train(*callbacks, recompute=False):
        config = tiny_config(transformer_engine_backend="paddle")
        model = model_class(config).from_config(config)
        settings = dict(max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=2, device="cpu")
        settings["recompute"] = recompute
        arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], disable_tqdm=True, **settings)
        Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=list(callbacks)).train()

    return train


@pytest.mark.parametrize("recompute", [False, True])
def test_nvtx_names_the_parts_of_a_step(train, nvtx, recompute):
    environ = {"ENABLE_PROFILE": "1", "PROFILE_START_STEP": "1", "PROFILE_STOP_STEP": "1"}
    train(ProfilerCallback(environ, SimpleNamespace(start=lambda: None, stop=lambda: None)), recompute=recompute)
    again = [[f"      layers.{i} forward"] if recompute else [] for i in range(2)]
    micro_batch = [
        *("  forward", "    embed_tokens forward", "    layers.0 forward", "    layers.1 forward"),
        *("    lm_head forward", "    criterion forward"),
        *("  backward", "    criterion backward", "    lm_head backward"),
        *("    layers.1 backward", *again[1], "    layers.0 backward", *again[0], "    embed_tokens backward"),
    ]
    assert nvtx.lines == ["step 1", *micro_batch, *micro_batch, "  optimizer"]
    assert nvtx.depth == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_paddles_profiler_writes_a_trace(train, tmp_path, capsys, recompute):
    environ = {"ENABLE_PROFILE": "1", "PROFILE_START_STEP": "1", "PROFILE_STOP_STEP": "1", "PROFILER": "paddle"}
    train(ProfilerCallback(environ), recompute=recompute)
    (trace,) = (tmp_path / "profile").glob("rank0*.json")
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event.get("name", "").partition("[")[0] for event in events}
    assert "matmul dygraph" in names
    assert {"step 1", "forward", "layers.0 forward", "backward", "lm_head backward", "optimizer"} <= names
    assert "matmul" in capsys.readouterr().out


def test_a_profile_that_fails_does_not_end_the_training(tmp_path, monkeypatch):
    def stop(self):
        raise SystemError("events cross")

    errors = []
    monkeypatch.setattr(paddle.profiler.Profiler, "stop", stop)
    monkeypatch.setattr(profiling.logger, "error", errors.append)
    profiler = profiling.PaddleProfiler()
    profiler.output_dir = str(tmp_path)
    profiler.start()
    profiler.stop()
    assert errors == ["PROFILER=paddle: Paddle's profiler made no trace: events cross"]


def test_nvtx_missing_is_said_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nvtx", None)
    with pytest.raises(ModuleNotFoundError, match="pip install nvtx"):
        ProfilerCallback({"ENABLE_PROFILE": "1"}, profiler=object())


def test_profiling_without_a_gpu_is_refused_before_training():
    if missing_gpu() is None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(OSError, match="libcuda|cuInit"):
        ProfilerCallback({"ENABLE_PROFILE": "1"})


@pytest.mark.gpu
def test_the_driver_opens_and_closes_the_profilers_window():
    profiler = profiling.CudaProfiler()
    context = ctypes.c_void_p()
    assert profiler.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert profiler.driver.cuCtxSetCurrent(context) == 0
    profiler.start()
    profiler.stop()
    assert profiler.driver.cuDevicePrimaryCtxRelease_v2(0) == 0


# ---------------------------------------------------------------------------------------------------- kernels


class FakeLibrary:
    """Stands for the native module, which counts what it runs from its loading on."""

    def __init__(self):
        self.run = Counter({("gemm", "fp8"): 7})

    def counts(self):
        return dict(self.run)


@pytest.fixture
def library(monkeypatch):
    rt = SimpleNamespace(te=FakeLibrary())
    monkeypatch.setattr(runtime, "current", lambda: rt)
    return rt


def some_work(rt):
    rt.te.run.update({("gemm", "fp8"): 2, ("gemm", "bfloat16"): 1, ("launch", ""): 1})


def test_what_runs_meanwhile_is_counted(library):
    with counting.count_entry_points() as outer:
        some_work(library)
        with counting.count_entry_points() as inner:
            some_work(library)
    assert inner == {("gemm", "fp8"): 2, ("gemm", "bfloat16"): 1, ("launch", ""): 1}
    assert outer == inner + inner
    some_work(library)
    assert sum(outer.values()) == 8


def test_the_kernels_of_the_first_step_are_summed_up(library, tmp_path):
    run = Run(tmp_path, KernelsCallback(SimpleNamespace(transformer_engine_backend="transformer_engine", use_fp8=True)))
    for _ in range(2):
        run.step(lambda: some_work(library))
    assert json.loads((tmp_path / "kernels.json").read_text()) == {
        "step": 1,
        "backend": "transformer_engine",
        "gemms": 3,
        "fp8_gemms": 2,
        "kernels": {"gemm bfloat16": 1, "gemm fp8": 2, "launch": 1},
    }
    line = run.callback.line(run.callback.summary(1))
    assert line == (
        "kernels of step 1: Transformer Engine's; 2 of its 3 GEMMs in fp8; calls: gemm bfloat16 1, gemm fp8 2, launch 1"
    )


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_other_backends_run_none_of_them(tmp_path, backend):
    run = Run(tmp_path, KernelsCallback(SimpleNamespace(transformer_engine_backend=backend)))
    run.step()
    summary = json.loads((tmp_path / "kernels.json").read_text())
    assert summary["kernels"] == {} and summary["backend"] == backend
    assert "none of Transformer Engine's" in run.callback.line(summary)
