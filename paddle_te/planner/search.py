"""All layouts of a model on so many GPUs: the fastest that fit, and why the others do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from paddle_te.job import FINETUNE, Job, check, fault
from paddle_te.options.launcher import OVERLAPS, SPLIT
from paddle_te.options.layers import DISPATCHERS, LAYERS_ON_HOST, again, in_chunks, stored_in_fp8
from paddle_te.options.lora import TRANSPOSES_KEPT
from paddle_te.options.training import MASTER_WEIGHTS, MOMENTS, OFFLOADED_AT_ONCE, STATES_ON_HOST, WHOLE_LAYERS
from paddle_te.planner.gpus import Gpu
from paddle_te.planner.layout import by_flag, shape
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.memory import Memory, fits, host_bytes, lacking, memory_of_step, offloaded_bytes, state_bytes
from paddle_te.planner.model import Model
from paddle_te.planner.plan import Plan
from paddle_te.planner.ranking import rank
from paddle_te.planner.speed import hidden_layers, time_of_step

# What backward may compute again: first what saves most bytes in a ms (`layer_time.again_ms`), then more and more
RECOMPUTE: tuple[dict[str, object], ...] = (
    {},
    again("layernorm"),
    again("layernorm", "mlp_act"),
    again("layernorm", "mlp_act", "core_attn"),
    again("layernorm", "mlp"),
    again("layernorm", "mlp", "core_attn"),
    WHOLE_LAYERS,
)
# The same for layers with experts
OF_EXPERTS = (
    RECOMPUTE[0],
    again("moe_act"),
    again("moe_act", "core_attn"),
    again("moe"),
    again("moe", "core_attn"),
    WHOLE_LAYERS,
)
# The same with the MLP in chunks, where a rank has so many tokens that this makes one layer's backward much smaller.
CHUNK = 16384
IN_CHUNKS = tuple(each | in_chunks(CHUNK) for each in RECOMPUTE[-3:])
BATCHES = (1, 2, 4, 8)
LONG = 16384  # tokens of a sequence from which on it may pay that ranks share it
SEQUENCES = 16  # of a step for each GPU, where the user asks for no other number


@dataclass(frozen=True)
class Search:
    """Hold what a search has found.

    plans: those that fit, the fastest first; of those that differ in micro-batches, in chunks, or only in which
    parts of a layer are computed again, the best. too_large: {how the ranks share the model: the Plan of it that
    needs least memory}, where none fits.
    """

    plans: list[Plan]
    too_large: dict[str, Plan]


def usual_tokens(gpus: int, sequence: int, optimizer_in_backward: str = "off") -> int:
    """Tokens of a step on all GPUs, where the user asks for no other number.

    With an update in backward all GPUs share one micro-batch.
    """
    return (SEQUENCES * gpus if optimizer_in_backward == "off" else 1) * sequence


def search(
    model: Model,
    gpu: Gpu,
    gpus: int,
    sequence: int,
    tokens_per_step: int,
    precision: str,
    wanted: Callable[[Job], bool] = lambda layout: True,
    **flags: Any,
) -> Search:
    """Search among the layouts that have exactly `tokens_per_step` tokens a step and for which `wanted` is true.

    flags: further fields that all layouts have, such as optim_moments. The optimizer's states, host memory and the
    update in backward are searched for unless flags give them.

    Raises ValueError if no layout has so many tokens, or for flags that do not go together.
    """
    flags = by_flag(flags)
    if tokens_per_step % sequence:
        raise ValueError(f"tokens_per_step={tokens_per_step} is no multiple of the sequence length {sequence}")
    found = False
    fitting: dict[tuple[object, ...], Plan] = {}
    least: dict[str, Plan] = {}
    every = layouts(model, gpu, gpus, sequence, tokens_per_step // sequence, precision, **flags)
    for layout in _fitted(model, filter(wanted, every), gpu, flags):
        found = True
        kind_of_layout, memory = shape(layout), memory_of_step(model, layout)
        fitted = fits(memory, model, layout, gpu)
        smallest = kind_of_layout not in least or memory.total < least[kind_of_layout].memory.total
        if not fitted and not smallest:
            continue
        plan = Plan(layout, memory, time_of_step(model, layout, gpu))
        if fitted:
            kind = kind_of_layout, *_shown_apart(layout)
            fitting[kind] = min(plan, fitting.get(kind, plan), key=rank)
        if smallest:
            least[kind_of_layout] = plan
    if not found:
        check(layout_of(1, sequence, precision=precision, **flags))  # flags that go together in no layout
        raise ValueError(
            f"no layout of {gpus} GPUs divides {model.heads} heads, {model.layers} layers and "
            f"{tokens_per_step // sequence} sequences a step evenly; try another tokens_per_step"
        )
    shapes = {kind[0] for kind in fitting}
    too_large = {each: plan for each, plan in least.items() if each not in shapes}
    return Search(sorted(fitting.values(), key=rank), too_large)


def _shown_apart(layout: Job) -> tuple[object, ...]:
    """Return a key: two layouts that share the model alike are both in a Search only if their keys differ."""
    computed = layout.recomputed == "full", bool(layout.recomputed_modules)
    return *computed, layout.layers_on_host > 0, layout.share_on_host > 0, *layout.optimizer.values()


def layouts(
    model: Model, gpu: Gpu, gpus: int, sequence: int, sequences: int, precision: str, **flags: Any
) -> Iterator[Job]:
    """Yield the layouts that the launcher accepts, one of those that are equally fast and large."""
    for one in _optimizers(layout_of(gpus, sequence, precision=precision, **flags), flags):
        for whole in _model_parallel(model, gpu, one):
            for batch in BATCHES:
                micro_batches, rest = divmod(sequences, whole.data * batch)
                if rest or not micro_batches:
                    continue
                filled = whole.but(per_device_train_batch_size=batch, gradient_accumulation_steps=micro_batches)
                for shared in _data_parallel(model, filled, flags):
                    if _accepted(model, shared):
                        every = map(_with_what_is_stored, _of_memory(model, shared, flags))
                        yield from (each for each in every if fault(each) is None)


def _optimizers(layout: Job, given: Collection[str]) -> Iterator[Job]:
    """Yield the layout with ordinary updates and with those in backward, unless the user or an adapter decides.

    It has the main gradients that the launcher keeps.
    """
    decided = "optimizer_in_backward" in given or layout.lora
    for kind in (layout.optimizer_in_backward,) if decided else ("off", "last_norm"):
        norm = 0.0 if kind == "unclipped" else layout.max_grad_norm
        one = layout.but(optimizer_in_backward=kind, max_grad_norm=norm)
        yield one if "amp_master_grad" in given else one.but(amp_master_grad=one.keeps_main_gradients)


def _of_memory(model: Model, layout: Job, given: Collection[str]) -> Iterator[Job]:
    """Yield the layout with all that backward may compute again, and with the loss at once and in chunks.

    With a base in fp8 only, yield it with its transposed copies kept, too. The user may have decided on these.
    """
    own = {name: getattr(layout, name) for each in (again(), in_chunks(0)) for name in each if name in given}
    # layers with LoRA have no chunks, and experts neither
    in_turn = RECOMPUTE + IN_CHUNKS * (layout.tokens >= 2 * CHUNK and not layout.lora)
    every = OF_EXPERTS if model.idle else in_turn
    if again().keys() <= {*given}:
        every = ({}, WHOLE_LAYERS | {"recompute_granularity": "core_attn"})
    at_once = (False, True) if layout.pp == 1 and not layout.fp8_lm_head else (False,)
    chunks = (layout.use_fused_linear_cross_entropy,) if "use_fused_linear_cross_entropy" in given else at_once
    decided = TRANSPOSES_KEPT in given or not layout.fp8_base
    transposes = (layout.keep_fp8_transpose_cache,) if decided else (False, True)
    for each in dict.fromkeys(tuple((each | own).items()) for each in every):
        for in_pieces, kept in product(chunks, transposes):
            yield layout.but(use_fused_linear_cross_entropy=in_pieces, **{TRANSPOSES_KEPT: kept}, **dict(each))


def _with_what_is_stored(layout: Job) -> Job:
    """The layout; with nothing stored in fp8 where backward computes that again, which refuses the flag."""
    return layout.but(**stored_in_fp8(False)) if layout.input_again else layout


def _fitted(model: Model, every: Iterable[Job], gpu: Gpu, given: Collection[str]) -> Iterator[Job]:
    """Yield each layout that fits, and instead of one that does not, those that do with less on the device.

    These have smaller states of the optimizer or something in host memory; where nothing is enough, it is the
    layout itself. given: fields that the user has chosen.
    """
    for layout in every:
        memory = memory_of_step(model, layout)
        lack = lacking(memory, model, layout, gpu)
        if lack > 0 and layout.keep_fp8_transpose_cache and TRANSPOSES_KEPT not in given:
            continue  # the same without them needs less
        found = [layout] if lack <= 0 else list(_made_smaller(model, layout, memory, lack, gpu, given))
        yield from [each for each in found if _accepted(model, each) and host_bytes(model, each) <= gpu.host * 1e9] or [
            layout
        ]


def _made_smaller(
    model: Model, layout: Job, memory: Memory, lack: float, gpu: Gpu, given: Collection[str]
) -> Iterator[Job]:
    """Yield a layout that lacks so many bytes with each kind of states, the plainest first.

    It is as it is or with as much in host memory as must be, up to the first kind with which it fits as it is.
    """
    for kinds in _states(layout, given):
        smaller = layout.but(**kinds)
        states = memory.states * state_bytes(smaller) / state_bytes(layout)
        lacks = lack - (memory.states - states)
        if lacks <= 0:
            yield smaller
            return
        yield from _moved(model, smaller, states, lacks, gpu, given)


def _states(layout: Job, given: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield the forms of AdamW's states, the plainest first.

    With smaller moments the master weights are remainders, too, which lose nothing. An adapter's states are small
    anyhow.
    """
    moments = (layout.optim_moments,) if "optim_moments" in given or layout.lora else MOMENTS
    for kind in moments:
        masters = MASTER_WEIGHTS if kind == "float32" else list(MASTER_WEIGHTS)[-1:]
        for master in (layout.master_weights,) if "master_weights" in given or layout.lora else masters:
            yield {"optim_moments": kind, "master_weights": master}


