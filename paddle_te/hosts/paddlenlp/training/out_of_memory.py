"""What a run says that needs more memory than its GPU has: where the memory goes, and what the planner would change."""

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import paddle

from paddle_te import commands, configs, device
from paddle_te.host import HostArguments, HostConfig, HostModel
from paddle_te.hosts.paddlenlp.lora import target_modules
from paddle_te.job import Job
from paddle_te.job.words import printed
from paddle_te.models.backend import is_te
from paddle_te.models.lora import TARGETS
from paddle_te.options.layers import stored_in_fp8
from paddle_te.options.lora import TRANSPOSES_KEPT, Adapter
from paddle_te.options.training import OPTIMIZER, chosen
from paddle_te.planner.gpus import GPUS, Gpu
from paddle_te.planner.layout import adapter_flags, extra_arguments, shape
from paddle_te.planner.memory import lacking, memory_of_step
from paddle_te.planner.model import Model
from paddle_te.planner.remedies import bill, remedies
from paddle_te.runs.rollback import RunEnded
from paddle_te.training.throughput import device_name

logger = logging.getLogger(__name__)

# Paddle's allocator, nvgpu's and CUDA's words
OUT_OF_MEMORY = re.compile(r"out of memory|ResourceExhausted|cudaErrorMemoryAllocation", re.IGNORECASE)
WANTED, FREE = (re.compile(rf"{words} ([\d.]+)([KMGT]?)B") for words in ("Cannot allocate", "available memory is only"))
SUGGESTIONS = 3
SMALLER = 0.98  # of what has failed: the planner was seen to be wrong by up to 1.8 % (docs/guides/plan.md)


@contextlib.contextmanager
def advised(config: HostConfig, args: HostArguments, name: str, lora: HostModel = None) -> Iterator[None]:
    """End training that runs out of memory with RunEnded.

    Its line says how much was wanted and, where the planner knows the run, what else would fit. The details have
    the error itself.

    config: the model's. args: the TrainingArguments. name: the model's, as the user gave it. lora: the TELoRAModel
    where an adapter is trained alone.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError, SystemError) as error:
        if isinstance(error, RunEnded) or not (isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error))):
            raise
        logger.debug("out of memory", exc_info=True)
        told = Shortage.of(str(error)).told()
        if is_te(args):
            told += f" {advice(config, args, device_name(), name, lora and lora_of(lora))}"
        raise RunEnded(told) from error


@dataclass(frozen=True)
class Shortage:
    """What a device lacks, in bytes; None where nobody says it.

    wanted: by the tensor that found no room. free: beside all that is taken. tensors: what they have. kept: with what
    Paddle keeps for later ones. total: of the device.
    """

    device: str
    wanted: float | None
    free: float | None
    tensors: int
    kept: int
    total: int | None

    @classmethod
    def of(cls, problem: str) -> Self:
        """Return the Shortage of this device. problem: the error's words."""
        wanted, free = (_bytes(pattern.search(problem)) for pattern in (WANTED, FREE))
        name = f"{paddle.device.get_device()} ({device_name()})"
        return cls(name, wanted, free, *device.memory_in_use(), device.total_memory())

    def told(self) -> str:
        unused = self.kept - self.tensors
        sizes = [
            (self.wanted, "more wanted"),
            (self.tensors, "in use by tensors"),
            (unused, "kept by Paddle beside them"),
        ]
        sizes += [(self.free, "free"), (self.total, "in all")]
        words = [f"{_gb(size)} {what}" for size, what in sizes if size is not None]
        return f"out of memory on {self.device}: {', '.join(words)}."


def _bytes(found: re.Match[str] | None) -> float | None:
    """Return the bytes of a match of a number and its unit, which Paddle counts in powers of 1024."""
    return found and float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB"


def lora_of(model: HostModel) -> dict[str, Any]:
    """Return the flags of a TELoRAModel. Other target_modules than those of a flag count as all."""
    there = {*model.lora_config.target_modules}
    targets = next((name for name in TARGETS if {*target_modules(name)} == there), "all")
    scaling = model.base_scaling
    adapter = Adapter(rank=model.lora_config.r, targets=targets, fp8_base=scaling is not None)
    return adapter.flags | {TRANSPOSES_KEPT: scaling is not None and scaling.keeps_transpose}


def job_of_run(config: HostConfig, args: HostArguments, lora: Mapping[str, Any] | None = None) -> Job:
    """Return the Job of a run whose samples are as long as its model's seq_length. lora: `lora_of`'s flags."""
    length = {"max_seq_length": config.seq_length, "max_length": config.seq_length}
    return Job.of(args, script=args.SCRIPT, world=args.world_size, **length, **(lora or {}))


def advice(
    config: HostConfig, args: HostArguments, gpu_name: str, name: str, lora: Mapping[str, Any] | None = None
) -> str:
    """Return the memory of the layout by part, layouts that need less and fit, and the command that lists all of them.

    gpu_name: as its driver says it. name: the model's. lora: of an adapter that is trained alone.
    """
    model, layout = Model.of(config), job_of_run(config, args, lora)
    need = memory_of_step(model, layout)
    told = f"The planner counts {need.total / 1e9:.1f} GB on each GPU when a step needs most{bill(need, least=0.05)}. "
    gpu = next(((kind, gpu) for kind, gpu in GPUS.items() if gpu.title in gpu_name), None)
    told += _what_fits(model, layout, gpu[1]) if gpu else ""
    flags = [f"--gpus {layout.world} --seq {layout.sequence} --tokens_per_step {layout.tokens_per_step}"]
    flags += [f"--precision {layout.precision}", *adapter_flags(layout), *chosen(layout, OPTIMIZER)]
    flags += printed(stored_in_fp8(True)) if layout.stores_input_in_fp8 else []
    flags += [f"--gpu {gpu[0]}"] if gpu else []
    return told + "All layouts: " + commands.line("plan", configs.name_of(name), *" ".join(flags).split())


def _what_fits(model: Model, layout: Job, gpu: Gpu) -> str:
    change, plans = remedies(model, layout, _with_less(model, layout, gpu), SUGGESTIONS)
    if not plans:
        return "No layout of these GPUs with as many tokens a step needs less and fits. "
    with_base = f" and {' '.join(printed(change))}" if change and layout.lora else ""  # else a plan names it
    found = "; ".join(f"{_described(plan.layout)} ({plan.memory.total / 1e9:.0f} GB)" for plan in plans)
    return f"With as many tokens a step{with_base} these need less and would fit, the fastest first: {found}. "


def _with_less(model: Model, layout: Job, gpu: Gpu) -> Gpu:
    """Return the GPU with so little memory that the layout, which has failed on it, does not fit.

    By the planner's numbers neither it nor a layout that needs about as much fits then.
    """
    needed = lacking(memory_of_step(model, layout), model, layout, gpu) + gpu.memory * 1e9
    return replace(gpu, memory=min(gpu.memory, SMALLER * needed / 1e9))


def _described(layout: Job) -> str:
    """Return a layout with the flags that it needs."""
    further = extra_arguments(layout.but(lora=False))  # an adapter's flags are the run's own
    words = [shape(layout), f"recompute {layout.recomputed}", f"batch {layout.batch}", further]
    return ", ".join(filter(None, words))
