"""What ranks send, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from paddle_te import configs
from paddle_te.planner import communication, speed
from paddle_te.planner.model import Model
from tests.unit.planner.round_numbers import ROUND, SMALL, layout, times


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


@pytest.mark.parametrize(
    "settings, beside",
    [
        (dict(precision="bf16"), 4 + 2),
        (dict(precision="fp8"), 4 / 2 + 2),
        (dict(precision="fp8", fp8_recipe="current"), 2),
        (dict(precision="fp8", fp8_recipe="block"), 0),
    ],
)
def test_tensor_parallel(settings, beside):
    """6 all-gathers and 4 reduce-scatters of 2 MB over 2 ranks, 1 MB / 100 GB/s each, of which 4 are half hidden.

    Slow GEMMs of a rank's own rows hide those that run beside them, fast ones hide nothing. Delayed scaling gathers
    half as much."""
    gathered = 0.5 if settings == dict(precision="fp8") else 1
    all_of_them, during_gemms = 6 * gathered + 4, 2 * gathered + 2
    slow = replace(ROUND, tp_overlap=0.5, gemm_bf16=1e-3, gemm_fp8=1e-3)
    waits = times(slow, gpus=2, tp=2, **settings)["tensor parallel"]
    assert waits == pytest.approx(10 * 0.01 * (all_of_them - during_gemms / 2 - beside))
    fast = replace(slow, gemm_bf16=1e30, gemm_fp8=1e30)
    assert times(fast, gpus=2, tp=2, **settings)["tensor parallel"] == pytest.approx(
        10 * 0.01 * (all_of_them - during_gemms / 2)
    )


def test_a_rank_multiplies_its_own_rows():
    """Half of 1000 tokens with half of the weight: 1000 · 1000 of proj, behind 3000 · 1000 of q, k and v. Each
    multiplication and addition takes 1e-9 ms."""
    gpu = replace(ROUND, gemm_bf16=1)
    found = communication._own_rows_ms("attention", "row", SMALL, layout(2, tp=2), gpu)
    assert found == pytest.approx(2 * 500 * 500 * 1000 / 1e9)
    columns = communication._own_rows_ms("attention", "column", SMALL, layout(2, tp=2), gpu)
    assert columns == pytest.approx(3 * found)


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


def test_experts_gradients_go_to_their_replicas():
    """Four ranks, of which two and two have the same experts: half of their numbers, shared by two instead of four."""
    settings = layout(4, sharding=4, stage=1).but(amp_master_grad=True)
    scatter, gather = communication.sharding_ms(1e9, settings, ROUND)
    divided = communication.sharding_ms(1e9, settings.but(expert_parallel_degree=2), ROUND, experts=0.8e9)
    assert (scatter, gather) == pytest.approx((4e9 * 3 / 4 / 100e6, 2e9 * 3 / 4 / 100e6))
    assert divided == pytest.approx((0.2 * scatter + 4 * 0.4e9 / 2 / 100e6, 0.2 * gather + 2 * 0.4e9 / 2 / 100e6))