def _moved(model: Model, layout: Job, states: float, lack: float, gpu: Gpu, given: Collection[str]) -> Iterator[Job]:
    """Yield the layout with enough in host memory to fit, unless the user has said how much.

    First the activations of as many layers as needed, then as many layers as computing hides with states for the
    rest, then states only. states: bytes of the optimizer's states on the device.
    """
    if LAYERS_ON_HOST not in given and layout.pp == 1 and layout.recomputed != "full":
        of_a_layer = offloaded_bytes(model, layout)
        count, hidden = math.ceil(lack / of_a_layer), hidden_layers(model, layout, gpu)
        if count <= model.layers - 2:
            yield layout.but(**{LAYERS_ON_HOST: count})
        if 0 < hidden < count:
            both = layout.but(**{LAYERS_ON_HOST: hidden})
            yield from _states_moved(both, states, lack - hidden * of_a_layer, given)
    yield from _states_moved(layout, states, lack, given)


def _states_moved(layout: Job, states: float, lack: float, given: Collection[str]) -> Iterator[Job]:
    hundredths = math.ceil(100 * (lack + OFFLOADED_AT_ONCE * state_bytes(layout)) / states)
    if STATES_ON_HOST not in given and not layout.lora and hundredths <= 100:  # an adapter's weights are too small
        yield layout.but(**{STATES_ON_HOST: hundredths / 100})


