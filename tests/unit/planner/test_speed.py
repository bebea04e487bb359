"""The formulas of a step's time against numbers worked out by hand."""

from dataclasses import replace

import pytest

from paddle_te import configs
from paddle_te.options.training import OFFLOADED_AT_ONCE
from paddle_te.planner import communication, layer_time, memory, offloaded, speed
from paddle_te.planner.gpus import GPUS
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.model import Model

# round numbers: nothing slows anything down, and nothing takes latency
ROUND = replace(
    GPUS["h200"],
    nvlink=100,
    nvlink_of_two=100,
    network=10,
    collective=0,
    nvlink_hop=0,
    network_hop=0,
    overlap=1,
    slowdown=0,
    hbm=1000,
    update=500,
    launch=0,
    gap=0,
    bucket=1e30,
)
SMALL = Model(hidden=1000, ffn=4000, layers=10, heads=10, kv_heads=10, head_dim=100, vocabulary=10_000)


def layout(gpus=1, **settings):
    return layout_of(gpus, 1000, **dict(precision="bf16") | settings)


def times(gpu=ROUND, **settings):
    return speed.time_of_step(SMALL, layout(**settings), gpu)


@pytest.mark.parametrize(
    "ranks, stride, ms",
    [
        (1, 1, 0),
        (4, 1, 7.5),  # 1 GB · 3/4 / 100 GB/s
        (8, 1, 8.75),
        (16, 1, 15 / 16 / 80 * 1e3),  # 8 cards of 10 GB/s in each node
        (4, 8, 75),  # one rank a node: one card
        (4, 2, 7.5),
    ],
)
def test_ring(ranks, stride, ms):
    assert communication.ring_ms(1e9, ranks, stride, 1, ROUND) == pytest.approx(ms)


def test_two_gpus_reach_less_than_four():
    """The bandwidth between two is another number; over two nodes of one rank each it does not count."""
    gpu = replace(ROUND, nvlink_of_two=50)
    assert communication.ring_ms(1e9, 2, 1, 1, gpu) == pytest.approx(10)  # 1 GB / 2 / 50 GB/s
    assert communication.ring_ms(1e9, 4, 1, 1, gpu) == pytest.approx(7.5)
    assert communication.ring_ms(1e9, 2, 8, 1, gpu) == pytest.approx(50)


def test_hops_of_a_ring():
    """16 ranks in two nodes: 14 steps of 1 µs and 2 of 5 µs, and 20 µs, for each of 3 messages."""
    gpu = replace(ROUND, nvlink_hop=1, network_hop=5, collective=20)
    assert communication.ring_ms(0, 16, 1, 3, gpu) == pytest.approx(3 * (14 + 10 + 20) / 1e3)
    assert communication.ring_ms(0, 8, 1, 1, gpu) == pytest.approx((7 + 20) / 1e3)
    assert communication.ring_ms(0, 1, 1, 1, gpu) == 0


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


def test_copies_that_computing_waits_for():
    """Of 10 layers the first computes before the copies begin, and the last must wait for them: 8 hide them."""
    moved = memory.offloaded_bytes(SMALL, layout()) / 1e6  # ms a layer at 1 GB/s
    slow = replace(ROUND, pcie=1, hbm=1e30)
    # of a layer's time forward has a third, and backward, which has the rest, hides all of them
    for layer, ms in ((moved, (4 - 8 / 3) * moved), (2 * moved, 0.0), (0.0, 2 * 4 * moved)):
        assert speed.offload_ms(SMALL, layout(offload_activations=4), slow, layer) == pytest.approx(ms)
    hidden = speed.offload_ms(SMALL, layout(offload_activations=4), ROUND, 1e6)
    assert hidden == pytest.approx(2 * 4 * moved / 1000)  # read once and written once, at 1000 GB/s


