"""The greatest memory of a training step, by part.

The functions below list the tensors that te keeps of a layer for its backward. The peaks of Paddle's allocator on
H200s confirm the sums (tests/unit/planner compares with all of them). Sources: Korthikanti et al. 2022
(arXiv:2205.05198), 4, for sequence parallelism and pipelines in flight; Rajbhandari et al. 2020 (arXiv:1910.02054), 3,
for sharding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import NamedTuple

from paddle_te.job import Job
from paddle_te.options.training import LOSS_CHUNK_TOKENS, MASTER_WEIGHTS, MOMENTS, OFFLOADED_AT_ONCE
from paddle_te.planner.frozen import Frozen, frozen_of
from paddle_te.planner.gpus import Gpu
from paddle_te.planner.model import Gemm, Model
from paddle_te.planner.muon import matrices_here, workspace
from paddle_te.planner.offloaded import whole_weights
from paddle_te.planner.skipped import mean_of_layers

MXFP8 = 33 / 32  # bytes of a number: one, and for 32 together one more
GEMM_WORKSPACE = 32 * 2**20  # of cuBLAS, TE's size (native/shim/calls.h)
# GB of a card that NCCL keeps by kind of parallelism, measured on two H100s one kind at a time: the driver's
# count less Paddle's allocator and the 0.7 GB of a run on one card (benchmarks/planned/2026-11-25_h100x2_overhead.md)
COMMUNICATORS = {"data": 1.4, "pipeline": 1.8, "sharding": 1.8, "experts": 1.8, "sequence": 2.3, "tensor": 2.4}
FURTHER_KIND = 0.5  # GB more for each further kind in the same layout; assumed
# Bytes that a router keeps of a token: each number of its input in float32; and for each expert logits, scores,
# probabilities and places
ROUTER_BYTES, ROUTE_BYTES = 4, 24
LOGIT_BYTES = 4  # of a token and entry of the vocabulary: logits and their gradient, both bf16


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU at the moment of a step when they are most.

    gradients: those that exist at that moment. working: temporary tensors of the loss, of lm_head's backward or of a
    layer's backward.
    """

    weights: float
    gradients: float
    states: float
    fp8_weights: float
    activations: float
    working: float

    @cached_property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))


class Moment(NamedTuple):
    """The parts of a Memory that change during a step."""

    gradients: float
    fp8_weights: float
    activations: float
    working: float


def memory_of_step(model: Model, layout: Job, rank: int | None = None) -> Memory:
    """Return the memory of the pipeline stage that needs most.

    That is the first stage, which keeps most micro-batches, or the last, which has the head. If layers at the ends are
    not in fp8 it may be the second.

    rank: one of the ranks that share the weights; None: the rank that has most.
    """
    stages = {0, layout.pp - 1}
    if model.experts and max(layout.ep, layout.tp) > 1:
        model = _of_a_rank(model, layout.ep, layout.moe_token_dispatcher_type == "alltoall", layout.tp)
    if layout.skipped_layers(model.layers):
        stages.add(min(1, layout.pp - 1))
    return max((_stage(model, layout, stage, rank) for stage in stages), key=lambda memory: memory.total)


@cache
def _of_a_rank(model: Model, ep: int, by_all_to_all: bool, tp: int) -> Model:
    return model.of_a_rank(ep, by_all_to_all).of_a_tensor_rank(tp)


def releases_gradients(layout: Job) -> bool:
    """Return whether a step's gradients are freed before the next step begins.

    One process frees gradients in bf16 (`optimizer.adamw.FactorAdamW.clear_grad`). Main gradients are freed with
    --release_grads and in sharding stage 3, where a rank's parts are new in each step
    (`upstream.stage3_gradients`).
    """
    if layout.amp_master_grad:
        return layout.release_grads or layout.shards_weights
    return layout.release_grads or layout.world == 1


def lacking(memory: Memory, model: Model, layout: Job, gpu: Gpu) -> float:
    """Return the bytes that a GPU lacks for a Memory; 0 or less if it fits.

    Paddle's allocator cannot join its free pieces, so there must be room for the largest tensor, the logits, once more.
    """
    logits = 0 if layout.use_fused_linear_cross_entropy else 2 * layout.tokens * model.vocabulary / layout.tp
    return memory.total + logits - (gpu.memory - communicators(layout)) * 1e9