def _model_parallel(model: Model, gpu: Gpu, one: Job) -> Iterator[Job]:
    """Yield layouts with TP within a node, with SEP and CP for long sequences, and with PP and VP.

    TP divides heads, MLP and vocabulary. Fine-tuning has only TP, and no pipelines.
    """
    for tp in range(1, min(one.world, gpu.gpus_per_node) + 1):
        if one.world % tp or any(size % tp for size in _divided(model)):
            continue
        divided = one.but(tensor_parallel_degree=tp, sequence_parallel=tp > 1, pad_to_max_length=one.lora and tp > 1)
        yield divided
        if one.script == FINETUNE:
            continue
        if one.sequence >= LONG and not model.positions and not model.sinks:
            yield from _shared_sequences(model, gpu, divided)
        for pp in range(2, one.world // tp + 1):
            if not model.pipeline or one.world % (tp * pp) or model.layers % pp:
                continue
            for vp in (1, 2, 4):
                if not model.layers % (pp * vp):
                    yield divided.but(pipeline_parallel_degree=pp, virtual_pp_degree=vp)


def _divided(model: Model) -> tuple[int, ...]:
    """Return the numbers that tensor parallel ranks divide. Experts are whole on a rank, whatever their width."""
    of_mlp = model.number_of_experts or model.ffn // 16
    return model.heads, model.kv_heads, of_mlp, model.vocabulary


def _shared_sequences(model: Model, gpu: Gpu, layout: Job) -> Iterator[Job]:
    """Sequences over ranks of a node: by SEP, of what a rank's heads divide into, and by CP, which has no window."""
    degree = 2
    while layout.world % (layout.tp * degree) == 0 and layout.tp * degree <= gpu.gpus_per_node:
        if model.kv_heads // layout.tp % degree == 0:  # and so the heads
            yield layout.but(sep_parallel_degree=degree)
        if not model.windows:
            yield layout.but(context_parallel_degree=degree)
        degree *= 2


def _accepted(model: Model, layout: Job) -> bool:
    """Return whether the launcher and the script accept a layout."""
    return fault(layout.but(model=model.spec) if model.experts else layout) is None


def _data_parallel(model: Model, layout: Job, given: Collection[str]) -> Iterator[Job]:
    """Yield the layout over the ranks with other data: DP, or sharding.

    Overlap is there where it was compared with none: not with PP, nor where ranks share sequences; stage 3 has none.
    LoRA over several GPUs was run with sharding in stage 2 only, which pipelines do not have. Where the user has said
    how many ranks divide the experts, only these are there.
    """
    if layout.ep > 1:
        yield from _divided_experts(model, layout, (layout.ep,), given)
        return
    if layout.lora:
        yield _sharded(layout, 1 if layout.pp > 1 else 2) if layout.data > 1 else layout
        return
    yield layout
    for stage in (1, 2, 3) if layout.data > 1 else ():
        overlaps = stage < 3 and layout.pp == layout.sharing == 1
        yield _sharded(layout, stage, OVERLAPS[f"stage{stage}"] if overlaps else "")
    if model.experts and "expert_parallel_degree" not in given:
        yield from _divided_experts(model, layout, range(2, layout.data + 1), given)


def _divided_experts(model: Model, layout: Job, degrees: Iterable[int], given: Collection[str]) -> Iterator[Job]:
    """Yield the layout in sharding stage 1 whose ranks divide the experts, by each dispatcher.

    Tensor parallel ranks divide them by themselves, and no others then do.
    """
    kinds = DISPATCHERS if "moe_token_dispatcher_type" not in given else (layout.moe_token_dispatcher_type,)
    config = OVERLAPS["stage1"] if layout.pp == 1 else SPLIT
    for degree in degrees if layout.tp == 1 else ():
        if layout.data % degree or model.number_of_experts % degree:
            continue
        for kind in kinds:
            yield _sharded(layout, 1, config).but(expert_parallel_degree=degree, moe_token_dispatcher_type=kind)


def _sharded(layout: Job, stage: int, config: str = "") -> Job:
    return layout.but(
        sharding=f"stage{stage}",
        sharding_parallel_degree=layout.data,
        sharding_parallel_config=config,
        amp_master_grad=layout.amp_master_grad or bool(config),
    )
