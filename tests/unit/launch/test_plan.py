"""The launcher's checks and the command it builds, through its Python interface."""

import json
import shlex
from types import SimpleNamespace

import pytest

from paddle_te import configs
from paddle_te.launch import devices, finetune, nodes, pretrain
from paddle_te.launch.__main__ import main
from paddle_te.launch.arguments import ROOT, make_parser, parse
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.paddleformers.start import two_tokens
from paddle_te.launch.plan import make_plan
from paddle_te.options import launcher
from tests.small_corpora import write_corpus
from tests.small_tokenizers import sentencepiece_model

VARIABLES = [option.name for option in (*launcher.VARIABLES, *launcher.PRETRAIN_VARIABLES)]
GPUS = {"DRY_RUN": "1", "MOCK_DATA": "1", "DEVICE": "gpu", "DEVICES": "0,1,2,3,4,5,6,7"}
CPU = {"DRY_RUN": "1", "MOCK_DATA": "1", "DEVICE": "cpu"}


MIXTURE = dict(model_name="qwen3-30b-a3b", backend="te", CHECK_MEMORY=0)


def plan(environ=GPUS, **arguments):
    return make_plan(pretrain, [f"--{name}={value}" for name, value in arguments.items()], environ)[0]


def refusal(environ=GPUS, **arguments):
    with pytest.raises(LaunchError) as error:
        plan(environ, **arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def flags(command, script):
    words = command[command.index(script) + 1 :]
    assert all(word.startswith("--") for word in words[::2]), words
    return {key[2:]: value for key, value in zip(words[::2], words[1::2], strict=True)}


# ---------------------------------------------------------------------------------------------------- values


WRONG_VALUES = {
    "batch_size_per_device": ["0", "-1", "1.5", "x"],
    "FSDP": ["0", "x"],
    "TP": ["0", "2.0", "1e1", "２"],
    "PP": ["-2", " "],
    "VP": ["0"],
    "GA": ["0", "eight"],
    "SP": ["True", "1", "yes"],
    "max_seqlen": ["0", "4k"],
    "sharding_stage": ["stage0", "2", "Stage1"],
    "backend": ["paddle", "transformer_engine", "TE"],
    "precision": ["fp16", "BF16", "8"],
    "recompute": ["true", "selective"],
    "resume_step": ["latest", "-1", "1.0"],
    "nsys_profile": ["1", "no"],
    "DEVICE": ["cuda", "xpu"],
    "DEVICES": ["a", "0,0", "00,0", "0;1", "0,", "GPU-", "GPU-1,GPU-1", "０"],
    "MAX_STEPS": ["0", "many"],
    "SAVE_STEPS": ["0"],
    "LOGGING_STEPS": ["-1"],
    "LEARNING_RATE": ["0", "nan", "inf", "-1e-3", "fast"],
    "MOCK_DATA": ["yes"],
    "DETERMINISTIC": ["yes"],
    "DRY_RUN": ["2"],
    "OVERLAP": ["yes"],
    "OVERWRITE": ["y"],
    "NNODES": ["0", "two"],
    "NODE_RANK": ["-1"],
    "MASTER_PORT": ["0"],
    "PROFILE_START_STEP": ["0"],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG_VALUES.items() for value in values])
def test_wrong_values_name_the_argument(name, value):
    message = refusal(**{name: value})
    assert message.startswith(f"{name}: ") and repr(value) in message and "must be" in message


@pytest.mark.parametrize("name", [name for name in VARIABLES if name in WRONG_VALUES])
def test_the_environment_is_checked_like_arguments(name):
    value = WRONG_VALUES[name][0]
    assert refusal({**GPUS, name: value}).startswith(f"{name}: {value!r}")


def test_slurms_variables_are_checked_too():
    assert refusal({**GPUS, "SLURM_JOB_NUM_NODES": "x"}).startswith("NNODES: 'x'")


def test_empty_variables_count_as_not_set():
    empty = dict.fromkeys(VARIABLES, "")
    assert plan({**empty, **GPUS}).command == plan().command


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(FSDP=1), "FSDP=1 shards nothing: FSDP=all shards over all"),
        (dict(sharding_stage="stage3", TP=1, FSDP=8), "for sharding_stage=stage1 or stage2; stage3's"),
        (dict(FSDP=2), "stage2 has no float32 main gradients in PaddleNLP where DP is 2: set FSDP=all, or stage1"),
        (dict(sharding_stage="stage1", TP=1, PP=2, CP=2, FSDP=2), "for PP=2 or for CP=2, not for both"),
        (dict(sharding_stage="stage1", TP=1, PP=2, EP=2, **MIXTURE), "EP=2 needs split_param, with which Paddle"),
        (dict(precision="fp32"), "not gpu and fp32"),
        (dict(LOGGING_STEPS=1), "needs LOGGING_STEPS of 2 or more"),
    ],
)
def test_overlap_is_refused(arguments, words):
    assert words in refusal(**(dict(FSDP=4, OVERLAP=1, LOGGING_STEPS=2, precision="bf16") | arguments))


# What OVERLAP=1 sets on eight nvgpus, and a layout in which it can be
OVERLAP_FLAG = "--sharding_parallel_config"
ON_NVGPU = dict(DEVICE="nvgpu", FSDP=4, backend="te", precision="bf16", DRY_RUN=1)


def overlapping(capsys, **arguments):
    """The flags of a run, whether the overlap is on, and what the launcher says of it."""
    made = plan(**(ON_NVGPU | arguments))
    given = flags(made.command, made.script)
    of_the_user = arguments.get("EXTRA_ARGS", "").count(OVERLAP_FLAG)
    return given, made.command.count(OVERLAP_FLAG) > of_the_user, capsys.readouterr().err