def communicators(layout: Job) -> float:
    """Return the GB of each GPU that NCCL keeps for the groups in which a layout's ranks exchange anything."""
    degrees = {
        "data": layout.replicas,
        "pipeline": layout.pp,
        "sharding": layout.sharding_ranks,
        "experts": layout.ep,  # whose own was not measured
        "sequence": layout.sharing,
        "tensor": layout.tp,
    }
    kinds = [COMMUNICATORS[kind] for kind, degree in degrees.items() if degree > 1]
    return max(kinds, default=0) + FURTHER_KIND * max(len(kinds) - 1, 0)


def fits(memory: Memory, model: Model, layout: Job, gpu: Gpu) -> bool:
    """Return whether a GPU has room for a Memory."""
    return lacking(memory, model, layout, gpu) <= 0


def _stage(model: Model, layout: Job, stage: int, rank: int | None) -> Memory:
    first, last = stage == 0, stage == layout.pp - 1
    embeddings = first + (last and not (first and model.tied))
    local = (model.layers / layout.pp * model.layer_weights + embeddings * model.embedding) / layout.tp
    frozen = frozen_of(model, layout.freeze)
    weights = 2 * local
    trained = trained_elements(model, layout, local - frozen.on_stage(stage, layout.pp) / layout.tp)
    if layout.shards_weights:  # a rank's slices; of the whole weights, the largest at the loss
        weights = 2 * local / layout.sharding_ranks + 2 * embeddings * model.embedding / layout.tp
    if layout.lora:
        weights += 2 * trained
        # a byte each, and one for the transposed copy if kept; the scales of blocks are less than a thousandth
        if layout.makes_transposes:
            weights -= model.layers / layout.pp * model.gemm_weights / layout.tp
    if layout.second_model:  # whole on each rank
        weights += 2 * local
    # sharding ranks share the states of all experts evenly, also of the experts on other ranks
    elsewhere = model.layers / layout.pp * model.experts * (layout.ep - 1)
    own = own_elements(model, layout, trained + elsewhere, rank)
    gradients = gradient_bytes(layout) * (own if layout.shards_gradients else trained)
    moment = max(_moments(model, layout, stage, gradients, frozen), key=sum)
    states = state_bytes(layout) * states_on_device(own, layout)
    states += more_moments(model, layout, trained + elsewhere) * own / (trained + elsewhere)
    return Memory(weights=weights, states=states, **moment._asdict())


def trained_elements(model: Model, layout: Job, local: float) -> float:
    """Count the weights that a rank trains: all `local` ones, or with LoRA its adapters.

    These are A [inputs, rank] and B [rank, outputs] for each part of a weight. Tensor parallel ranks share B of a
    column-parallel one, and A of a row-parallel one.
    """
    if not layout.lora:
        return local
    elements = 0.0
    for gemm in adapted(model, layout):
        split_in, split_out = {"column": (1, layout.tp), "row": (layout.tp, 1), "whole": (1, 1)}[gemm.mode]
        elements += sum(gemm.inputs / split_in + size / split_out for size in gemm.outputs)
    return layout.adapter.rank * elements * model.layers / layout.pp


def adapted(model: Model, layout: Job) -> list[Gemm]:
    """Return the GEMMs of a layer that have low-rank products."""
    return [gemm for gemm in model.gemms if layout.adapts(gemm.part)]


