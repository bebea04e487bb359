"""The greatest memory of a training step, by part.

What te keeps of a layer for its backward is written out below, tensor by tensor; that it is so many bytes and no more
was seen in the peaks of Paddle's allocator on H200s (tests/unit/planner compares with all of them). Sources: sequence
parallelism and pipelines in flight Korthikanti et al. 2022 (arXiv:2205.05198), 4; sharding Rajbhandari et al. 2020
(arXiv:1910.02054), 3.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from paddle_te.options.scripts import MASTER_WEIGHTS, MOMENTS, OFFLOADED_AT_ONCE
from paddle_te.planner.gpus import Gpu
from paddle_te.planner.layout import Layout
from paddle_te.planner.model import Model


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU. working: what head and loss, or a layer's backward, need for a moment, the greater of both."""

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


def memory_of_step(model: Model, layout: Layout, released: bool | None = None) -> Memory:
    """Of the pipeline stage that needs most: the first, which keeps most micro-batches, or the last, with the head.

    released: whether a step lets its gradients go, so that the next one begins without them; None: as te does it.
    """
    released = releases_gradients(layout) if released is None else released
    stages = {0, layout.pp - 1}
    return max((_stage(model, layout, stage, released) for stage in stages), key=lambda memory: memory.total)


def releases_gradients(layout: Layout) -> bool:
    """Whether a step's gradients are gone before the next one begins. One process lets those in bf16 go
    (`optimizer.adamw.FactorAdamW.clear_grad`), main gradients go with --release_grads."""
    return layout.release_grads or (layout.gpus == 1 and not layout.main_grads)


def lacking(memory: Memory, model: Model, layout: Layout, gpu: Gpu) -> float:
    """Bytes that a GPU has too little for it; where it fits, 0 or less.

    Paddle's allocator cannot join the free pieces that it has, so that there must be room for one more of the largest
    tensors, the logits.
    """
    logits = 0 if layout.loss_in_chunks else 2 * layout.tokens * model.vocabulary / layout.tp
    room = gpu.memory - (gpu.communicators if layout.gpus > 1 else 0)
    return memory.total + logits - room * 1e9


def fits(memory: Memory, model: Model, layout: Layout, gpu: Gpu) -> bool:
    """Whether a GPU has room for it."""
    return lacking(memory, model, layout, gpu) <= 0


def _stage(model: Model, layout: Layout, stage: int, released: bool) -> Memory:
    first, last = stage == 0, stage == layout.pp - 1
    layers = model.layers / layout.pp
    here = layers - layout.offload_activations  # whose activations are on the device
    outside = model.embedding * (first + (last and not (first and model.tied)))
    local = (layers * model.layer_weights + outside) / layout.tp
    kept = here * kept_of_a_layer(model, layout) * _in_flight(layout, first)
    with_copies = here if layout.micro_batches == 1 else layers
    head = head_of_a_token(model, layout) * layout.tokens / layout.tp if last else 0
    of_a_layer = backward_of_a_layer(model, layout) / layout.tp
    memory = Memory(
        weights=2 * local,
        gradients=gradient_bytes(layout) * (gradients_at_once(model, layout) or local),
        states=state_bytes(layout) * states_on_device(local / layout.sharding, layout),
        fp8_weights=with_copies * fp8_copies_of_a_layer(model, layout) / layout.tp,
        activations=kept * layout.tokens / layout.tp,
        working=max(head, of_a_layer) + _head_gradient(model, layout) * last,
    )
    if layout.sharing > 1:
        return _with_a_copy_of_gradients(memory)
    if not released or layout.micro_batches > 1 or layout.optimizer_in_backward != "off":
        return memory
    # the embedding's gradient is the last one, unless it is the head's, too
    after_layers = local if last and model.tied else local - model.embedding * first / layout.tp
    return _largest_moment(memory, after_layers / local, 1 / layers, of_a_layer)


def _with_a_copy_of_gradients(memory: Memory) -> Memory:
    """Paddle sums gradients over the ranks that share sequences in a copy of all of them, when the activations are
    gone: the greater of both."""
    if memory.gradients <= memory.activations + memory.working + memory.fp8_weights:
        return memory
    return replace(memory, gradients=2 * memory.gradients, activations=0, working=0, fp8_weights=0)


