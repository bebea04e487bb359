"""The parts of a step's memory, worked out by hand; tests/unit/tools/test_scaling_model.py has what was measured."""

from dataclasses import replace

import pytest

from paddle_te import configs
from paddle_te.options.scripts import OFFLOADED_AT_ONCE
from paddle_te.planner import GPUS, Layout, Model, memory

SMALL = Model(hidden=64, ffn=256, layers=4, heads=4, kv_heads=2, vocabulary=1000)
LAYOUT = Layout(gpus=1, sequence=100)


def parts(layout=LAYOUT, model=SMALL, **changes):
    return memory.memory_of_step(model, replace(layout, **changes))


@pytest.mark.parametrize(
    "name, count", [("llama-3-8b", 8_030_261_248), ("Qwen/Qwen2.5-0.5B", 494_032_768), ("gpt-5b", 5_047_558_144)]
)
def test_parameters(name, count):
    """As published; the second has biases and tied embeddings, the third also learned positions."""
    assert Model.of(configs.read(name)).parameters == count


def test_states_are_sixteen_bytes_a_parameter():
    one = parts()
    local = SMALL.parameters - SMALL.hidden  # the final norm does not count
    assert (one.weights, one.gradients, one.states) == (2 * local, 2 * local, 12 * local)
    compact = parts(optim_moments="bfloat16", master_weights="bf16_remainder")
    assert compact == replace(one, states=6 * local)
    assert parts(optim_moments="int8") == replace(one, states=(4 + 2 * 260 / 256) * local)
    assert one.fp8_weights == 4 * SMALL.gemm_weights  # a transpose; for several micro-batches both
    assert parts(micro_batches=2).fp8_weights == 8 * SMALL.gemm_weights
    assert parts(recompute="full").fp8_weights == parts(precision="bf16").fp8_weights == 0


def test_states_on_the_host():
    """Those of a few pieces are on the device; tests/unit/optimizer/test_offloaded_states.py measures them."""
    large = replace(SMALL, layers=10_000)
    one, moved = parts(model=large), parts(model=large, offload_optimizer=0.75)
    assert moved == replace(one, states=one.states / 4 + 12 * OFFLOADED_AT_ONCE)
    assert parts(offload_optimizer=0.75) == parts()  # which fit into the slots
    of_a_rank = memory.states_on_host(large, replace(LAYOUT, gpus=4, sharding=4, offload_optimizer=0.5))
    assert of_a_rank == 12 * large.parameters / 8


@pytest.mark.parametrize(
    "changes, gradients, states",
    [
        (dict(gpus=4), 4, 12),  # DataParallel's buffers
        (dict(gpus=4, sharding=4, overlap=True, main_grads=True), 4, 3),
        (dict(gpus=4, sharding=4, stage=2, overlap=True, main_grads=True), 1, 3),
        (dict(gpus=4, sharding=4, stage=3, main_grads=True), 1, 3),
    ],
)
def test_what_ranks_share(changes, gradients, states):
    one, shared = parts(), parts(**changes)
    assert shared.gradients == pytest.approx(one.weights / 2 * gradients)
    assert shared.states == pytest.approx(one.weights / 2 * states)


def test_a_layer_keeps_these_tensors():
    """In fp8 of hidden 64, 4 + 2·2 heads of 16, ffn 256: the transposes of four GEMMs' inputs in one byte, the rest in
    two: the inputs of both halves, qkv, attention's output with 4 statistics in float32, gate and up; and both norms'
    statistics. tests/unit/layers/test_recompute.py measures them, and what is left out with recompute_modules."""
    statistics = 2 * 4
    fp8 = 2 * 64 + 64 + 2 * 128 + (2 * 64 + 4 * 4) + 64 + 2 * 64 + 64 + 4 * 256 + 256 + statistics
    assert memory.kept_of_a_layer(SMALL, LAYOUT) == fp8
    again = memory.kept_of_a_layer(SMALL, replace(LAYOUT, recompute="core_attn"))
    assert again == fp8 - (2 * 64 + 4 * 4)
    assert memory.kept_of_a_layer(SMALL, replace(LAYOUT, recompute="full")) == 2 * 64
    # in bf16 proj's input is attention's output
    bf16 = 2 * 64 + 2 * 64 + 2 * 128 + (2 * 64 + 4 * 4) + 2 * 64 + 2 * 64 + 4 * 256 + 2 * 256 + statistics
    assert memory.kept_of_a_layer(SMALL, replace(LAYOUT, precision="bf16")) == bf16
    # attention in fp8 keeps q, k, v and its output in one byte
    assert memory.kept_of_a_layer(SMALL, replace(LAYOUT, fp8_attention=True)) == fp8 - 128 - 64