def _moments(model: Model, layout: Job, stage: int, gradients: float, frozen: Frozen) -> Iterator[Moment]:
    """Yield a stage's candidates for the greatest memory, all in a step's last micro-batch.

    They are the loss, lm_head's backward, the last layer's backward, the first layer's, and the optimizer's step.
    gradients: bytes of all gradients that the stage keeps.
    """
    first, last = stage == 0, stage == layout.pp - 1
    layers, several = model.layers / layout.pp, layout.micro_batches > 1
    here = layers - layout.layers_on_host  # whose activations are on the device
    kept = mean_of_layers(lambda job: kept_of_a_layer(model, job), model, layout, stage) * layout.tokens
    kept += 0 if layout.recomputed == "full" else _packed_factors(model, layout)
    kept *= _in_flight(layout, first) / layout.tp
    # a frozen embedding's output has no gradient, without which PaddleNLP computes nothing again
    whole = layout.lora and layout.recomputed == "full" and first
    whole_layer = whole * (_kept_again(model, layout) * layout.tokens + _packed_factors(model, layout)) / layout.tp
    waiting_layers = here * kept + whole_layer
    copies = mean_of_layers(lambda job: fp8_copies_of_a_layer(model, job), model, layout, stage) / layout.tp
    head_copies = fp8_copies_of_the_head(model, layout, last) / layout.tp
    always = layers * copies + head_copies if several else 0  # of several micro-batches
    while_layers_wait = always or here * copies

    if layout.optimizer_in_backward != "off":
        gradients = 0  # they are used up at once
    before = 0 if releases_gradients(layout) and not several else gradients  # when backward begins
    head = 0 if layout.lora or (frozen.embedding if model.tied else frozen.head) else model.embedding / layout.tp
    of_the_head = gradient_bytes(layout) * head if gradients else 0
    after_the_head = before or of_the_head * last
    # the embedding's gradient comes last, unless it is the head's, too
    comes_last = first and not (layout.lora or frozen.embedding or last and model.tied)
    of_the_embedding = gradient_bytes(layout) * model.embedding / layout.tp if gradients and comes_last else 0
    after_the_layers = before or gradients - of_the_embedding
    new = new_gradients(model, layout) * (frozen.matrices < model.layers * model.gemm_weights)

    if last:
        waiting = Moment(before, while_layers_wait + (0 if several else head_copies), waiting_layers, GEMM_WORKSPACE)
        yield from _moments_of_the_head(model, layout, waiting, head)
    # beside the gradient of the layer's output, which the residual passes on
    layer = (backward_of_a_layer(model, layout) + 2 * model.hidden * layout.tokens) / layout.tp + GEMM_WORKSPACE
    yield Moment(after_the_head + new, while_layers_wait, waiting_layers, layer)
    yield Moment(after_the_layers or new, always or copies, kept + whole_layer, layer)
    # Paddle sums the gradients of ranks that share sequences in a copy of all of them
    yield Moment(gradients * (2 if layout.sharing > 1 else 1), always, 0, GEMM_WORKSPACE)
    yield Moment(gradients, always, 0, GEMM_WORKSPACE + workspace(model, layout))


def _moments_of_the_head(model: Model, layout: Job, waiting: Moment, head: float) -> Iterator[Moment]:
    """Yield the Moments of the loss and of lm_head's backward, while all activations wait.

    In chunks the loss also computes its gradients, and adds lm_head's up in float32. Backward multiplies them by the
    loss's gradient, in float32.

    All tensor parallel ranks have lm_head's input, the output of the last norm, and its gradient whole. head: elements
    of lm_head's weight that have a gradient.
    """
    logits = model.vocabulary * layout.tokens / layout.tp
    states = model.hidden * layout.tokens
    norm = 4 * states + waiting.working
    backward = waiting._replace(gradients=waiting.gradients + (0 if layout.amp_master_grad else 2 * head))
    if layout.use_fused_linear_cross_entropy:
        chunk = min(layout.tokens, LOSS_CHUNK_TOKENS) * model.vocabulary / layout.tp
        yield waiting._replace(working=norm + 4 * head + LOGIT_BYTES * chunk)
        yield backward._replace(working=norm + 4 * head)
        return
    yield waiting._replace(working=norm + LOGIT_BYTES * logits)
    casts = 2 if layout.fp8_lm_head else 0  # of the logits' gradient, and its transpose
    yield backward._replace(working=norm + (2 + casts) * logits)


def new_gradients(model: Model, layout: Job) -> float:
    """Return the bytes of the gradients that a layer's backward makes at once: those of the MLP's two GEMMs.

    They exist until they are added or used up. There are none with main gradients, to which GEMMs add.
    `backward_of_a_layer` counts those of an MLP in chunks.
    """
    return 0 if layout.amp_master_grad or layout.mlp_in_chunks or layout.lora else 2 * model.mlp_weights / layout.tp


