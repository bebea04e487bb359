"""HOST=paddleformers: the launcher's arguments as a recipe, and the folder that the model starts from."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddle_te import configs, host
from paddle_te.configs.spec import spec_of
from paddle_te.launch import finetune, pretrain
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.paddleformers.start import two_tokens
from paddle_te.launch.plan import make_plan
from paddle_te.manifest import COMPLETE_MARK
from paddle_te.weights.dims import Dims
from paddle_te.weights.layouts import hf_layout
from tests.small_corpora import write_corpus

GPUS = {"DRY_RUN": "1", "HOST": "paddleformers", "DEVICE": "nvgpu", "DEVICES": "0,1"}
TINY = dict(model_name="tiny-llama-demo", tokenizer_name="none", TP=1, GA=1, max_seqlen=64, MOCK_DATA=1)


def plan(job=pretrain, environ=GPUS, **arguments):
    return make_plan(job, [f"--{name}={value}" for name, value in arguments.items()], environ)[0]


def refusal(**arguments):
    with pytest.raises(LaunchError) as error:
        plan(**arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def files(made):
    """{name: content} of what the plan writes; links as their targets."""
    return {path.name: content for path, content in made.files.items()}


def recipe(made):
    return json.loads(files(made)["recipe.json"])


def subset(values, **wanted):
    return {name: values.get(name) for name in wanted} == wanted


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b"):
        write_corpus(folder / name)
        (folder / f"{name}.json").write_text(json.dumps({"max_token_id": 4095}))
    return folder


@pytest.fixture
def weights(tmp_path):
    """A folder of Hugging Face's with tiny-llama-demo's weights, all zeros, and a tokenizer."""
    folder = tmp_path / "weights"
    folder.mkdir()
    config = configs.read("tiny-llama-demo")
    layout = hf_layout()
    dims = Dims(spec_of(config))
    zeros = {
        layout.full_name(place): np.zeros(dims.slot_shape(place), np.float32) for place in layout.tensors(dims.spec)
    }
    save_file(zeros, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(two_tokens()["tokenizer.json"])
    return folder


def test_what_each_process_runs():
    made = plan(**TINY, FSDP=2, backend="te", precision="fp8", EXP_NAME="run")
    assert made.script.endswith("paddle_te/hosts/paddleformers/__main__.py")
    script = made.command.index(made.script)
    assert made.command[script - 2 : script] == ["--log_dir", str(made.logs)]
    assert made.command[script + 1 :] == ["train", str(made.folder / "recipe.json")]


def test_the_positions_of_pretraining(data, weights):
    arguments = dict(TINY, MOCK_DATA=0, DATA_PATH=data, tokenizer_name=weights, init_weight=weights)
    layout = dict(batch_size_per_device=3, FSDP=2, sharding_stage="stage1", GA=4, backend="te", precision="fp8")
    made = plan(**arguments | layout, recompute="full", LEARNING_RATE=1e-3, MAX_STEPS=7, SAVE_STEPS=5)
    lines = recipe(made)
    assert subset(lines, stage="PT", fine_tuning="full", do_train=True, device="nvgpu", output_dir=str(made.output))
    assert subset(lines, dataset_type="pretrain", input_dir=f"1.0 {data}/a 1.0 {data}/b", max_seq_len=64)
    assert subset(lines, per_device_train_batch_size=3, gradient_accumulation_steps=4, max_steps=7, save_steps=5)
    assert subset(lines, sharding="stage1", sharding_parallel_size=2, tensor_model_parallel_size=1)
    assert subset(lines, transformer_engine_backend="transformer_engine", use_fp8=True)
    assert subset(lines, compute_type="bf16", fp16_opt_level="O2", amp_master_grad=True)
    assert subset(lines, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert subset(lines, learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=0, weight_decay=0.01)
    assert subset(lines, continue_training=True, resume_from_checkpoint=None, overwrite_output_dir=True)
    assert lines["model_name_or_path"] == str(made.folder / "start")
    start = files(made)
    assert start["model.safetensors"] == weights / "model.safetensors"
    assert start["tokenizer.json"] == weights / "tokenizer.json"
    assert subset(json.loads(start["config.json"]), hidden_size=256, vocab_size=4096, fuse_rms_norm=False)


def test_degrees_pass_through_and_float32_is_said():
    lines = recipe(plan(**TINY | dict(TP=2), precision="fp32", backend="pd", SP="true", EXTRA_ARGS="--max_grad_norm 0"))
    assert subset(lines, tensor_model_parallel_size=2, sequence_parallel=True, sharding="", amp_master_grad=False)
    assert subset(lines, compute_type="float32", mock_data=True, continue_training=False)
    assert "fp16_opt_level" not in lines and "input_dir" not in lines


def test_core_attention_alone_is_computed_again():
    lines = recipe(plan(**TINY, backend="pd", recompute="core_attn"))
    assert subset(lines, recompute_granularity="selective", recompute_modules=["core_attn"])


def test_extra_arguments_are_lines():
    extra = "--fp8_recipe current --reset_attention_mask true --adam_beta2 0.95 --recompute_modules layernorm mlp_act"
    lines = recipe(plan(**TINY, backend="te", precision="fp8", EXTRA_ARGS=extra))
    assert subset(lines, fp8_recipe="current", reset_attention_mask=True, reset_position_ids=False, adam_beta2=0.95)
    assert subset(lines, recompute_modules=["layernorm", "mlp_act"], recompute_granularity="selective")


def test_the_positions_of_fine_tuning(weights, tmp_path):
    for name in ("train", "dev"):
        (tmp_path / f"{name}.json").write_text('{"src": "a", "tgt": "b"}\n')
    arguments = dict(model_name=weights, dataset=tmp_path, output=tmp_path / "out", max_seqlen=128, backend="pd")
    lines = recipe(plan(finetune, **arguments, method="lora-attention", MAX_STEPS=3))
    assert subset(lines, stage="SFT", fine_tuning="lora", lora_rank=32, lora_targets="attention", num_train_epochs=3)
    assert subset(lines, rslora=False, lora_plus_scale=1.0)
    extra = "--rslora true --lora_plus_scale 4 --lora_alpha"
    lines = recipe(plan(finetune, **arguments, method="lora", EXTRA_ARGS=f"{extra} 4"))
    assert subset(lines, rslora=True, lora_plus_scale=4.0, lora_alpha=None)
    with pytest.raises(LaunchError, match="lora_alpha=64: in PaddleFormers it is 4 with rslora; leave it out"):
        plan(finetune, **arguments, method="lora", EXTRA_ARGS=f"{extra} 64")
    assert subset(lines, train_dataset_path=f"{tmp_path}/train.json", eval_dataset_path=f"{tmp_path}/dev.json")
    assert subset(lines, train_dataset_type="erniekit", max_seq_len=128, src_length=64, packing=False, do_eval=True)
    lines = recipe(plan(finetune, **arguments, method="full", EXTRA_ARGS="--zero_padding true"))
    assert subset(lines, fine_tuning="full", packing=True, lora_targets=None, lora_rank=None)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(OVERLAP=1, FSDP=2, LOGGING_STEPS=2), "OVERLAP=true: PaddleFormers has nothing like it"),
        (dict(PROFILER="paddle"), "PROFILER=paddle: PaddleFormers has nothing like it"),
        (dict(TP="auto", backend="te"), "auto: the planner knows PaddleNLP's layouts, not PaddleFormers'"),
        (dict(FSDP=2, precision="fp32"), "sharding_stage=stage2: PaddleFormers shards the optimizer with float32"),
        (dict(recompute="core_attn"), "recompute=core_attn: PaddleFormers' own layers have full"),
        (dict(EXTRA_ARGS="--optim_moments int8"), "optim_moments=int8: PaddleFormers has nothing like it"),
        (dict(EXTRA_ARGS="--sharding stage2"), "EXTRA_ARGS: --sharding: with PaddleFormers say it by FSDP and"),
        (dict(EXTRA_ARGS="--on_nan skip"), "on_nan=skip: PaddleFormers has nothing like it"),
        (dict(EXTRA_ARGS="--unified_checkpoint 1"), "unified_checkpoint=true: PaddleFormers has nothing like it"),
        (
            dict(NNODES=2, NODE_RANK=0, MASTER="localhost:1234"),
            "NNODES=2: with PaddleFormers the launcher has one",
        ),
        (dict(DEVICE="cpu", DEVICES="0", precision="fp32", GA=2), "GA=2: PaddleFormers fails with GA above 1"),
        (dict(tokenizer_name="meta-llama/Llama-2-7b"), "PaddleFormers downloads no tokenizer here"),
        (dict(training_script=__file__), "is for PaddleNLP; PaddleFormers runs a recipe"),
    ],
)
def test_refused_before_work_starts(arguments, words):
    assert words in refusal(**TINY | arguments)


def test_weights_of_other_names_are_refused(weights):
    config = (weights / "config.json").read_text()
    save_file({"llama.embed_tokens.weight": np.zeros(1, np.float32)}, weights / "model.safetensors")
    assert "lacks model.embed_tokens.weight" in refusal(**TINY, init_weight=weights) and config


def test_weights_that_contradict_their_config_are_refused(weights):
    path = weights / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 8192}))
    assert "follows from vocab_size=8192" in refusal(**TINY, init_weight=weights)


def test_data_of_another_tokenizer_are_refused(data):
    (data / "b.json").write_text(json.dumps({"tokens": 6000, "max_token_id": 4096}))
    arguments = dict(TINY, MOCK_DATA=0, DATA_PATH=data, tokenizer_name=data)
    (data / "tokenizer.json").write_text(two_tokens()["tokenizer.json"])
    assert "b.bin has token id 4096, but the model's vocab_size is 4096" in refusal(**arguments)


def test_links_and_texts_are_written(weights, tmp_path):
    arguments = TINY | dict(tokenizer_name=weights, init_weight=weights, OUTPUT_DIR=tmp_path / "run")
    made = plan(**arguments)
    for _ in range(2):  # also over those of an earlier start
        made.write_files()
    assert json.loads((tmp_path / "run/recipe.json").read_text())["stage"] == "PT"
    assert (tmp_path / "run/start/model.safetensors").readlink() == weights / "model.safetensors"


@pytest.mark.parametrize(
    "there, given, chosen",
    [
        (["paddleformers"], {}, "paddleformers"),
        (["paddlenlp"], {}, "paddlenlp"),
        (["paddlenlp"], {"HOST": "paddleformers"}, "paddleformers"),
        ([], {}, "paddlenlp"),
    ],
)
def test_the_host_is_the_installed_one_unless_it_is_said(monkeypatch, there, given, chosen):
    monkeypatch.setattr(host, "installed", lambda: there)
    environ = {name: value for name, value in GPUS.items() if name != "HOST"} | given
    words = [f"--{name}={value}" for name, value in TINY.items()]
    assert make_plan(pretrain, words, environ)[1].HOST == chosen


def test_two_hosts_must_be_told_apart(monkeypatch):
    monkeypatch.setattr(host, "installed", lambda: list(host.HOSTS))
    environ = {name: value for name, value in GPUS.items() if name != "HOST"}
    with pytest.raises(LaunchError, match="this Python has PaddleNLP and PaddleFormers.*set HOST=paddlenlp or"):
        plan(environ=environ, **TINY)


def test_a_machines_name_is_no_host(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert plan(environ=GPUS | {"HOST": "node7"}, **TINY).script.endswith("run_pretrain.py")
    with pytest.raises(LaunchError, match="HOST: 'node8' must be one of paddlenlp, paddleformers"):
        plan(environ=GPUS | {"HOST": "node8"}, **TINY)


@pytest.mark.parametrize(
    "state, saved_by", [("trainer_state.json", "paddlenlp"), ("trainer_state.bin", "paddleformers")]
)
def test_each_host_resumes_its_own_checkpoints(tmp_path, state, saved_by):
    (tmp_path / "checkpoint-3").mkdir()
    for name in (state, COMPLETE_MARK):
        (tmp_path / "checkpoint-3" / name).write_text("")
    (tmp_path / "checkpoint-4").mkdir()  # not complete
    (other,) = host.HOSTS.keys() - {saved_by}
    arguments = TINY | dict(OUTPUT_DIR=tmp_path, resume_step="auto", backend="pd")
    made = plan(**arguments, HOST=saved_by)
    if saved_by == "paddleformers":
        assert recipe(made)["resume_from_checkpoint"] == str(tmp_path / "checkpoint-3")
    words = f"checkpoint-3 was saved by {host.HOSTS[saved_by]}, and the host is {host.HOSTS[other]}; go on with HOST="
    assert words in refusal(**arguments, HOST=other)


def test_lines_that_do_not_go_together():
    assert "min_learning_rate 0.1: the rate would rise" in refusal(**TINY, EXTRA_ARGS="--min_learning_rate 0.1")
    assert "report_to wandbee: it must be one of" in refusal(**TINY, EXTRA_ARGS="--report_to wandbee")
