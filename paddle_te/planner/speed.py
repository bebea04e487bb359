"""The time of a training step, by part.

A step is a sum of work over the rates that a GPU reaches (`gpus`). Sources:

- Pipeline: Narayanan et al. 2021 (arXiv:2104.04473), 2.2: a bubble of (p-1)/(v·m).
- Tensor and sequence parallelism: Korthikanti et al. 2022 (arXiv:2205.05198), 4.
- Sharding: Rajbhandari et al. 2020 (arXiv:1910.02054), 7.
- Ring collectives of S bytes over n ranks: Patarasuk and Yuan 2009. Each rank sends S·(n-1)/n in all-gather and
  reduce-scatter, twice that in all-reduce, in n-1 hops.
- SEP: Jacobs et al. 2023 (arXiv:2309.14509), 3.2: an all-to-all of S bytes sends S·(n-1)/n.
- CP: Liu et al. 2023 (arXiv:2310.01889), 3: keys and values travel while attention computes.
"""

from __future__ import annotations

import math

from paddle_te.job import Job
from paddle_te.options.training import OFFLOADED_AT_ONCE
from paddle_te.planner.frozen import frozen_of
from paddle_te.planner.gpus import Gpu
from paddle_te.planner.memory import (
    MXFP8,
    adapted,
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

CAST_BYTES = 4.5  # a weight that becomes fp8, with its transpose
EXPERTS_CAST_BYTES = 9  # the same of an expert, whose small matrices are cast at half that speed; fitted
AMAX_BYTES = 2  # a number whose greatest magnitude current scaling finds before it is cast
ROUTING = 0.7  # ms: a hundred small kernels around a layer's router, forward and backward; fitted
# An all-to-all of experts puts rows in order (4 bytes a number, for each rank) and makes their sums in float32 (16),
# forward and backward. In each forward the host waits for the router, and then the GPU for the host. Both are fitted.
EXCHANGED_BYTES, EXCHANGE_WAIT = 40, 1.2
ROW_BYTES = 12  # a number of a token's row: gathered and summed, forward and backward
# A number of a token that its router sees: in float32, cast there and back and read by three GEMMs (24); and the
# gradients of hidden states that two parts of the layer read are summed twice (20).
ROUTER_BYTES = 44
LOSS_BYTES = 12  # a token and entry of the vocabulary, of the loss and its gradient
ATTENTION_FORWARD = 0.25  # its share of attention's time, the rest is backward's (measured at 65,536 tokens)
ADDED_NORM_BYTES = 16  # a number: a norm of a half's output, and the residual sum, which otherwise a GEMM makes
ANSWERS = 2 / 3  # share of answers in preference tuning's tokens: head and loss compute only these; assumed
CHUNKS_COST = 1.17  # of head and loss in chunks, compared with both at once
# The CPU's time for a layer in multiples of that without recompute. With full recompute Paddle runs the forward again
# (on an H100 a step of llama-125m took 87 ms instead of 35). Each part that is computed again adds a share (assumed).
LAUNCHES_OF_FULL_RECOMPUTE = 2.7
LAUNCHES_OF_A_PART = 0.05
EXCHANGE_PASSES = 3  # over what an all-to-all of SEP sends, to bring it into the order of the ranks and of the heads
# CP merges each later step's attention output, and the gradients of queries, keys and values, into the earlier steps'.
# Each number becomes float32 (6 bytes) and is added (12).
MERGE_BYTES = 18


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
    scatter, gather = sharding_ms(local, layout, gpu, experts_of(model, layout))
    shared = shared_sequence_ms(model, layout, gpu)
    dispatch = dispatch_ms(model, layout, gpu)
    forward = layers * layer / 3
    update = update_ms(own_elements(model, layout, local), layout, gpu)
    mine = local - experts_of(model, layout) * (1 - 1 / layout.ep)  # without those that other ranks have
    backward = (layers * (layer + tp) + head) * 2 / 3
    # activations come back over the same link meanwhile
    copied = layout.layers_on_host * offloaded_bytes(model, layout) / gpu.pcie / 1e6
    # stages 2 and 3 reduce each micro-batch's gradients, stage 3 gathers the weights for each
    reductions, gathers = m if layout.shards_gradients else 1, m if layout.shards_weights else 1
    communication = reductions * exposed_ms(scatter, 2 * forward, layout, gpu)
    communication += gathers * exposed_ms(gather, forward, layout, gpu)
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
        "sharding": communication,
        "offload": m * offload_ms(model, layout, gpu, layer + tp + shared)
        + states_ms(model, layout, gpu, update + max(0.0, backward - copied) * (layout.optimizer_in_backward != "off")),
        "optimizer": update + muon_ms(model, layout, gpu) + gradients_ms(mine, layout, gpu),
    }