def own_elements(model: Model, layout: Job, local: float, rank: int | None = None) -> float:
    """Return the number of a stage's `local` weights whose optimizer states a sharding rank holds.

    rank: None: the rank that holds most. Stage 2 leaves each weight whole, stages 1 and 3 divide all evenly.
    """
    if layout.sharding_ranks == 1 or layout.stage != 2 or layout.pp > 1 or layout.lora:  # adapters are many and small
        return local / layout.sharding_ranks
    shares = shares_of_whole_weights(model, layout.tp, layout.sharding_ranks)
    return max(shares) if rank is None else shares[rank]


@cache
def shares_of_whole_weights(model: Model, tp: int, ranks: int) -> tuple[float, ...]:
    """Return the elements of each sharding rank's weights in stage 2.

    Paddle's GroupShardedOptimizerStage2 goes through the weights in the model's order and gives each to the rank that
    has fewest elements so far, the first of equals.
    """
    shares = [0.0] * ranks
    for weight in whole_weights(model, tp):
        shares[shares.index(min(shares))] += weight
    return tuple(shares)


def gradient_bytes(layout: Job) -> float:
    """Return the bytes of a gradient for each parameter.

    Stage 1 with overlap keeps gradients in float32. paddle.DataParallel copies bf16 gradients into its own buffers.
    """
    each = 4 if layout.amp_master_grad or layout.overlaps else 2
    return each + (2 if layout.replicas > 1 and not layout.amp_master_grad and not layout.shards_gradients else 0)


def state_bytes(layout: Job) -> float:
    """Return the bytes a parameter of master weight and moments: AdamW's two, or Muon's one (see `more_moments`)."""
    moments = 1 if layout.optim == "muon" else 2
    return MASTER_WEIGHTS[layout.master_weights] + moments * MOMENTS[layout.optim_moments]


def more_moments(model: Model, layout: Job, elements: float) -> float:
    """Return the bytes that a rank's elements have beyond `state_bytes`: with Muon AdamW's second moments."""
    if layout.optim != "muon":
        return 0.0
    return MOMENTS[layout.optim_moments] * max(0.0, elements - matrices_here(model, layout))


def states_on_device(local: float, layout: Job) -> float:
    """Return the number of a rank's `local` weights whose states are on the device at a time."""
    moved = layout.share_on_host * local
    return local - moved + min(moved, OFFLOADED_AT_ONCE)


def states_on_host(model: Model, layout: Job) -> float:
    """Return the bytes of optimizer states that a rank has in host memory, on average over the pipeline's stages."""
    local = model.parameters / (layout.tp * layout.pp * layout.sharding_ranks)
    return layout.share_on_host * state_bytes(layout) * local


def fp8_copies_of_the_head(model: Model, layout: Job, last: bool) -> float:
    """Return the bytes of fp8 copies for the last stage's head, on all tensor parallel ranks.

    They are copies of the head's weight and, with --fp8_lm_head, of its input.
    """
    of_the_weight = model.embedding * (2 if layout.micro_batches > 1 else 1)
    of_the_input = 0 if layout.lora else model.hidden * layout.tokens  # only the weight's gradient needs it
    return of_the_weight + of_the_input if last and layout.fp8_lm_head else 0


def fp8_copies_of_a_layer(model: Model, layout: Job) -> float:
    """Return the bytes of the fp8 copies of a layer's weights that are kept.

    With one micro-batch these are the transposes that dgrad needs, unless the GEMM is computed again and makes them
    anew. With several micro-batches they are data and transposes, kept from one to the next.
    """
    if layout.precision != "fp8" or layout.fp8_base:
        return 0
    if layout.micro_batches > 1:
        return 2 * model.gemm_weights
    if layout.recomputed == "full":
        return 0
    if layout.mlp_in_chunks:
        return model.gemm_weights - model.mlp_weights
    return model.gemm_weights - model.hidden * model.fc1 * ("mlp" in layout.recomputed_modules)