def test_copies_of_the_optimizers_states():
    """Half of 12 bytes a parameter in both directions at once; those in the slots come during forward."""
    gpu, settings = replace(ROUND, pcie=1, hbm=1e30), layout(offload_optimizer=0.5)
    assert speed.states_ms(SMALL, settings, gpu, 3.0) == pytest.approx(0)  # the slots take all
    large = replace(SMALL, layers=100)
    moved, ahead = 6 * large.parameters, 12 * OFFLOADED_AT_ONCE
    assert speed.states_ms(large, settings, gpu, 3.0) == pytest.approx((moved - ahead) / 1e6 - 3)
    assert speed.states_ms(large, settings, gpu, 1e9) == pytest.approx(0)
    one, in_backward = (
        speed.time_of_step(large, settings.but(optimizer_in_backward=how), gpu) for how in ("off", "last_norm")
    )
    assert one["offload"] - in_backward["offload"] == pytest.approx(one["layers"] * 2 / 3 + one["head"] * 2 / 3)


def test_pieces_without_a_slot_are_late():
    """In backward, of 12 slots: fc1's 24.5 pieces are 13 more than there are slots, and the first of these waits for
    two copies; fc2's 12.3 are one more. Six of ten of each have their states on the host, and the rest is small."""
    model = replace(SMALL, ffn=int(24.5 * 2**23) // 2000, vocabulary=100)
    assert offloaded.late_pieces(model, 1, 0.6) == 6 * (13 + 1) + 6 * (1 + 1)
    assert offloaded.late_pieces(model, 4, 0.6) == offloaded.late_pieces(model, 1, 0) == 0
    gpu, settings = replace(ROUND, pcie=1, hbm=1e30), layout(offload_optimizer=0.6)
    in_backward = settings.but(optimizer_in_backward="unclipped")
    assert speed.states_ms(model, in_backward, gpu, 1e9) == pytest.approx(96 * 2**23 * 12 / 1e6)
    assert speed.states_ms(model, settings, gpu, 1e9) == pytest.approx(0)


def test_heads_for_tokens():
    """SEP 2 of 1000 tokens: 500 with 3000 numbers of q, k and v there and 1000 back, forward and backward; a rank sends
    half of them, and copies all three times."""
    size = 500 * 4000 * 2 / 1e6  # ms at 1 GB/s
    want = 2 * (size / 2 / 100 + 3 * 2 * size / 1000)
    assert communication.shared_sequence_ms(SMALL, layout(2, sep=2), ROUND) == pytest.approx(want)
    again = communication.shared_sequence_ms(SMALL, layout(2, sep=2, recompute="full"), ROUND)
    assert again == pytest.approx(1.5 * want)


def test_keys_that_travel():
    """CP 2: 500 tokens' keys and values of 2000 numbers travel once in forward, once again in backward, and there their
    float32 gradients twice; merging moves 18 bytes a number. Attention that takes long enough hides what travels."""
    kv = 500 * 2000 * 2 / 100 / 1e6
    merged = 500 * (2 * 1000 + 2000) * 18 / 1e9
    for rate, sent in ((1e9, 6 * kv), (1, 0)):
        gpu = replace(ROUND, attention_bf16=rate)
        found = communication.shared_sequence_ms(SMALL, layout(2, cp=2), gpu)
        assert found == pytest.approx(sent + merged, rel=1e-3)


def test_gradients_of_shared_sequences():
    """Of 1000 float32 gradients a copy there and back, and the sum over two ranks."""
    found = communication.shared_gradients_ms(1000, layout(2, cp=2, main_grads=True), ROUND)
    assert found == pytest.approx(4 * 4e3 / 1e9 + 2 * 2e3 / 100e6)
    assert communication.shared_gradients_ms(1000, layout(2), ROUND) == 0


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


def test_one_gpu_is_its_layers_head_and_optimizer():
    parts = times(micro_batches=3)
    assert parts["layers"] == pytest.approx(30 * layer_time.layer_ms(SMALL, layout(), ROUND, cached=False))
    assert parts["head"] == pytest.approx(3 * speed.head_ms(SMALL, layout(), ROUND))
    # the norm and AdamW read bf16 gradients, and AdamW writes the weight and reads and writes 12 bytes of states
    assert parts["optimizer"] == pytest.approx(SMALL.parameters * (2 + 2 + 2 + 24) / 500 / 1e6)
    # from the second micro-batch on two gradients in bf16 are read and one is written
    assert parts["accumulation"] == pytest.approx(2 * SMALL.parameters * 6 / 1000 / 1e6)
    there = ("layers", "head", "optimizer", "accumulation")
    assert sum(parts.values()) == pytest.approx(sum(parts[name] for name in there))
    main = dict(micro_batches=3, main_grads=True)
    added = times(**main)["accumulation"]  # read and written
    assert added == pytest.approx(2 * SMALL.parameters * 8 / 1000 / 1e6)
    # those of the step before are cleared, and read as the first micro-batch's are added, or are gone
    cleared = times(**main)["optimizer"] - times(**main, release_grads=True)["optimizer"]
    assert cleared == pytest.approx(SMALL.parameters * 8 / 1000 / 1e6)


def test_moments_in_8_bits_take_their_arithmetic():
    """7 ms for 1e9 weights; the norm of the bf16 gradients is read at the memory's speed."""
    states = dict(optim_moments="int8", master_weights="bf16_remainder")
    slow, fast = (times(replace(ROUND, update_int8=ms), **states)["optimizer"] for ms in (70, 0))
    assert slow == pytest.approx(SMALL.parameters * (2 / 500 / 1e6 + 70 / 1e9))
    assert fast == pytest.approx(SMALL.parameters * (2 + 2 + 2 + 2 * (2 + 2 * 260 / 256)) / 500 / 1e6)


def test_moments_in_bfloat16_take_theirs():
    """At this GPU's bandwidth 16 bytes a weight take longer than rounding them."""
    states = dict(optim_moments="bfloat16", master_weights="bf16_remainder")
    slow, fast = (times(replace(ROUND, update_bfloat16=ms), **states)["optimizer"] for ms in (70, 0))
    assert slow == pytest.approx(SMALL.parameters * (2 / 500 / 1e6 + 70 / 1e9))
    assert fast == pytest.approx(SMALL.parameters * (2 + 16) / 500 / 1e6)


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


def test_what_the_cpu_takes_longer():
    """The trainer between two steps, and layers that the GPU has computed before the CPU has launched the next ones."""
    layer = layer_time.layer_ms(SMALL, layout(), ROUND, cached=False)
    slow = replace(ROUND, gap=4, launch=layer + 0.5)
    assert times(slow, micro_batches=3)["host"] == pytest.approx(4 + 30 * 0.5)
    assert times(replace(slow, launch=layer - 0.5))["host"] == pytest.approx(4)
    # while ranks send and receive, the CPU gets ahead
    again = times(replace(ROUND, launch=10), recompute="full")
    assert again["host"] == pytest.approx(10 * 27 - again["layers"])  # 2.7 times as much to launch
    shared = times(slow, gpus=2, tp=2)
    assert shared["host"] == pytest.approx(4 + 10 * (layer + 0.5) - shared["layers"] - shared["tensor parallel"])


def test_sharding_moves_six_bytes_a_parameter_and_stage_3_eight():
    """Reduce-scatter of float32 gradients, all-gather of bf16 weights: 3/4 of 6 GB over 4 ranks at 100 GB/s. Stage 3
    gathers them again for a backward in bf16; that of fp8 does not read them, unless it computes a layer again."""
    main = dict(gpus=4, sharding=4, main_grads=True)
    assert communication.sharding_ms(1e9, layout(**main), ROUND) == pytest.approx((30, 15))
    assert sum(communication.sharding_ms(1e9, layout(**main, stage=3), ROUND)) == pytest.approx(60)
    fp8 = main | dict(stage=3, precision="fp8")
    assert sum(communication.sharding_ms(1e9, layout(**fp8), ROUND)) == pytest.approx(45)
    assert sum(communication.sharding_ms(1e9, layout(**fp8, recompute="full"), ROUND)) == pytest.approx(60)
    assert communication.sharding_ms(1e9, layout(gpus=4), ROUND) == pytest.approx((30, 0))  # 2 · 2 GB · 3/4


def test_exposed_communication():
    gpu = replace(ROUND, overlap=0.75, slowdown=0.1)
    overlapped = layout(gpus=4, sharding=4, overlap=True)
    assert communication.exposed_ms(8, 100, overlapped, gpu) == pytest.approx(2 + 0.6)
    assert communication.exposed_ms(8, 3, overlapped, gpu) == pytest.approx(5 + 0.3)
    assert communication.exposed_ms(8, 100, overlapped.but(sharding_parallel_config=""), gpu) == 8
    alone = overlapped.but(sharding_parallel_config="", sharding="stage3")  # needs no flag
    assert communication.exposed_ms(8, 100, alone, gpu) == pytest.approx(2 + 0.6)


def test_what_each_micro_batch_communicates():
    """Stage 1 reduces and gathers once a step, stage 2 reduces for each micro-batch, stage 3 gathers for each, too."""
    gpu, main = replace(ROUND, overlap=0), dict(gpus=4, sharding=4, main_grads=True, overlap=True)
    reduced, gathered = communication.sharding_ms(SMALL.parameters, layout(**main), gpu)
    for stage, want in ((1, reduced + gathered), (2, 3 * reduced + gathered), (3, 3 * (reduced + 2 * gathered))):
        parts = times(gpu, **main, stage=stage, micro_batches=3)
        assert parts["sharding"] == pytest.approx(want)


def test_bubble():
    """(p-1)/(v·m) of the layers' time: 3/(2·12) with 4 stages of 2 virtual ones and 12 micro-batches. The head is part
    of the last stage alone, which no other waits for when a step begins and ends."""
    parts = times(gpus=4, pp=4, vp=2, micro_batches=12)
    without = parts["layers"] + parts["stage transfers"]
    assert parts["bubble"] == pytest.approx(without * 3 / 24)
    # activation and gradient, 2 MB each, twice for two virtual stages, at 100 GB/s within a node
    assert parts["stage transfers"] == pytest.approx(12 * 2 * 2 * 0.02)


def test_tensor_parallel():
    """6 all-gathers and 4 reduce-scatters of 2 MB over 2 ranks, 1 MB / 100 GB/s each, of which 4 are half hidden; in
    fp8 half as much is gathered."""
    gpu = replace(ROUND, tp_overlap=0.5)
    assert times(gpu, gpus=2, tp=2)["tensor parallel"] == pytest.approx(10 * 8 * 0.01)
    assert times(gpu, gpus=2, tp=2, precision="fp8")["tensor parallel"] == pytest.approx(10 * (5 / 2 + 3) * 0.01)


@pytest.mark.parametrize(
    "settings, shards, bytes_each",
    [
        (dict(gpus=4, sharding=4, overlap=True), 4, 0),
        (dict(gpus=4, sharding=4, stage=3, overlap=True), 4, 0),
        (dict(gpus=4, sharding=4), 4, 4 + 4),  # cleared, and read as wgrad adds to them
        (dict(gpus=4), 1, 4 + 4),  # into a buffer and out of it
        (dict(gpus=4, tp=4), 1, 0),
    ],
)
def test_optimizer_and_gradients(settings, shards, bytes_each):
    local = SMALL.parameters / settings.get("tp", 1)
    update = (2 * (4 if settings.get("overlap") else 2) + 2 + 24) / shards / 500
    assert times(**settings)["optimizer"] == pytest.approx((update + bytes_each / 1000) * local / 1e6)


def test_the_rank_with_most_weights_updates_last():
    """Stage 2 gives each rank whole weights, stage 1 an equal share of all."""
    main = dict(gpus=4, sharding=4, main_grads=True)
    stage2, stage1 = (times(**main, stage=stage)["optimizer"] for stage in (2, 1))
    more = max(memory.shares_of_whole_weights(SMALL, 1, 4)) - SMALL.parameters / 4
    assert more > 0 and stage2 - stage1 == pytest.approx((4 + 4 + 2 + 24) * more / 500 / 1e6)


def test_frozen_weights_have_no_gradient_to_compute_and_no_update():
    """Two thirds of the products with a frozen matrix are left: those of its output, and of its input's gradient."""
    model = Model.of(configs.read("Qwen/Qwen3-0.6B"))
    whole, frozen = (speed.time_of_step(model, layout(freeze=each), ROUND) for each in (None, (r"layers\.",)))
    gemms = 6 * 1000 * model.layers * model.gemm_weights / ROUND.gemm_bf16 / 1e9
    assert whole["layers"] - frozen["layers"] == pytest.approx(gemms / 3)
    share = (model.embedding + model.hidden) / model.parameters
    assert frozen["optimizer"] == pytest.approx(share * whole["optimizer"], rel=1e-3)
    head = 6 * 1000 * model.embedding / ROUND.head_bf16 / 1e9
    of_the_head = speed.time_of_step(model, layout(freeze=("embed",)), ROUND)["head"]
    assert whole["head"] - of_the_head == pytest.approx(head / 3)


def test_a_reference_takes_a_forward():
    """A third of a step whose weights are all trained, half of one of LoRA; none where it is computed before."""
    alike = dict(loss_in_chunks=True)
    none, reference = times(**alike), times(**alike, script="dpo")
    by_hand = 2 * 1000 * 10 * SMALL.gemm_weights / ROUND.gemm_bf16 / 1e9
    assert none["reference"] == 0 and reference | {"reference": 0, "head": none["head"]} == none
    assert reference["head"] == pytest.approx(none["head"] * speed.ANSWERS)
    assert by_hand < reference["reference"] < (none["layers"] + none["head"]) / 3 * 1.05
    lora = times(**alike, lora=dict(rank=8), script="dpo")
    assert lora["reference"] > (lora["layers"] + lora["head"]) / 3
    assert times(**alike, micro_batches=3, script="kto")["reference"] == pytest.approx(3 * reference["reference"])
    for without in (dict(precompute_ref_log_probs=True), dict(loss_type="orpo"), dict(reference_free=True)):
        assert times(**alike, script="dpo", **without)["reference"] == 0


def test_ranks_that_divide_experts():
    """Qwen3-30B's 2048 numbers of 1000 tokens on two ranks, gathered and scattered, each way, in 48 layers."""
    model, whole = Model.of(configs.read("qwen3-30b-a3b")), layout(4, sharding=4, stage=1).but(amp_master_grad=True)
    one, two = (speed.time_of_step(model, whole.but(expert_parallel_degree=ep), ROUND) for ep in (1, 2))
    each = 2 * 1000 * 2048 * 2 / 2 / 100e6
    assert one["dispatch"] == 0 and two["dispatch"] == pytest.approx(48 * 4 * each)
    exchanged = whole.but(expert_parallel_degree=4, moe_token_dispatcher_type="alltoall")
    all_four = speed.time_of_step(model, exchanged, ROUND)["dispatch"]
    ordered = communication.EXCHANGED_BYTES * 4 * 1000 * 2048 / 1e9
    assert all_four == pytest.approx(48 * (4 * 3 * each * (1 - 0.75**8) + ordered + communication.EXCHANGE_WAIT))
    again = whole.but(expert_parallel_degree=2, recompute=True, recompute_granularity="full")
    assert communication.dispatch_ms(model, again, ROUND) == pytest.approx(6 * each)


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
    # of two ranks that gather their tokens each has room for twice as many rows; casts to fp8 leave it out
    two = layout(2, sharding=2, ep=2, main_grads=True)
    room = 1000 * (4 * 8 * 2048 + 8 * 2 * 8 * 768) / 1e9
    assert layer_time.rows_ms(model, two, ROUND) == pytest.approx(rows + room)
    assert layer_time.rows_ms(model, two.but(use_fp8=True), ROUND) == pytest.approx(rows)


def test_layers_with_experts_among_others():
    """GLaM has them in every second layer."""
    model = Model.of(configs.read("glam-126m-64e"))
    assert (model.sparse, model.outputs, model.routed, model.topk) == (0.5, 32, 1, 2)


def test_experts_gradients_go_to_their_replicas():
    """Four ranks, of which two and two have the same experts: half of their numbers, shared by two instead of four."""
    settings = layout(4, sharding=4, stage=1).but(amp_master_grad=True)
    scatter, gather = communication.sharding_ms(1e9, settings, ROUND)
    divided = communication.sharding_ms(1e9, settings.but(expert_parallel_degree=2), ROUND, experts=0.8e9)
    assert (scatter, gather) == pytest.approx((4e9 * 3 / 4 / 100e6, 2e9 * 3 / 4 / 100e6))
    assert divided == pytest.approx((0.2 * scatter + 4 * 0.4e9 / 2 / 100e6, 0.2 * gather + 2 * 0.4e9 / 2 / 100e6))
