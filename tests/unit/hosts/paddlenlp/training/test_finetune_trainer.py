"""What of fine-tuning's arguments does not go together."""

from types import SimpleNamespace

import pytest

from paddle_te.hosts.paddlenlp.training.finetune_trainer import check_together

DATA = dict(zero_padding=False, pad_to_multiple_of=16, pad_to_max_length=False, max_length=64)


def check(quantize_base=None, dropout=0.0, **arguments):
    data_args = SimpleNamespace(**{name: arguments.pop(name, default) for name, default in DATA.items()})
    training_args = dict(do_train=True, fp8_dpa=False, use_fp8=False, sequence_parallel=False, world_size=2)
    training_args |= dict(freeze=None, recompute_modules=None, mlp_chunk_tokens=0)
    training_args |= dict(activation_func_fp8_input_store=False)
    training_args |= dict(sep_parallel_degree=1, context_parallel_degree=1, transformer_engine_backend="paddle")
    training_args |= dict(optim_moments="float32", master_weights="float32", unified_checkpoint=False)
    training_args |= dict(fp8_recipe="delayed", tensor_parallel_degree=1, per_device_train_batch_size=2)
    model_args = SimpleNamespace(merge_lora=False, lora=True, lora_dropout=dropout, quantize_base=quantize_base)
    check_together(model_args, data_args, SimpleNamespace(**training_args | arguments))


SEP, CP = dict(sep_parallel_degree=2), dict(context_parallel_degree=2)


@pytest.mark.parametrize("arguments, message", [
    (SEP | dict(pad_to_multiple_of=5), "--pad_to_multiple_of 5 with --sep_.* 2: it must be a multiple of 2, which"),
    (CP | dict(pad_to_multiple_of=6), "--pad_to_multiple_of 6 with --context_.* 2: it must be a multiple of 4, which"),
    (SEP | dict(use_fp8=True), "--pad_to_multiple_of 16 with --sep_.* 2: it must be a multiple of 32, .* for fp8"),
    (SEP | dict(transformer_engine_backend="none"), "--sep_parallel_degree 2 with backend none needs --pad_to_max_l"),
    (SEP | dict(transformer_engine_backend="none", zero_padding=True), "--zero_padding with --sep_parallel_degree 2"),
    (CP | dict(zero_padding=True), "--zero_padding with --context_parallel_degree 2: ring attention knows no"),
])  # fmt: skip
def test_what_does_not_go_with_shared_sequences(arguments, message):
    with pytest.raises(ValueError, match=message):
        check(**arguments)


def test_fp8_recipes_that_do_not_go_with_lengths():
    block, shared = dict(use_fp8=True, fp8_recipe="block"), dict(sequence_parallel=True, tensor_parallel_degree=2)
    check(**block, pad_to_multiple_of=128)
    with pytest.raises(
        ValueError, match="--pad_to_multiple_of 64: GEMMs with --fp8_recipe block need a multiple of 128"
    ):
        check(**block, pad_to_multiple_of=64)
    check(use_fp8=True, **shared, pad_to_max_length=True)
    check(**block, **shared, pad_to_multiple_of=128, pad_to_max_length=True, max_length=128)
    with pytest.raises(ValueError, match="--max_length 64 .* multiple of 128 tokens on each of 2 ranks, not 64"):
        check(**block, **shared, pad_to_multiple_of=128, pad_to_max_length=True)


def test_an_adapters_smaller_states_are_not_left_to_paddlenlp():
    check(master_weights="bf16_remainder", optim_moments="int8")
    with pytest.raises(ValueError, match="--optim_moments int8 with --lora true --unified_checkpoint true: PaddleNLP"):
        check(optim_moments="int8", unified_checkpoint=True)
    with pytest.raises(ValueError, match="--master_weights bf16_remainder with --lora true --unified_checkpoint true"):
        check(master_weights="bf16_remainder", unified_checkpoint=True)


def test_what_goes_with_shared_sequences():
    check(**SEP)
    check(**SEP, zero_padding=True)
    check(**CP)
    check(**SEP, transformer_engine_backend="none", pad_to_max_length=True)


def test_parts_computed_again_with_lora():
    check(recompute_modules=["layernorm", "mlp_act"], activation_func_fp8_input_store=True)
    check(recompute_modules=["core_attn"], dropout=0.1)
    with pytest.raises(ValueError, match="--recompute_modules layernorm mlp with --lora_dropout: norm and activation"):
        check(recompute_modules=["mlp", "core_attn", "layernorm"], dropout=0.1)
    with pytest.raises(ValueError, match="--activation_func_fp8_input_store true with --lora_dropout"):
        check(activation_func_fp8_input_store=True, dropout=0.1)
    with pytest.raises(ValueError, match="--mlp_chunk_tokens 16384 with --lora: .* or take --recompute true"):
        check(mlp_chunk_tokens=16384)


def test_an_adapter_leaves_nothing_to_freeze():
    with pytest.raises(ValueError, match="--freeze with --lora true, which trains none of the model's weights"):
        check(freeze=["embed"])
