"""`auto`: the planner chooses the layout for the GPUs that the launcher finds."""

import json
import re
import shlex

import pytest

from paddle_te import configs
from paddle_te.launch import devices, finetune, pretrain
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.paddleformers.start import two_tokens
from paddle_te.launch.plan import make_plan
from tests.small_tokenizers import write

WORDS = "--model_name=llama-3-8b --tokenizer_name=none --backend=te --precision=fp8 --max_seqlen=8192"
ENVIRON = {"DRY_RUN": "1", "MOCK_DATA": "1", "DEVICE": "nvgpu", "CUSTOM_DEVICE_ROOT": ""}


@pytest.fixture(autouse=True)
def h200s(monkeypatch):
    monkeypatch.setattr(devices, "_gpu_listing", lambda: [f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})" for i in range(8)])


def plan(words, devices=8, **environ):
    devices = ",".join(map(str, range(devices)))
    words = [*shlex.split(WORDS), *words.split(), f"--DEVICES={devices}"]
    return make_plan(pretrain, words, ENVIRON | environ)


def refusal(words, devices=8, **environ):
    with pytest.raises(LaunchError) as error:
        plan(words, devices, **environ)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_one_auto_leaves_all_that_is_not_given_to_the_planner(capsys):
    made, args = plan("--TP=auto")
    assert (args.TP, args.FSDP, args.sharding_stage, args.OVERLAP) == (1, 8, "stage1", True)
    assert args.batch_size_per_device * args.GA == 16
    assert "--sharding_parallel_degree 8" in shlex.join(made.command) and "--logging_steps 2" in shlex.join(
        made.command
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("auto: batch_size_per_device=1 FSDP=8 TP=1 ")
    assert "fastest that fits 8 x H200 with 1,048,576 tokens a step" in line and "; next is stage" in line
    assert re.search(r"by the planner 1\d,\d{3} tokens/s per GPU and \d+ of its \d+ GB; next", line)


def test_what_is_given_stays():
    _, args = plan("--TP=auto --PP=2 --GA=32 --TOKENS_PER_STEP=2097152", LOGGING_STEPS="1")
    assert (args.PP, args.GA, args.LOGGING_STEPS) == (2, 32, 1)
    assert args.SP == (args.TP > 1)
    _, args = plan("--PP=auto --FSDP=all", OVERLAP="0")
    assert args.FSDP == 8 // (args.TP * args.PP) and args.OVERLAP is False
    _, args = plan("--TP=auto --recompute=full")
    assert args.recompute == "full" and not args.EXTRA_ARGS


def test_a_run_file_may_say_auto(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(dict(tensor_parallel_degree="auto", sequence_parallel="auto")))
    words = [str(tmp_path / "run.json"), *shlex.split(WORDS), "--DEVICES=0,1"]
    _, args = make_plan(pretrain, words, ENVIRON)
    assert args.TP * args.FSDP == 2 and args.SP == (args.TP > 1)


def test_parts_of_layers_are_computed_again_and_others_moved_to_the_host_where_that_fits():
    """Llama-3-8B on one GPU with the states that are given, whose own EXTRA_ARGS stay."""
    given = "--seed=7 --optim_moments float32 --master_weights float32 --optimizer_in_backward off"
    made, args = plan("--TP=auto --TOKENS_PER_STEP=8192", devices=1, EXTRA_ARGS=given)
    assert args.EXTRA_ARGS.startswith("--recompute_modules layernorm") and args.EXTRA_ARGS.endswith(" --seed=7")
    assert "--offload_" in args.EXTRA_ARGS
    assert made.command[-1] == "--seed=7"


def test_the_mlp_is_taken_in_chunks_where_that_fits():
    """All of Llama-3-8B on one GPU with full recompute, which is given, and 131,072 tokens."""
    state = "--optim_moments bfloat16 --master_weights bf16_remainder"
    words = "--GA=auto --recompute=full --max_seqlen=131072 --TOKENS_PER_STEP=262144"
    _, args = plan(words, devices=1, EXTRA_ARGS=state)
    assert "--mlp_chunk_tokens 16384" in args.EXTRA_ARGS and args.recompute == "full"


def test_sequences_that_devices_share():
    """SEP and CP are the user's to choose: the planner takes what is given."""
    _, args = plan("--TP=auto --max_seqlen=32768 --CP=2 --TOKENS_PER_STEP=262144")
    assert (args.SEP, args.CP) == (1, 2) and args.TP * args.FSDP * args.CP <= 8
    _, args = plan("--TP=auto --max_seqlen=32768 --TOKENS_PER_STEP=262144")
    assert (args.SEP, args.CP) == (1, 1)


def test_a_smaller_state_of_the_optimizer_is_counted():
    """Llama-3-8B on one GPU, which then needs no recompute; the flags are passed on once."""
    state = "--optim_moments bfloat16 --master_weights bf16_remainder"
    words = "--TP=auto --TOKENS_PER_STEP=8192"
    _, args = plan(words, devices=1, EXTRA_ARGS=f"--seed=7 {state}")
    assert "--recompute_modules" not in args.EXTRA_ARGS and args.recompute == "none"
    assert args.EXTRA_ARGS.endswith(f"{state} --seed=7") and args.EXTRA_ARGS.count("--optim_moments") == 1
    assert "--optim_moments: 'half' must be one of float32" in refusal(words, EXTRA_ARGS="--optim_moments half")


def test_states_are_chosen_where_none_are_given(capsys, monkeypatch):
    """And what that costs is said: Llama-3-8B on an H100."""
    monkeypatch.setattr(devices, "_gpu_listing", lambda: ["GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)"])
    _, args = plan("--TP=auto", devices=1)
    assert "--optim_moments bfloat16 --master_weights bf16_remainder" in args.EXTRA_ARGS
    assert "; moments in bfloat16: they are rounded at random after each step" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["", " true"])
