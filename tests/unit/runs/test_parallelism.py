"""The scripts' flags against each other: the refusals of the launcher (launch/test_plan.py), in their own names."""

import pytest

from paddle_te.hosts.paddlenlp.training.arguments import ArgumentParser, ModelArguments, PreTrainingArguments
from paddle_te.hosts.paddlenlp.training.datasets import DataArguments
from paddle_te.hosts.paddlenlp.training.finetune_datasets import FinetuneDataArguments
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuneModelArguments, FinetuningArguments

# 4 layers, 4 heads, 2 kv heads
COMMON = dict(model_name_or_path="tiny-llama-demo", mock_data="true", max_seq_length=64, output_dir="unused")
TP, PP, VP = "tensor_parallel_degree", "pipeline_parallel_degree", "virtual_pp_degree"
SEP, CP = "sep_parallel_degree", "context_parallel_degree"
PD = {"transformer_engine_backend": "paddle"}
GA, SHARDING = "gradient_accumulation_steps", "sharding_parallel_degree"


@pytest.mark.parametrize(
    "world, flags, message",
    [
        (4, {TP: 4}, "--tensor_parallel_degree=4 must divide num_key_value_heads=2 of .*; it may be 1, 2$"),
        (6, {TP: 3}, "--tensor_parallel_degree=3 must divide num_attention_heads=4"),
        (3, {PP: 3, GA: 3}, "--pipeline_parallel_degree=3 x --virtual_pp_degree=1 = 3 must divide the 4 layers"),
        (2, {PP: 2, VP: 2, GA: 4}, "--virtual_pp_degree=2 needs --pipeline_parallel_degree of at least 3, not 2"),
        (4, {PP: 4, VP: 2, GA: 6}, "--gradient_accumulation_steps=6 must be a multiple of --pipeline_parallel_deg"),
        (4, {PP: 4, GA: 2}, "--gradient_accumulation_steps=2 must be at least --pipeline_parallel_degree=4"),
        (2, {"sequence_parallel": "true"}, "--sequence_parallel=true needs --tensor_parallel_degree of at least 2"),
        (2, {TP: 2, "sequence_parallel": "1", "max_seq_length": 63}, "--max_seq_length=63 must be a multiple of"),
        (2, {TP: 2, PP: 2, GA: 2}, "= 4 must divide the number of devices, 2; DP is what remains; one process"),
        (1, {TP: 2}, "= 2 must divide the number of devices, 1"),
        (2, {TP: 2, SEP: 2}, "x --sep_parallel_degree=2 x .* = 4 must divide the number of devices, 2"),
        (4, {TP: 2, SEP: 2}, "--sep_parallel_degree=2 must divide num_key_value_heads of a device, of .* 2 / --tensor"),
        (2, {SEP: 2, "max_seq_length": 63}, "--max_seq_length=63 must be a multiple of --sep_parallel_degree=2"),
        (
            4,
            {TP: 2, SEP: 2, "sequence_parallel": "1", "max_seq_length": 62},
            "--max_seq_length=62 must be a multiple of --sep_parallel_degree=2 x --tensor_parallel_degree=2 with",
        ),
        (4, PD | {SEP: 2, CP: 2}, "--sep_parallel_degree=2 does not go with --context_parallel_degree=2"),
        (2, PD | {CP: 2, "max_seq_length": 66}, "--max_seq_length=66 must be a multiple of 2 x --context_parallel_deg"),
        (4, PD | {CP: 2, SHARDING: 2, "sharding": "stage3"}, "--sharding=stage3 does not go with --context_parallel_"),
        (
            2,
            PD | {CP: 2, "model_name_or_path": "mistral-7b-v0.1"},
            "--context_parallel_degree=2: ring attention has no sliding window, mistral-7b-v0.1 has; use --sep_",
        ),
        (2, PD | {SEP: 2, "model_name_or_path": "gpt-126m"}, "--sep_parallel_degree=2: GPT's embedding of positions"),
        (4, {SEP: 2, SHARDING: 2, "sharding": "stage2"}, "--sharding=stage2 does not go with --sep_parallel_degree=2"),
        (4, {PP: 2, GA: 2, SHARDING: 2, "sharding": "stage2"}, "--sharding=stage2 does not go with --pipeline"),
        (4, {TP: 2, "sharding": "stage3"}, "--sharding=stage3 does not go with --tensor_parallel_degree=2"),
        (2, {"model_name_or_path": "llama-9000b"}, "llama-9000b"),
        (
            2,
            {PP: 2, GA: 2, "model_name_or_path": "mistral-7b-v0.1"},
            "--pipeline_parallel_degree=2: PaddleNLP has no pipeline for Mistral; it must be 1",
        ),
        (1, {GA: 0}, "--gradient_accumulation_steps 0: it must be a whole number of at least 1$"),
        (
            1,
            {"per_device_eval_batch_size": 0},
            "--per_device_eval_batch_size 0: it must be a whole number of at least 1$",
        ),
        (
            2,
            {PP: 2, GA: 2, "model_name_or_path": "llama-3.2-1b", "sharding_parallel_config": "split_param"},
            "--sharding_parallel_config split_param with --pipeline_parallel_degree=2: .* tied embeddings",
        ),
    ],
)
def test_impossible_layouts_are_refused(monkeypatch, world, flags, message):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", str(world))
    words = [str(word) for key, value in (COMMON | flags).items() for word in (f"--{key}", value)]
    with pytest.raises(ValueError, match=message) as error:  # LayoutError is one
        ArgumentParser((ModelArguments, DataArguments, PreTrainingArguments)).parse_args_into_dataclasses(words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "world, flags, message",
    [
        (1, {TP: 2}, "= 2 must divide the number of devices, 1"),
        (4, {TP: 2, "sharding": "stage3"}, "--sharding=stage3 does not go with --tensor_parallel_degree=2"),
        (4, {TP: 4}, "--tensor_parallel_degree=4 must divide num_key_value_heads=2"),
        (2, {TP: 2, "sequence_parallel": "1", "max_length": 63}, "--max_length=63 must be a multiple of"),
        (
            1,
            {"per_device_train_batch_size": 0},
            "--per_device_train_batch_size 0: it must be a whole number of at least 1$",
        ),
    ],
)
def test_fine_tuning_refuses_them_too(monkeypatch, world, flags, message):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", str(world))
    common = dict(model_name_or_path="tiny-llama-demo", output_dir="unused")
    words = [str(word) for key, value in (common | flags).items() for word in (f"--{key}", value)]
    parser = ArgumentParser((FinetuneModelArguments, FinetuneDataArguments, FinetuningArguments))
    with pytest.raises(ValueError, match=message):
        parser.parse_args_into_dataclasses(words)
