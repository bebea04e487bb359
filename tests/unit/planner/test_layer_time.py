"""A layer's time, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from paddle_te import configs
from paddle_te.planner import layer_time, speed
from paddle_te.planner.model import Model
from tests.unit.planner.round_numbers import ROUND, SMALL, layout, times


@pytest.mark.parametrize(
    "norms, bytes_a_token",
    [
        (dict(qk_norm="head"), 4 * 1000 + 2 * 2000),  # v is written beside q and k, which backward reads again
        (dict(qk_norm="all"), 4 * 1000 + 8 * 2000),  # and whose squares are summed over all heads, in both directions
        (dict(norms="both"), 2 * 16 * 1000),
        (dict(norms="after"), 0),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_norms_that_a_llama_does_not_have(norms, bytes_a_token, precision):
    def ms(model):
        return speed.time_of_step(model, layout(precision=precision), ROUND)["layers"]

    assert ms(replace(SMALL, **norms)) - ms(SMALL) == pytest.approx(10 * 1000 * bytes_a_token / 1e9)


def test_swiglus_input_in_fp8():
    """33 bytes for 32 of fc1's 8000 numbers are written, and read in the place of 64; SwiGLU that is computed again
    reads them, but with LoRA, where the gradient's kernel writes it. Another activation's input is cast there and
    back."""
    a_byte, mxfp8 = 10 * 1000 / 1e9, 33 / 32  # ms of a byte a token: layers times tokens at 1000 GB/s
    stored = dict(fp8_input_store=True)
    assert times(**stored)["layers"] - times()["layers"] == pytest.approx((2 * mxfp8 - 2) * 8000 * a_byte)
    again = stored | dict(recompute_modules=("mlp_act",))
    assert times(**again)["layers"] - times(**stored)["layers"] == pytest.approx((mxfp8 * 8000 + 2 * 4000) * a_byte)
    lora = dict(lora=dict(rank=8))
    adding = times(**again, **lora)["layers"] - times(**stored, **lora)["layers"]
    assert adding == pytest.approx(2 * 4000 * a_byte)
    gelu = replace(SMALL, gated=False)
    found = layer_time.elementwise_bytes(gelu, layout(**stored)) - layer_time.elementwise_bytes(gelu, layout())
    assert found == pytest.approx(2 * (2 + mxfp8) * 4000)


def test_the_mlp_in_chunks_computes_again_and_adds_up():
    """As with the MLP computed again, and of both weights' gradients, 12 million numbers, three chunks of four read and
    write each: 8 bytes at 1000 GB/s. With full recompute fc1, norm and activation come once more."""
    again, adding = times(recompute_modules=("mlp",))["layers"], 10 * 3 * 8 * 12e6 / 1e9
    for chunks in (dict(mlp_chunk_tokens=250), dict(mlp_chunk_tokens=250, recompute_modules=("mlp",))):
        assert times(**chunks)["layers"] == pytest.approx(again + adding)
    once_more = times(recompute="full", mlp_chunk_tokens=250)["layers"] - times(recompute="full")["layers"]
    assert once_more == pytest.approx(again - times()["layers"] + adding)
    assert times(mlp_chunk_tokens=1000) == times()


def test_a_layer_by_hand():
    """1000 tokens: 16 million weights; attention 6·s·h a token; the bytes of the element-wise kernels."""
    gpu = replace(ROUND, gemm_bf16=100, attention_bf16=10, gemm_fp8=200)
    gemms, attention, moved = 6 * 1000 * 16e6 / 100e9, 6 * 1000 * 1000 * 1000 / 10e9, 1000 * (40 + 36 + 88) * 1e3 / 1e9
    once = gemms + attention + 0.8 * moved
    assert layer_time.layer_ms(SMALL, layout(), gpu, cached=False) == pytest.approx(once)
    full = once + (gemms + 0.8 * moved) / 3 + attention / 4  # attention's forward is faster than half of its backward
    assert layer_time.layer_ms(SMALL, layout(recompute="full"), gpu, cached=False) == pytest.approx(full)
    assert layer_time.layer_ms(SMALL, layout(gpus=2, tp=2), gpu, cached=False) == pytest.approx(once / 2)
    kept, cast = (layer_time.layer_ms(SMALL, layout(precision="fp8"), gpu, cached) for cached in (True, False))
    fused = 1000 * (38 + 36 + 7 * 8) * 1e3 / 1e9  # our kernels cast SwiGLU and RMSNorm in the pass that computes them
    assert kept == pytest.approx(gemms / 2 + attention + fused)
    of_gpt = layer_time.elementwise_bytes(replace(SMALL, gated=False), layout(precision="fp8"))
    assert of_gpt == (40 + 36 + 11 * 4) * 1e3
    assert cast - kept == pytest.approx(16e6 * 4.5 / 1e9)


def test_a_window_leaves_out_what_no_token_sees():
    """Counted one by one: a token sees itself and those before it, in a window at most so many."""
    gpu, layers = replace(ROUND, attention_bf16=10), SMALL.layers
    model = replace(SMALL, windows=(100,) * 10 + (1000,) * 5)
    seen = {window: sum(min(token, window) for token in range(1, 1001)) for window in (100, 1000)}
    share = (10 * seen[100] + (layers - 10) * seen[1000]) / (layers * seen[1000])
    whole = layer_time.attention_ms(SMALL, layout(), gpu)
    assert layer_time.attention_ms(model, layout(), gpu) == pytest.approx(share * whole, rel=1e-3)


def test_current_scaling_reads_numbers_once_more():
    """2 bytes of each number that a GEMM reads: 4000 in attention's inputs and 4000 in its outputs' gradients, and 1000
    before and behind the MLP. For SwiGLU and its gradient it reads what they are computed from: 8000, 4000 and 8000. It
    also reads all weights, unless they are kept."""
    delayed, current = (layout(precision="fp8", fp8_recipe=name) for name in ("delayed", "current"))
    gpu = replace(ROUND, gemm_fp8=1e9)
    kept, cast = (
        layer_time.layer_ms(SMALL, current, gpu, cached) - layer_time.layer_ms(SMALL, delayed, gpu, cached)
        for cached in (True, False)
    )
    numbers = (1000 + 3000) + (1000 + 1000) + 2 * 1000 + 2 * 8000 + 4000
    assert kept == pytest.approx(2 * 1000 * numbers / 1e9)
    assert cast - kept == pytest.approx(2 * 16e6 / 1e9)


def test_a_base_in_fp8_is_transposed_unless_the_copies_are_kept():
    """Its 16 million weights are read and written, in each micro-batch; 16 bits are cast, once."""

    def ms(cached, fp8_base=True, **flags):
        lora = dict(rank=8, fp8_base=fp8_base)
        return layer_time.layer_ms(SMALL, layout(precision="fp8", lora=lora, **flags), ROUND, cached)

    for cached in (False, True):
        kept = ms(cached, keep_fp8_transpose_cache=True)
        assert kept == pytest.approx(ms(True, fp8_base=False))
        assert ms(cached) - kept == pytest.approx(2 * 16e6 / 1e9)


def test_what_experts_take_beside_their_gemms():
    """Qwen3-30B's 1000 tokens in 8 rows of 2048 numbers each: gathered and summed there and back; the router; the
    gradients of 128 experts' weights, written once; and their casts, at half a dense weight's speed."""
    model, one = Model.of(configs.read("qwen3-30b-a3b")), layout()
    assert (model.routed, model.topk, model.sparse, model.outputs) == (8, 8, 1, 128)
    rows = 1000 * 2048 * (12 * 8 + 44) / 1e9
    assert layer_time.rows_ms(model, one, ROUND) == pytest.approx(rows)
    experts = 128 * 3 * 2048 * 768
    assert layer_time.written_ms(model, one, ROUND) == pytest.approx(2 * experts / 1e9)
    assert layer_time.written_ms(model, layout(lora=dict(rank=8, targets="attention")), ROUND) == 0
    kept, cast = (layer_time.layer_ms(model, layout(precision="fp8"), ROUND, cached) for cached in (True, False))
    assert cast - kept == pytest.approx((9 * experts + 4.5 * (model.gemm_weights - experts)) / 1e9)
    dense = Model.of(configs.read("Qwen/Qwen3-0.6B"))
    assert layer_time.rows_ms(dense, one, ROUND) == layer_time.written_ms(dense, one, ROUND) == 0
    # of two ranks that gather their tokens each has room for twice as many rows
    two = layout(2, sharding=2, ep=2, main_grads=True)
    room = 1000 * (4 * 8 * 2048 + 8 * 2 * 8 * 768) / 1e9
    assert layer_time.rows_ms(model, two, ROUND) == pytest.approx(rows + room)
    assert layer_time.rows_ms(model, two.but(use_fp8=True), ROUND) == pytest.approx(rows + room)
    # forward, a third of them, passes over these rows again where backward computes the experts again
    again = [two.but(recompute_modules=("moe",), expert_parallel_degree=ranks) for ranks in (1, 2)]
    one, both = (layer_time.again_ms(model, job, ROUND, 0, 0, cached=True) for job in again)
    assert both - one == pytest.approx(room / 3)
