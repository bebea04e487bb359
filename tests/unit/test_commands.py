"""Each command that is printed, or stands in a text of the package, is one that its program takes."""

import argparse
import ast
import importlib
import re
import shlex
from importlib.metadata import metadata
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from paddle_te import commands, configs
from paddle_te.__main__ import COMMANDS
from paddle_te.hosts.paddlenlp.training import out_of_memory
from paddle_te.launch import auto, cards, devices, finetune, pretrain
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.paddleformers.start import two_tokens
from paddle_te.launch.plan import make_plan
from paddle_te.planner import command
from paddle_te.planner.gpus import GPUS
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.model import Model
from paddle_te.planner.search import search, usual_tokens
from paddle_te.weights.contents import convert_command, merge_command
from paddle_te.weights.inspection import _manifest
from tests.unit.hosts.paddlenlp.native import tiny_config

PACKAGE = Path(commands.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "commands.py")
DRY = dict(DRY_RUN="1", DEVICE="nvgpu", CUSTOM_DEVICE_ROOT="")
HOSTILE = ["a folder", "it's", "$(touch x);"]
TOO_LARGE = dict(model_name="meta-llama/Meta-Llama-3-8B", tokenizer_name="none", batch_size_per_device=1, FSDP=8, TP=1)
TOO_LARGE |= dict(GA=1, max_seqlen=8192, sharding_stage="stage1", backend="te", precision="fp8")
IN_TEXT = r"paddle-te ([a-z][\w-]*)((?: +(?:--[\w-]+|[A-Z_]+\b|\w+=\S+|[\w./-]+/?))*)"


def parser_of(name):
    return importlib.import_module(COMMANDS[name].module).make_parser(*COMMANDS[name].words)


def parsed(line):
    """The arguments of a printed command, by its program's parser; placeholders are what they stand for."""
    program, name, *words = shlex.split(line)
    assert program == "paddle-te"
    capitals = {word for word in words if re.fullmatch(r"[A-Z_]+", word)}
    assert capitals <= commands.PLACEHOLDERS.keys(), line
    words = ["8" if word == commands.NUMBER else word for word in words]
    parser = parser_of(name)
    parser.error = lambda message: pytest.fail(f"{line}: {message}")
    return parser.parse_args(words)


# ------------------------------------------------------------------------------------------- commands of values


