"""What a step runs: Nsight Systems' window, Paddle's profiler, named ranges for both, the summary of TE's kernels."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import paddle
from paddle.nn import Layer
from paddlenlp.trainer import TrainerCallback

from paddle_te.host import HostArguments, HostConfig, HostModel
from paddle_te.native.library import driver
from paddle_te.options import LayerOptions
from paddle_te.training.callback import Control, State

logger = logging.getLogger(__name__)

KERNELS = "kernels.json"


class ProfilerCallback(TrainerCallback):
    """Opens and closes the profiler's window around some steps.

    Inert unless ENABLE_PROFILE=1. PROFILE_START_STEP and PROFILE_STOP_STEP are the first and the last profiled step,
    counted from 0, both included (default 0). PROFILER=nsys (default): the window of
    `nsys profile --capture-range=cudaProfilerApi`, the steps and their parts named (see `Ranges`). PROFILER=paddle:
    Paddle's own profiler, whose trace of each process, with the same names, is in `output_dir`/profile. Among several
    machines only PROFILE_NODEID (default 0) of SLURM_NODEID profiles.

    Args:
        environ: where the settings come from; None: os.environ.
        profiler: an object with start() and stop(); None: a CudaProfiler or PaddleProfiler.

    Raises ValueError for settings that are not whole numbers or leave no step, ModuleNotFoundError for nsys
    without the package nvtx, OSError for nsys without an NVIDIA driver and GPU: all before training starts.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, profiler: Profiler | None = None) -> None:
        environ = os.environ if environ is None else environ

        def setting(name: str) -> int:
            try:
                return int(environ.get(name) or 0)
            except ValueError:
                raise ValueError(f"{name}={environ[name]!r}: must be a whole number") from None

        self.enabled = bool(setting("ENABLE_PROFILE")) and setting("SLURM_NODEID") == setting("PROFILE_NODEID")
        if not self.enabled:
            return
        self.start_step, self.stop_step = setting("PROFILE_START_STEP"), setting("PROFILE_STOP_STEP")
        if self.stop_step < self.start_step:
            raise ValueError(f"PROFILE_STOP_STEP={self.stop_step} is before PROFILE_START_STEP={self.start_step}")
        kind = environ.get("PROFILER") or "nsys"
        if kind not in ("nsys", "paddle"):
            raise ValueError(f"PROFILER={kind!r}: it may be nsys, paddle")
        self.profiler: Profiler = profiler or (CudaProfiler() if kind == "nsys" else PaddleProfiler())
        self.markers: Markers = _nvtx() if kind == "nsys" else RecordEvents()
        self.running = False
        self.ranges: Ranges | None = None

    def on_step_begin(
        self, args: HostArguments, state: State, control: Control, model: HostModel = None, **kwargs: Any
    ) -> None:
        if not self.enabled:
            return
        if not self.running and state.global_step == self.start_step:
            self.profiler.output_dir = args.output_dir
            self.profiler.start()
            self.running = True
            self.ranges = Ranges(self.markers, model)
        if self.running and self.ranges:
            self.ranges.push(f"step {state.global_step}")

    def on_substep_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if self.enabled and self.ranges:
            self.ranges.backward_ends()

    def on_optimizer_begin(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if self.enabled and self.ranges:
            self.ranges.backward_ends()
            self.ranges.push("optimizer")

    def on_optimizer_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if self.enabled and self.ranges:
            self.ranges.pop("optimizer")

    def on_step_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if not self.enabled or not self.running:
            return
        if self.ranges:
            self.ranges.pop(f"step {state.global_step - 1}")  # the Trainer has counted the step that ended just now
        if state.global_step > self.stop_step:
            self._stop()

    def on_train_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if self.enabled and self.running:
            self._stop()

    def _stop(self) -> None:
        self.profiler.stop()
        self.running = False
        if self.ranges:
            self.ranges.remove()
            self.ranges = None


class Markers(Protocol):
    """What names ranges in a timeline, such as the package nvtx."""

    def push_range(self, name: str) -> object: ...

    def pop_range(self) -> object: ...


class Profiler(Protocol):
    """What opens and closes a profiler's window. output_dir: the run's, which the callback sets."""

    output_dir: str

    def start(self) -> None: ...

    def stop(self) -> None: ...


class CudaProfiler:
    """The profiler's window through the CUDA driver: whichever CUDA runtime computes, nsys sees it.

    Raises OSError where there is no driver or no GPU.
    """

    output_dir = "."  # nsys has its own

    def __init__(self) -> None:
        self.driver = driver()

    def start(self) -> None:
        """Open the window for the calling thread's CUDA context. Raise RuntimeError when the driver refuses."""
        self._call("cuProfilerStart")

    def stop(self) -> None:
        """Wait for the work under way, then close the window. Raise RuntimeError when the driver refuses."""
        self._call("cuCtxSynchronize")
        self._call("cuProfilerStop")

    def _call(self, function: str) -> None:
        if status := getattr(self.driver, function)():
            raise RuntimeError(f"{function} failed with CUresult {status}; unset ENABLE_PROFILE to train unprofiled")


class PaddleProfiler:
    """Paddle's profiler: a trace of each rank for chrome://tracing in `output_dir`/profile and a table in the log."""

    output_dir = "."  # the callback sets it

    def start(self) -> None:
        folder = str(Path(self.output_dir) / "profile")
        rank = paddle.distributed.get_rank()
        ready = paddle.profiler.export_chrome_tracing(folder, f"rank{rank}")
        self.profiler = paddle.profiler.Profiler(on_trace_ready=ready)
        self.profiler.start()

    def stop(self) -> None:
        try:
            self.profiler.stop()
            self.profiler.summary()
        except SystemError as error:  # of events that cross; not worth the training
            logger.error(f"PROFILER=paddle: Paddle's profiler made no trace: {error}")
        del self.profiler  # a process may have one at a time


def _nvtx() -> Markers:
    try:
        import nvtx
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the profiler of nsys needs the package nvtx, which names ranges: pip install nvtx"
        ) from None
    return nvtx