def kept_of_a_layer(model: Model, layout: Job) -> float:
    """Return the bytes a token that a layer keeps for backward, its input included."""
    h, f = model.hidden, model.ffn
    entry = 2 * h  # the residual of the attention half, from which its norm is computed again
    if layout.recomputed == "full":
        return entry
    again = layout.recomputed_modules
    if layout.mlp_in_chunks:
        again += ("mlp",)
    statistics = 8 if model.bias else 4  # float32, of a norm
    # A norm of a half's output keeps that output for its backward. Where it replaces the norm before the half, it keeps
    # as much as that norm would, and no norm's output can be computed again.
    added = 2 * (2 * h + statistics) if model.norms == "both" else 0
    if model.norms == "after":
        again = tuple(part for part in again if part != "layernorm")
    of_input = {part: _kept_of_an_input(layout, part) for part in ("attention", "mlp")}
    norm, norm_2 = (0.0 if "layernorm" in again else of_input[part] * h + statistics for part in of_input)
    norm_2 += of_input["mlp"] * h * (model.copies - 1 if model.idle else 0)  # rows of experts beside the norm's output
    of_attention = 1 if layout.fp8_dpa else 2
    # with norms of q and k the GEMM's output is kept, too, for the norms' backward
    qkv = (of_attention + (2 if model.qk_norm else 0)) * model.qkv
    attention = (
        0 if "core_attn" in again else of_attention * model.context + 4 * model.heads
    )  # its output, the softmax's statistics
    # in bf16 proj's input is attention's output, which is counted above, unless SEP exchanges it for other tokens
    proj = of_input["attention"] * model.context
    if of_input["attention"] == 2 and "core_attn" not in again and layout.sep == 1:
        proj = 0
    # latent vectors, before and after their norms; and two GEMMs each cast the hidden states
    latent = (2 + of_input["attention"]) * model.latent_ranks
    latent += h if model.latent and of_input["attention"] == 1 else 0
    middle = 2 * h  # the residual of the MLP half
    # its input, and its output (gate and up)
    fc1 = 0 if {"mlp", "moe"} & {*again} else norm_2 + (MXFP8 if layout.stores_input_in_fp8 else 2) * model.fc1
    activation = 0 if {"mlp", "mlp_act", "moe", "moe_act"} & {*again} else of_input["mlp"] * f  # fc2's input
    low_rank = 2 * sum(_width(layout, gemm) for gemm in _kept_products(model, layout))  # x·A
    router = 0 if "moe" in again else ROUTER_BYTES * h * model.sparse + ROUTE_BYTES * model.outputs
    return entry + norm + latent + qkv + attention + proj + middle + router + fc1 + activation + added + low_rank


def _kept_of_an_input(layout: Job, part: str) -> int:
    """Return the bytes of each number of a GEMM's input that wait for the weight's gradient.

    In fp8 only the transpose is kept. With LoRA the adapter's gradient needs the input in bf16.
    """
    if layout.lora:
        return 2 * layout.adapts(part)
    return 1 if layout.precision == "fp8" else 2


def _width(layout: Job, gemm: Gemm) -> int:
    """Return the columns of all A of a GEMM's weight together."""
    return layout.adapter.rank * len(gemm.outputs)


def _packed_factors(model: Model, layout: Job) -> float:
    """Return the bytes of a layer's packed factors: each weight's A side by side, and its B on a diagonal."""
    return 2 * sum(_width(layout, gemm) * (gemm.inputs + sum(gemm.outputs)) for gemm in _kept_products(model, layout))


def _kept_products(model: Model, layout: Job) -> list[Gemm]:
    """Return the GEMMs whose low-rank products keep something: without fc1 where recompute names `mlp`."""
    fc1 = ("mlp", "column") if layout.recomputed != "full" and "mlp" in layout.recomputed_modules else None
    return [gemm for gemm in adapted(model, layout) if (gemm.part, gemm.mode) != fc1]


def offloaded_bytes(model: Model, layout: Job) -> float:
    """Return the bytes of a layer that move to host memory.

    They are all that the layer keeps, with one micro-batch also the fp8 copies of its weights.
    """
    copies = fp8_copies_of_a_layer(model, layout) if layout.micro_batches == 1 else 0
    return (kept_of_a_layer(model, layout) * layout.tokens + copies) / layout.tp


def host_bytes(model: Model, layout: Job) -> float:
    """Return bytes of host memory that are pinned for a GPU."""
    return layout.layers_on_host * offloaded_bytes(model, layout) + states_on_host(model, layout)


