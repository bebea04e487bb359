"""The parts of a step's memory, worked out by hand; tests/unit/tools/test_scaling_model.py has what was measured."""

from dataclasses import replace
from unittest import mock

import pytest

from paddle_te import configs
from paddle_te.options.training import OFFLOADED_AT_ONCE
from paddle_te.planner import memory
from paddle_te.planner.frozen import frozen_of
from paddle_te.planner.gpus import GPUS
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.model import Model

SMALL = Model(hidden=64, ffn=256, layers=4, heads=4, kv_heads=2, head_dim=16, vocabulary=1000)


def changed(**changes):
    return layout_of(**dict(gpus=1, sequence=100) | changes)


LAYOUT = changed()


FEW_WORDS = replace(SMALL, vocabulary=16)  # whose layers take more than the head


def parts(layout=LAYOUT, model=SMALL, rank=None, held=True, **changes):
    """Without cuBLAS's workspace, which every moment has. held: gradients are there at all moments."""
    releases = (lambda _: False) if held else memory.releases_gradients
    with mock.patch.object(memory, "releases_gradients", releases):
        found = memory.memory_of_step(model, changed(**changes), rank)
    return replace(found, working=found.working - memory.GEMM_WORKSPACE)


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


def test_lora_trains_its_adapters_alone():
    """LoRA of rank 8 in fp8. There are an A and a B beside each of q, k, v (64 to 64, 32, 32), proj (64 to 64), gate,
    up (64 to 256) and down (256 to 64). Of a GEMM's input a layer keeps only what these products need, in bf16.
    tests/multiprocess/hosts measures it all."""
    adapters = 4 * 8 * ((128 + 96 + 96) + 128 + 3 * 320)
    one, lora = parts(), parts(lora=dict(rank=8))
    assert lora.weights == one.weights + 2 * adapters
    assert (lora.gradients, lora.states, lora.fp8_weights) == (2 * adapters, 12 * adapters, one.fp8_weights)
    in_fp8 = parts(lora=dict(rank=8, fp8_base=True))
    assert in_fp8.weights == lora.weights - 4 * SMALL.gemm_weights and in_fp8.fp8_weights == 0
    assert in_fp8.activations == lora.activations and in_fp8.states == lora.states
    kept = parts(lora=dict(rank=8, fp8_base=True), keep_fp8_transpose_cache=True)
    assert kept == replace(in_fp8, weights=in_fp8.weights + 4 * SMALL.gemm_weights)
    inputs = 64 + 64 + 64 + 256
    with_products = memory.kept_of_a_layer(SMALL, changed(lora=dict(rank=8)))
    # attention's output, which is kept anyway, is proj's input
    assert with_products == memory.kept_of_a_layer(SMALL, LAYOUT) - inputs + 2 * (inputs - 64) + 2 * 8 * 7
    of_attention = changed(lora=dict(rank=8, targets="attention"))
    assert memory.kept_of_a_layer(SMALL, of_attention) == with_products - 2 * (64 + 256) - 2 * 8 * 3
    packed = 2 * 8 * (3 * (64 + 128) + (64 + 64) + 2 * (64 + 512) + (256 + 64))
    assert lora.activations == 4 * (100 * with_products + packed)
    # TP ranks share B of q, k, v, gate and up, and A of proj and down; sharding ranks the states
    two = 4 * 8 * ((3 * 64 + 128 / 2) + (64 / 2 + 64) + 2 * (64 + 256 / 2) + (256 / 2 + 64))
    assert parts(gpus=2, tp=2, lora=dict(rank=8)).states == 12 * two
    assert parts(gpus=4, sharding=4, stage=2, lora=dict(rank=8)).states == 12 * adapters / 4
    # backward transposes fc1's weight, and a frozen lm_head has no gradient
    full = dict(recompute="full", model=FEW_WORDS, sequence=1000)
    grown = parts(lora=dict(rank=8, fp8_base=True), **full).working - parts(lora=dict(rank=8), **full).working
    assert grown == 64 * 512
    kept = parts(lora=dict(rank=8, fp8_base=True), keep_fp8_transpose_cache=True, **full)
    assert kept.working == parts(lora=dict(rank=8), **full).working
    # the first layer, whose input has no gradient, is not computed again
    assert parts(lora=dict(rank=8), **full).activations == 4 * 2 * 64 * 1000 + 1000 * (with_products - 2 * 64) + packed
    chunks = parts(loss_in_chunks=True, lora=dict(rank=8))
    assert chunks.working == 4 * 64 * 100 + 4 * 1000 * 100 and chunks.gradients == lora.gradients


