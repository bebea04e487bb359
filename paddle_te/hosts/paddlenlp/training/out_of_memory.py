"""What a run says that needs more memory than its GPU has: where the memory goes, and what the planner would change."""

import contextlib
import re
from dataclasses import fields, replace

from paddle_te.hosts.paddlenlp.lora import target_modules
from paddle_te.hosts.paddlenlp.training.callbacks import device_name
from paddle_te.models.lora import TARGETS
from paddle_te.options.scripts import OPTIMIZER, chosen
from paddle_te.planner import GPUS, Lora, Model, layout_of, memory_of_step, search
from paddle_te.runs.rollback import RunEnded

# Paddle's allocator, nvgpu's and CUDA's words
OUT_OF_MEMORY = re.compile(r"out of memory|ResourceExhausted|cudaErrorMemoryAllocation", re.IGNORECASE)
SUGGESTIONS = 3


@contextlib.contextmanager
def advised(config, args, lora=None):
    """Ends training that runs out of memory with RunEnded, whose line says what else would fit.

    config: the model's. args: the TrainingArguments. lora: the TELoRAModel where an adapter is trained alone. What the
    planner does not know, other backends than te, ends with its own error.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError, SystemError) as error:
        known = args.transformer_engine_backend == "transformer_engine"
        if isinstance(error, RunEnded) or not known or not OUT_OF_MEMORY.search(str(error)):
            raise
        raise RunEnded(advice(str(error), config, args, device_name(), lora and lora_of(lora))) from error


def lora_of(model):
    """The planner's Lora of a TELoRAModel. Other target_modules than those of a flag count as all."""
    there = {*model.lora_config.target_modules}
    targets = next((name for name in TARGETS if {*target_modules(name)} == there), "all")
    return Lora(model.lora_config.r, targets, model.base_precision is not None)


def advice(problem, config, args, device, lora=None):
    """The line: the problem's own words, the memory of the run's layout by part, layouts that fit, and the command that
    lists all of them. device: the GPU's name, as its driver says it. lora: of an adapter that is trained alone."""
    model, layout = Model.of(config), layout_of(args, args.world_size, config.seq_length, lora)
    need = memory_of_step(model, layout)
    sizes = {part.name.replace("_", " "): getattr(need, part.name) / 1e9 for part in fields(need)}
    parts = sorted(((size, part) for part, size in sizes.items() if size >= 0.05), reverse=True)
    bill = ", ".join(f"{part} {size:.1f}" for size, part in parts)
    words = next(line for line in problem.splitlines() if OUT_OF_MEMORY.search(line)).strip()
    told = f"{words[:200].rstrip('.')}. "
    told += f"The planner counts {need.total / 1e9:.1f} GB on each GPU when a step needs most ({bill}). "
    gpu = next(((name, gpu) for name, gpu in GPUS.items() if gpu.title in device), None)
    told += _what_fits(model, layout, gpu[1]) if gpu else ""
    flags = [*(lora.flags() if lora else ()), *chosen(layout, OPTIMIZER)]
    flags += ["--activation_func_fp8_input_store true"] * layout.fp8_input_store
    return told + (
        f"All layouts: paddle-te plan {config.name_or_path or 'MODEL'} --gpus {layout.gpus} --seq {layout.sequence} "
        f"--tokens_per_step {layout.tokens_per_step} --precision {layout.precision}"
        + "".join(f" {flag}" for flag in flags)
        + (f" --gpu {gpu[0]}" if gpu else "")
    )


def _what_fits(model, layout, gpu):
    with_base = ""
    plans = _plans(model, layout, gpu)
    if not plans and layout.lora and not layout.fp8_base:
        in_fp8 = replace(layout, precision="fp8", lora=replace(layout.lora, fp8_base=True))
        plans, with_base = _plans(model, in_fp8, gpu), " and --use_fp8 true --quantize_base fp8"
    if not plans:
        return "No layout of these GPUs fits. "
    found = "; ".join(f"{_described(plan.layout)} ({plan.memory.total / 1e9:.0f} GB)" for plan in plans)
    return f"With as many tokens a step{with_base} these would fit, the fastest first: {found}. "


def _plans(model, layout, gpu):
    """The fastest that fit of those which train the same with as many tokens a step."""
    asked = layout.gpus, layout.sequence, layout.tokens_per_step, layout.precision
    own = dict(lora=layout.lora, fp8_input_store=layout.fp8_input_store)
    return search(model, gpu, *asked, **own, **layout.optimizer).plans[:SUGGESTIONS]


def _described(layout):
    """A layout with the flags that it needs."""
    further = replace(layout, lora=None).extra_arguments()  # an adapter's flags are the run's own
    words = [str(layout), f"recompute {layout.recompute}", f"batch {layout.batch}", further]
    return ", ".join(filter(None, words))