def _largest_moment(memory: Memory, of_gradients: float, of_layers: float, of_a_layer: float) -> Memory:
    """Of a step that begins without gradients, which come as activations go: the largest of backward's beginning, of
    the first layer's backward, its end, and of the optimizer's step.

    of_gradients: their share that is there in the first layer's backward. of_layers: that layer's share of what all
    keep. of_a_layer: bytes that a layer's backward needs for a moment.
    """
    first_layer = replace(
        memory,
        gradients=of_gradients * memory.gradients,
        activations=of_layers * memory.activations,
        fp8_weights=of_layers * memory.fp8_weights,
        working=of_a_layer,
    )
    moments = replace(memory, gradients=0), first_layer, replace(memory, activations=0, working=0, fp8_weights=0)
    return max(moments, key=lambda moment: moment.total)


def gradients_at_once(model: Model, layout: Layout) -> float:
    """With an update in backward: elements of the gradients that there are at a time, the head's or those of the two
    GEMMs of a layer's MLP, which te computes together. Else 0."""
    if layout.optimizer_in_backward == "off":
        return 0
    return max(model.embedding, model.mlp_weights) / layout.tp


def gradient_bytes(layout: Layout) -> float:
    """A parameter. Stage 2 and 3 keep a rank's share; stage 1 with overlap keeps all, in float32. paddle.DataParallel
    copies bf16 gradients into buffers of its own."""
    each = 4 if layout.main_grads or layout.overlap else 2
    if layout.sharding > 1 and layout.stage > 1:
        return each / layout.sharding
    return each + (2 if layout.replicas > 1 and not layout.main_grads else 0)


def state_bytes(layout: Layout) -> float:
    """A parameter: its master weight and AdamW's two moments."""
    return MASTER_WEIGHTS[layout.master_weights] + 2 * MOMENTS[layout.optim_moments]


def states_on_device(local: float, layout: Layout) -> float:
    """Of so many weights that a rank has states of, those whose states are on the device at a time."""
    moved = layout.offload_optimizer * local
    return local - moved + min(moved, OFFLOADED_AT_ONCE)


def states_on_host(model: Model, layout: Layout) -> float:
    """Bytes of the optimizer's states that a rank has in host memory, on average over the pipeline's stages."""
    local = model.parameters / (layout.tp * layout.pp * layout.sharding)
    return layout.offload_optimizer * state_bytes(layout) * local


def fp8_copies_of_a_layer(model: Model, layout: Layout) -> int:
    """Bytes of fp8 copies of the GEMMs' weights that are kept: for one micro-batch the transposes that dgrad needs,
    which a GEMM that is computed again makes anew; for several both, from one to the next."""
    if layout.precision != "fp8":
        return 0
    if layout.micro_batches > 1:
        return 2 * model.gemm_weights
    if layout.recompute == "full":
        return 0
    if layout.mlp_in_chunks:
        return model.gemm_weights - model.mlp_weights
    return model.gemm_weights - model.hidden * model.fc1 * ("mlp" in layout.recomputed_modules)


def kept_of_a_layer(model: Model, layout: Layout) -> float:
    """Bytes a token that wait for backward, the layer's input included."""
    h, f = model.hidden, model.ffn
    entry = 2 * h  # the residual of the attention half, from which its norm is computed again
    if layout.recompute == "full":
        return entry
    fp8, again = layout.precision == "fp8", layout.recomputed_modules
    if layout.mlp_in_chunks:
        again += ("mlp",)
    gemm = 1 if fp8 else 2  # of a GEMM's input: in fp8 its transpose alone
    norm = 0 if "layernorm" in again else gemm * h + (8 if model.bias else 4)  # its output and float32 statistics
    of_attention = 1 if layout.fp8_attention else 2
    qkv = of_attention * model.qkv
    attention = (
        0 if "core_attn" in again else of_attention * h + 4 * model.heads
    )  # its output, the softmax's statistics
    # in bf16 its input is attention's output, unless that is exchanged for other tokens
    proj = h if fp8 else 2 * h * ("core_attn" in again or layout.sep > 1)
    middle = 2 * h  # the residual of the MLP half
    fc1 = 0 if "mlp" in again else norm + 2 * model.fc1  # its input, and its output (gate and up)
    activation = 0 if {"mlp", "mlp_act"} & {*again} else gemm * f  # fc2's input
    return entry + norm + qkv + attention + proj + middle + fc1 + activation