def test_states_on_the_host():
    """Those of a few pieces are on the device; tests/unit/optimizer/test_offloaded_states.py measures them."""
    large = replace(SMALL, layers=10_000)
    one, moved = parts(model=large), parts(model=large, offload_optimizer=0.75)
    assert moved == replace(one, states=one.states / 4 + 12 * OFFLOADED_AT_ONCE)
    assert parts(offload_optimizer=0.75) == parts()  # which fit into the slots
    of_a_rank = memory.states_on_host(large, changed(gpus=4, sharding=4, offload_optimizer=0.5))
    assert of_a_rank == 12 * large.parameters / 8


@pytest.mark.parametrize(
    "changes, gradients, states",
    [
        (dict(gpus=4), 4, 12),  # DataParallel's buffers
        (dict(gpus=4, sharding=4, overlap=True, main_grads=True), 4, 3),
        (dict(gpus=4, sharding=4, stage=3, main_grads=True), 1, 3),
    ],
)
def test_what_ranks_share(changes, gradients, states):
    one, shared = parts(), parts(**changes)
    assert shared.gradients == pytest.approx(one.weights / 2 * gradients)
    assert shared.states == pytest.approx(one.weights / 2 * states)


def test_stage_2_leaves_weights_whole():
    """One layer over two ranks, each weight to the smaller one: the embedding, 64,000, to the first; norm, qkv, proj,
    norm, fc1, fc2 and the last norm to the second, 61,632 together, and so lm_head, too."""
    one_layer = replace(SMALL, layers=1)
    assert memory.shares_of_whole_weights(one_layer, 1, 2) == (64_000, 125_632)
    layout = dict(model=one_layer, gpus=2, sharding=2, stage=2, overlap=True, main_grads=True)
    largest, first = (parts(rank=rank, **layout) for rank in (None, 0))
    assert (largest.gradients, largest.states) == (4 * 125_632, 12 * 125_632)
    assert (first.gradients, first.states) == (4 * 64_000, 12 * 64_000)


def test_a_layer_keeps_these_tensors():
    """In fp8 of hidden 64, 4 + 2·2 heads of 16, ffn 256: the transposes of four GEMMs' inputs in one byte, the rest in
    two: the inputs of both halves, qkv, attention's output with 4 statistics in float32, gate and up; and both norms'
    statistics. tests/unit/layers/test_recompute.py measures them, and what is left out with recompute_modules."""
    statistics = 2 * 4
    fp8 = 2 * 64 + 64 + 2 * 128 + (2 * 64 + 4 * 4) + 64 + 2 * 64 + 64 + 4 * 256 + 256 + statistics
    assert memory.kept_of_a_layer(SMALL, LAYOUT) == fp8
    again = memory.kept_of_a_layer(SMALL, changed(recompute="core_attn"))
    assert again == fp8 - (2 * 64 + 4 * 4)
    assert memory.kept_of_a_layer(SMALL, changed(recompute="full")) == 2 * 64
    # in bf16 proj's input is attention's output
    bf16 = 2 * 64 + 2 * 64 + 2 * 128 + (2 * 64 + 4 * 4) + 2 * 64 + 2 * 64 + 4 * 256 + 2 * 256 + statistics
    assert memory.kept_of_a_layer(SMALL, changed(precision="bf16")) == bf16
    # attention in fp8 keeps q, k, v and its output in one byte
    assert memory.kept_of_a_layer(SMALL, changed(fp8_attention=True)) == fp8 - 128 - 64
    # norms of q and k keep what the GEMM gives for q, k and v
    assert memory.kept_of_a_layer(replace(SMALL, qk_norm="head"), LAYOUT) == fp8 + 2 * 128