def test_overlap_is_the_default(capsys):
    given, on, said = overlapping(capsys)
    assert on and (given["sharding_parallel_config"], given["logging_steps"]) == ("enable_stage2_overlap", "2")
    assert said.count("\n") == 1 and "OVERLAP=auto: on, sharding's communication in stage2 runs at the same" in said
    assert "a line for every 2 steps; OVERLAP=0 turns it off" in said
    by_itself = given
    given, on, said = overlapping(capsys, OVERLAP=1)
    assert given == by_itself and not said
    given, on, said = overlapping(capsys, LOGGING_STEPS=10)
    assert on and given["logging_steps"] == "10" and "log has" not in said
    for nothing_to_say in (dict(OVERLAP=0), dict(FSDP=1)):
        given, on, said = overlapping(capsys, **nothing_to_say)
        assert not on and given["logging_steps"] == "1" and not said


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(FSDP=2), "stage2 has no float32 main gradients in PaddleNLP where DP is 2"),
        (dict(FSDP=2, PP=2, sharding_stage="stage1"), "with PP=2 no run has shown that it is faster"),
        (dict(LOGGING_STEPS=1), "it needs LOGGING_STEPS of 2 or more"),
        (dict(backend="pd", precision="fp32"), "precision bf16 or fp8, not nvgpu and fp32"),
        (dict(DEVICE="gpu"), "it would add up gradients in float32, which this run does not"),
        (dict(EXTRA_ARGS="--amp_master_grad false"), "it would add up gradients in float32"),
        (
            dict(EXTRA_ARGS="--sharding_parallel_config enable_stage2_overlap"),
            "EXTRA_ARGS has --sharding_parallel_config, which says how",
        ),
        (dict(EXTRA_ARGS="--logging_steps 1"), "EXTRA_ARGS has --logging_steps 1, and it needs 2"),
        (dict(EXTRA_ARGS="--optim adafactor"), "a run with --optim adafactor could not resume from one without"),
    ],
)
def test_overlap_is_off_by_itself(capsys, arguments, words):
    given, on, said = overlapping(capsys, **arguments)
    assert not on and given["logging_steps"] == "1"
    assert said.startswith("OVERLAP=auto: off, because ") and words in said and said.count("\n") == 1


def test_without_ranks_to_shard_over_nothing_is_said_of_overlap(capsys):
    assert overlapping(capsys, TP=8, FSDP=1)[1:] == (False, "")


def test_overlap_on_paddlepaddle_gpu_with_main_gradients(capsys):
    _, on, said = overlapping(capsys, DEVICE="gpu", EXTRA_ARGS="--amp_master_grad true")
    assert on and "OVERLAP=auto: on" in said


@pytest.mark.parametrize(
    "word, here",
    [("--max_seq_length", "max_seqlen"), ("--tensor-parallel-degree=2", "TP"), ("--tp", "TP"), ("--bf16", "precision")],
)
def test_a_name_from_elsewhere_is_answered_with_the_one_here(word, here):
    with pytest.raises(LaunchError, match=f"unknown argument {word}: paddle-te pretrain has --{here} "):
        parse(pretrain, [word, "2"], {})


def test_extra_args_may_begin_with_dashes():
    args = parse(pretrain, ["tiny-llama-demo", "--EXTRA_ARGS", "--warmup_steps 3"], {})
    assert args.EXTRA_ARGS == "--warmup_steps 3"


def test_unknown_arguments():
    assert "--TPP=2: did you mean paddle-te pretrain's --TP?" in refusal(TPP=2)
    assert "unknown argument --T=2: EXTRA_ARGS takes run_pretrain.py's flags" in refusal(T=2), "no abbreviations"
    assert "--warmup_steps=2: give it in EXTRA_ARGS" in refusal(warmup_steps=2)
    with pytest.raises(LaunchError, match="--DATA_PATH: it belongs to paddle-te pretrain "):
        parse(finetune, ["--DATA_PATH", "data"], {})


@pytest.mark.parametrize(
    "words, message",
    [
        ("--logging_steps 3 --learning_rat 3", "--learning_rat: run_pretrain.py has no such flag; did you mean "),
        ("--xyzzy", "--xyzzy: run_pretrain.py has no such flag"),
        ("--tp 2", "--tp: run_pretrain.py has no such flag; paddle-te pretrain has --TP"),
        ("--max_grad_nor 1", "--max_grad_nor: run_pretrain.py has no such flag; did you mean --max_grad_norm?"),
        ("--lora_rank 8", "--lora_rank: run_pretrain.py has no such flag; it belongs to paddle-te finetune"),
        ("--warmup_steps 3 5", "EXTRA_ARGS: '5' follows no flag; "),
    ],
)
def test_what_the_script_would_not_take(words, message):
    assert refusal(EXTRA_ARGS=words).startswith(message)


def test_only_a_script_of_the_users_own_knows_its_flags(tmp_path, monkeypatch):
    """Nor does anybody here without PaddleNLP."""
    given = dict(EXTRA_ARGS="--seed 1 --no_log_on_each_node")
    assert plan(**given).command[-1] == "--no_log_on_each_node", "PaddleNLP's own"
    given = dict(EXTRA_ARGS="--xyzzy 1")
    ours = ROOT / "llm/llama/run_pretrain.py"
    assert refusal(**given, training_script=ours).startswith("--xyzzy: run_pretrain.py has no such flag")
    own = tmp_path / "run_pretrain.py"
    extended = ours.read_text().replace("    run(", "    read_mine()\n    run(")
    started = "import patches\n" + ours.read_text().partition('"""\n')[2]
    for program in ("from paddle_te.scripts import run", extended, started, "print 'of Python 2'"):
        own.write_text(program)
        assert plan(**given, training_script=own).command[-2:] == ["--xyzzy", "1"]
    monkeypatch.setattr("paddle_te.launch.flags.paddlenlps_flags", frozenset)
    assert plan(**given).command[-2:] == ["--xyzzy", "1"]


