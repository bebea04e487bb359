"""All layouts of a model on so many GPUs: the fastest that fit, and why the others do not."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from paddle_te.options.scripts import OFFLOADED_AT_ONCE
from paddle_te.planner.gpus import Gpu
from paddle_te.planner.layout import Layout
from paddle_te.planner.memory import Memory, fits, host_bytes, lacking, memory_of_step, offloaded_bytes, state_bytes
from paddle_te.planner.model import Model
from paddle_te.planner.speed import time_of_step
from paddle_te.runs.parallelism import LayoutError, check_layout

# What backward may compute again: first what saves most bytes in a millisecond (`speed.again_ms`), then more and more
RECOMPUTE = (
    {"recompute": "none"},
    {"recompute_modules": ("layernorm",)},
    {"recompute_modules": ("layernorm", "mlp_act")},
    {"recompute_modules": ("layernorm", "mlp_act", "core_attn")},
    {"recompute_modules": ("layernorm", "mlp")},
    {"recompute_modules": ("layernorm", "mlp", "core_attn")},
    {"recompute": "full"},
)
# The same with the MLP in chunks, where a rank has so many tokens that this makes one layer's backward much smaller.
CHUNK = 16384
IN_CHUNKS = tuple(
    again | {"mlp_chunk_tokens": CHUNK}
    for again in RECOMPUTE
    if again.get("recompute") == "full" or "mlp" in again.get("recompute_modules", ())
)
BATCHES = (1, 2, 4, 8)
LONG = 16384  # tokens of a sequence from which on it may pay that ranks share it
SEQUENCES = 16  # of a step for each GPU, where the user asks for no other number
OFFLOAD_DOUBT = 1.03  # by which four runs with something in host memory differed from what is computed


@dataclass(frozen=True)
class Plan:
    """A layout with what it needs. times: {part: ms}."""

    layout: Layout
    memory: Memory
    times: dict[str, float]

    @cached_property
    def milliseconds(self) -> float:
        """Of a step."""
        return sum(self.times.values())

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU."""
        return self.layout.tokens_per_step / self.milliseconds * 1e3 / self.layout.gpus


@dataclass(frozen=True)
class Search:
    """plans: those that fit, the fastest first; of those that differ in micro-batches, in chunks, or in which parts of
    a layer are computed again alone the best.
    too_large: {how the ranks share the model: the Plan of it that needs least memory}, where none fits."""

    plans: list[Plan]
    too_large: dict[str, Plan]


def usual_tokens(gpus: int, sequence: int, optimizer_in_backward: str = "off") -> int:
    """Tokens of a step on all GPUs, where the user asks for no other number. With an update in backward all GPUs share
    one micro-batch."""
    return (SEQUENCES * gpus if optimizer_in_backward == "off" else 1) * sequence