def launch_ms(layout: Job, gpu: Gpu) -> float:
    """Return the CPU's ms to launch a layer: forward, backward, and the parts that backward computes again."""
    if layout.recomputed == "full":
        return LAUNCHES_OF_FULL_RECOMPUTE * gpu.launch
    return (1 + LAUNCHES_OF_A_PART * len(layout.recomputed_modules)) * gpu.launch


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


def layer_ms(model: Model, layout: Job, gpu: Gpu, cached: bool) -> float:
    """Return the ms of one layer for a micro-batch, forward and backward.

    cached: the layer's fp8 weights are kept from an earlier micro-batch.
    """
    fp8, tokens = layout.precision == "fp8", layout.tokens
    gemms = products(model, layout) * tokens * model.active_weights / (gpu.gemm_fp8 if fp8 else gpu.gemm_bf16) / 1e9
    attention = attention_ms(model, layout, gpu)
    elementwise = tokens * elementwise_bytes(model, layout) / (gpu.hbm_lora if layout.lora else gpu.hbm) / 1e6
    experts = model.experts / layout.ep
    weights = model.gemm_weights - model.experts + experts
    cast = weights * (CAST_BYTES + AMAX_BYTES * finds_amax(layout)) + experts * (EXPERTS_CAST_BYTES - CAST_BYTES)
    casts = cast / gpu.hbm / 1e6 if fp8 and not cached else 0
    if layout.fp8_base:  # transposes for backward
        casts = weights * 2 / gpu.hbm / 1e6
    rows = rows_ms(model, layout, gpu)
    once = gemms + attention + elementwise + rows + written_ms(model, layout, gpu)
    if layout.recomputed == "full":
        again = gemms * 2 / products(model, layout) + (elementwise + rows) / 3 + ATTENTION_FORWARD * attention
    else:
        again = again_ms(model, layout, gpu, gemms, attention, cached)
    routing = ROUTING * model.sparse * (4 / 3 if routes_again(layout) else 1)
    return (once + again + casts + chunks_ms(model, layout, gpu, gemms)) / layout.tp + routing


def routes_again(layout: Job) -> bool:
    """Say whether backward computes a layer's router and rows again."""
    return layout.recomputed == "full" or "moe" in layout.recomputed_modules


def rows_ms(model: Model, layout: Job, gpu: Gpu) -> float:
    """Return the ms that move tokens to their experts' rows and back, and the ms of the router's passes.

    In 16 bits kernels also pass over rows that no expert has filled: they write zeros there twice and compute the
    activation of them. Kernels that cast to fp8 skip such rows.
    """
    if not model.experts:
        return 0.0
    moved = ROW_BYTES * model.hidden * model.routed + ROUTER_BYTES * model.hidden * model.sparse
    if layout.precision != "fp8":
        moved += (model.room(layout) - 1) * (4 * model.hidden * model.routed + 8 * model.fc1)
    return layout.tokens * moved / gpu.hbm / 1e6


def written_ms(model: Model, layout: Job, gpu: Gpu) -> float:
    """Return the ms in which GEMMs over an expert's few rows write its weights' gradients, which nothing hides.

    Main gradients are counted where they are added up.
    """
    if layout.amp_master_grad:
        return 0.0
    trained = (products(model, layout) - 4) / 2
    return 2 * trained * model.experts / layout.ep / gpu.hbm / 1e6


def finds_amax(layout: Job) -> bool:
    """Say whether each number is read once more before it is cast, for the scale."""
    return layout.precision == "fp8" and layout.fp8_recipe == "current"


def amax_bytes(model: Model, layout: Job) -> float:
    """Return the bytes a token, forward and backward, that current scaling reads for its scales.

    For SwiGLU and its gradient these are the bytes of their inputs.
    """
    if not finds_amax(layout):
        return 0.0
    numbers = sum(gemm.inputs + sum(gemm.outputs) for gemm in model.attention_gemms)
    return AMAX_BYTES * (numbers + 2 * model.copies * model.hidden + 2 * model.fc1 + model.ffn)


def products(model: Model, layout: Job) -> float:
    """Return a layer's operations for each token and weight, forward and backward, on average.

    A frozen weight has no gradient; the gradient of its input is counted, also where nothing before it is trained.
    """
    frozen = frozen_of(model, layout.freeze).matrices / (model.layers * model.gemm_weights)
    return 4 if layout.lora else 6 - 2 * frozen


