"""What a run says when its GPU has no memory left: what takes the memory, and which layouts would fit."""

import pytest
from paddlenlp.trainer import PdArgumentParser
from paddlenlp.transformers import LlamaConfig

from paddle_te import configs
from paddle_te.hosts.paddlenlp.training import out_of_memory
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuningArguments
from paddle_te.planner import Layout
from paddle_te.runs.rollback import RunEnded
from tests.unit.hosts.paddlenlp.training.test_arguments import parse

PADDLES = """(External) CustomDevice error
Out of memory error on nvgpu:0. Cannot allocate 7.828125GB memory on nvgpu:0, available memory is only 3.1GB.
  [Hint: something]"""
TE_FP8 = ["--transformer_engine_backend", "transformer_engine", "--use_fp8", "true", "--bf16", "true"]


@pytest.fixture
def config():
    found = LlamaConfig(**configs.read("llama-3-8b"))
    found.seq_length, found.use_fused_linear_cross_entropy = 8192, False
    return found


@pytest.fixture
def arguments(tmp_path):
    _, arguments = parse(tmp_path, *TE_FP8, "--recompute", "true", "--recompute_granularity", "core_attn")
    return arguments


def test_the_layout_is_the_runs(config, arguments):
    arguments.gradient_accumulation_steps, arguments.per_device_train_batch_size = 4, 2
    found = out_of_memory.layout_of(config, arguments)
    assert found == Layout(1, 8192, batch=2, micro_batches=4, recompute="core_attn", vp=arguments.virtual_pp_degree)


def test_advice(config, arguments):
    """Llama-3-8B does not fit on one H200 with recompute core_attn. It fits with more of it."""
    arguments.per_device_train_batch_size = 1
    told = out_of_memory.advice(PADDLES, config, arguments, "NVIDIA H200")
    assert told.startswith("Out of memory error on nvgpu:0. Cannot allocate 7.828125GB")
    assert "The planner counts 153.6 GB on each GPU when a step needs most (states 96.4," in told
    assert "\n" not in told and "gradients" not in told  # which are not there yet
    parts = "--recompute_modules layernorm mlp_act --offload_activations 4 --use_fused_linear_cross_entropy true"
    assert f"would fit, the fastest first: one GPU, recompute none, batch 1, {parts} (" in told
    assert "; one GPU, recompute none, batch 1, --recompute_modules layernorm mlp_act --offload_optimizer 0.05" in told
    assert told.endswith("--gpus 1 --seq 8192 --tokens_per_step 8192 --precision fp8 --gpu h200")
    unknown = out_of_memory.advice(PADDLES, config, arguments, "NVIDIA A10")
    assert "would fit" not in unknown and unknown.endswith("--precision fp8")


def end(error, config, arguments, **more):
    with out_of_memory.advised(config, arguments, **more):
        raise error


def test_what_else_ends_a_run_stays_as_it_is(monkeypatch, config, arguments):
    monkeypatch.setattr(out_of_memory, "device_name", lambda: "NVIDIA H200")
    with pytest.raises(RunEnded, match="The planner counts"):
        end(MemoryError(PADDLES), config, arguments)
    for error in (RuntimeError("another"), RunEnded("out of memory, said by another")):
        with pytest.raises(type(error), match=str(error)):
            end(error, config, arguments)
    with pytest.raises(MemoryError):
        end(MemoryError(PADDLES), config, arguments, lora=True)
    arguments.transformer_engine_backend = "paddle"
    with pytest.raises(MemoryError):
        end(MemoryError(PADDLES), config, arguments)


def test_fine_tuning_has_the_arguments(config, tmp_path):
    """A layout is read of those, too."""
    words = ["--output_dir", str(tmp_path), *TE_FP8, "--per_device_train_batch_size", "4", "--optim_moments", "int8"]
    (arguments,) = PdArgumentParser(FinetuningArguments).parse_args_into_dataclasses(words)
    found = out_of_memory.layout_of(config, arguments)
    assert found == Layout(1, 8192, batch=4, optim_moments="int8", vp=arguments.virtual_pp_degree)
