"""The time of collectives.

Sources:

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
from paddle_te.planner.gpus import Gpu
from paddle_te.planner.layer_time import attention_ms, routes_again
from paddle_te.planner.model import Model

# An all-to-all of experts puts rows in order (4 bytes a number, for each rank) and makes their sums in float32 (16),
# forward and backward. In each forward the host waits for the router, and then the GPU for the host. Both are fitted.
EXCHANGED_BYTES, EXCHANGE_WAIT = 40, 1.2
EXCHANGE_PASSES = 3  # over what an all-to-all of SEP sends, to bring it into the order of the ranks and of the heads
# CP merges each later step's attention output, and the gradients of queries, keys and values, into the earlier steps'.
# Each number becomes float32 (6 bytes) and is added (12).
MERGE_BYTES = 18


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
    return _beside_ms(communication, window, gpu)


def _beside_ms(communication: float, window: float, gpu: Gpu) -> float:
    """Return `exposed_ms` of a communication that runs beside computing."""
    hidden = min(gpu.overlap * communication, window)
    return communication - hidden + gpu.slowdown * hidden


def tensor_parallel_ms(model: Model, layout: Job, gpu: Gpu) -> float:
    """Return the ms of a layer's collectives, forward and backward, with sequence parallelism.

    There are 4 all-gathers and 4 reduce-scatters of a [tokens, hidden] tensor (4.2.2), and backward gathers 2 tensors
    again. These two all-gathers and 2 of the reduce-scatters (bf16) run during whole GEMMs. The others run while a rank
    multiplies its own rows (ops/te/rank_rows.py), before experts while nothing is computed. With current and block
    scaling 16 bits are gathered while nothing is computed. The sum of rows with block scaling is a reduce-scatter.
    """
    apart = layout.precision == "bf16" or layout.fp8_recipe == "delayed"  # rows can be multiplied before all are there
    in_blocks = layout.precision == "fp8" and layout.fp8_recipe == "block"
    gathered = 1 if layout.precision == "fp8" and apart else 2
    elements = layout.tokens * model.hidden
    gather, scatter = (ring_ms(size * elements, layout.tp, 1, 1, gpu) for size in (gathered, 2))
    waits = (1 - gpu.tp_overlap) * 2 * (gather + scatter)
    for part in ("attention", "mlp"):
        column, row = (_own_rows_ms(part, mode, model, layout, gpu) for mode in ("column", "row"))
        waits += sum(_beside_ms(gather, apart * window, gpu) for window in (column, row))
        waits += _beside_ms(scatter, (not in_blocks) * row, gpu)
    return waits


def _own_rows_ms(part: str, mode: str, model: Model, layout: Job, gpu: Gpu) -> float:
    """Return the ms of a layer's GEMMs of a part and mode for the rows that a sequence-parallel rank has itself."""
    weights = sum(gemm.inputs * sum(gemm.outputs) for gemm in model.gemms if (gemm.part, gemm.mode) == (part, mode))
    apart = 1 - model.sparse if part == "mlp" else 1.0
    rate = gpu.gemm_fp8 if layout.precision == "fp8" else gpu.gemm_bf16
    return apart * 2 * layout.tokens * weights / layout.tp**2 / rate / 1e9


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


def exposed_sharding_ms(model: Model, layout: Job, gpu: Gpu, local: float, forward: float) -> float:
    """Return the ms of sharding's collectives in a step that computing does not hide.

    local: a rank's parameters. forward: ms of a micro-batch's layers. Stages 2 and 3 reduce each micro-batch's
    gradients, stage 3 gathers the weights for each.
    """
    scatter, gather = sharding_ms(local, layout, gpu, experts_of(model, layout))
    reductions = layout.micro_batches if layout.shards_gradients else 1
    gathers = layout.micro_batches if layout.shards_weights else 1
    reduced = reductions * exposed_ms(scatter, 2 * forward, layout, gpu)
    return reduced + gathers * exposed_ms(gather, forward, layout, gpu)