# ---------------------------------------------------------------------------------------------------- combinations


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(model_name="llama-9b"), ["model_name", "'llama-9b'", "perhaps meta-llama/Meta-Llama-3-8B"]),
        (dict(tokenizer_name="llama-125m"), ["tokenizer_name", "meta-llama/Llama-2-7b"]),
        (dict(tokenizer_name="some/tokenizer"), ["tokenizer_name", "'some/tokenizer'"]),
        (dict(init_weight="/no/such/folder"), ["init_weight", "/no/such/folder"]),
        (dict(resume_step=7), ["resume_step=7", "none"]),
        (dict(EXTRA_ARGS="--a 'b"), ["EXTRA_ARGS", "--a 'b"]),
        (dict(training_script="/no/such/script.py"), ["training_script", "/no/such/script.py"]),
    ],
)
def test_impossible_combinations(arguments, words):
    message = refusal(**arguments)
    assert all(word in message for word in words), message


def test_the_rules_are_asked_in_the_launchers_words(tmp_path):
    """All of them: tests/unit/job."""
    assert refusal(TP=3).startswith("TP=3 x PP=1 x FSDP=1 = 3 must divide the number of devices, 8")
    assert plan(TP=1, PP=2, sharding_stage="stage3").command, "the stage is ignored with FSDP=1"
    said = refusal(precision="fp8", backend="te", EXTRA_ARGS="--fp8_recipe block", max_seqlen=1040, TP=1)
    assert said.startswith("EXTRA_ARGS: precision=fp8 with block scaling needs multiples of 128; ")
    assert refusal({**CPU, "DEVICES": "0"}, TP=1).startswith("precision=bf16 does not train on a plain CPU in Paddle")


def test_data_and_tokenizer(tmp_path):
    real = {key: value for key, value in GPUS.items() if key != "MOCK_DATA"}
    empty = tmp_path / "empty folder"
    empty.mkdir()
    assert refusal({**real, "DATA_PATH": str(tmp_path / "nowhere")}).startswith("DATA_PATH: there is no folder")
    assert "holds no .idx file; prepare it with paddle-te prepare-data" in refusal({**real, "DATA_PATH": str(empty)})
    assert "holds no tokenizer that can be read" in refusal(tokenizer_name=empty)
    (empty / "demo.idx").touch()
    assert f"DATA_PATH: {empty}/demo.bin is missing: make one" in refusal({**real, "DATA_PATH": str(empty)})
    (empty / "demo.bin").touch()
    assert "demo.idx is no index of token ids, or damaged" in refusal({**real, "DATA_PATH": str(empty)})
    write_corpus(empty / "demo", [[1, 2, 3]] * 9)
    assert "demo.bin has 27 tokens, and max_seqlen=4096 needs one more" in refusal({**real, "DATA_PATH": str(empty)})
    write_corpus(empty / "demo", [[1, 2, 40_000]] * 2000)
    assert "demo.bin has token id 40000, but the model's vocab" in refusal({**real, "DATA_PATH": str(empty)})
    write_corpus(empty / "demo")
    (empty / "sentencepiece.bpe.model").write_bytes(sentencepiece_model())
    assert refusal({**real, "DATA_PATH": str(empty)}, tokenizer_name="none").startswith("tokenizer_name=none goes with")
    made = plan({**real, "DATA_PATH": str(empty)}, tokenizer_name=empty)
    given = flags(made.command, made.script)
    assert given["input_dir"] == given["tokenizer_name_or_path"] == str(empty)
    assert "mock_data" not in given


def test_a_models_tokenizer_is_its_own_unless_another_is_named(tmp_path):
    def tokenizer(environ=GPUS, **arguments):
        made = plan(environ, **arguments)
        return flags(made.command, made.script)["tokenizer_name_or_path"]

    assert tokenizer(model_name="llama-3-8b") == "meta-llama/Meta-Llama-3-8B"
    assert tokenizer(model_name="qwen2.5-7b", tokenizer_name="none", TP=4) == "none"
    assert tokenizer(model_name="llama-125m") == "none", "random tokens need none"
    data = {**GPUS, "MOCK_DATA": "0", "DATA_PATH": str(tmp_path)}
    write_corpus(tmp_path / "demo")
    assert refusal(data, model_name="llama-125m").startswith("tokenizer_name: 'llama-125m' comes without a tokenizer")
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configs.read("llama-125m")))
    assert refusal(data, model_name=folder).startswith(f"tokenizer_name: '{folder}' comes without a tokenizer")
    (folder / "tokenizer.json").touch()
    assert refusal(data, model_name=folder).startswith(f"tokenizer_name: {folder}/tokenizer.json: is not JSON")
    (folder / "tokenizer.json").write_text(two_tokens()["tokenizer.json"])
    assert tokenizer(data, model_name=folder) == str(folder)


