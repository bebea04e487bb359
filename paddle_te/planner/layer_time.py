"""The time of a decoder layer: GEMMs, attention, passes over memory, and what is computed again."""

from __future__ import annotations

import math

from paddle_te.job import Job
from paddle_te.planner.frozen import frozen_of
from paddle_te.planner.gpus import Gpu
from paddle_te.planner.memory import (
    MXFP8,
    adapted,
)
from paddle_te.planner.model import Model

CAST_BYTES = 4.5  # a weight that becomes fp8, with its transpose
EXPERTS_CAST_BYTES = 9  # the same of an expert, whose small matrices are cast at half that speed; fitted
AMAX_BYTES = 2  # a number whose greatest magnitude current scaling finds before it is cast
ROUTING = 0.7  # ms: a hundred small kernels around a layer's router, forward and backward; fitted
ROW_BYTES = 12  # a number of a token's row: gathered and summed, forward and backward
# A number of a token that its router sees: in float32, cast there and back and read by three GEMMs (24); and the
# gradients of hidden states that two parts of the layer read are summed twice (20).
ROUTER_BYTES = 44
ATTENTION_FORWARD = 0.25  # its share of attention's time, the rest is backward's (measured at 65,536 tokens)
ADDED_NORM_BYTES = 16  # a number: a norm of a half's output, and the residual sum, which otherwise a GEMM makes
# The CPU's time for a layer in multiples of that without recompute. With full recompute Paddle runs the forward again
# (on an H100 a step of llama-125m took 87 ms instead of 35). Each part that is computed again adds a share (assumed).
LAUNCHES_OF_FULL_RECOMPUTE = 2.7
LAUNCHES_OF_A_PART = 0.05


def launch_ms(layout: Job, gpu: Gpu) -> float:
    """Return the CPU's ms to launch a layer: forward, backward, and the parts that backward computes again."""
    if layout.recomputed == "full":
        return LAUNCHES_OF_FULL_RECOMPUTE * gpu.launch
    return (1 + LAUNCHES_OF_A_PART * len(layout.recomputed_modules)) * gpu.launch


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
    if layout.fp8_base:  # no step casts the weights
        casts = weights * 2 / gpu.hbm / 1e6 if layout.makes_transposes else 0
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
    """Return the ms that move tokens to their experts' rows and back, and the ms of the router's passes."""
    if not model.experts:
        return 0.0
    moved = ROW_BYTES * model.hidden * model.routed + ROUTER_BYTES * model.hidden * model.sparse
    return layout.tokens * (moved + empty_bytes(model, layout)) / gpu.hbm / 1e6


def empty_bytes(model: Model, layout: Job) -> float:
    """Return the bytes a token, forward and backward, of rows that have room and that no expert has filled.

    In 16 bits kernels write zeros there twice and compute the activation of them. Kernels that cast to fp8 neither
    read nor write there. But layers over two ranks and steps over four took as long as if they did: fitted.
    """
    return (model.room(layout) - 1) * (4 * model.hidden * model.routed + 8 * model.fc1)


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
        moved += norm + activation + 4 * model.copies * model.hidden + empty_bytes(model, layout) / 3
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
