"""Speed and memory of a training, in the Trainer's logs and in a log of its own."""

import ctypes
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import paddle

from paddle_te import device
from paddle_te.host import HostArguments, HostConfig
from paddle_te.models.experts import ROUTING
from paddle_te.native.library import driver
from paddle_te.options import BACKENDS, LayerOptions
from paddle_te.planner.model import Model
from paddle_te.runs.convergence import TRAIN_LOG, TRAIN_SUMMARY
from paddle_te.runs.lines import of_preferences, samples_of_step
from paddle_te.training.callback import Callback, Control, State
from paddle_te.training.fp8_statistics import WORST


def model_flops_per_token(config: HostConfig, lora: bool = False) -> int:
    """Return the floating-point operations that training needs per token, forward and backward, without recomputation.

    6 per weight that is multiplied (2 forward, 4 backward; of experts those of one token, the embedding's lookup has
    none) and
    12·L·H·Q·T for attention's two products, not halved for the causal mask.
    Source: Chowdhery et al., PaLM (arXiv:2204.02311), appendix B; Megatron-LM and torchtitan count alike.

    Args:
        config: the model's, PaddleNLP's object; its seq_length is the tokens in a sample (T).
        lora: the weights are frozen and have no gradients: 4 per weight. What A and B need is not counted.
    """
    model, each = Model.of(config), 4 if lora else 6
    weights = model.layers * model.active_weights + model.embedding
    return each * weights + 12 * model.layers * model.hidden * config.seq_length


# Part of the device's name: dense bf16 and fp8 TFLOP/s. The first match counts. From NVIDIA's data sheets of each
# product, whose figures with sparsity are twice as large (GB200, GB300: the NVL72's, B200, B300: the HGX's, per GPU);
# of the H20 there is none: as sellers give it.
PEAK_TFLOPS: dict[str, tuple[float, float | None]] = {
    "GB300": (2500, 5000),
    "GB200": (2500, 5000),
    "B300": (2250, 4500),
    "B200": (2250, 4500),
    "H200 NVL": (835, 1671),
    "H200": (989, 1979),
    "H100 PCIe": (756, 1513),
    "H100 NVL": (835, 1671),
    "H100": (989, 1979),
    "H800": (989, 1979),
    "H20": (148, 296),
    "A100": (312, None),
    "A800": (312, None),
    "L40S": (362, 733),
    "L40": (181, 362),
    "L4": (121, 242),
}


def peak_tflops(name: str, fp8: bool = False) -> float | None:
    """Return what a device of that name computes a second at most in the GEMMs' precision; None for an unknown one."""
    return next((peaks[fp8] for part, peaks in PEAK_TFLOPS.items() if part in name), None)


def device_name() -> str:
    """Return the GPU's name as NVIDIA's driver says it, such as "NVIDIA H200"; for others their kind, such as "cpu"."""
    if device.compute_capability() is None:
        return device.kind()
    name, number = ctypes.create_string_buffer(96), int(paddle.device.get_device().partition(":")[2])
    driver().cuDeviceGetName(name, len(name), number)
    return name.value.decode()


def run_name(config: HostConfig) -> str:
    """Return the backend's short name, none, pd or te, with -fp8 where it runs in fp8."""
    layers = LayerOptions.of(config)
    name = next(short for short, backend in BACKENDS.items() if backend == layers.transformer_engine_backend)
    return f"{name}-fp8" if layers.use_fp8 else name


def exact_loss(loss: float, steps: int) -> float:
    """Return the loss as it was before the Trainer rounded it to 8 decimals.

    One step's loss is a float32, whose neighbours lie more than 1e-8 apart from 0.125 upwards: there the rounded
    value names exactly one float32. Below, and for a mean over several steps, the error stays under 5e-9.
    """
    return float(np.float32(loss)) if steps == 1 else loss