def offloaded_bytes(model: Model, layout: Layout) -> float:
    """Bytes of a layer that --offload_activations moves: all that the layer keeps, and with it the fp8 copies of its
    weights where they are made for one micro-batch."""
    copies = fp8_copies_of_a_layer(model, layout) if layout.micro_batches == 1 else 0
    return (kept_of_a_layer(model, layout) * layout.tokens + copies) / layout.tp


def host_bytes(model: Model, layout: Layout) -> float:
    """Bytes of host memory that are pinned for a GPU."""
    return layout.offload_activations * offloaded_bytes(model, layout) + states_on_host(model, layout)


def head_of_a_token(model: Model, layout: Layout) -> float:
    """Bytes a token of the final norm, logits and their gradients, both bf16."""
    logits = 0 if layout.loss_in_chunks else 4 * model.vocabulary
    return logits + 12 * model.hidden


def backward_of_a_layer(model: Model, layout: Layout) -> float:
    """Bytes for a moment, of all tensor parallel ranks: the gradients of the activation's output (bf16) and input (fp8
    with its transpose, or bf16); with full recompute also what the layer keeps, and where the MLP is computed again
    fc1's output."""
    again = _kept_again(model, layout)
    gradients = 2 * model.ffn + 2 * model.fc1
    if layout.mlp_in_chunks:
        return _backward_in_chunks(model, layout, again, gradients + 2 * model.fc1)
    if layout.recompute != "full" and "mlp" in layout.recomputed_modules:
        again = 2 * model.fc1
    return (again + gradients) * layout.tokens


def _kept_again(model: Model, layout: Layout) -> float:
    """Bytes a token of what a layer keeps that is computed again as a whole, besides its input; else 0."""
    if layout.recompute != "full":
        return 0
    return kept_of_a_layer(model, replace(layout, recompute="none")) - 2 * model.hidden


def _backward_in_chunks(model: Model, layout: Layout, again: float, of_mlp: float) -> float:
    """The greater of two moments, of a layer whose MLP is taken in chunks.

    In the MLP: `of_mlp` bytes for each token of a chunk, both weights in fp8 and their gradients in float32; the
    gradients of its input and output; with full recompute its output, and the copy of its gradient that Paddle makes.
    In attention: dq, dk and dv before and after they are rotated back, or beside them what attention in 16 bits reads;
    and as above without the gradient of the MLP's output. What the layer keeps of attention and projection is gone.
    """
    h, fp8, full = model.hidden, layout.precision == "fp8", layout.recompute == "full"
    weights = 2 * model.mlp_weights * fp8 + (0 if layout.main_grads else 4 * model.mlp_weights)
    of_mlp = of_mlp * layout.mlp_chunk_tokens + weights + (again + (8 if full else 4) * h) * layout.tokens
    norm = 0 if "layernorm" in layout.recomputed_modules else (1 if fp8 else 2) * h
    gone = 0 if full else kept_of_a_layer(model, layout) - 2 * h - norm
    in_16_bits = 0 if layout.fp8_attention else 4 * h
    of_attention = (6 if full else 2) * h + norm * full + 4 * model.qkv + in_16_bits - gone
    return max(of_mlp, of_attention * layout.tokens)


def _head_gradient(model: Model, layout: Layout) -> float:
    """Loss in chunks adds lm_head's gradient up in float32, where that is not a main gradient anyhow."""
    return 4 * model.embedding / layout.tp if layout.loss_in_chunks and not layout.main_grads else 0


def _in_flight(layout: Layout, first: bool) -> float:
    """Micro-batches whose activations a stage keeps: 1F1B on the first stage pp, interleaved somewhat more (4.2.3)."""
    if layout.pp == 1 or not first:
        return 1
    interleaved = 1 + (layout.pp - 1) / (layout.pp * layout.vp) if layout.vp > 1 else 1
    return min(layout.pp * interleaved, layout.micro_batches * layout.vp)