@pytest.fixture
def printed(monkeypatch):
    """The commands that were made."""
    made, line = [], commands.line
    monkeypatch.setattr(commands, "line", lambda *words: made.append(line(*words)) or made[-1])
    return made


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_makes_commands_of_values(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            assert not re.search(r"paddle-te [\w-]+ (--?[\w-]+[ =]|[\w./]+ )*\0|converter\.py .*\0", text), text


@pytest.mark.parametrize("folder", HOSTILE)
def test_the_converters_and_verifys(folder, tmp_path, printed):
    folder = tmp_path / folder
    folder.mkdir()
    (folder / "manifest.json").touch()
    assert convert_command(folder, "--mode", "pd2te") and merge_command(folder) and merge_command("a b", folder)
    assert printed[-1] and _manifest(folder).endswith(f"{printed[-1]} compares it")
    converts, adds, merges, verifies = map(parsed, printed)
    assert (converts.input_ckpt_path, converts.mode) == (str(folder), "pd2te")
    assert (adds.input_ckpt_path, adds.lora_path) == (commands.MODEL, str(folder))
    assert (merges.input_ckpt_path, merges.lora_path, merges.output_ckpt_path) == (str(folder), "a b", commands.OUTPUT)
    assert [str(each) for each in verifies.folders] == [str(folder)]


@pytest.mark.parametrize("lora", [None, dict(rank=16, targets="mlp", fp8_base=True)])
@pytest.mark.parametrize("model", ["meta-llama/Meta-Llama-3-8B", *HOSTILE])
def test_the_planners_after_a_lack_of_memory(model, lora, monkeypatch, printed):
    """Of a run, and of the launcher."""
    layout = layout_of(8, 8192, sharding=8, stage=2, precision="fp8", lora=lora, optim_moments="int8")
    monkeypatch.setattr(out_of_memory, "job_of_run", lambda *_: layout)
    config = tiny_config(seq_length=8192, num_hidden_layers=1)
    told = out_of_memory.advice(config, SimpleNamespace(world_size=8), "NVIDIA H100 80GB HBM3", model, lora)
    monkeypatch.setattr(cards, "remedies", lambda *_: ({}, []))
    args = argparse.Namespace(GPU=None, model_name=model, max_seqlen=8192)
    text = cards._what_fits(args, Model.of(config), layout, GPUS["h100"])
    assert told.endswith(printed[0]) and f"; {printed[1]} says what more do" in text
    for found in map(parsed, printed):
        assert (found.model, found.seq, found.gpu, found.gpus) == (model, 8192, "h100", 8)
        assert (found.lora_rank, found.quantize_base) == ((16, "fp8") if lora else (None, None))


def test_the_planners_for_auto_on_another_machine(monkeypatch, printed):
    monkeypatch.setattr(devices, "_gpu_listing", lambda: ["GPU 0: NVIDIA A10 (UUID: GPU-0)"])
    with pytest.raises(LaunchError) as refused:
        auto._gpu(argparse.Namespace(GPU=None, DRY_RUN=True, model_name="a b"), 4)
    assert printed[0] in str(refused.value) and parsed(printed[0]).model == "a b" and parsed(printed[0]).gpus == 4


SEARCHES = [
    ("meta-llama/Meta-Llama-3-8B", 1, 8192, {}),
    ("meta-llama/Meta-Llama-3-8B", 8, 8192, {}),
    ("meta-llama/Meta-Llama-3-8B", 2, 65536, dict(optim_moments="int8")),
    ("Qwen/Qwen2.5-7B", 4, 4096, dict(fp8_input_store=True)),
    ("gpt-126m", 2, 1024, dict(optimizer_in_backward="unclipped")),
    ("meta-llama/Meta-Llama-3-70B", 4, 4096, dict(lora=dict(rank=16, targets="attention", fp8_base=True))),
    ("meta-llama/Meta-Llama-3-8B", 1, 4096, dict(lora=dict(rank=16, fp8_base=True))),
]


@pytest.mark.parametrize("model, gpus, sequence, how", SEARCHES)
def test_the_launcher_takes_each_layout_that_is_printed(model, gpus, sequence, how, printed, tmp_path):
    tokens = usual_tokens(gpus, sequence, how.get("optimizer_in_backward", "off"))
    found = search(Model.of(configs.read(model)), GPUS["h100"], gpus, sequence, tokens, "fp8", **how)
    layouts = [plan.layout for plan in chain(found.plans[:10], found.too_large.values())]
    assert layouts
    text = "\n".join(chain.from_iterable(command._command_lines(model, layout) for layout in layouts))
    assert all(line in text for line in printed) and len(printed) == len(layouts)
    (tmp_path / "train.json").write_text('{"src": "a", "tgt": "b"}\n')
    folders = {commands.MODEL: str(model_folder(tmp_path)), commands.DATASET: str(tmp_path)}
    folders |= {commands.OUTPUT: str(tmp_path / "out")}
    environ = DRY | dict(DEVICES=",".join(map(str, range(gpus))), CHECK_MEMORY="0")
    for line in printed:
        parsed(line)
        job = {"pretrain": pretrain, "finetune": finetune}[shlex.split(line)[1]]
        words = [re.sub(r"=([A-Z]+)$", lambda value: f"={folders[value[1]]}", word) for word in shlex.split(line)[2:]]
        assert make_plan(job, words, environ)


def model_folder(folder):
    """A model's as far as the launcher looks at it."""
    (folder / "config.json").write_text((PACKAGE / "configs/llama-125m/config.json").read_text())
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").write_text(two_tokens()["tokenizer.json"])
    return folder


def test_what_the_launcher_says_would_fit_does(monkeypatch):
    """Each of its suggestions, put behind the command that was refused."""
    monkeypatch.setattr(devices, "_gpu_listing", list)
    words = [f"--{name}={value}" for name, value in TOO_LARGE.items()]
    environ = DRY | dict(DEVICES="0,1,2,3,4,5,6,7", MOCK_DATA="1", GPU="h100")
    with pytest.raises(LaunchError) as refused:
        make_plan(pretrain, words, environ)
    [found] = re.findall(r"the fastest first: (.*); CHECK_MEMORY=0", str(refused.value))
    suggestions = [re.sub(r" \(\d+ GB\)$", "", each) for each in found.split("; or ")]
    assert len(suggestions) == cards.SUGGESTIONS
    for suggestion in suggestions:
        changed = TOO_LARGE | dict(word.split("=", 1) for word in shlex.split(suggestion))
        assert make_plan(pretrain, [f"--{name}={value}" for name, value in changed.items()], environ)


# ------------------------------------------------------------------------------------------- commands in texts


def texts():
    """(file, string) of the package, the documentation of modules among them, which --help prints."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "paddle-te " in node.value:
                yield pytest.param(node.value, id=f"{path.relative_to(PACKAGE)}:{node.lineno}")


@pytest.mark.parametrize("text", texts())
def test_programs_and_flags_in_texts_are_there(text):
    for name, rest in re.findall(IN_TEXT, text.replace("\\\n", " ")):
        if name in COMMANDS:
            known = {flag for action in parser_of(name)._actions for flag in action.option_strings}
            flags = re.findall(r"--[\w-]+", rest)
            assert {*flags} <= known or name == "lm_eval", (name, {*flags} - known)
        else:
            assert name in ("has", "command"), f"paddle-te {name}: there is no such command"


def test_what_is_to_be_installed_is_there():
    """The extras and the files that pip is told, in texts and in what `paddle-te env` prints."""
    root = PACKAGE.parent
    extras = {*metadata("paddle_te").get_all("Provides-Extra")}
    sources = "\n".join(path.read_text() for path in FILES)
    told = re.findall(r"(?:paddle_te|'\.)\[([\w,]+)\]'", sources)
    assert told and {extra for each in told for extra in each.split(",")} <= extras
    files = [each.replace("{}.{}", "3.11") for each in re.findall(r"pip install -c (\S+)", sources)]
    assert files and all((root / each).is_file() for each in files), files
    assert all((root / each).is_dir() for each in re.findall(r"pip install (\./\w+)", sources))
