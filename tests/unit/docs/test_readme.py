"""README_TE.md and README_TE_zh.md name every argument of every script, and none that is not there; their tables and
docs/reference/options.md are what paddle_te.options makes."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paddlenlp.transformers.configuration_utils import LlmMetaConfig

from paddle_te.hosts.paddlenlp.evaluation.evaluate import EvalArguments
from paddle_te.hosts.paddlenlp.training.arguments import ModelArguments, PreTrainingArguments
from paddle_te.hosts.paddlenlp.training.datasets import DataArguments
from paddle_te.hosts.paddlenlp.training.finetune_datasets import FinetuneDataArguments
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuneModelArguments, FinetuningArguments
from paddle_te.hosts.paddlenlp.training.preference_datasets import PreferenceDataArguments
from paddle_te.hosts.paddlenlp.training.preference_trainer import DPOConfig, KTOConfig
from paddle_te.options.pages import TABLES, pages

ROOT = Path(__file__).parents[3]
READMES = ["llm/llama/README_TE.md", "llm/llama/README_TE_zh.md"]
BASES = {field.name for base in PreTrainingArguments.__mro__[1:] if dataclasses.is_dataclass(base)
         for field in dataclasses.fields(base)}  # fmt: skip


def names(*classes):
    return {field.name for cls in classes for field in dataclasses.fields(cls)}


def options(*command):
    """The --flags that a program's --help shows."""
    text = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"(?<![\w-])--((?:no-)?[a-z]\w*)", text.stdout)) - {"help"}


@pytest.fixture(scope="module")
def scripts():
    """{program: its own flags}."""
    own = set(PreTrainingArguments.__annotations__) - {name for name, *_ in LlmMetaConfig._get_all_meta()}
    return {
        "run_pretrain.py": own | names(ModelArguments, DataArguments),
        "run_finetune.py": names(FinetuneModelArguments, FinetuneDataArguments),
        "run_dpo.py": names(PreferenceDataArguments, DPOConfig),
        "run_kto.py": names(KTOConfig),
        "run_eval.py": names(EvalArguments),
        "te_llama_ckpt_converter.py": options("llm/llama/te_llama_ckpt_converter.py"),
        "prepare_data.py": options("tools/prepare_data.py"),
    }


@pytest.mark.parametrize("readme", READMES)
def test_every_flag_is_there(scripts, readme):
    text = (ROOT / readme).read_text().replace("--[no-]", "--no-X --")
    for program, flags in scripts.items():
        missing = {flag for flag in flags if not re.search(rf"--{re.escape(flag)}\b", text)}
        missing -= {flag for flag in missing if flag.startswith("no-") and f"--no-X --{flag[3:]}" in text}
        assert not missing, f"{readme} lacks flags of {program}"


def test_tables_are_made_from_the_options():
    for path, text in pages().items():
        assert path.is_file() and path.read_text() == text, f"{path}: write it anew with python -m paddle_te.options"
    made = [name for path in READMES for name in re.findall("<!-- options: (.+) -->", (ROOT / path).read_text())]
    assert {*made} == TABLES.keys() - {"llama_finetune.sh, variables"}, "which are pretraining's"
    assert len(made) == 2 * len(set(made)), "in both languages"


@pytest.mark.parametrize("readme", READMES)
def test_no_flag_is_invented(scripts, readme):
    text = re.sub(r"--\[no-\]", "--", (ROOT / readme).read_text())
    known = set().union(*scripts.values()) | BASES | names(FinetuningArguments) | {"help", "flag", "logdir", "devices"}
    known |= {"model", "model_args", "tasks", "output_path"}  # of EleutherAI's command
    known.add("no-deps")  # of pip
    for program in (
        "tools/benchmark/compare",
        "tools/benchmark/throughput",
        "tools/benchmark/scaling_model",
        "nvgpu/build",
    ):
        known |= options(f"{program}.py")
    known |= options("-m", "paddle_te.runs.convergence")
    assert set(re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", text)) - known == set()


def test_both_languages_have_the_same_commands():
    blocks = [re.findall(r"```bash\n(.*?)```", (ROOT / readme).read_text(), re.DOTALL) for readme in READMES]
    commands = [[re.sub(r"\s*#.*", "", block) for block in found] for found in blocks]
    assert commands[0] == commands[1]