def test_checkpoints_and_initial_weights(tmp_path):
    environ = {**GPUS, "OUTPUT_BASE": str(tmp_path), "EXP_NAME": "run 1"}
    output = tmp_path / "run 1/output"
    for step in (10, 9, 100):
        (output / f"checkpoint-{step}").mkdir(parents=True)
        (output / f"checkpoint-{step}/.checkpoint_done").touch()
    (output / "checkpoint-110").mkdir()  # training stopped while it was written
    weights = tmp_path / "weights"
    weights.mkdir()

    assert "9, 10, 100" in refusal(environ, resume_step=11)
    assert "not complete" in refusal(environ, resume_step=110)
    assert refusal(environ, resume_step="none").startswith("resume_step=none starts anew")
    assert "init_weight" in refusal({**environ, "EXP_NAME": "2"}, init_weight=weights)
    (weights / "model_state.pdparams").touch()
    for resume in ("auto", "10"):
        assert refusal(environ, resume_step=resume, init_weight=weights).startswith("init_weight and resume_step=")

    def given(environ, **arguments):
        made = plan(environ, **arguments)
        found = flags(made.command, made.script)
        return found.get("resume_from_checkpoint"), found.get("te_init_weight_path")

    assert given(environ, resume_step=10) == (str(output / "checkpoint-10"), None)
    assert given(environ, resume_step="auto") == ("auto", None)
    assert given({**environ, "OVERWRITE": "1"}) == (None, None)
    assert given({**environ, "EXP_NAME": "2"}, resume_step="auto", init_weight=weights) == ("auto", str(weights))


def test_an_output_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    environ = {**CPU, "DRY_RUN": "0", "OUTPUT_BASE": str(tmp_path / "file/out"), "EXP_NAME": "e"}
    message = refusal(environ, model_name="llama-125m", tokenizer_name="none", TP=1, precision="fp32")
    assert message.startswith(
        f"OUTPUT_BASE, EXP_NAME or OUTPUT_DIR: {tmp_path}/file/out/e cannot be made or written: {tmp_path}/file is"
    )


# ---------------------------------------------------------------------------------------------------- devices, nodes


def fake_smi(folder, gpus, monkeypatch):
    lines = "".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: GPU-{i})'\n" for i in range(gpus))
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}echo '  MIG 1g.18gb Device 0: (UUID: MIG-0)'\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_devices_are_found(tmp_path, monkeypatch):
    mock = {"MOCK_DATA": "1"}
    cpu = dict(model_name="llama-125m", TP=1, precision="fp32")

    def seen(environ, **arguments):
        args = parse(pretrain, [f"--{name}={value}" for name, value in arguments.items()], {**mock, **environ})
        found = devices.find_devices(args, environ)
        return found.kind, ",".join(found.ids)

    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi yet
    monkeypatch.setattr(devices, "_has_paddle_gpu", lambda: False)
    assert seen({}) == ("cpu", "0")
    assert seen({}, DEVICES="0,1", **cpu) == ("cpu", "0,1")
    with pytest.raises(LaunchError, match="DEVICE: no device of kind gpu"):
        seen({}, DEVICE="gpu")
    # A dry run for another machine, which must have an accelerator.
    assert seen({}, DRY_RUN=1, DEVICES="0,1,2,3") == ("gpu", "0,1,2,3")
    assert seen({}, DRY_RUN=1, DEVICES="0,1", precision="fp32") == ("cpu", "0,1")
    assert seen({}, DRY_RUN=1, DEVICES="0,1", precision="fp32", GPU="h100") == ("gpu", "0,1")

    # The plug-in: its host runtime on a machine with no GPU, else all GPUs.
    plugin = {"CUSTOM_DEVICE_ROOT": "/plugin"}
    assert seen(plugin) == ("nvgpu", "0")
    assert seen({**plugin, "NVGPU_HOST_DEVICES": "3"}) == ("nvgpu", "0,1,2")
    assert seen(plugin, DEVICES="0,1,2,3") == ("nvgpu", "0,1,2,3")
    assert seen(plugin, DEVICE="cpu") == ("cpu", "0")
    with pytest.raises(LaunchError, match="DEVICES: no nvgpu 8 here"):
        seen(plugin, DEVICES="8")

    installed = SimpleNamespace(origin=str(tmp_path / "site/paddle/__init__.py"))
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: installed)
    library = tmp_path / "site/paddle_custom_device/libnvgpu.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert seen({}) == ("cpu", "0"), "installed, but there is no GPU"
    fake_smi(tmp_path, 4, monkeypatch)
    assert seen({}) == ("nvgpu", "0,1,2,3")
    assert seen({"CUSTOM_DEVICE_ROOT": ""}) == ("cpu", "0")
    library.unlink()
    assert seen({}) == ("cpu", "0"), "GPUs that this Paddle cannot use"
    assert seen(plugin) == ("nvgpu", "0,1,2,3")
    assert seen({**plugin, "CUDA_VISIBLE_DEVICES": "2,3"}) == ("nvgpu", "0,1")
    monkeypatch.setattr(devices, "_has_paddle_gpu", lambda: True)
    assert seen(plugin) == ("gpu", "0,1,2,3")
    assert seen({}, DEVICES="1,3") == ("gpu", "1,3")
    assert seen({"CUDA_VISIBLE_DEVICES": "2,3"}) == ("gpu", "2,3")
    for nothing in ("", "-1"):
        assert seen({"CUDA_VISIBLE_DEVICES": nothing}) == ("cpu", "0")
    with pytest.raises(LaunchError, match="DEVICE: no device of kind nvgpu"):
        seen({"CUDA_VISIBLE_DEVICES": "-1"}, DEVICE="nvgpu")
    with pytest.raises(LaunchError, match="NVGPU_HOST_DEVICES: 'two' must be a whole number"):
        seen({"NVGPU_HOST_DEVICES": "two"}, DEVICE="nvgpu")
    with pytest.raises(LaunchError, match="DEVICES: no gpu 0 here; visible: 2, 3"):
        seen({"CUDA_VISIBLE_DEVICES": "2,3"}, DEVICES="0,2")