def test_the_first_stage_keeps_what_is_in_flight():
    without_head = replace(SMALL, vocabulary=16)

    def activations(**changes):
        return parts(model=without_head, **changes).activations

    whole = activations(micro_batches=8)
    assert activations(gpus=4, pp=4, micro_batches=8) == whole  # a quarter of the layers, of four micro-batches
    assert activations(gpus=4, pp=4, micro_batches=2) == whole / 2
    assert activations(gpus=4, pp=4, vp=2, micro_batches=8) == pytest.approx(whole * (1 + 3 / 8))


def released(layout=LAYOUT, model=FEW_WORDS, **changes):
    """Of one process as it is, in bytes of gradients, activations, fp8 weights, and what is needed for a moment."""
    found = parts(layout, model, held=False, **changes)
    return found.gradients, found.activations, found.fp8_weights, found.working


def test_moments_of_a_step_whose_gradients_are_released():
    """The loss has none yet; then lm_head's and the first new ones are there; in the first layer's backward all but the
    embedding's; in the optimizer's step all, and nothing else."""
    kept, copies, layer = memory.kept_of_a_layer(FEW_WORDS, LAYOUT), FEW_WORDS.gemm_weights, FEW_WORDS.layer_weights
    tokens, embedding, new = 10_000, 16 * 64, 2 * 64 * 768
    logits = 4 * 1000 * tokens + 4 * 64 * tokens
    assert released(model=SMALL, sequence=tokens) == (0, 4 * kept * tokens, 4 * copies, logits)
    of_a_layer = memory.backward_of_a_layer(FEW_WORDS, changed(sequence=tokens)) + 2 * 64 * tokens
    last_layer = 2 * embedding + new, 4 * kept * tokens, 4 * copies, of_a_layer
    assert released(sequence=tokens) == last_layer
    assert parts(model=FEW_WORDS, sequence=tokens).gradients == 2 * (2 * embedding + 4 * layer) + new
    full, tokens = dict(recompute="full"), 100
    of_a_layer = memory.backward_of_a_layer(FEW_WORDS, changed(**full)) + 2 * 64 * tokens
    assert released(**full) == (2 * (embedding + 4 * layer), 2 * 64 * tokens, 0, of_a_layer)
    assert released(model=SMALL, sequence=16, **full) == (2 * (2 * 64_000 + 4 * layer), 0, 0, 0)


def test_whose_gradients_are_released():
    """Those in bf16 of one process, and main gradients with the flag; never those of several micro-batches."""
    assert memory.releases_gradients(LAYOUT) and not memory.releases_gradients(changed(main_grads=True))
    assert memory.releases_gradients(changed(main_grads=True, release_grads=True))
    assert not memory.releases_gradients(changed(gpus=2))
    assert released(micro_batches=2) == released(micro_batches=2, release_grads=True) != released()
    assert parts(micro_batches=2, held=False) == parts(micro_batches=2)


def test_lm_heads_backward():
    """In chunks the gradient is summed in float32, and becomes a new bf16 one, unless it is added to a main gradient.
    In fp8 the logits' gradient is cast twice, and a transpose of the weight and of the head's input is kept."""
    embedding, narrow = 64_000, replace(SMALL, ffn=32)  # whose layers take less than the head
    held = parts(model=narrow).gradients
    least = 16  # tokens, whose logits take less than the new gradient
    chunks = parts(LAYOUT, narrow, loss_in_chunks=True, sequence=least)
    assert (chunks.gradients, chunks.working) == (held + 2 * embedding, 4 * 64 * least + 4 * embedding)
    main = parts(LAYOUT, narrow, loss_in_chunks=True, sequence=least, main_grads=True)
    assert (main.gradients, main.working) == (2 * held, 4 * 64 * least + 4 * embedding + 4 * 1000 * least)
    # of few tokens the loss needs more, with a chunk's logits and their gradient
    one, tokens = parts(), 100
    few = parts(loss_in_chunks=True)
    assert few == replace(one, working=4 * 64 * tokens + 4 * embedding + 4 * 1000 * tokens)
    fp8 = parts(fp8_head=True)
    kept = embedding + 64 * tokens
    assert fp8 == replace(one, gradients=one.gradients + 2 * embedding, fp8_weights=one.fp8_weights + kept)
    several = parts(fp8_head=True, micro_batches=2).fp8_weights
    assert several == 8 * SMALL.gemm_weights + 2 * embedding + 64 * tokens