def backward_of_a_layer(model: Model, layout: Job) -> float:
    """Return the temporary bytes of a layer's backward, on all tensor parallel ranks.

    - the gradients of the activation's output (bf16) and input (fp8 with its transpose, or bf16);
    - with full recompute all that the layer keeps, and where the MLP is computed again fc1's output;
    - the transposed copy of a weight that exists in fp8 only;
    - with LoRA SwiGLU's gradient in both bf16 and fp8. The gradient of the activation's output takes the room of that
      output, which fc2's adapter has used by then, unless the output is computed again beside it;
    - for other activations than SwiGLU their input in 16 bits, where it is kept in fp8.
    """
    again, act_again = _kept_again(model, layout), {"mlp", "mlp_act"} & {*layout.recomputed_modules}
    gradients = 2 * model.fc1 + 2 * model.ffn
    if layout.adapts("mlp"):
        gradients += 2 * model.ffn if act_again else -2 * model.ffn
        gradients += model.fc1 if model.gated and layout.precision == "fp8" else 0
    if layout.mlp_in_chunks:
        return _backward_in_chunks(model, layout, again, gradients + 2 * model.fc1)
    if layout.recomputed != "full" and "mlp" in layout.recomputed_modules:
        again = 2 * model.fc1
    if layout.recomputed != "full" and "moe" in layout.recomputed_modules:
        again = 2 * (model.fc1 + model.ffn + model.copies * model.hidden)
    if layout.stores_input_in_fp8 and not model.gated:
        again += 2 * model.fc1
    transposed = model.hidden * model.fc1 if layout.makes_transposes else 0  # the largest weight
    return (again + gradients) * layout.tokens + transposed


def _kept_again(model: Model, layout: Job) -> float:
    """Return the bytes a token that full recompute makes again, without the layer's input; 0 without full recompute."""
    if layout.recomputed != "full":
        return 0
    return kept_of_a_layer(model, layout.but(recompute=False)) - 2 * model.hidden


def _backward_in_chunks(model: Model, layout: Job, again: float, of_mlp: float) -> float:
    """Return the greater of two moments in the backward of a layer whose MLP is taken in chunks.

    In the MLP there are `of_mlp` bytes for each token of a chunk, both weights in fp8, their gradients in float32, and
    the gradients of the MLP's input and output. Full recompute adds its output and Paddle's copy of its gradient.

    In attention there are dq, dk and dv, before and after they are rotated back, and all of the above except the
    gradient of the MLP's output. Attention in 16 bits also has its inputs, when the tensors that the layer keeps of
    attention and projection are freed. Attention in fp8 has its workspace while they still exist.
    """
    h, fp8, full = model.hidden, layout.precision == "fp8", layout.recomputed == "full"
    weights = 2 * model.mlp_weights * fp8 + (0 if layout.amp_master_grad else 4 * model.mlp_weights)
    of_mlp = of_mlp * layout.chunk + weights + (again + (8 if full else 4) * h) * layout.tokens
    norm = 0 if "layernorm" in layout.recomputed_modules else (1 if fp8 else 2) * h
    of_attention: float = (6 if full else 2) * h + norm * full + 4 * model.qkv
    if layout.fp8_dpa:
        of_attention += fp8_attention_workspace(model)
    else:
        of_attention += 4 * model.q - (0 if full else kept_of_a_layer(model, layout) - 2 * h - norm)
    return max(of_mlp, of_attention * layout.tokens)


def fp8_attention_workspace(model: Model) -> float:
    """Return bytes a token of cuDNN's backward in fp8.

    dq in float32, and where queries share keys and values dk and dv of each query's head in float32, before they
    are summed (cudnn-frontend, node/sdpa_fp8_bwd.h: dK_fullhead).
    """
    return 4 * model.q * (3 if model.kv_heads < model.heads else 1)


def _in_flight(layout: Job, first: bool) -> float:
    """Micro-batches whose activations a stage keeps: 1F1B on the first stage pp, interleaved somewhat more (4.2.3)."""
    if layout.pp == 1 or not first:
        return 1
    interleaved = 1 + (layout.pp - 1) / (layout.pp * layout.vp) if layout.vp > 1 else 1
    return min(layout.pp * interleaved, layout.micro_batches * layout.vp)
