"""The parts of a step's time against numbers worked out by hand."""

from dataclasses import replace

import pytest

from paddle_te import configs
from paddle_te.options.training import OFFLOADED_AT_ONCE
from paddle_te.planner import layer_time, memory, speed
from paddle_te.planner.model import Model
from tests.unit.planner.round_numbers import ROUND, SMALL, layout, times


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


def test_one_gpu_is_its_layers_head_and_optimizer():
    parts = times(micro_batches=3)
    assert parts["layers"] == pytest.approx(30 * layer_time.layer_ms(SMALL, layout(), ROUND, cached=False))
    assert parts["head"] == pytest.approx(3 * speed.head_ms(SMALL, layout(), ROUND))
    # the norm and AdamW read bf16 gradients, and AdamW writes the weight and reads and writes 12 bytes of states
    assert parts["optimizer"] == pytest.approx(SMALL.parameters * (2 + 2 + 2 + 24) / 500 / 1e6)
    there = ("layers", "head", "optimizer", "accumulation")
    assert sum(parts.values()) == pytest.approx(sum(parts[name] for name in there))
    main = dict(micro_batches=3, main_grads=True)
    # those of the step before are cleared, and read as the first micro-batch's are added, or are gone
    cleared = times(**main)["optimizer"] - times(**main, release_grads=True)["optimizer"]
    assert cleared == pytest.approx(SMALL.parameters * 8 / 1000 / 1e6)


@pytest.mark.parametrize(
    "settings, bytes_each",
    [
        (dict(), 2 + 2),  # GEMMs read the sum in bf16 and write it
        (dict(main_grads=True), 4 + 4),  # and in float32
        (dict(gpus=2), 2 + 2 + 2),  # Paddle reads two gradients and writes one
    ],
)
def test_gradients_are_added_from_the_second_micro_batch_on(settings, bytes_each):
    added = times(micro_batches=3, **settings)["accumulation"]
    assert added == pytest.approx(2 * SMALL.parameters * bytes_each / 1000 / 1e6)
    assert times(**settings)["accumulation"] == 0


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


def test_bubble():
    """(p-1)/(v·m) of the layers' time: 3/(2·12) with 4 stages of 2 virtual ones and 12 micro-batches. The head is part
    of the last stage alone, which no other waits for when a step begins and ends."""
    parts = times(gpus=4, pp=4, vp=2, micro_batches=12)
    without = parts["layers"] + parts["stage transfers"]
    assert parts["bubble"] == pytest.approx(without * 3 / 24)
    # activation and gradient, 2 MB each, twice for two virtual stages, at 100 GB/s within a node
    assert parts["stage transfers"] == pytest.approx(12 * 2 * 2 * 0.02)


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
