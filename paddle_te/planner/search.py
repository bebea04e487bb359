"""All layouts of a model on so many GPUs: the fastest that fit, and why the others do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace

from paddle_te.job import fault
from paddle_te.options.scripts import MASTER_WEIGHTS, MOMENTS, OFFLOADED_AT_ONCE
from paddle_te.planner.gpus import Gpu
from paddle_te.planner.layout import Layout
from paddle_te.planner.memory import Memory, fits, host_bytes, lacking, memory_of_step, offloaded_bytes, state_bytes
from paddle_te.planner.model import Model
from paddle_te.planner.plan import Plan
from paddle_te.planner.ranking import rank
from paddle_te.planner.speed import hidden_layers, time_of_step

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

    flags: further fields that all of them have, such as optim_moments. Where they say nothing of the optimizer's
    states, of what is in host memory, or of an update in backward, it is searched for.

    Raises ValueError where no layout has so many tokens.
    """
    if tokens_per_step % sequence:
        raise ValueError(f"tokens_per_step={tokens_per_step} is no multiple of the sequence length {sequence}")
    found, fitting, least = False, {}, {}
    every = layouts(model, gpu, gpus, sequence, tokens_per_step // sequence, precision, **flags)
    for layout in _fitted(model, filter(wanted, every), gpu, flags):
        found = True
        shape, memory = str(layout), memory_of_step(model, layout)
        fitted = fits(memory, model, layout, gpu)
        smallest = shape not in least or memory.total < least[shape].memory.total
        if not fitted and not smallest:
            continue
        plan = Plan(layout, memory, time_of_step(model, layout, gpu))
        if fitted:
            kind = shape, *_shown_apart(layout)
            fitting[kind] = min(plan, fitting.get(kind, plan), key=rank)
        if smallest:
            least[shape] = plan
    if not found:
        raise ValueError(
            f"no layout of {gpus} GPUs divides {model.heads} heads, {model.layers} layers and "
            f"{tokens_per_step // sequence} sequences a step evenly; try another tokens_per_step"
        )
    shapes = {shape for shape, *_ in fitting}
    too_large = {shape: plan for shape, plan in least.items() if shape not in shapes}
    return Search(sorted(fitting.values(), key=rank), too_large)


def _shown_apart(layout: Layout) -> tuple[object, ...]:
    """What two layouts that share the model alike must differ in to be both in a Search."""
    again = layout.recompute == "full", bool(layout.recomputed_modules)
    return *again, layout.offload_activations > 0, layout.offload_optimizer > 0, *layout.optimizer.values()


def layouts(
    model: Model, gpu: Gpu, gpus: int, sequence: int, sequences: int, precision: str, **flags: object
) -> Iterator[Layout]:
    """Those that the launcher accepts; of what is equally fast and large one."""
    for one in _optimizers(Layout(gpus, sequence, precision=precision, **flags), flags):
        for whole in _model_parallel(model, gpu, one):
            for batch in BATCHES:
                micro_batches, rest = divmod(sequences, whole.data * batch)
                if rest or not micro_batches:
                    continue
                filled = replace(whole, batch=batch, micro_batches=micro_batches)
                for shared in filter(_accepted, _data_parallel(filled)):
                    yield from filter(_accepted, map(_with_what_is_stored, _of_memory(shared, flags)))


def _optimizers(layout: Layout, given: Container[str]) -> Iterator[Layout]:
    """The layout with ordinary updates and with those in backward, unless the user or an adapter decides, and with the
    main gradients that the launcher keeps."""
    decided = "optimizer_in_backward" in given or layout.lora
    for kind in (layout.optimizer_in_backward,) if decided else ("off", "last_norm"):
        one = replace(layout, optimizer_in_backward=kind)
        yield one if "main_grads" in given else replace(one, main_grads=one.main_grads_by_themselves)


def _of_memory(layout: Layout, given: Container[str]) -> Iterator[Layout]:
    """The layout with all that backward may compute again, and with the loss at once and in chunks, unless the user has
    decided on these."""
    own = {name: getattr(layout, name) for name in ("recompute_modules", "mlp_chunk_tokens") if name in given}
    # layers with LoRA have no chunks
    every = RECOMPUTE + IN_CHUNKS * (layout.tokens >= 2 * CHUNK and not layout.lora)
    if "recompute_modules" in given:
        every = ({"recompute": "none"}, {"recompute": "core_attn"})
    in_chunks = (False, True) if layout.pp == 1 and not layout.fp8_head else (False,)
    for again in dict.fromkeys(tuple((each | own).items()) for each in every):
        for chunks in (layout.loss_in_chunks,) if "loss_in_chunks" in given else in_chunks:
            yield replace(layout, loss_in_chunks=chunks, **dict(again))


def _with_what_is_stored(layout: Layout) -> Layout:
    """The layout; without fp8_input_store where backward computes that input again, which refuses the flag."""
    again = layout.recompute == "full" or "mlp" in layout.recompute_modules or layout.mlp_chunk_tokens
    return replace(layout, fp8_input_store=False) if again else layout


def _fitted(model: Model, every: Iterable[Layout], gpu: Gpu, given: Container[str]) -> Iterator[Layout]:
    """Each layout that fits; in the place of one that does not, those that do with smaller states of the optimizer or
    with something in host memory; itself where nothing is enough. given: fields that the user has chosen."""
    for layout in every:
        memory = memory_of_step(model, layout)
        lack = lacking(memory, model, layout, gpu)
        found = [layout] if lack <= 0 else list(_made_smaller(model, layout, memory, lack, gpu, given))
        yield from [each for each in found if host_bytes(model, each) <= gpu.host * 1e9] or [layout]


def _made_smaller(
    model: Model, layout: Layout, memory: Memory, lack: float, gpu: Gpu, given: Container[str]
) -> Iterator[Layout]:
    """A layout that lacks so many bytes, with each kind of states, the plainest first, as it is or with as much in host
    memory as must be, up to the first kind with which it fits as it is."""
    for kinds in _states(layout, given):
        smaller = replace(layout, **kinds)
        states = memory.states * state_bytes(smaller) / state_bytes(layout)
        lacks = lack - (memory.states - states)
        if lacks <= 0:
            yield smaller
            return
        yield from _moved(model, smaller, states, lacks, gpu, given)


def _states(layout: Layout, given: Container[str]) -> Iterator[dict[str, str]]:
    """How AdamW's states may be kept, the plainest first. With smaller moments the master weights are remainders, too,
    which lose nothing. An adapter's states are small anyhow."""
    moments = (layout.optim_moments,) if "optim_moments" in given or layout.lora else MOMENTS
    for kind in moments:
        masters = MASTER_WEIGHTS if kind == "float32" else list(MASTER_WEIGHTS)[-1:]
        for master in (layout.master_weights,) if "master_weights" in given or layout.lora else masters:
            yield {"optim_moments": kind, "master_weights": master}


def _moved(
    model: Model, layout: Layout, states: float, lack: float, gpu: Gpu, given: Container[str]
) -> Iterator[Layout]:
    """The layout with the activations of as many layers in host memory as must be, with as many hundredths of the
    optimizer's states, and with both: as many layers as computing hides, and states for the rest; where that is enough,
    and the user has not said how many. states: bytes that are on the device."""
    if "offload_activations" not in given and layout.pp == 1 and layout.recompute != "full":
        of_a_layer = offloaded_bytes(model, layout)
        count, hidden = math.ceil(lack / of_a_layer), hidden_layers(model, layout, gpu)
        if count <= model.layers - 2:
            yield replace(layout, offload_activations=count)
        if 0 < hidden < count:
            both = replace(layout, offload_activations=hidden)
            yield from _states_moved(both, states, lack - hidden * of_a_layer, given)
    yield from _states_moved(layout, states, lack, given)


def _states_moved(layout: Layout, states: float, lack: float, given: Container[str]) -> Iterator[Layout]:
    hundredths = math.ceil(100 * (lack + OFFLOADED_AT_ONCE * state_bytes(layout)) / states)
    if "offload_optimizer" not in given and not layout.lora and hundredths <= 100:  # an adapter's weights are too small
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
    return fault(layout.job) is None


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
