"""What a run says when its GPU has no memory left: what takes the memory, and which layouts would fit."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from paddlenlp.trainer import PdArgumentParser
from paddlenlp.transformers import LlamaConfig

from paddle_te import configs
from paddle_te.fp8 import DelayedScaling, Float8BlockScaling, stored_scaling
from paddle_te.hosts.paddlenlp.lora import lora_config
from paddle_te.hosts.paddlenlp.training import out_of_memory
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuningArguments
from paddle_te.options.lora import Adapter
from paddle_te.planner.gpus import GPUS
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.memory import memory_of_step
from paddle_te.planner.model import Model
from paddle_te.planner.remedies import remedies
from paddle_te.runs.rollback import RunEnded
from tests.unit.hosts.paddlenlp.training.test_arguments import parse

PADDLES = """
----------------------
Error Message Summary:
----------------------
ResourceExhaustedError:

Out of memory error on nvgpu:0. Cannot allocate 7.828125GB memory on nvgpu:0, available memory is only 59.996338MB.

Please check whether there is any other process using nvgpu:0.
"""
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
    found = out_of_memory.job_of_run(config, arguments)
    assert (found.world, found.sequence, found.batch, found.micro_batches) == (1, 8192, 2, 4)
    assert (found.recomputed, found.precision, found.te) == ("core_attn", "fp8", True)


def test_advice(config, arguments):
    """Llama-3-8B does not fit on one H200 with recompute core_attn. It fits with more of it."""
    arguments.per_device_train_batch_size = 1
    told = out_of_memory.advice(config, arguments, "NVIDIA H200", str(configs.resolve("llama-3-8b")))
    assert "The planner counts 153.3 GB on each GPU when a step needs most (states 96.4," in told
    assert "\n" not in told and "gradients" not in told  # which are not there yet
    assert "would fit, the fastest first: one GPU, recompute none, batch 1, --recompute_modules layernorm " in told
    assert "; one GPU, recompute none, batch 1, " in told and "--offload_activations" in told
    assert "All layouts: paddle-te plan meta-llama/Meta-Llama-3-8B --gpus 1" in told
    assert told.endswith("--gpus 1 --seq 8192 --tokens_per_step 8192 --precision fp8 --gpu h200")
    arguments.activation_func_fp8_input_store = True
    stored = out_of_memory.advice(config, arguments, "NVIDIA H200", "my models/8b")
    assert "(states 96.4," in stored and "146.0 GB" in stored  # 7.3 GB less
    parts = "--recompute_modules layernorm mlp_act --activation_func_fp8_input_store true"
    assert f"recompute none, batch 1, {parts} (142 GB)" in stored
    assert stored.endswith("--precision fp8 --activation_func_fp8_input_store true --gpu h200")
    arguments.activation_func_fp8_input_store = False
    unknown = out_of_memory.advice(config, arguments, "NVIDIA A10", "8b")
    assert "would fit" not in unknown and unknown.endswith("--precision fp8")


def adapter(targets="all", rank=16, base=None):
    """What `advised` reads of a TELoRAModel."""
    return SimpleNamespace(lora_config=lora_config(Adapter(targets=targets, rank=rank)), base_scaling=base)


IN_FP8 = stored_scaling(DelayedScaling())


@pytest.mark.parametrize("base", [None, IN_FP8], ids=["16 bits", "fp8"])
def test_advice_for_lora(monkeypatch, arguments, base):
    """Llama-3-70B's weights in bf16 are more than an H200 has; in fp8 they fit, with parts of layers computed again."""
    monkeypatch.setattr(out_of_memory, "device_name", lambda: "NVIDIA H200")
    arguments.per_device_train_batch_size = 1
    config = LlamaConfig(**configs.read("meta-llama/Meta-Llama-3-70B"))
    config.seq_length, config.use_fused_linear_cross_entropy = 8192, False
    with pytest.raises(RunEnded) as ended:
        end(MemoryError(PADDLES), config, arguments, lora=adapter("attention", base=base))
    told = str(ended.value)
    assert ("fp8 weights 68.5" if base is None else ", weights 72.8,") in told
    assert ("and --use_fp8 true --quantize_base fp8 these need less" in told) == (base is None)
    assert "one GPU, recompute none, batch 1, --recompute_modules layernorm" in told
    assert told.endswith(
        f"--precision fp8 --lora_rank 16 --lora_targets attention{' --quantize_base fp8' * bool(base)} --gpu h200"
    )


