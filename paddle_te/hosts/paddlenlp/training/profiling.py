"""What a step runs: Nsight Systems' window, Paddle's profiler, named ranges for both, the summary of TE's kernels."""

import json
import logging
import os
import re
from contextlib import ExitStack
from pathlib import Path

import paddle
from paddlenlp.trainer import TrainerCallback

from paddle_te.native.library import driver
from paddle_te.options import LayerOptions

logger = logging.getLogger(__name__)

KERNELS = "kernels.json"


class ProfilerCallback(TrainerCallback):
    """Opens and closes the profiler's window around some steps.

    Inert unless ENABLE_PROFILE=1. PROFILE_START_STEP and PROFILE_STOP_STEP are the first and the last profiled step,
    counted from 0, both included (default 0). PROFILER=nsys (default): the window of
    `nsys profile --capture-range=cudaProfilerApi`, with PROFILE_EMIT_NVTX=1 the steps and their parts named (see
    `Ranges`). PROFILER=paddle: Paddle's own profiler, whose trace of each process, with the same names, is in
    `output_dir`/profile. Among several machines only PROFILE_NODEID (default 0) of SLURM_NODEID profiles.

    Args:
        environ: where the settings come from; None: os.environ.
        profiler: an object with start() and stop(); None: a CudaProfiler or PaddleProfiler.

    Raises ValueError for settings that are not whole numbers or leave no step, ModuleNotFoundError when NVTX is asked
    for and not installed, OSError for nsys without an NVIDIA driver and GPU: all before training starts.
    """

    def __init__(self, environ=None, profiler=None):
        environ = os.environ if environ is None else environ

        def setting(name):
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
        nvtx = kind == "nsys" and setting("PROFILE_EMIT_NVTX")
        self.markers = _nvtx() if nvtx else RecordEvents() if kind == "paddle" else None
        self.profiler = profiler or (CudaProfiler() if kind == "nsys" else PaddleProfiler())
        self.running, self.ranges = False, None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if not self.enabled:
            return
        if not self.running and state.global_step == self.start_step:
            self.profiler.output_dir = args.output_dir
            self.profiler.start()
            self.running = True
            self.ranges = Ranges(self.markers, model) if self.markers else None
        if self.running and self.ranges:
            self.ranges.push(f"step {state.global_step}")

    def on_substep_end(self, args, state, control, **kwargs):
        if self.enabled and self.ranges:
            self.ranges.backward_ends()

    def on_optimizer_begin(self, args, state, control, **kwargs):
        if self.enabled and self.ranges:
            self.ranges.backward_ends()
            self.ranges.push("optimizer")

    def on_optimizer_end(self, args, state, control, **kwargs):
        if self.enabled and self.ranges:
            self.ranges.pop("optimizer")

    def on_step_end(self, args, state, control, **kwargs):
        if not self.enabled or not self.running:
            return
        if self.ranges:
            self.ranges.pop(f"step {state.global_step - 1}")  # the Trainer has counted the step that ended just now
        if state.global_step > self.stop_step:
            self._stop()

    def on_train_end(self, args, state, control, **kwargs):
        if self.enabled and self.running:
            self._stop()

    def _stop(self):
        self.profiler.stop()
        self.running = False
        if self.ranges:
            self.ranges.remove()
            self.ranges = None


class CudaProfiler:
    """The profiler's window through the CUDA driver: whichever CUDA runtime computes, nsys sees it.

    Raises OSError where there is no driver or no GPU.
    """

    def __init__(self):
        self.driver = driver()

    def start(self):
        """Opens the window for the calling thread's CUDA context. Raises RuntimeError when the driver refuses."""
        self._call("cuProfilerStart")

    def stop(self):
        """Waits for the work under way, then closes the window. Raises RuntimeError when the driver refuses."""
        self._call("cuCtxSynchronize")
        self._call("cuProfilerStop")

    def _call(self, function):
        if status := getattr(self.driver, function)():
            raise RuntimeError(f"{function} failed with CUresult {status}; unset ENABLE_PROFILE to train unprofiled")


class PaddleProfiler:
    """Paddle's profiler: a trace of each rank for chrome://tracing in `output_dir`/profile and a table in the log."""

    output_dir = "."  # the callback sets it

    def start(self):
        folder = str(Path(self.output_dir) / "profile")
        rank = paddle.distributed.get_rank()
        ready = paddle.profiler.export_chrome_tracing(folder, f"rank{rank}")
        self.profiler = paddle.profiler.Profiler(on_trace_ready=ready)
        self.profiler.start()

    def stop(self):
        try:
            self.profiler.stop()
            self.profiler.summary()
        except SystemError as error:  # of events that cross; not worth the training
            logger.error(f"PROFILER=paddle: Paddle's profiler made no trace: {error}")
        self.profiler = None  # a process may have one at a time