class RecordEvents:
    """push_range and pop_range, nvtx's, for Paddle's profiler.

    Backward begins inside the event of a layer's forward that wraps the model, a part's backward inside that of one
    gradient, and they end outside. Paddle refuses events that cross: of these the beginning alone is recorded, an event
    without length.
    """

    def __init__(self) -> None:
        self.open: list[Any] = []  # None for an event without length

    def push_range(self, name: str) -> None:
        event = paddle.profiler.RecordEvent(name)
        event.begin()
        at_once = name.endswith("backward")
        if at_once:
            event.end()
        self.open.append(None if at_once else event)

    def pop_range(self) -> None:
        if event := self.open.pop():
            event.end()


# classes of a model's parts that have ranges of their own, but not inside one another
PARTS = re.compile("DecoderLayer|Embedding|LMHead|Criterion")


class Ranges:
    """Names forward, backward, optimizer, each decoder layer, embedding, head and criterion in a timeline.

    Through hooks on the model, until `remove`. markers: has push_range(name) and pop_range(), such as the package nvtx.
    model: the Trainer's; its parts are recognised by their classes' names. Under pipeline parallelism, which calls the
    layers one by one, there are the parts' ranges and the optimizer's.
    """

    def __init__(self, markers: Markers, model: HostModel) -> None:
        self.markers = markers
        self.backward_part: str | None = None
        self.open: list[str] = []
        self.hooks: list[Any] = []
        self._hook(model, lambda: self.push("forward"), self._forward_ends)
        parts: list[str] = []
        for name, part in model.named_sublayers():
            if PARTS.search(type(part).__name__) and not any(name.startswith(f"{outer}.") for outer in parts):
                parts.append(name)
                self._hook_part(part, ".".join(name.split(".")[-2 if name[-1].isdigit() else -1 :]))

    def _hook(self, layer: Any, before: Callable[[], object], after: Callable[[Any], object]) -> None:
        self.hooks.append(layer.register_forward_pre_hook(lambda *_: before()))
        self.hooks.append(layer.register_forward_post_hook(lambda layer, inputs, output: after(output)))

    def _hook_part(self, part: Layer, name: str) -> None:
        def after(output: Any) -> None:
            self.pop(f"{name} forward")
            output = output[0] if isinstance(output, (tuple, list)) else output
            if not output.stop_gradient:  # in backward the part begins where its output's gradient is there
                output.register_hook(lambda _: self._backward_begins(f"{name} backward"))

        self._hook(part, lambda: self.push(f"{name} forward"), after)

    def _backward_begins(self, name: str) -> None:
        self.pop(self.backward_part)
        self.backward_part = name
        self.push(name)

    def _forward_ends(self, output: Any) -> None:
        self.pop("forward")
        self.push("backward")

    def push(self, name: str) -> None:
        self.markers.push_range(name)
        self.open.append(name)

    def pop(self, name: str | None) -> None:
        """Close a range and those inside it; nothing if it is not open."""
        while name in self.open:
            self.markers.pop_range()
            self.open.pop()

    def backward_ends(self) -> None:
        self.pop(self.backward_part)
        self.pop("backward")
        self.backward_part = None

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


class KernelsCallback(TrainerCallback):
    """Says after the run's first step which of Transformer Engine's kernels it ran, and in which precision.

    Counted where they are called, in the first process, so that "is TE, is fp8 really on?" is answered by what ran:
    one log line, and `output_dir`/kernels.json, {"step", "backend", "gemms", "fp8_gemms", "kernels": {name: calls}}.
    Counting slows that one step by less than a millisecond; the summary's speeds leave it out anyway.
    """

    def __init__(self, config: HostConfig) -> None:
        layers = LayerOptions.of(config)
        self.backend, self.use_fp8 = layers.transformer_engine_backend, layers.use_fp8
        self.counts: Mapping[tuple[str, str], int] = {}
        self.stack, self.done = ExitStack(), False

    def on_step_begin(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if not self.done and self.backend == "transformer_engine":
            from paddle_te.ops.te.counting import count_entry_points

            self.counts = self.stack.enter_context(count_entry_points())

    def on_step_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if self.done:
            return
        self.stack.close()
        self.done = True
        if state.is_world_process_zero:
            summary = self.summary(state.global_step)
            (Path(args.output_dir) / KERNELS).write_text(json.dumps(summary, indent=2) + "\n")
            logger.info(self.line(summary))

    def summary(self, step: int) -> dict[str, Any]:
        """Return what kernels.json holds."""
        gemms = {precision: count for (name, precision), count in self.counts.items() if name == "gemm"}
        return {
            "step": step,
            "backend": self.backend,
            "gemms": sum(gemms.values()),
            "fp8_gemms": gemms.get("fp8", 0),
            "kernels": {" ".join(key).rstrip(): count for key, count in sorted(self.counts.items())},
        }

    def line(self, summary: Mapping[str, Any]) -> str:
        """Return the summary for people."""
        if not summary["kernels"]:
            return f"kernels of step {summary['step']}: none of Transformer Engine's (backend {self.backend})"
        ran = ", ".join(f"{name} {count}" for name, count in summary["kernels"].items())
        fp8 = f"{summary['fp8_gemms']} of its {summary['gemms']} GEMMs in fp8"
        return f"kernels of step {summary['step']}: Transformer Engine's; {fp8}; calls: {ran}"