def elementwise_bytes(model: Model, layout: Job) -> float:
    """Return the bytes a token of norms, rotation, activation, casts and transposes in a layer, forward and backward.

    In fp8 our kernels make both copies of SwiGLU, of its gradient and of RMSNorm in one pass. With LoRA norms and
    activation write bf16. Casts make fp8 of it without a transpose, for SwiGLU and its gradient in the same pass.
    Low-rank products read and write inputs and outputs four times each.
    """
    more = stored_bytes(model, layout) + norm_bytes(model) + amax_bytes(model, layout)
    if layout.precision != "fp8" or layout.lora:
        # fitted: how many of the counted bytes a step's time shows, fewer where a cache still holds what is read
        seen = 1.1 if layout.lora else 0.8
        in_bf16 = seen * (40 * model.hidden + 12 * model.qkv + 11 * model.fc1)
        low_rank = 8 * sum(gemm.inputs + sum(gemm.outputs) for gemm in adapted(model, layout))
        cast = 3 * sum(gemm.inputs + sum(gemm.outputs) for gemm in model.gemms) if layout.precision == "fp8" else 0
        if cast and model.gated:
            cast -= 2 * (model.ffn + model.fc1)
        return in_bf16 + low_rank + cast + more
    norm, activation = (38, 7) if model.gated else (40, 11)
    return norm * model.hidden + 12 * model.qkv + activation * model.fc1 + more


def norm_bytes(model: Model) -> float:
    """Return the bytes a token of the norms that a Llama does not have.

    The kernel of the rotation computes the norms of q and k. It then also writes v, because it does not turn q and k
    in place, and in backward it reads the inputs of the norms. Norms over all heads read q and k once more to sum
    their squares, in backward both them and their gradients.
    """
    v = model.kv // 2
    qk = model.qkv - v
    of_heads = {None: 0, "head": 4 * v + 2 * qk, "all": 4 * v + 8 * qk}[model.qk_norm]
    return of_heads + 2 * ADDED_NORM_BYTES * model.hidden * (model.norms == "both")


def stored_bytes(model: Model, layout: Job) -> float:
    """Return the bytes a token that storing the activation's input in fp8 adds.

    SwiGLU's kernels write it in passing and read it instead of bf16. For other activations it is cast, and cast back.
    """
    if not layout.stores_input_in_fp8:
        return 0.0
    return (2 * MXFP8 - 2 if model.gated else 2 * (MXFP8 + 2)) * model.fc1


def attention_ms(model: Model, layout: Job, gpu: Gpu) -> float:
    """Return the ms of attention in one layer for a micro-batch, forward and backward, on all tensor parallel ranks.

    Ranks that share sequences have some heads of all tokens, or some queries and all keys, which is the same work.
    Tokens outside a window take no time, and the others take the usual time: assumed, not measured.
    """
    rate = gpu.attention_fp8 if layout.fp8_dpa else gpu.attention_bf16
    numbers = (model.q + model.context) / 2  # of a key, which a query is multiplied with, and of its value
    return 6 * layout.tokens * model.seen(layout.sequence) * numbers / rate / 1e9


def again_ms(model: Model, layout: Job, gpu: Gpu, gemms: float, attention: float, cached: bool) -> float:
    """Return the ms of the parts of a layer that backward computes again.

    gemms, attention: their ms in one forward and backward. Norms and activation read and write each number once.
    fc1's weight is cast again unless it is cached.
    """
    again, times = layout.recomputed_modules, 0.0
    if layout.mlp_in_chunks:
        again = tuple(part for part in again if part not in ("mlp", "mlp_act"))  # `chunks_ms` has them
    norm, activation = 4 * model.hidden, 2.0 * model.fc1 + 2 * model.ffn  # bytes a token
    if layout.stores_input_in_fp8 and model.gated:  # with LoRA the gradient's kernel, which reads it anyhow, writes it
        activation = (0 if layout.lora else MXFP8 * model.fc1) + 2 * model.ffn
    moved = 0.0
    if "layernorm" in again and model.norms != "after":
        moved += norm if "mlp" in again else 2 * norm
    if "mlp_act" in again:
        moved += activation
    if "mlp" in again:
        fc1 = model.hidden * model.fc1
        moved += norm + activation
        times += gemms / 3 * fc1 / model.active_weights
        if layout.precision == "fp8" and not cached:
            times += fc1 * CAST_BYTES / gpu.hbm / 1e6
    if "moe_act" in again:
        moved += activation
    if "moe" in again:
        moved += norm + activation + 4 * model.copies * model.hidden
        times += gemms / 3 * model.hidden * (model.fc1 + model.ffn) / model.active_weights
    if "core_attn" in again:
        times += 1.3 * attention / 3
    return times + layout.tokens * moved / gpu.hbm / 1e6