def uuids(*args, environ={}):  # noqa: B006 (read only)
    """DEVICES by UUID on four GPUs, of which GPU-2… are two, as the command has them."""
    made = plan({"MOCK_DATA": "1", "DEVICE": "gpu", "CUSTOM_DEVICE_ROOT": "", **environ}, DEVICES=",".join(args), TP=1)
    return made.devices.ids, made.env.get("CUDA_DEVICE_ORDER")


def test_devices_by_uuid(tmp_path, monkeypatch):
    names = ["GPU-0a-1", "GPU-1b-2", "GPU-2c-3", "GPU-2c-33"]
    listing = [f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: {name})" for i, name in enumerate(names)]
    listing.insert(1, "  MIG 1g.10gb     Device  0: (UUID: MIG-5d)")
    monkeypatch.setattr(devices, "_gpu_listing", lambda: listing)
    dry = {"DRY_RUN": "1"}
    assert uuids("GPU-1b-2", "GPU-0a", environ=dry) == (["1", "0"], "PCI_BUS_ID")
    assert uuids("GPU-2c-3", "3", environ=dry) == (["2", "3"], "PCI_BUS_ID"), "a whole UUID that begins another one"
    assert uuids("1", environ=dry) == (["1"], None)
    assert uuids("GPU-1b", environ={**dry, "CUDA_VISIBLE_DEVICES": "2,1"})[0] == ["1"]
    assert uuids("GPU-1b", environ={**dry, "CUDA_VISIBLE_DEVICES": "GPU-2c-3,GPU-1b"})[0] == ["GPU-1b"]
    assert uuids("GPU-1b", environ={**dry, "CUDA_VISIBLE_DEVICES": "2,1", "DEVICE": "nvgpu"})[0] == ["1"]
    for wrong, said in {
        "GPU-9": "GPU-9 is the UUID of no GPU here, or of several; nvidia-smi -L shows GPU-0a-1, GPU-1b-2, GPU-2c-3",
        "GPU-2": "GPU-2 is the UUID of no GPU here, or of several",
        "1,GPU-1b": "1,GPU-1b names a GPU twice",
        "MIG-5d": "MIG-5d is a part of a GPU, with which",
    }.items():
        assert said in refusal({"DRY_RUN": "1", "MOCK_DATA": "1", "DEVICE": "gpu"}, DEVICES=wrong, TP=1)
    hidden = {"DRY_RUN": "1", "MOCK_DATA": "1", "DEVICE": "gpu", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert "GPU-2c-3 is the UUID of no GPU here" in refusal(hidden, DEVICES="GPU-2c-3", TP=1)
    assert "a GPU's name, and this runs on the CPU" in refusal(CPU, DEVICES="GPU-0a", TP=1, precision="fp32")
    assert devices.has_gpu("GPU-0a", {}) and not devices.has_gpu("GPU-0a", {"CUDA_VISIBLE_DEVICES": "1"})


def test_a_dry_run_counts_uuids_where_no_gpu_is_seen(monkeypatch, capsys):
    monkeypatch.setattr(devices, "_gpu_listing", list)
    assert uuids("GPU-7", "GPU-3", environ={"DRY_RUN": "1"})[0] == ["0", "1"]
    assert "counts those of DEVICES from 0" in capsys.readouterr().err


@pytest.mark.parametrize("named, left", [
    ("0,1,2,3", ["0", "1", "2"]),
    ("3,0", []),  # CUDA shows none that come after one that is not there
    ("GPU-1,GPU-2", ["GPU-1", "GPU-2"]),
    ("MIG-0,GPU-3,GPU-2", ["MIG-0"]),
    ("all", ["0", "1", "2"]),
])  # fmt: skip
def test_a_gpu_that_is_gone_is_not_seen_where_it_is_named(tmp_path, monkeypatch, named, left):
    fake_smi(tmp_path, 3, monkeypatch)
    environ = {} if named == "all" else {"CUDA_VISIBLE_DEVICES": named}
    assert devices.visible_devices("gpu", environ) == left
    assert devices.visible_devices("nvgpu", environ) == [str(number) for number in range(len(left))]


def test_named_gpus_are_believed_where_no_driver_answers(tmp_path, monkeypatch):
    fake_smi(tmp_path, 0, monkeypatch)
    assert devices.visible_devices("gpu", {"CUDA_VISIBLE_DEVICES": "2,GPU-7"}) == ["2", "GPU-7"]


def test_one_device_needs_no_launcher():
    made = plan({**GPUS, "DEVICES": "3"}, TP=1)
    assert made.command[1:3] == ["-u", made.script] and made.env["FLAGS_selected_gpus"] == "3"
    assert "PORT_RANGE" not in made.env
    visible = plan({**GPUS, "DEVICES": "3", "CUDA_VISIBLE_DEVICES": "2,3"}, TP=1)
    assert visible.env["FLAGS_selected_gpus"] == "1", "Paddle counts among the visible ones"
    assert plan({**GPUS, "DEVICE": "nvgpu", "DEVICES": "1"}, TP=1).env["FLAGS_selected_nvgpus"] == "1"
    on_cpu = plan({**CPU, "CUDA_VISIBLE_DEVICES": "0", "CUSTOM_DEVICE_ROOT": "/p"}, TP=1, precision="fp32")
    assert on_cpu.shell().startswith("env -u CUDA_VISIBLE_DEVICES PYTHONPATH=")
    assert on_cpu.env["CUSTOM_DEVICE_ROOT"] == "", "unset, an installed plug-in would be loaded"
    assert "CUSTOM_DEVICE_ROOT" not in plan({**CPU, "CUSTOM_DEVICE_ROOT": ""}, TP=1, precision="fp32").env


def words_before_script(made):
    return made.command[1 : made.command.index(made.script)]


def test_several_devices():
    made = plan()
    assert words_before_script(made) == [
        *("-u", "-m", "paddle.distributed.launch", "--devices", "0,1,2,3,4,5,6,7"),
        *("--host", "127.0.0.1", "--log_dir", str(made.logs)),
    ]
    assert made.processes == 8
    assert made.env["PORT_RANGE"] == "10000:19999", "below the ephemeral ports"
    assert plan({**GPUS, "PORT_RANGE": "9000:9008"}).env["PORT_RANGE"] == "9000:9008"
    on_cpu = plan({**CPU, "DEVICES": "0,1"}, TP=1, precision="fp32")
    assert words_before_script(on_cpu)[3:5] == ["--nproc_per_node", "2"]


def test_tensor_parallel_ranks_start_collectives_first():
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert plan(GPUS, TP=2).env[name] == "1" and plan({**GPUS, name: "8"}, TP=2).env[name] == "8"
    assert name not in plan(GPUS, TP=1).env and name not in plan(CPU, TP=1, precision="fp32").env


def test_several_nodes():
    slurm = {**GPUS, "SLURM_JOB_NUM_NODES": "4", "SLURM_NODEID": "2", "SLURM_JOB_ID": "1234567"}
    addresses = "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4"
    made = plan({**slurm, "IP_STR": addresses}, TP=8, FSDP=4)
    assert words_before_script(made)[5:] == [
        *("--ips", "HOSTS", "--start_port", "29134", "--host", "10.0.0.3", "--log_dir", str(made.logs)),
    ]
    assert "--ips 10.0.0.1,10.0.0.3 --start_port" in " ".join(made.command_on(["10.0.0.1", "10.0.0.3"]))
    assert made.logs.name == "node2" and made.logs.parts[-3].startswith("N4_DP1_TP8_")
    plain = {**GPUS, "NNODES": "2", "NODE_RANK": "0", "MASTER": "127.0.0.1:7070"}
    assert words_before_script(plan(plain))[5:11] == [
        *("--ips", "HOSTS", "--start_port", "7070", "--host", "127.0.0.1")
    ]
    assert plan({**plain, "MASTER": "127.0.0.1", "NODE_RANK": "1"}).nodes.master == "127.0.0.1:6070"
    for fewer in ("NNODES", "SLURM_STEP_NUM_NODES"):  # of us, or of an srun on one of the job's nodes
        assert words_before_script(plan({**slurm, fewer: "1"}))[5] == "--host"

    assert refusal({**slurm, "IP_STR": "10.0.0.1,10.0.0.2"}).startswith("IP_STR: it must hold 4 addresses")
    assert refusal(slurm).startswith("MASTER: with 4 nodes")
    assert refusal({**plain, "NODE_RANK": "2"}).startswith("NODE_RANK: with 2 nodes it must be 0 to 1")
    assert refusal({**plain, "NODE_RANK": ""}).startswith("NODE_RANK: ")
    for port in ("port", "0", "65535", "70000", "７000"):
        assert refusal({**plain, "MASTER": f"127.0.0.1:{port}"}).startswith(f"MASTER: 127.0.0.1:{port} must be")
    for address in ("[::1]:7000", "::1", "fe80::1:7000", "[2001:db8::5]"):
        assert f"MASTER: {address} is an IPv6 address" in refusal({**plain, "MASTER": address})
        assert "is an IPv6 address" in refusal({**slurm, "IP_STR": f"{address},b,c,d"})
    for address in (":7000", "0.0.0.0:7000", "１２７.0.0.1:7000"):
        assert f"MASTER: {address} must be address:port" in refusal({**plain, "MASTER": address})
    tasks = {"SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_NUM_NODES": "4"}
    assert "starts this 32 times on 4 nodes" in refusal({**slurm, **tasks, "IP_STR": addresses})
    assert plan({**slurm, **tasks, "SLURM_STEP_NUM_TASKS": "4", "IP_STR": addresses})
    assert "number of devices, 16" in refusal(plain, TP=8, FSDP=4)


def test_a_head_node_whose_name_is_a_loopback_address(monkeypatch):
    """Debian's /etc/hosts has the machine's own name at 127.0.1.1: the others would wait a quarter of an hour."""
    found = {"node0": "127.0.1.1", "localhost": "127.0.0.1", "127.0.0.3": "127.0.0.3"}
    found[nodes.socket.gethostname()] = "127.0.0.2"
    monkeypatch.setattr(nodes.socket, "gethostbyname", found.__getitem__)

    def master_of(master, rank="0"):
        args = parse(pretrain, [], {"MOCK_DATA": "1", "NNODES": "2", "NODE_RANK": rank, "MASTER": master})
        job = nodes.find_nodes(args, {"NODE_RANK": rank})
        assert rank == "0" or job.host == "127.0.0.2", "by its name, where the route has 127.0.0.1 for every node"
        return job.master

    with pytest.raises(LaunchError, match="MASTER: 'node0' is 127.0.1.1 on this node"):
        master_of("node0:6070")
    assert master_of("localhost:6070") == "127.0.0.1:6070" and master_of("127.0.0.3:6070") == "127.0.0.3:6070"
    assert master_of("node0:6070", rank="1") == "127.0.1.1:6070", "only the head knows that it is itself"


# ---------------------------------------------------------------------------------------------------- command


def test_the_original_flags_by_default(tmp_path):
    made = plan({**GPUS, "OUTPUT_BASE": str(tmp_path)})
    name = "N1_DP4_TP2_PP1_VP1_GA8_SPfalse_FSDP1_MBS2_none_bf16_none_meta-llama_Llama-2-7b"
    expected = {
        "model_name_or_path": str(configs.resolve("meta-llama/Llama-2-7b")),
        "tokenizer_name_or_path": "meta-llama/Llama-2-7b",
        "output_dir": str(tmp_path / name / "output"),
        "split": "949,50,1",
        "max_seq_length": "4096",
        "per_device_train_batch_size": "2",
        "gradient_accumulation_steps": "8",
        "tensor_parallel_degree": "2",
        "sharding_parallel_degree": "1",
        "pipeline_parallel_degree": "1",
        "virtual_pp_degree": "1",
        "sequence_parallel": "0",
        "transformer_engine_backend": "none",
        "bf16": "1",
        "fp16_opt_level": "O2",
        "recompute": "0",
        "learning_rate": "3e-05",
        "min_learning_rate": "3e-06",
        "warmup_steps": "30",
        "max_steps": "20000",
        "save_steps": "10000",
        "logging_steps": "1",
        "use_flash_attention": "1",
        "use_fused_rope": "1",
        "fuse_attention_ffn": "1",
        "device": "gpu",
        "do_train": "1",
        "continue_training": "0",
        "report_to": "visualdl",
    }
    given = flags(made.command, made.script)
    assert {key: given.get(key) for key in expected} == expected
    absent = {"sharding", "use_fp8", "resume_from_checkpoint", "te_init_weight_path", "pipeline_parallel_config"}
    assert not absent & given.keys()
    assert list(tmp_path.iterdir()) == [], "a plan writes nothing"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            dict(backend="te", precision="fp8"),
            dict(transformer_engine_backend="transformer_engine", use_fp8="1", bf16="1"),
        ),
        (dict(backend="pd", precision="fp32"), dict(transformer_engine_backend="paddle", bf16="0")),
        (dict(recompute="core_attn"), dict(recompute="1", recompute_granularity="core_attn")),
        (dict(recompute="full"), dict(recompute="1", recompute_granularity="full")),
        (dict(FSDP=4, sharding_stage="stage1"), dict(sharding="stage1", sharding_parallel_degree="4")),
        (
            dict(FSDP=4, OVERLAP=1, LOGGING_STEPS=2),
            dict(sharding_parallel_config="enable_stage2_overlap", amp_master_grad="1", logging_steps="2"),
        ),
        (
            dict(FSDP=4, sharding_stage="stage1", OVERLAP=1, LOGGING_STEPS=10, backend="te"),
            dict(
                sharding_parallel_config="split_param enable_stage1_overlap enable_stage1_allgather_overlap",
            ),
        ),
        (dict(SP="true"), dict(sequence_parallel="1", pipeline_parallel_config="disable_partial_send_recv")),
        (
            dict(SP="true", PP=2, FSDP=2, sharding_stage="stage1", OVERLAP=1),
            dict(
                sharding_parallel_config="enable_stage1_broadcast_overlap",
                pipeline_parallel_config="disable_partial_send_recv enable_sharding_comm_overlap",
                logging_steps="2",
            ),
        ),
        (
            dict(DEVICE="nvgpu"),
            dict(device="nvgpu", use_flash_attention="0", use_fused_rope="0", amp_master_grad="1"),
        ),
        (
            dict(LEARNING_RATE="1e-4", MAX_STEPS=7),
            dict(learning_rate="0.0001", min_learning_rate="1e-05", max_steps="7", warmup_steps="0"),
        ),
        (dict(MAX_STEPS=290), dict(warmup_steps="29")),  # which a short run reaches the end of
        (
            dict(TP=1, SEP=4, sharding_stage="stage1", FSDP="all"),
            dict(sep_parallel_degree="4", sharding_parallel_degree="2"),
        ),
        (
            dict(TP=1, EP=4, sharding_stage="stage1", FSDP="all", OVERLAP=0, **MIXTURE),
            dict(expert_parallel_degree="4", sharding_parallel_config="split_param", amp_master_grad="1"),
        ),
        (dict(TP=1, PP=4, VP=2, GA=16), dict(virtual_pp_degree="2", gradient_accumulation_steps="16")),
    ],
)
def test_what_an_argument_changes(arguments, expected):
    made = plan(**arguments)
    given = flags(made.command, made.script)
    assert {key: given.get(key) for key in expected} == expected