def test_a_tensor_parallel_head_reads_all_tokens():
    """Its input and the gradient of that are whole, two bytes each for a number; of the logits a rank has its part."""
    two = parts(gpus=2, tp=2)
    assert two.working == 4 * 64 * 100 + 4 * 1000 * 100 / 2


def test_the_mlp_in_chunks():
    """tests/unit/layers/test_mlp_chunks.py measures them. A layer keeps nothing of the MLP but its input, and no fp8
    copies of its weights; the gradients of one layer's weights are there in float32, unless they are main gradients."""
    chunks = changed(mlp_chunk_tokens=10)
    attention_half = memory.kept_of_a_layer(SMALL, changed(recompute_modules=("mlp",)))
    assert memory.kept_of_a_layer(SMALL, chunks) == attention_half
    assert memory.fp8_copies_of_a_layer(SMALL, chunks) == 64 * (4 + 2 * 2) * 16 + 64 * 64
    weights = 64 * (2 * 256 + 256)
    assert memory.backward_of_a_layer(SMALL, chunks) == 100 * 4 * 64 + 10 * 2 * (2 * 512 + 256) + (2 + 4) * weights
    main_grads = chunks.but(amp_master_grad=True)
    assert memory.backward_of_a_layer(SMALL, main_grads) == memory.backward_of_a_layer(SMALL, chunks) - 4 * weights
    few = chunks.but(mlp_chunk_tokens=100)
    assert parts(few) == parts()
    # cuDNN's backward in fp8 has dq, and dk and dv of each of the four query heads, in float32
    in_fp8 = chunks.but(fp8_dpa=True, max_seq_length=10_000)
    assert memory.backward_of_a_layer(SMALL, in_fp8) == 10_000 * (2 * 64 + 4 * 128 + 12 * 64)
    assert memory.fp8_attention_workspace(replace(SMALL, kv_heads=4)) == 4 * 64


def test_with_an_update_in_backward_there_are_new_gradients_only():
    """None yet at the loss; lm_head's, 1000 · 64, beside fewer tokens than it has columns; of a model with few words
    those of the MLP's two GEMMs, 64 · (2 · 256 + 256)."""
    one = parts()
    assert parts(optimizer_in_backward="last_norm") == replace(one, gradients=0)
    few_tokens = parts(optimizer_in_backward="last_norm", sequence=16)
    assert (few_tokens.gradients, few_tokens.working) == (2 * 64_000, 4 * 64 * 16 + 2 * 1000 * 16)
    assert parts(model=FEW_WORDS, optimizer_in_backward="unclipped").gradients == 2 * 64 * 768
    assert parts(gpus=2, tp=2, model=FEW_WORDS, optimizer_in_backward="unclipped").gradients == 64 * 768


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
    bf16 = changed(precision="bf16")
    assert (
        memory.kept_of_a_layer(SMALL, bf16.but(world=2, sep_parallel_degree=2))
        == memory.kept_of_a_layer(SMALL, bf16) + 2 * 64
    )


def test_room_for_the_logits_again():
    gpu, need = GPUS["h200"], parts()
    logits = 2 * 100 * 1000
    assert memory.fits(need, SMALL, LAYOUT, replace(gpu, memory=(need.total + logits) / 1e9))
    assert not memory.fits(need, SMALL, LAYOUT, replace(gpu, memory=(need.total + logits - 1000) / 1e9))


@pytest.mark.parametrize(
    "changes, gb",
    [
        (dict(gpus=1), 0),
        (dict(gpus=2), 1.4),
        (dict(gpus=2, tp=2), 2.4),
        (dict(gpus=4, tp=2, pp=2), 2.4 + 0.5),
        (dict(gpus=16, tp=2, cp=2, sharding=2), 2.4 + 3 * 0.5),  # and two replicas
    ],
)
def test_room_for_communicators(changes, gb):
    assert memory.communicators(changed(**changes)) == pytest.approx(gb)