def test_swiglus_input_in_fp8_is_counted(value):
    """Llama-3-8B on one GPU, which then needs no recompute; the flag is passed on once."""
    words = "--TP=auto --TOKENS_PER_STEP=8192"
    _, args = plan(words, devices=1, EXTRA_ARGS=f"--activation_func_fp8_input_store{value} --seed=7")
    flags = "--activation_func_fp8_input_store true --master_weights bf16_remainder"
    assert args.EXTRA_ARGS == f"{flags} --seed=7"


def test_states_that_the_user_has_put_on_the_host():
    """Stay there, and the layout is chosen with them; where the user says nothing the planner may put them there."""
    words = "--TP=auto --recompute=none --batch_size_per_device=1 --TOKENS_PER_STEP=131072"
    _, args = plan(words, devices=1, EXTRA_ARGS="--offload_optimizer 0.5 --seed=7")
    assert args.EXTRA_ARGS == "--offload_optimizer 0.5 --seed=7"
    _, args = plan(words, devices=1, EXTRA_ARGS="--optim_moments float32 --master_weights float32")
    assert args.EXTRA_ARGS == "--offload_optimizer 0.38"
    assert "must be a number from 0 to 1" in refusal(words, devices=1, EXTRA_ARGS="--offload_optimizer 2")


@pytest.mark.parametrize("words, message", [
    ("--TP=auto --model_name=gpt-175b", "no layout fits 8 x H200; the smallest, TP8 with recompute"),
    ("--TP=auto --GA=3 --SP=true", "auto: no layout with GA=3 SP=true has 1,048,576 tokens a step on 8 devices; set"),
    ("--TP=auto --TOKENS_PER_STEP=1000", "TOKENS_PER_STEP=1000 must be a multiple of max_seqlen=8192"),
    ("--TOKENS_PER_STEP=8192", "TOKENS_PER_STEP goes with auto"),
    ("--TP=auto --backend=pd", "auto: the planner knows backend=te in bf16 and fp8, not pd in fp8"),
    ("--TP=auto --SEP=2", "auto: the planner considers SEP for sequences of at least 16384 tokens, not of"),
    ("--TP=automatic", "must be a whole number of at least 1, or auto"),
    ("--recompute=some --TP=auto", "must be one of none, core_attn, full, or auto"),
])  # fmt: skip
def test_what_cannot_be_chosen_is_refused(words, message):
    assert message in refusal(words)