def test_run_pretrain_understands_every_flag(tmp_path):
    from paddlenlp.trainer import PdArgumentParser

    from paddle_te.hosts.paddlenlp.training.arguments import ModelArguments, PreTrainingArguments
    from paddle_te.hosts.paddlenlp.training.datasets import DataArguments

    environ = {**GPUS, "OUTPUT_BASE": str(tmp_path / "out put"), "EXTRA_ARGS": "--seed 7 --run_name 'a b'"}
    made = plan(environ, backend="te", precision="fp8", recompute="core_attn", SP="true", FSDP=2, resume_step="auto")
    parser = PdArgumentParser((ModelArguments, DataArguments, PreTrainingArguments))
    known, unknown = parser.parse_known_args(made.command[made.command.index(made.script) + 1 :])
    assert unknown == []
    assert (known.seed, known.run_name) == (7, "a b"), "EXTRA_ARGS come last, split as a shell would"
    assert known.use_fp8 is known.bf16 is known.mock_data is known.sequence_parallel is known.recompute is True
    assert known.use_fused_rms_norm is known.continue_training is False
    assert known.output_dir.startswith(str(tmp_path / "out put"))
    assert (known.tensor_parallel_degree, known.recompute_granularity) == (2, "core_attn")
    assert (known.sharding, known.resume_from_checkpoint) == ("stage2", "auto")