def _nvtx():
    try:
        import nvtx
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "PROFILE_EMIT_NVTX=1 needs the package nvtx: pip install nvtx, or set PROFILE_EMIT_NVTX=0"
        ) from None
    return nvtx


class RecordEvents:
    """push_range and pop_range, nvtx's, for Paddle's profiler.

    Backward begins inside the event of a layer's forward that wraps the model, a part's backward inside that of one
    gradient, and they end outside. Paddle refuses events that cross: of these the beginning alone is recorded, an event
    without length.
    """

    def __init__(self):
        self.open = []

    def push_range(self, name):
        event = paddle.profiler.RecordEvent(name)
        event.begin()
        if name.endswith("backward"):
            event.end()
            event = None
        self.open.append(event)

    def pop_range(self):
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

    def __init__(self, markers, model):
        self.markers, self.open, self.backward_part, self.hooks = markers, [], None, []
        self._hook(model, lambda: self.push("forward"), self._forward_ends)
        parts = []
        for name, part in model.named_sublayers():
            if PARTS.search(type(part).__name__) and not any(name.startswith(f"{outer}.") for outer in parts):
                parts.append(name)
                self._hook_part(part, ".".join(name.split(".")[-2 if name[-1].isdigit() else -1 :]))

    def _hook(self, layer, before, after):
        self.hooks.append(layer.register_forward_pre_hook(lambda *_: before()))
        self.hooks.append(layer.register_forward_post_hook(lambda layer, inputs, output: after(output)))

    def _hook_part(self, part, name):
        def after(output):
            self.pop(f"{name} forward")
            output = output[0] if isinstance(output, (tuple, list)) else output
            if not output.stop_gradient:  # in backward the part begins where its output's gradient is there
                output.register_hook(lambda _: self._backward_begins(f"{name} backward"))

        self._hook(part, lambda: self.push(f"{name} forward"), after)

    def _backward_begins(self, name):
        self.pop(self.backward_part)
        self.backward_part = name
        self.push(name)

    def _forward_ends(self, output):
        self.pop("forward")
        self.push("backward")

    def push(self, name):
        self.markers.push_range(name)
        self.open.append(name)

    def pop(self, name):
        """Closes a range and those inside it; nothing if it is not open."""
        while name in self.open:
            self.markers.pop_range()
            self.open.pop()

    def backward_ends(self):
        self.pop(self.backward_part)
        self.pop("backward")
        self.backward_part = None

    def remove(self):
        for hook in self.hooks:
            hook.remove()


class KernelsCallback(TrainerCallback):
    """Says after the run's first step which of Transformer Engine's kernels it ran, and in which precision.

    Counted where they are called, in the first process, so that "is TE, is fp8 really on?" is answered by what ran:
    one log line, and `output_dir`/kernels.json, {"step", "backend", "gemms", "fp8_gemms", "kernels": {name: calls}}.
    Counting slows that one step by less than a millisecond; the summary's speeds leave it out anyway.
    """

    def __init__(self, config):
        layers = LayerOptions.of(config)
        self.backend, self.use_fp8 = layers.transformer_engine_backend, layers.use_fp8
        self.counts, self.stack, self.done = {}, ExitStack(), False

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.done and self.backend == "transformer_engine":
            from paddle_te.ops.te.counting import count_entry_points

            self.counts = self.stack.enter_context(count_entry_points())

    def on_step_end(self, args, state, control, **kwargs):
        if self.done:
            return
        self.stack.close()
        self.done = True
        if state.is_world_process_zero:
            summary = self.summary(state.global_step)
            (Path(args.output_dir) / KERNELS).write_text(json.dumps(summary, indent=2) + "\n")
            logger.info(self.line(summary))

    def summary(self, step):
        """What kernels.json holds."""
        gemms = {precision: count for (name, precision), count in self.counts.items() if name == "gemm"}
        return {
            "step": step,
            "backend": self.backend,
            "gemms": sum(gemms.values()),
            "fp8_gemms": gemms.get("fp8", 0),
            "kernels": {" ".join(key).rstrip(): count for key, count in sorted(self.counts.items())},
        }

    def line(self, summary):
        """The summary for people."""
        if not summary["kernels"]:
            return f"kernels of step {summary['step']}: none of Transformer Engine's (backend {self.backend})"
        ran = ", ".join(f"{name} {count}" for name, count in summary["kernels"].items())
        fp8 = f"{summary['fp8_gemms']} of its {summary['gemms']} GEMMs in fp8"
        return f"kernels of step {summary['step']}: Transformer Engine's; {fp8}; calls: {ran}"