@pytest.mark.parametrize("listing, there", [
    (["GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)"], "NVIDIA A100-SXM4-80GB"), ([], "no NVIDIA GPU"),
    (["GPU 0: NVIDIA H200 (UUID: GPU-1)", "GPU 1: NVIDIA A10 (UUID: GPU-2)"], "NVIDIA A10 and NVIDIA H200"),
])  # fmt: skip
def test_gpus_that_the_planner_does_not_know(monkeypatch, listing, there):
    monkeypatch.setattr(devices, "_gpu_listing", lambda: listing)
    assert f"auto: the planner knows H200 and H100, and here is {there};" in refusal("--TP=auto", devices=1)


@pytest.fixture
def finetuning(tmp_path):
    """Plans fine-tuning of a folder with Llama-3-8B's configuration."""
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions/train.json").write_text('{"src": "a", "tgt": "b"}\n')
    config = {"config.json": json.dumps(configs.read("llama-3-8b")), "model_state.pdparams": ""}
    write(tmp_path / "model", config | two_tokens())
    folders = {"model_name": "model", "dataset": "questions", "output": "out"}
    words = [f"--{name}={tmp_path / folder}" for name, folder in folders.items()]
    environ = ENVIRON | {"MOCK_DATA": ""}

    def plan(text, devices=8, **more):
        kinds = f"--backend=te --max_seqlen=4096 --DEVICES={','.join(map(str, range(devices)))}"
        return make_plan(finetune, [*words, *kinds.split(), *text.split()], environ | more)

    return plan


@pytest.mark.parametrize(
    "method, extra, fp8_base, targets",
    [
        ("full", "", None, None),
        ("lora", "", False, "all"),
        ("lora-mlp", "--lora_rank 16 --quantize_base fp8", True, "mlp"),
        ("lora-mlp", "--lora_rank 16 --quantize_base fp8 --keep_fp8_transpose_cache false", True, "mlp"),
    ],
)
def test_fine_tuning_is_left_to_the_planner(method, extra, fp8_base, targets, finetuning, capsys):
    made, args = finetuning(f"--method={method} --precision=fp8 --TP=auto", EXTRA_ARGS=extra)
    layout = made.layout
    assert (layout.pp, layout.vp, layout.overlaps, layout.world) == (1, 1, False, 8)
    assert layout.tokens_per_step == 8 * 16 * 4096 and args.batch_size_per_device * args.GA * layout.data == 128
    assert layout.lora == (targets is not None) and layout.fp8_base == bool(fp8_base)
    assert layout.keep_fp8_transpose_cache == (layout.fp8_base and "keep_fp8_transpose_cache false" not in extra)
    assert layout.keep_fp8_transpose_cache == ("keep_fp8_transpose_cache true" in args.EXTRA_ARGS)
    assert not layout.lora or (layout.lora_rank, layout.lora_targets) == (16 if extra else 32, targets)
    assert "--lora_rank" not in args.EXTRA_ARGS or args.EXTRA_ARGS.count("--lora_rank") == 1
    said = capsys.readouterr().err
    assert said.startswith("auto: batch_size_per_device=") and " PP=" not in said and "\n" not in said.strip()


def test_what_is_given_of_fine_tuning_stays(finetuning):
    layout = finetuning("--method=full --FSDP=auto --TP=2 --batch_size_per_device=1", TOKENS_PER_STEP="262144")[
        0
    ].layout
    assert (layout.tp, layout.batch, layout.tokens_per_step) == (2, 1, 262144)


def test_a_whole_model_takes_more_than_an_adapter(finetuning):
    adapters, whole = (finetuning(f"--method={each} --GA=auto", devices=1, GPU="h100")[1] for each in ("lora", "full"))
    assert "--offload_optimizer" in whole.EXTRA_ARGS and "--offload" not in adapters.EXTRA_ARGS