def test_experiment_names(tmp_path):
    folder = tmp_path / "my model (v2)"
    folder.mkdir()
    (folder / "config.json").write_text((configs.resolve("llama-125m") / "config.json").read_text())
    arguments = dict(TP=4, backend="te", precision="fp8", SP="true", recompute="full", batch_size_per_device=1)
    made = plan({**GPUS, "OUTPUT_BASE": str(tmp_path)}, model_name=folder, tokenizer_name="none", **arguments)
    name = "N1_DP2_TP4_PP1_VP1_GA8_SPtrue_FSDP1_MBS1_te_fp8_full_my_model__v2_"
    assert made.logs == tmp_path / name / "logs"
    assert plan(model_name="llama-3-8b").logs.parts[-2].endswith("_none_bf16_none_meta-llama_Meta-Llama-3-8B")
    assert "_FSDP1_SEP2_MBS2_" in plan(SEP=2).logs.parts[-2]
    assert "_FSDP1_CP2_MBS2_" in plan(CP=2).logs.parts[-2]
    divided = plan(TP=1, EP=4, sharding_stage="stage1", FSDP=8, **MIXTURE)
    assert "_FSDP8_EP4_MBS2_" in divided.logs.parts[-2]
    assert plan(EXP_NAME="mine").logs.parts[-2] == "mine"