def test_the_first_stage_keeps_what_is_in_flight():
    without_head = replace(SMALL, vocabulary=16)

    def activations(**changes):
        return parts(model=without_head, **changes).activations

    whole = activations(micro_batches=8)
    assert activations(gpus=4, pp=4, micro_batches=8) == whole  # a quarter of the layers, of four micro-batches
    assert activations(gpus=4, pp=4, micro_batches=2) == whole / 2
    assert activations(gpus=4, pp=4, vp=2, micro_batches=8) == pytest.approx(whole * (1 + 3 / 8))


def test_gradients_that_are_released_and_activations_are_not_there_together():
    long, short = (parts(sequence=tokens, main_grads=True, release_grads=True) for tokens in (10_000, 16))
    assert long.gradients == 0 and long.activations > 0
    assert short.gradients > 0 and short.activations == 0


def test_the_mlp_in_chunks():
    """tests/unit/layers/test_mlp_chunks.py measures them. A layer keeps nothing of the MLP but its input, and no fp8
    copies of its weights; the gradients of one layer's weights are there in float32, unless they are main gradients."""
    chunks = replace(LAYOUT, mlp_chunk_tokens=10)
    attention_half = memory.kept_of_a_layer(SMALL, replace(LAYOUT, recompute_modules=("mlp",)))
    assert memory.kept_of_a_layer(SMALL, chunks) == attention_half
    assert memory.fp8_copies_of_a_layer(SMALL, chunks) == 64 * (4 + 2 * 2) * 16 + 64 * 64
    weights = 64 * (2 * 256 + 256)
    assert memory.backward_of_a_layer(SMALL, chunks) == 100 * 4 * 64 + 10 * 2 * (2 * 512 + 256) + (2 + 4) * weights
    main_grads = replace(chunks, main_grads=True)
    assert memory.backward_of_a_layer(SMALL, main_grads) == memory.backward_of_a_layer(SMALL, chunks) - 4 * weights
    few = replace(chunks, mlp_chunk_tokens=100)
    assert parts(few) == parts()


def test_with_an_update_in_backward_there_are_the_largest_gradients_only():
    """Here the head's, 1000 · 64; of a model with few words those of the MLP's two GEMMs, 64 · (2 · 256 + 256)."""
    one, few_words = parts(), replace(SMALL, vocabulary=16)
    assert parts(optimizer_in_backward="last_norm") == replace(one, gradients=2 * 64_000)
    assert parts(model=few_words, optimizer_in_backward="unclipped").gradients == 2 * 64 * 768
    assert parts(gpus=2, tp=2, optimizer_in_backward="unclipped").gradients == 64_000


def test_layers_whose_activations_are_on_the_host():
    """tests/unit/ops/test_te_offload.py measures the bytes. Copies of weights for several micro-batches stay."""
    one, two = parts(), parts(offload_activations=2)
    assert two == replace(one, activations=one.activations / 2, fp8_weights=one.fp8_weights / 2)
    assert memory.offloaded_bytes(SMALL, LAYOUT) == (one.activations + one.fp8_weights) / 4
    several = parts(micro_batches=2)
    assert parts(micro_batches=2, offload_activations=2) == replace(several, activations=one.activations / 2)


def test_ranks_that_share_sequences_have_parts_of_the_activations():
    one, two = parts(sequence=10_000), parts(sequence=10_000, gpus=2, cp=2)
    assert two == replace(one, activations=one.activations / 2, working=one.working / 2)
    # with few tokens the copy of the gradients takes more than what is gone by then
    few = parts(gpus=2, sep=2, precision="bf16", main_grads=True, sequence=16)
    assert (few.gradients, few.activations, few.working, few.fp8_weights) == (8 * one.weights / 2, 0, 0, 0)
    # in bf16 attention's output is there twice: before the exchange, and behind it as proj's input
    bf16 = replace(LAYOUT, precision="bf16")
    assert memory.kept_of_a_layer(SMALL, replace(bf16, gpus=2, sep=2)) == memory.kept_of_a_layer(SMALL, bf16) + 2 * 64


def test_room_for_the_logits_again():
    gpu, need = GPUS["h200"], parts()
    logits = 2 * 100 * 1000
    assert memory.fits(need, SMALL, LAYOUT, replace(gpu, memory=(need.total + logits) / 1e9))
    assert not memory.fits(need, SMALL, LAYOUT, replace(gpu, memory=(need.total + logits - 1000) / 1e9))
