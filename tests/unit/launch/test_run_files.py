"""Run files: the same plan from the launcher's words and PaddleNLP's, what overrides what, and what is refused."""

import json
from pathlib import Path

import pytest

from paddle_te import configs, recipes
from paddle_te.launch import __main__ as launcher
from paddle_te.launch import finetune, pretrain, run_files
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.paddleformers.start import two_tokens
from paddle_te.launch.plan import make_plan
from paddle_te.planner.gpus import GPUS as CARDS
from paddle_te.planner.memory import lacking, memory_of_step
from paddle_te.planner.model import Model
from tests.sizes import TINY
from tests.small_corpora import write_corpus

GPUS = {"DRY_RUN": "1", "DEVICE": "gpu", "DEVICES": "0,1,2,3"}
# PaddleNLP's llm/config/llama/pretrain_argument.json, without the data that it names
PRETRAINING = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B", "tokenizer_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "input_dir": "data", "output_dir": "ckpts", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16,
    "tensor_parallel_degree": 2, "pipeline_parallel_degree": 1, "sharding": "stage2", "virtual_pp_degree": 1,
    "sequence_parallel": 0, "max_seq_length": 4096, "learning_rate": 3e-05, "min_learning_rate": 3e-06,
    "max_steps": 10000, "save_steps": 5000, "bf16": True, "fp16_opt_level": "O2", "recompute": False,
    "recompute_granularity": "full", "unified_checkpoint": True, "do_train": True, "save_total_limit": 2,
}  # fmt: skip
# llm/config/llama/sft_argument.json and lora_argument.json, shortened
FINETUNING = {
    "model_name_or_path": "model", "dataset_name_or_path": "questions", "output_dir": "out", "max_steps": -1,
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_train_epochs": 3, "learning_rate": 3e-05,
    "logging_steps": 1, "evaluation_strategy": "epoch", "src_length": 1024, "max_length": 2048, "bf16": True,
    "fp16_opt_level": "O2", "do_train": True, "do_eval": True, "eval_with_do_generation": False, "recompute": True,
    "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "sharding": "stage1", "pissa": False,
    "unified_checkpoint": True, "zero_padding": False,
}  # fmt: skip


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Makes a run file in a folder with data, a model and questions; returns its name."""
    monkeypatch.chdir(tmp_path)
    files = {"data/x": "", "model/model_state.pdparams": ""} | {f"model/{n}": text for n, text in two_tokens().items()}
    files |= dict.fromkeys(("questions/train.json", "questions/dev.json"), '{"src": "a", "tgt": "b"}\n')
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    write_corpus(tmp_path / "data/corpus", [[5, 6, 7]] * 4000)
    (tmp_path / "model/config.json").write_text(json.dumps(TINY))

    def write(values, name="run.json"):
        (tmp_path / name).write_text(values if isinstance(values, str) else json.dumps(values))
        return name

    return write


def plan(job, words, environ=GPUS):
    return make_plan(job, words, environ)


def flags(command, script):
    """{flag: value} as argparse reads them: the last of two counts."""
    words = command[command.index(script) + 1 :]
    return {key[2:]: value for key, value in zip(words[::2], words[1::2], strict=True)}


def refusal(job, words, environ=GPUS):
    with pytest.raises(LaunchError) as error:
        plan(job, words, environ)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_paddlenlps_file_of_pretraining(file, tmp_path):
    made, args = plan(pretrain, [file(PRETRAINING)])
    assert (args.TP, args.FSDP, args.sharding_stage, args.GA) == (2, 2, "stage2", 16), "all devices that TP leaves"
    assert (args.precision, args.recompute, args.SP, args.backend) == ("bf16", "none", False, "none")
    assert made.output == made.folder == tmp_path / "ckpts" and args.DATA_PATH == "data"
    given = flags(made.command, made.script)
    assert given["sharding_parallel_degree"] == "2" and given["max_steps"] == "10000" and given["bf16"] == "1"
    assert given["min_learning_rate"] == "3e-06" and given["unified_checkpoint"] == "true", "passed on"


def test_paddlenlps_file_of_fine_tuning(file, tmp_path):
    made, args = plan(finetune, [file(FINETUNING)], {**GPUS, "DEVICES": "0,1"})
    assert (args.FSDP, args.sharding_stage, args.recompute, args.MAX_STEPS) == (2, "stage1", "full", None)
    given = flags(made.command, made.script)
    assert given["src_length"] == "1024" and given["evaluation_strategy"] == "epoch" and given["do_eval"] == "true"
    assert not {"eval_with_do_generation", "pissa"} & given.keys() and made.output == tmp_path / "out"


def test_the_command_line_overrides_in_whichever_words(file):
    name = file(PRETRAINING)
    args = plan(pretrain, [name, "--TP", "1", "--precision=fp8", "--backend", "te", "--recompute", "full"])[1]
    assert (args.TP, args.FSDP, args.precision, args.recompute) == (1, 4, "fp8", "full")
    launchers = file({"TP": 4, "precision": "fp8", "backend": "te", "MOCK_DATA": 1, "tokenizer_name": "none"}, "b.json")
    words = [launchers, "--tensor_parallel_degree", "2", "--bf16", "true", "--fp16_opt_level", "O2", "--seed", "7"]
    made, args = plan(pretrain, words, {**GPUS, "DEVICES": "0,1", "EXTRA_ARGS": "--seed 1 --adam_beta2 0.95"})
    assert (args.TP, args.precision) == (2, "bf16")
    assert flags(made.command, made.script)["seed"] == "7" and "--adam_beta2 0.95" in args.EXTRA_ARGS


def test_data_on_the_command_line_takes_the_place_of_a_recipes_random_tokens(file):
    file("{}")
    words = ["llama3-8b-4xh200-fp8.json", "--DATA_PATH", "data", "--tokenizer_name", "model"]
    made, args = plan(pretrain, words)
    assert not args.MOCK_DATA and flags(made.command, made.script)["input_dir"].endswith("/data")


def test_a_file_comes_before_the_environment(file):
    name = file({"MAX_STEPS": 7, "MOCK_DATA": True, "tokenizer_name": "none", "TP": 1})
    args = plan(pretrain, [name], {**GPUS, "MAX_STEPS": "5", "SAVE_STEPS": "3"})[1]
    assert (args.MAX_STEPS, args.SAVE_STEPS, args.MOCK_DATA) == (7, 3, True)


JOBS = {"pretrain": pretrain, "finetune": finetune}
FOLDERS = ["--model_name", "model", "--dataset", "questions", "--output", "out"]


def machines_of(recipe):
    """The environment of a dry run for a recipe's GPUs, eight in a node."""
    nodes = max(1, recipe.gpus // 8)
    several = {"NNODES": str(nodes), "NODE_RANK": "0", "MASTER": "127.0.0.1"} if nodes > 1 else {}
    devices = ",".join(map(str, range(recipe.gpus // nodes)))
    return {
        "DRY_RUN": "1",
        "DEVICE": "nvgpu",
        "GPU": recipe.card,
        "DEVICES": devices,
        "CUSTOM_DEVICE_ROOT": "",
    } | several


@pytest.mark.parametrize("recipe", recipes.recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_starts_on_its_gpus_and_fits(recipe, file, tmp_path):
    config = configs.read(recipe.model)
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    words = [recipe.name, *(FOLDERS if recipe.command == "finetune" else [])]
    made, args = plan(JOBS[recipe.command], words, machines_of(recipe))
    layout, model = made.layout, Model.of(config)
    assert (layout.world, layout.precision) == (recipe.gpus, recipe.precision)
    assert lacking(memory_of_step(model, layout), model, layout, CARDS[recipe.card]) <= 0
    assert recipe.task == "pretrain" or args.method.split("-")[0] == ("full" if recipe.task == "sft" else "lora")
    assert layout.fp8_base == (recipe.task == "lora-fp8")
    assert not {f"--{name}" for name in recipes.ABOUT} & {*made.command}, "what a recipe says of itself is no flag"


@pytest.mark.parametrize("name", ["llama3-8b-2xh200-fp8", "llama3-70b-1xh200-fp8-lora-fp8base"])
def test_print_config_writes_the_complete_file(name, file, capsys, monkeypatch):
    """From what it writes the same command is made, without the recipe and the variables."""
    recipe = recipes.Recipe(name)
    job, environ = JOBS[recipe.command], machines_of(recipe)
    words = [f"{name}.json", "--MAX_STEPS", "20", *(FOLDERS if job is finetune else [])]
    for variable, value in {**environ, "CHECK_MEMORY": "0", "SAVE_STEPS": "77"}.items():
        monkeypatch.setenv(variable, value)
    assert launcher.main([recipe.command, *words, "--print-config"]) == 0
    text = capsys.readouterr().out
    expected = {"MAX_STEPS": 20, "max_seqlen": recipe.values["max_seqlen"]} | (
        {} if job is finetune else {"SAVE_STEPS": 77}
    )
    assert json.loads(text).items() >= expected.items()
    complete = plan(job, [file(text)], {"DRY_RUN": "1", "CUSTOM_DEVICE_ROOT": ""})[0]
    assert complete.command == plan(job, words, {**environ, "CHECK_MEMORY": "0", "SAVE_STEPS": "77"})[0].command


@pytest.mark.parametrize("name", ["llama3-8b-8xh100-fp8", "llama3-8b-2xh200-fp8"])
def test_a_dry_run_without_gpus_is_one_of_the_recipes(name, monkeypatch):
    """As on the node from which jobs are submitted. A run, and what names its devices, is as always."""
    monkeypatch.setattr(run_files, "count_gpus", lambda: 0)
    made, args = plan(pretrain, [name], {"DRY_RUN": "1"})
    recipe = recipes.Recipe(name)
    assert (made.layout.world, args.GPU) == (recipe.gpus, recipe.card)
    with pytest.raises(LaunchError, match="backend=te needs an NVIDIA GPU"):
        plan(pretrain, [name], {"DRY_RUN": "1", "DEVICE": "cpu"})
    with pytest.raises(LaunchError, match="backend=te needs an NVIDIA GPU"):
        plan(pretrain, [name], {"DEVICE": "cpu"})


def test_a_recipe_is_refused_by_the_other_command(file):
    text = refusal(pretrain, ["llama3-8b-1xh100-fp8-lora"])
    assert text == "llama3-8b-1xh100-fp8-lora: its task is lora, and paddle-te pretrain runs pretrain"
    assert "paddle-te finetune runs sft, lora, lora-fp8" in refusal(finetune, ["llama3-8b-8xh100-fp8"])


@pytest.mark.parametrize(
    "values, words, said",
    [
        ("{", [], ["run.json", "is not JSON"]),
        ("[1]", [], ["run.json", "must be an object"]),
        ({"a": {}}, [], ["run.json", "a must be a value"]),
        ({"method": "lora"}, [], ["method", "paddle-te pretrain has no such argument"]),
        ({"TP": "x"}, [], ["TP: 'x' must be a whole number"]),
        ({"fp16": True}, [], ["fp16", "set bf16"]),
        ({"bf16": True}, [], ["fp16_opt_level", "O2"]),
        ({"bf16": "maybe"}, [], ["bf16", "true or false"]),
        ({"neftune": True}, [], ["neftune true", "not supported"]),
        ({"resume_from_checkpoint": "x"}, [], ["resume_step"]),
        ({"precision": "fp8", "bf16": True, "fp16_opt_level": "O2"}, [], ["precision=fp8", "give one"]),
        ({}, ["4"], ["4", "--NAME VALUE"]),
        ({}, ["--TP"], ["--TP", "value is missing"]),
        ({}, ["--ep", "2"], ["ep: there is no such name; here it is EP"]),
    ],
)
def test_what_means_nothing_is_refused(values, words, said, file):
    text = refusal(pretrain, [file(values), *words])
    assert all(part in text for part in said), text


def test_an_unknown_file_says_what_lists_the_recipes(file):
    assert "no such recipe; paddle-te recipes lists those" in refusal(pretrain, ["none.json"])


@pytest.mark.parametrize("name", ["llama3-8b-8xh100-fp9", "LLama3-8b-8xh100-fp8", "llama3-8b-8h100-fp8.json"])
def test_a_misspelt_recipe_is_named(name, file):
    assert "no such recipe; did you mean llama3-8b-8xh100-fp8" in refusal(pretrain, [name])


def test_models_and_folders_are_no_misspelt_recipes(file, tmp_path):
    (tmp_path / "llama3-8b-8xh100").mkdir()  # somebody's model
    assert not run_files.is_run_file(["llama3-8b-8xh100"])
    assert not any(run_files.is_run_file([name]) for each in configs.known_names() for name in (each, each.lower()))


def test_a_recipe_that_does_not_come_first_is_no_model(file, tmp_path):
    text = refusal(pretrain, ["--TP=1", "--model_name=llama3-8b-8xh100-fp8"])
    assert text == "model_name: 'llama3-8b-8xh100-fp8' is a recipe; it stands before all other arguments"
    Path("model").rename("llama3-8b-8xh100-fp8")  # somebody's model, which that recipe has made
    words = "--model_name llama3-8b-8xh100-fp8 --dataset questions --output out --TP 1 --backend te".split()
    assert plan(finetune, words)[0].output == tmp_path / "out"