def test_frozen_weights_have_neither_gradients_nor_states():
    """The pattern finds the weights of a pipeline's first stage: the embedding and the first half of the layers."""
    model, patterns = Model.of(configs.read("Qwen/Qwen3-8B")), (r"embed|layers\.(\d|1[0-7])\.",)
    whole, frozen = (parts(model=model, freeze=freeze) for freeze in (None, patterns))
    trained = 18 * model.layer_weights + model.embedding + model.hidden  # the last half, the head and its norm
    assert frozen.states == pytest.approx(12 * trained, rel=1e-5)
    assert whole.states == pytest.approx(12 * model.parameters, rel=1e-5)
    assert frozen.weights == whole.weights
    assert whole.gradients - frozen.gradients == 2 * (model.parameters - trained)
    found = frozen_of(model, patterns)
    assert found.on_stage(0, 2) == model.parameters - trained and found.on_stage(1, 2) == 0


def test_a_frozen_head_has_no_gradient_at_the_loss():
    model = Model.of(configs.read("Qwen/Qwen3-0.6B-Base"))  # tied: the embedding is the head
    whole, frozen = (parts(model=model, held=False, batch=32, freeze=each) for each in (None, ("embed",)))
    assert whole.states - frozen.states == 12 * model.embedding
    with pytest.raises(ValueError, match="--freeze embed: a Model of sizes only"):
        parts(freeze=("embed",))


def test_a_reference_of_its_own_is_a_second_model():
    """Under an adapter it is the model itself. Its weights are whole, whatever sharding does."""
    tuned, again = parts(loss_in_chunks=True), parts(loss_in_chunks=True, script="dpo")
    assert again == replace(tuned, weights=2 * tuned.weights)
    adapter = dict(loss_in_chunks=True, lora=dict(rank=8))
    assert parts(**adapter, script="dpo") == parts(**adapter)
    assert parts(loss_in_chunks=True, script="dpo", loss_type="simpo") == tuned
    assert parts(loss_in_chunks=True, script="kto", precompute_ref_log_probs=True) == tuned
    slices = dict(gpus=4, sharding=4, stage=3, loss_in_chunks=True)
    assert parts(**slices, script="dpo").weights - parts(**slices).weights == tuned.weights


def test_ranks_that_divide_experts():
    """Each has fewer weights and gradients, as many states, and room for all ranks' tokens."""
    model = Model.of(configs.read("qwen3-30b-a3b"))
    whole = layout_of(8, 4096, sharding=8, stage=1, precision="bf16").but(amp_master_grad=True)
    one, four = (memory.memory_of_step(model, whole.but(expert_parallel_degree=ep)) for ep in (1, 4))
    experts = 48 * 128 * 3 * 2048 * 768
    assert one.weights - four.weights == pytest.approx(2 * experts * 3 / 4, rel=1e-6)
    assert one.gradients - four.gradients == pytest.approx(4 * experts * 3 / 4, rel=1e-6)
    assert four.states == pytest.approx(one.states, rel=1e-6)
    assert four.activations > one.activations
    exchanged = whole.but(expert_parallel_degree=4, moe_token_dispatcher_type="alltoall")
    few = memory.memory_of_step(model, exchanged)
    assert few.weights == pytest.approx(four.weights) and one.activations < few.activations < four.activations
    rank = model.of_a_rank(4, by_all_to_all=True)
    assert rank.ffn == 9 / 8 * 8 * 768 and rank.copies == pytest.approx(9 / 8 * 8 + 4 * (1 - 0.75**8))
    assert rank.mlp_weights == pytest.approx(model.of_a_rank(4).mlp_weights)


def test_tensor_parallel_ranks_have_room_for_all_tokens():
    """Qwen3-30B over four H200s of 150.1 GB: 143.2 GB were in use in its first step, with 30.8 of states to come."""
    model = Model.of(configs.read("qwen3-30b-a3b"))
    said = layout_of(4, 4096, tp=4, batch=8, micro_batches=8).but(
        optim_moments="int8", master_weights="bf16_remainder", amp_master_grad=True
    )
    need = memory.memory_of_step(model, said)
    assert need.total - need.states > 143.2e9
    assert need.weights == pytest.approx(2 * model.parameters / 4)