def test_the_shown_command_is_the_command():
    made = plan(EXTRA_ARGS="--run_name 'a  b;c'")
    words = shlex.split(made.shell())
    assert words[0] == "env" and words[-len(made.command) :] == made.command and words[-1] == "a  b;c"


def test_nsys(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(nsys_profile="true").startswith("nsys_profile=true needs nsys")
    (tmp_path / "nsys").write_text("#!/bin/sh\n")
    (tmp_path / "nsys").chmod(0o755)
    made = plan({**GPUS, "PROFILE_STOP_STEP": "5", "OUTPUT_BASE": str(tmp_path)}, nsys_profile="true")
    line = shlex.join(made.command)
    wanted = "nsys profile -s none -c cudaProfilerApi -t cuda,nvtx --force-overwrite true --capture-range-end=stop -o "
    assert line.startswith(wanted) and made.command[made.command.index("-o") + 1].startswith(
        f"{made.logs.parent}/profile/"
    )
    profile = {key: value for key, value in made.env.items() if "PROFILE" in key}
    steps = dict(PROFILE_START_STEP="3", PROFILE_STOP_STEP="5")
    assert profile == dict(ENABLE_PROFILE="1", PROFILER="nsys", **steps)
    second = {**GPUS, "NNODES": "2", "NODE_RANK": "1", "MASTER": "127.0.0.1:6070"}
    other = plan(second, nsys_profile="true")
    assert "nsys" not in other.command and other.env["ENABLE_PROFILE"] == "0", "one node is recorded"


@pytest.mark.parametrize("kind", ["gpu", "nvgpu", "cpu"])
def test_deterministic(kind):
    machine = {**(CPU if kind == "cpu" else GPUS), "DEVICE": kind}
    arguments = dict(backend="pd", precision="fp32", TP=1) if kind == "cpu" else {}
    name, without = "NVTE_ALLOW_NONDETERMINISTIC_ALGO", plan(machine, **arguments).env
    added = plan({**machine, "DETERMINISTIC": "1"}, **arguments).env.items() - without.items()
    assert name not in without
    if kind == "cpu":
        assert not added, "a CPU's runs are equal anyway"
        return
    assert (name, "0") in added and (kind == "gpu") == ("FLAGS_embedding_deterministic" in dict(added))
    contrary = {**machine, "DETERMINISTIC": "1", name: "1"}
    assert refusal(contrary) == f"DETERMINISTIC=1 sets {name}=0, but the environment has '1': unset it"


def test_paddles_profiler():
    made = plan({**GPUS, "PROFILER": "paddle", "PROFILE_STOP_STEP": "4"})
    assert (made.env["ENABLE_PROFILE"], made.env["PROFILER"], made.env["PROFILE_STOP_STEP"]) == ("1", "paddle", "4")
    assert "nsys" not in made.command and plan().env["ENABLE_PROFILE"] == "0"


def test_seventeen_arguments_in_the_originals_order():
    assert " ".join(option.name for option in pretrain.ARGUMENTS) == (
        "model_name tokenizer_name batch_size_per_device FSDP TP PP VP GA SP max_seqlen sharding_stage backend "
        "precision recompute resume_step init_weight nsys_profile"
    )


@pytest.mark.parametrize("words", [["finetune"], ["finetune", "--TP", "0"]])
def test_whoever_gives_no_argument_is_told_of_help(words, capsys):
    assert main(words) == 2
    assert ("paddle-te finetune --help lists the arguments" in capsys.readouterr().err) == (len(words) == 1)


@pytest.mark.parametrize("job", [pretrain, finetune])
def test_help_names_each_default_once(job):
    text = make_parser(job, {}).format_help()
    assert "(default: )" not in text and "(default: None)" not in text and "(default: none)" in text
    assert all(len(part.split("(default")) <= 2 for part in text.split("\n  --"))


def test_removed_options():
    said = refusal(CPU, EXTRA_ARGS="--tp_comm_overlap 4")
    assert said == "EXTRA_ARGS: --tp_comm_overlap: this option went with version 0.2.0; delete it"
    said = refusal({**CPU, "STRAGGLER_STEPS": "5"})
    assert said == "STRAGGLER_STEPS: this option went with version 0.2.0; delete it"