def chunks_ms(model: Model, layout: Job, gpu: Gpu, gemms: float) -> float:
    """Return the ms that an MLP in chunks takes more than an MLP at once.

    Backward computes norm, fc1 and activation again. Each chunk but the first reads and writes the weights' gradients
    in float32. gemms: the ms of the layer's GEMMs in one forward and backward.
    """
    if not layout.mlp_in_chunks:
        return 0.0
    fc1 = model.hidden * model.fc1
    moved: float = layout.tokens * (4 * model.hidden + 2 * model.fc1 + 2 * model.ffn)
    moved += 8 * model.mlp_weights * (math.ceil(layout.tokens / layout.chunk) - 1)
    casts = fc1 * CAST_BYTES if layout.precision == "fp8" and layout.micro_batches == 1 else 0
    return gemms / 3 * fc1 / model.active_weights + (moved + casts) / gpu.hbm / 1e6


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
    """Return the time in which the gradients of later micro-batches are added to those of the first.

    GEMMs read and write main gradients; Paddle reads two gradients in bf16 and writes one.
    """
    each = 8 if layout.amp_master_grad else 6
    return each * (layout.micro_batches - 1) * local / gpu.hbm / 1e6


def ring_ms(size_bytes: float, ranks: int, stride: int, messages: int, gpu: Gpu) -> float:
    """Return the ms of an all-gather or reduce-scatter of `size_bytes` over ranks that lie `stride` apart.

    Within a node it uses NVLink. Between nodes each rank has its own network card, and one ring goes through all ranks.
    """
    if ranks == 1:
        return 0.0
    inside = max(1, min(ranks, gpu.gpus_per_node // stride))  # members in one node
    nodes = math.ceil(ranks / inside)
    nvlink = gpu.nvlink_of_two if inside == 2 else gpu.nvlink
    bandwidth = nvlink if nodes == 1 else min(nvlink, inside * gpu.network)
    hops = (ranks - 1) * gpu.nvlink_hop if nodes == 1 else nodes * gpu.network_hop
    hops += 0 if nodes == 1 else (ranks - nodes) * gpu.nvlink_hop
    return size_bytes * (ranks - 1) / ranks / bandwidth / 1e6 + messages * (gpu.collective + hops) / 1e3


def exposed_ms(communication: float, window: float, layout: Job, gpu: Gpu) -> float:
    """Return the ms of a communication that computing does not hide, plus the ms by which it slows computing down.

    window: ms of computing at the same time. Without sharding Paddle reduces data-parallel gradients during backward.
    """
    if not layout.overlaps and layout.sharding_ranks > 1 and not layout.shards_weights:
        return communication
    hidden = min(gpu.overlap * communication, window)
    return communication - hidden + gpu.slowdown * hidden


def tensor_parallel_ms(model: Model, layout: Job, gpu: Gpu) -> float:
    """Return the ms of a layer's collectives, forward and backward, with sequence parallelism.

    There are 4 all-gathers and 4 reduce-scatters of a [tokens, hidden] tensor (4.2.2), and backward gathers 2 tensors
    again. These two all-gathers and 2 of the reduce-scatters (bf16) run during GEMMs.
    """
    gathered = 1 if layout.precision == "fp8" else 2
    elements = layout.tokens * model.hidden
    gather, scatter = (ring_ms(size * elements, layout.tp, 1, 1, gpu) for size in (gathered, 2))
    return 4 * gather + 2 * scatter + (1 - gpu.tp_overlap) * (2 * gather + 2 * scatter)


def experts_of(model: Model, layout: Job) -> float:
    """Return the elements of a stage's experts that sharding's ranks divide and train; 0 where none do."""
    trains = layout.ep > 1 and not layout.lora
    return model.layers / layout.pp * model.experts if trains else 0.0


def dispatch_ms(model: Model, layout: Job, gpu: Gpu) -> float:
    """Return the ms in which ranks that divide the experts exchange tokens: a micro-batch in one layer, on average.

    Tokens go to the experts and sums come back, in bf16, in forward and backward, while nothing is computed. With
    all-gather each of N ranks sends its tokens to all others. With all-to-all it sends a token only to the ranks of
    its k experts. If experts are balanced, these are a share 1 - (1 - 1/N)^k of the ranks. All-to-all also makes the
    host wait for the numbers of rows.
    """
    if layout.ep == 1:
        return 0.0
    forwards = 2 if routes_again(layout) else 1
    by_all_to_all = layout.moe_token_dispatcher_type == "alltoall"
    share = 1 - (1 - 1 / layout.ep) ** model.topk if by_all_to_all else 1.0
    size = 2 * layout.tokens * model.hidden * layout.ep * share
    one = ring_ms(size, layout.ep, layout.tp * layout.pp * layout.sharing, 1, gpu)
    sent = 2 * (forwards + 1) * one
    if by_all_to_all:
        ordered = EXCHANGED_BYTES * layout.ep * layout.tokens * model.hidden / gpu.hbm / 1e6
        sent += (forwards + 1) / 2 * ordered + forwards * EXCHANGE_WAIT
    return sent * model.sparse


def shared_sequence_ms(model: Model, layout: Job, gpu: Gpu) -> float:
    """Return the ms in which ranks that share sequences send and rearrange: a micro-batch in one layer, both passes."""
    if layout.sharing == 1:
        return 0.0
    forwards = 2 if layout.recomputed == "full" else 1
    if layout.sep > 1:
        size = 2 * layout.tokens * (model.qkv + model.context) / layout.tp  # q, k and v there, the output back
        copied = EXCHANGE_PASSES * 2 * size / gpu.hbm / 1e6
        return (forwards + 1) * (ring_ms(size, layout.sep, layout.tp, 2, gpu) + copied)
    kv, steps = 2 * layout.tokens * model.kv / layout.tp, layout.cp - 1

    def shifts(size: float, count: int) -> float:
        return count * ring_ms(2 * size, 2, layout.tp, 1, gpu)  # all of it goes to one rank

    attention = attention_ms(model, layout, gpu) / layout.tp
    sent = forwards * max(0.0, shifts(kv, steps) - attention / 3)
    sent += max(0.0, shifts(kv, steps) + shifts(2 * kv, layout.cp) - attention * 2 / 3)  # gradients in float32
    merged = steps * ((forwards + 1) * model.context + model.kv) * MERGE_BYTES
    return sent + layout.tokens * merged / layout.tp / gpu.hbm / 1e6


def shared_gradients_ms(local: float, layout: Job, gpu: Gpu) -> float:
    """Return the ms after backward that sum all gradients over the ranks that share sequences, in a copy."""
    size = (4 if layout.amp_master_grad else 2) * local
    messages = math.ceil(size / gpu.bucket)
    copied = 4 * size / gpu.hbm / 1e6 if layout.sharing > 1 else 0.0
    return copied + 2 * ring_ms(size, layout.sharing, layout.tp, messages, gpu)


def stage_transfer_ms(model: Model, layout: Job, gpu: Gpu) -> float:
    """Return the ms in which a stage sends a micro-batch's activations and gradients, in bf16, v times each."""
    if layout.pp == 1:
        return 0.0
    within = layout.tp * layout.pp <= gpu.gpus_per_node
    bandwidth, hop = (gpu.nvlink, gpu.nvlink_hop) if within else (gpu.network, gpu.network_hop)
    size = 2 * layout.tokens * model.hidden / layout.tp
    return layout.vp * 2 * (size / bandwidth / 1e6 + hop / 1e3)


def sharding_ms(local: float, layout: Job, gpu: Gpu, experts: float = 0.0) -> tuple[float, float]:
    """Return the ms of sharding's collectives during backward and during forward, for a rank's `local` parameters.

    experts: the parameters of experts, which layout.ep ranks divide. A rank shards its experts among its replicas.
    """
    stride = layout.tp * layout.pp * layout.sharing

    def ring(bytes_each: int, ranks: int, elements: float, between: int = 1) -> float:
        return ring_ms(bytes_each * elements, ranks, stride * between, math.ceil(2 * elements / gpu.bucket), gpu)

    replicas = 2 * ring(2, layout.replicas, local)  # all-reduce of bf16 gradients
    if layout.sharding_ranks == 1:
        return replicas, 0.0
    groups = [(layout.sharding_ranks, local - experts, 1)]
    if experts:
        groups.append((layout.sharding_ranks // layout.ep, experts / layout.ep, layout.ep))
    of_gradient = 4 if layout.amp_master_grad else 2
    gradients, weights = (sum(ring(size, *group) for group in groups) for size in (of_gradient, 2))
    again = layout.shards_weights and (layout.precision != "fp8" or layout.recomputed == "full")
    return replicas + gradients + (weights if again else 0), weights


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
