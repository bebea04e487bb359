"""The time of a training step, by part.

A step is a sum of work over the rates that a GPU reaches (`gpus`). Pipelines have a
bubble of (p-1)/(v·m): Narayanan et al. 2021 (arXiv:2104.04473), 2.2.
"""

from __future__ import annotations

from paddle_te.job import Job
from paddle_te.options.layers import FuseWgrad
from paddle_te.options.training import OFFLOADED_AT_ONCE
from paddle_te.planner.communication import (
    dispatch_ms,
    experts_of,
    exposed_sharding_ms,
    shared_gradients_ms,
    shared_sequence_ms,
    stage_transfer_ms,
    tensor_parallel_ms,
)
from paddle_te.planner.frozen import frozen_of
from paddle_te.planner.gpus import Gpu
from paddle_te.planner.layer_time import (
    ATTENTION_FORWARD,
    attention_ms,
    elementwise_bytes,
    launch_ms,
    layer_ms,
    products,
)
from paddle_te.planner.memory import (
    offloaded_bytes,
    own_elements,
    state_bytes,
    states_on_host,
    trained_elements,
)
from paddle_te.planner.model import Model
from paddle_te.planner.muon import muon_ms
from paddle_te.planner.offloaded import PIECE, late_pieces
from paddle_te.planner.skipped import mean_of_layers

LOSS_BYTES = 12  # a token and entry of the vocabulary, of the loss and its gradient
ANSWERS = 2 / 3  # share of answers in preference tuning's tokens: head and loss compute only these; assumed
# Bytes a weight in which later micro-batches' gradients are added up, by `Job.fuses_wgrad`. GEMMs read and write the
# sum, in float32 or bf16; Paddle reads two gradients in bf16 and writes one.
ADDED_BYTES: dict[FuseWgrad, int] = {True: 8, "grad": 4, False: 6}
CHUNKS_COST = 1.17  # of head and loss in chunks, compared with both at once


def time_of_step(model: Model, layout: Job, gpu: Gpu) -> dict[str, float]:
    """Return {part: ms}; the parts add up to a step."""
    m, layers = layout.micro_batches, model.layers / layout.pp
    layer = mean_of_layers(lambda job: layer_ms(model, job, gpu, m > 1), model, layout)
    first = mean_of_layers(lambda job: layer_ms(model, job, gpu, cached=False), model, layout)
    tp = tensor_parallel_ms(model, layout, gpu)
    transfer = stage_transfer_ms(model, layout, gpu)
    head = head_ms(model, layout, gpu)  # on the last stage, for which the others wait
    trained = model.parameters - frozen_of(model, layout.freeze).on_stage(0, 1)
    local = trained_elements(model, layout, trained / (layout.tp * layout.pp))
    reference, passes = reference_ms(model, layout, gpu, tp), 1.5 if reference_runs(layout) else 1.0
    shared = shared_sequence_ms(model, layout, gpu)
    dispatch = dispatch_ms(model, layout, gpu)
    forward = layers * layer / 3
    update = update_ms(own_elements(model, layout, local), layout, gpu)
    mine = local - experts_of(model, layout) * (1 - 1 / layout.ep)  # without those that other ranks have
    backward = (layers * (layer + tp) + head) * 2 / 3
    # activations come back over the same link meanwhile
    copied = layout.layers_on_host * offloaded_bytes(model, layout) / gpu.pcie / 1e6
    launch = max(0.0, layers * (m * launch_ms(layout, gpu) - first - (m - 1) * layer - m * (tp + shared + dispatch)))
    return {
        "layers": layers * (first + (m - 1) * layer),
        "host": gpu.gap + launch,
        "tensor parallel": m * layers * tp,
        "dispatch": m * layers * dispatch,
        "shared sequences": m * layers * shared + shared_gradients_ms(local, layout, gpu),
        "stage transfers": m * transfer * passes,
        "head": m * head,
        "reference": m * reference,
        "accumulation": accumulation_ms(mine, layout, gpu),
        "bubble": (layout.pp - 1)
        / layout.vp
        * (layers * (layer + tp + shared + dispatch) + transfer * passes + reference),  # the head is the last stage's
        "sharding": exposed_sharding_ms(model, layout, gpu, local, forward),
        "offload": m * offload_ms(model, layout, gpu, layer + tp + shared)
        + states_ms(model, layout, gpu, update + max(0.0, backward - copied) * (layout.optimizer_in_backward != "off")),
        "optimizer": update + muon_ms(model, layout, gpu) + gradients_ms(mine, layout, gpu),
    }


def update_ms(own: float, layout: Job, gpu: Gpu) -> float:
    """Return the ms of AdamW and of the norm of the gradients.

    Both read the gradients. AdamW also reads and writes the states and writes the weight. With smaller moments its
    arithmetic takes longer than its bytes.
    """
    gradients = 4 if layout.amp_master_grad or layout.overlaps else 2
    norm = own * gradients / gpu.update / 1e6
    adamw = own * (gradients + 2 + 2 * state_bytes(layout)) / gpu.update / 1e6
    of_arithmetic = {"bfloat16": gpu.update_bfloat16, "int8": gpu.update_int8}.get(layout.optim_moments, 0.0)
    return norm + max(adamw, own * of_arithmetic / 1e9)