def lora_flags(rank, targets, base, keeps=False):
    return dict(lora=True, lora_rank=rank, lora_targets=targets, quantize_base=base, keep_fp8_transpose_cache=keeps)


def test_adapters_of_other_targets():
    for keeps in (False, True):
        base = stored_scaling(Float8BlockScaling(), keeps)
        assert out_of_memory.lora_of(adapter("mlp", 8, base)) == lora_flags(8, "mlp", "fp8", keeps)
    other = adapter()
    other.lora_config.target_modules = [".*q_proj"]
    assert out_of_memory.lora_of(other) == lora_flags(16, "all", None)


def end(error, config, arguments, **more):
    with out_of_memory.advised(config, arguments, "llama-3-8b", **more):
        raise error


def test_what_else_ends_a_run_stays_as_it_is(monkeypatch, config, arguments):
    monkeypatch.setattr(out_of_memory, "device_name", lambda: "NVIDIA H200")
    with pytest.raises(RunEnded, match="The planner counts"):
        end(MemoryError(PADDLES), config, arguments)
    for error in (RuntimeError("another"), RunEnded("out of memory, said by another")):
        with pytest.raises(type(error), match=str(error)):
            end(error, config, arguments)
    arguments.transformer_engine_backend = "paddle"  # which the planner does not know
    with pytest.raises(RunEnded, match="^out of memory on .*8.4 GB more wanted") as ended:
        end(MemoryError(PADDLES), config, arguments)
    assert "planner" not in str(ended.value)


def test_fine_tuning_has_the_arguments(config, tmp_path):
    """A layout is read of those, too."""
    words = ["--output_dir", str(tmp_path), *TE_FP8, "--per_device_train_batch_size", "4", "--optim_moments", "int8"]
    (arguments,) = PdArgumentParser(FinetuningArguments).parse_args_into_dataclasses(words)
    found = out_of_memory.job_of_run(config, arguments)
    assert (found.script, found.sequence, found.batch, found.optim_moments) == ("finetune", 8192, 4, "int8")


@pytest.mark.parametrize(
    "problem, wanted, free",
    [
        (PADDLES, "8.4 GB more wanted, ", "0.1 GB free, "),
        ("Cannot allocate 256.000000B memory on nvgpu:0, available memory is only 0.000000B.", "0.0 MB", "0.0 MB free"),
        ("cudaMalloc: out of memory", "", ""),
    ],
)
def test_the_sizes(monkeypatch, problem, wanted, free):
    monkeypatch.setattr(out_of_memory.device, "memory_in_use", lambda: (70_100_000_000, 79_000_000_000))
    monkeypatch.setattr(out_of_memory.device, "total_memory", lambda: 85_000_000_000)
    told = out_of_memory.Shortage.of(problem).told()
    assert told.startswith("out of memory on cpu (cpu): ") and "\n" not in told
    assert f"{wanted}" in told and free in told and ("wanted" in told) == bool(wanted)
    assert "70.1 GB in use by tensors, 8.9 GB kept by Paddle beside them, " in told and told.endswith("85.0 GB in all.")


@pytest.mark.parametrize("memory", [20, 80, 145.5, 400])
def test_what_has_failed_is_not_recommended(memory):
    """Nor what needs as much, whatever the planner takes the GPU for: it may think that all of it fits."""
    gpu, model = replace(GPUS["h100"], memory=memory), Model.of(configs.read("llama-3-8b"))
    for layout in (
        layout_of(2, 8192, tp=2, micro_batches=32),
        layout_of(2, 8192, pp=2, micro_batches=32, main_grads=True),
    ):
        need = memory_of_step(model, layout).total
        _, plans = remedies(model, layout, out_of_memory._with_less(model, layout, gpu), 3)
        assert plans or memory == 20
        assert all(plan.layout != layout and plan.memory.total < need for plan in plans)


def test_a_smaller_state_of_the_optimizer_is_advised_where_no_layout_fits(config, arguments):
    arguments.per_device_train_batch_size = 3
    told = out_of_memory.advice(config, arguments, "NVIDIA H100", "8b")
    assert "The planner counts" in told and told.count("--optim_moments bfloat16") >= 1
    assert "these need less and would fit" in told and "and --optim_moments" not in told  # once, with its layout