def search(
    model: Model,
    gpu: Gpu,
    gpus: int,
    sequence: int,
    tokens_per_step: int,
    precision: str,
    wanted: Callable[[Layout], bool] = lambda layout: True,
    **flags: object,
) -> Search:
    """The Search among the layouts that have exactly `tokens_per_step` tokens a step and for which `wanted` is true.

    flags: further fields that all of them have, such as optim_moments.

    Raises ValueError where no layout has so many tokens.
    """
    if tokens_per_step % sequence:
        raise ValueError(f"tokens_per_step={tokens_per_step} is no multiple of the sequence length {sequence}")
    found, fitting, least = False, {}, {}
    every = layouts(model, gpu, gpus, sequence, tokens_per_step // sequence, precision, **flags)
    for layout in _with_offload(model, filter(wanted, every), gpu):
        found = True
        shape, memory = str(layout), memory_of_step(model, layout)
        fitted = fits(memory, model, layout, gpu)
        smallest = shape not in least or memory.total < least[shape].memory.total
        if not fitted and not smallest:
            continue
        plan = Plan(layout, memory, time_of_step(model, layout, gpu))
        if fitted:
            again = layout.recompute == "full", bool(layout.recomputed_modules)
            kind = shape, *again, layout.offload_activations > 0, layout.offload_optimizer > 0
            fitting[kind] = min(plan, fitting.get(kind, plan), key=_rank)
        if smallest:
            least[shape] = plan
    if not found:
        raise ValueError(
            f"no layout of {gpus} GPUs divides {model.heads} heads, {model.layers} layers and "
            f"{tokens_per_step // sequence} sequences a step evenly; try another tokens_per_step"
        )
    shapes = {shape for shape, *_ in fitting}
    too_large = {shape: plan for shape, plan in least.items() if shape not in shapes}
    return Search(sorted(fitting.values(), key=_rank), too_large)


def _rank(plan: Plan) -> tuple[float, float]:
    """The faster first, of equally fast ones that with less memory. Offload must gain more than its time may be off."""
    doubt = OFFLOAD_DOUBT if plan.layout.offloads else 1
    return doubt * plan.milliseconds, plan.memory.total


def layouts(
    model: Model, gpu: Gpu, gpus: int, sequence: int, sequences: int, precision: str, **flags: object
) -> Iterator[Layout]:
    """Those that the launcher accepts; of what is equally fast and large one."""
    one = Layout(gpus, sequence, precision=precision, **flags)
    if "main_grads" not in flags:
        one = replace(one, main_grads=one.main_grads_by_themselves)
    for whole in _model_parallel(model, gpu, one):
        for batch in BATCHES:
            micro_batches, rest = divmod(sequences, whole.data * batch)
            if rest or not micro_batches:
                continue
            filled = replace(whole, batch=batch, micro_batches=micro_batches)
            for shared in filter(_accepted, _data_parallel(filled)):
                # layers with LoRA have no chunks
                for again in RECOMPUTE + IN_CHUNKS * (shared.tokens >= 2 * CHUNK and not shared.lora):
                    for in_chunks in (False, True) if shared.pp == 1 else (False,):
                        yield _with_what_is_stored(replace(shared, loss_in_chunks=in_chunks, **again))


def _with_what_is_stored(layout: Layout) -> Layout:
    """The layout; without fp8_input_store where backward computes that input again, which refuses the flag."""
    again = layout.recompute == "full" or "mlp" in layout.recompute_modules or layout.mlp_chunk_tokens
    return replace(layout, fp8_input_store=False) if again else layout


def _with_offload(model: Model, every: Iterable[Layout], gpu: Gpu) -> Iterator[Layout]:
    """Each layout that fits; in the place of one that does not, those that move so much to the host that they do,
    either activations or states of the optimizer; itself where neither is enough or possible."""
    for layout in every:
        memory = memory_of_step(model, layout)
        lack = lacking(memory, model, layout, gpu)
        moved = [] if lack <= 0 else [*_activations_moved(model, layout, lack), *_states_moved(layout, memory, lack)]
        yield from [each for each in moved if host_bytes(model, each) <= gpu.host * 1e9] or [layout]


def _activations_moved(model: Model, layout: Layout, lack: float) -> Iterator[Layout]:
    """The layout with the activations of as many layers in host memory as must be, where there are so many."""
    count = math.ceil(lack / offloaded_bytes(model, layout))
    if layout.pp == 1 and layout.recompute != "full" and count <= model.layers - 2:
        yield replace(layout, offload_activations=count)


def _states_moved(layout: Layout, memory: Memory, lack: float) -> Iterator[Layout]:
    """The layout with as many hundredths of the optimizer's states in host memory as must be, where that is enough and
    the user has not said how many."""
    slots = OFFLOADED_AT_ONCE * state_bytes(layout)
    hundredths = math.ceil(100 * (lack + slots) / memory.states)
    if not (layout.offload_optimizer or layout.lora) and hundredths <= 100:  # an adapter's weights are too small
        yield replace(layout, offload_optimizer=hundredths / 100)


def _model_parallel(model: Model, gpu: Gpu, one: Layout) -> Iterator[Layout]:
    """TP within a node, of what heads, MLP and vocabulary divide into; SEP and CP of long sequences; PP and VP of the
    layers. Of LoRA TP alone: fine-tuning has no pipelines."""
    for tp in range(1, min(one.gpus, gpu.gpus_per_node) + 1):
        if one.gpus % tp or any(size % tp for size in (model.heads, model.kv_heads, model.ffn // 16, model.vocabulary)):
            continue
        divided = replace(one, tp=tp)
        yield divided
        if one.lora:
            continue
        if one.sequence >= LONG and not model.positions:
            yield from _shared_sequences(model, gpu, divided)
        for pp in range(2, one.gpus // tp + 1):
            if not model.pipeline or one.gpus % (tp * pp) or model.layers % pp:
                continue
            for vp in (1, 2, 4):
                if not model.layers % (pp * vp):
                    yield replace(divided, pp=pp, vp=vp)


def _shared_sequences(model: Model, gpu: Gpu, layout: Layout) -> Iterator[Layout]:
    """Sequences over ranks of a node: by SEP, of what a rank's heads divide into, and by CP, which has no window."""
    degree = 2
    while layout.gpus % (layout.tp * degree) == 0 and layout.tp * degree <= gpu.gpus_per_node:
        if model.kv_heads // layout.tp % degree == 0:  # and so the heads
            yield replace(layout, sep=degree)
        if not model.window:
            yield replace(layout, cp=degree)
        degree *= 2


def _accepted(layout: Layout) -> bool:
    """Whether the launcher, and what it starts, have nothing against it."""
    alone = layout.gpus == layout.tp and layout.micro_batches == 1
    if layout.optimizer_in_backward != "off" and not alone:
        return False  # gradients must be complete after one backward
    arguments = argparse.Namespace(
        TP=layout.tp,
        PP=layout.pp,
        VP=layout.vp,
        SEP=layout.sep,
        CP=layout.cp,
        FSDP=layout.sharding,
        GA=layout.micro_batches,
        SP=layout.tp > 1,
        max_seqlen=layout.sequence,
        sharding_stage=f"stage{layout.stage}",
    )
    try:
        check_layout(arguments, layout.gpus)
    except LayoutError:
        return False
    return True


def _data_parallel(layout: Layout) -> Iterator[Layout]:
    """Over the ranks with other data: DP, or sharding, with overlap where that was measured: not with PP, nor where
    ranks share sequences; stage 3 has none. LoRA over several GPUs was run with sharding in stage 2 alone."""
    if layout.lora:
        yield replace(layout, sharding=layout.data, stage=2)
        return
    yield layout
    for stage in (1, 2, 3) if layout.data > 1 else ():
        overlap = stage < 3 and layout.pp == layout.sharing == 1
        yield replace(layout, sharding=layout.data, stage=stage, overlap=overlap)