def offload_ms(model: Model, layout: Job, gpu: Gpu, layer: float) -> float:
    """Return the ms that the copies of activations cost a micro-batch.

    Copies run one after another while the GPU computes, and take some of the memory bandwidth. The GPU waits for late
    copies. Copies to the host start when the first layer's forward ends, and must end when the last layer's begins.
    Copies back start when the last layer's backward ends, and must end when the first layer's begins.

    layer: ms of a layer, a third of them in forward.
    """
    size = layout.layers_on_host * offloaded_bytes(model, layout)
    copies, beside = size / gpu.pcie / 1e6, model.layers - 2
    waits = max(0.0, copies - beside * layer / 3) + max(0.0, copies - beside * layer * 2 / 3)
    return waits + 2 * size / gpu.hbm / 1e6


def hidden_layers(model: Model, layout: Job, gpu: Gpu) -> int:
    """Return the number of layers whose copies to the host the other layers' forward hides."""
    beside = (model.layers - 2) * layer_ms(model, layout, gpu, layout.micro_batches > 1) / 3
    return min(int(beside * gpu.pcie * 1e6 / offloaded_bytes(model, layout)), model.layers - 2)


def states_ms(model: Model, layout: Job, gpu: Gpu, beside: float) -> float:
    """Return the ms that the copies of the optimizer's states cost a step.

    Copies in and out run at the same time. beside: ms of computing that hide them: the updates, and backward where
    weights are updated in it. Forward fills the slots on the device. In backward a weight's update also waits for the
    pieces that the slots have no room for.
    """
    size = states_on_host(model, layout)
    ahead = min(size, OFFLOADED_AT_ONCE * state_bytes(layout))
    waits = max(0.0, (size - ahead) / gpu.pcie / 1e6 - beside)
    if layout.optimizer_in_backward != "off":
        late = late_pieces(model, layout.tp, layout.share_on_host) if layout.share_on_host else 0
        waits = max(waits, late * PIECE * state_bytes(layout) / gpu.pcie / 1e6)
    return waits + 2 * size / gpu.hbm / 1e6


def head_ms(model: Model, layout: Job, gpu: Gpu) -> float:
    """Return the ms of final norm, lm_head, loss and embedding for a micro-batch."""
    tokens, frozen = layout.tokens / layout.tp, frozen_of(model, layout.freeze)
    tokens *= ANSWERS if layout.prefers else 1
    trained = not (layout.lora or (frozen.embedding if model.tied else frozen.head))
    products_of_head = (6 if trained else 4) * tokens * model.embedding
    gemms = products_of_head / (gpu.head_fp8 if layout.fp8_lm_head else gpu.head_bf16) / 1e9
    loss = tokens * (LOSS_BYTES * model.vocabulary + 60 * model.hidden) / gpu.hbm / 1e6
    return (gemms + loss) * (CHUNKS_COST if layout.use_fused_linear_cross_entropy else 1)


def reference_runs(layout: Job) -> bool:
    """Say whether a step begins with the reference's forward of all its micro-batches."""
    return layout.has_reference and not layout.precompute_ref_log_probs


def reference_ms(model: Model, layout: Job, gpu: Gpu, tp: float) -> float:
    """Return the ms of a micro-batch's forward through the reference of preference tuning; 0 without a reference.

    In a pipeline it is the last stage's. tp: `tensor_parallel_ms` of a layer, of which a forward takes a third.
    """
    if not reference_runs(layout):
        return 0.0
    rate, tokens = gpu.gemm_fp8 if layout.precision == "fp8" else gpu.gemm_bf16, layout.tokens
    gemms = 2 * tokens * model.gemm_weights / rate / 1e9
    elementwise = tokens * elementwise_bytes(model, layout) / gpu.hbm / 1e6 / 3
    layer = (gemms + elementwise + ATTENTION_FORWARD * attention_ms(model, layout, gpu)) / layout.tp + tp / 3
    return model.layers / layout.pp * layer + head_ms(model, layout, gpu) * 2 / products(model, layout)


def accumulation_ms(local: float, layout: Job, gpu: Gpu) -> float:
    """Return the ms in which the gradients of later micro-batches are added to those of the first."""
    return ADDED_BYTES[layout.fuses_wgrad] * (layout.micro_batches - 1) * local / gpu.hbm / 1e6


def gradients_ms(local: float, layout: Job, gpu: Gpu) -> float:
    """Return the ms that a step spends on a rank's `local` gradients besides adding them up and sending them.

    Main gradients are cleared, and wgrad reads them to add to them. That is not so if the step before has freed them,
    nor in stage 1 with overlap and in stage 3, where te overwrites them. In data parallelism Paddle's EagerReducer
    copies gradients into a buffer and back.
    """
    if layout.shards_weights or (layout.sharding_ranks > 1 and layout.stage == 1 and layout.overlaps):
        return 0.0
    if layout.data == 1 and (layout.release_grads or not layout.amp_master_grad):
        return 0.0
    return (4 + 4) * local / gpu.hbm / 1e6