def _step_of(line: str) -> int | None:
    """Return the step of a log's line; None for one that a crash or a full disk has cut short."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None


class ThroughputCallback(Callback):
    """Measure speed and memory, add them to the Trainer's logs and write `output_dir`/train_log.jsonl.

    A line per logging interval, from the first process of the job:
    `{"step", "loss", "lr", "tokens_per_second", "step_time", "peak_memory_bytes"}`, the loss with all its digits,
    `step_time` in seconds (mean of the interval; saving and evaluating not counted, loading data counted),
    `tokens_per_second` of the whole job, memory of the first process's device; "skipped_steps" where some were left
    out since the line before (`health`), and no line where all were; "grad_norm" before clipping, of the last step,
    where the Trainer logs it; what `models.experts` says of a mixture of experts; WORST of the interval's last step
    with fp8 statistics; preference tuning's rewards. A resumed run keeps the lines up to the step it resumes from. At
    the end train_summary.json, whose speeds leave out the first interval (warm-up).

    It must come before VisualDL's callback, which passes on what it finds in the logs: see `install_callbacks`.

    Args:
        backend: the layers' name for people.
        seq_length: tokens of a sample.
        flops_per_token: `model_flops_per_token`. peak: the device's in the GEMMs' precision, TFLOP/s. None: not known.
    """

    def __init__(
        self, backend: str, seq_length: float, flops_per_token: float | None = None, peak: float | None = None
    ) -> None:
        self.backend, self.seq_length, self.flops_per_token, self.peak = backend, seq_length, flops_per_token, peak
        self.last_step = 0
        self.steps = 0  # computed since the last log
        self.skipped = 0  # steps that were left out, of a resumed run those before too
        self.unlogged = 0  # of them, since the last line of the log
        self.busy = 0.0  # seconds of training since the last log
        self.mark: float | None = None  # perf_counter up to which `busy` has counted
        self.rate: float | None = None  # of the last update; the scheduler has the next one's when the Trainer logs
        self.records: list[dict[str, Any]] = []

    @classmethod
    def of(cls, config: HostConfig, lora: bool = False) -> Self:
        """Return the callback for a model of PaddleNLP's configuration; its seq_length says how long a sample is."""
        peak = peak_tflops(device_name(), LayerOptions.of(config).use_fp8)
        return cls(run_name(config), config.seq_length, model_flops_per_token(config, lora), peak)

    def _count_time(self) -> None:
        now = time.perf_counter()
        self.busy += now - (now if self.mark is None else self.mark)
        self.mark = now

    def on_train_begin(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self.last_step, self.steps, self.busy, self.mark, self.records = state.global_step, 0, 0.0, None, []
        if state.is_world_process_zero:
            self._start_log(Path(args.output_dir) / TRAIN_LOG)

    def _start_log(self, path: Path) -> None:
        kept = []
        if self.last_step and path.exists():
            lines = path.read_text(errors="replace").splitlines()
            kept = [line for line in lines if (step := _step_of(line)) and step <= self.last_step]
        self.skipped = sum(json.loads(line).get("skipped_steps", 0) for line in kept)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".tmp")
        partial.write_text("".join(line + "\n" for line in kept))
        partial.replace(path)

    def on_step_begin(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if self.mark is None:
            self.mark = time.perf_counter()

    def on_optimizer_begin(
        self, args: HostArguments, state: State, control: Control, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self.rate = optimizer.get_lr()

    def on_step_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self._count_time()
        self.steps += 1

    def _skip_time(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self.mark = time.perf_counter()

    on_save = on_evaluate = _skip_time

    def on_log(
        self, args: HostArguments, state: State, control: Control, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        logs = {} if logs is None else logs
        steps, left_out = self.steps, logs.get("skipped_steps", 0)
        self.skipped, self.unlogged = self.skipped + left_out, self.unlogged + left_out
        if "loss" not in logs or not steps:  # an evaluation's log, or the run's closing one
            return
        self._count_time()  # the Trainer has just read the loss: the device has finished these steps
        step_time = self.busy / steps
        losses = state.global_step - self.last_step - self.unlogged
        self.last_step, self.steps, self.busy = state.global_step, 0, 0.0

        samples = samples_of_step(args)
        tokens_per_second = samples * self.seq_length / step_time
        record = {
            "step": state.global_step,
            "loss": exact_loss(logs["loss"], losses),
            "lr": self.rate,
            "tokens_per_second": tokens_per_second,
            "step_time": step_time,
            "peak_memory_bytes": device.peak_memory(),
            **({"skipped_steps": self.unlogged} if self.unlogged else {}),
            **{name: logs[name] for name in ("grad_norm", *ROUTING, *WORST) if name in logs},
            **of_preferences(logs),
        }
        self.unlogged = 0
        self.records.append(record)
        logs.update(
            learning_rate=self.rate,
            tokens_per_second=round(tokens_per_second, 1),
            tokens_per_second_per_device=round(tokens_per_second / args.world_size, 1),
            samples_per_second=round(samples / step_time, 3),
            step_time=round(step_time, 4),
            peak_memory_bytes=record["peak_memory_bytes"],
            **{key: round(value, 4) for key, value in self._utilization(tokens_per_second, args).items()},
        )
        if state.is_world_process_zero:
            with open(Path(args.output_dir) / TRAIN_LOG, "a") as log:
                log.write(json.dumps(record) + "\n")

    def _utilization(self, tokens_per_second: float, args: HostArguments) -> dict[str, float]:
        """Return {"model_tflops_per_device", "mfu": their share of the device's peak}, of these what is known."""
        if self.flops_per_token is None:
            return {}
        tflops = tokens_per_second / args.world_size * self.flops_per_token / 1e12
        return {"model_tflops_per_device": tflops} | ({"mfu": tflops / self.peak} if self.peak else {})

    def _steady_step_time(self) -> float:
        """Return the mean seconds of the steps after the first interval, or of those of the only one."""
        if len(self.records) == 1:
            return self.records[0]["step_time"]
        ends = [record["step"] for record in self.records]
        counts = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        seconds = [count * record["step_time"] for count, record in zip(counts, self.records[1:], strict=True)]
        return sum(seconds) / sum(counts)

    def on_train_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if not self.records or not state.is_world_process_zero:
            return
        step_time = self._steady_step_time()
        samples = samples_of_step(args)
        tokens_per_second = samples * self.seq_length / step_time
        summary = {
            "backend": self.backend,
            "steps": state.global_step,
            "final_loss": self.records[-1]["loss"],
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / args.world_size,
            "step_time": step_time,
            "peak_memory_bytes": self.records[-1]["peak_memory_bytes"],
            "devices": args.world_size,
            "global_batch_size": samples,
            "seq_length": self.seq_length,
            "device": device_name(),
            "skipped_steps": self.skipped,
            "rollbacks": [asdict(rollback) for rollback in getattr(args, "rollbacks", ())],
            **self._utilization(tokens_per_second, args),
        }
        (Path(args.output_dir) / TRAIN_SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
