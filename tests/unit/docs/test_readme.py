"""The guides with the reference name every argument of every script, in both languages, and none that is not there;
docs/reference/options.md and docs/zh/reference/options.md are what paddle_te.options makes."""

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
TASKS = "pretrain data fine-tune preferences evaluate generate convert compare-backends benchmark".split()
GUIDES = ["llm/llama/README_TE.md", *(f"docs/guides/{task}.md" for task in TASKS)]
LANGUAGES = {
    "English": [*GUIDES, "docs/reference/options.md"],
    "Chinese": [*(page.replace("docs/", "docs/zh/") for page in GUIDES[1:]), "docs/zh/reference/options.md"],
}
BASES = {field.name for base in PreTrainingArguments.__mro__[1:] if dataclasses.is_dataclass(base)
         for field in dataclasses.fields(base)}  # fmt: skip


def read(pages):
    return "\n".join((ROOT / page).read_text() for page in pages)


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


@pytest.mark.parametrize("pages", LANGUAGES.values(), ids=LANGUAGES)
def test_every_flag_is_there(scripts, pages):
    text = read(pages).replace("--[no-]", "--no-X --")
    for program, flags in scripts.items():
        missing = {flag for flag in flags if not re.search(rf"--{re.escape(flag)}\b", text)}
        missing -= {flag for flag in missing if flag.startswith("no-") and f"--no-X --{flag[3:]}" in text}
        assert not missing, f"the pages lack flags of {program}"


def test_tables_are_made_from_the_options():
    for path, text in pages().items():
        assert path.is_file() and path.read_text() == text, f"{path}: write it anew with python -m paddle_te.options"


@pytest.fixture(scope="module")
def known(scripts):
    """The flags of all programs on the pages."""
    flags = set().union(*scripts.values()) | BASES | names(FinetuningArguments) | {"help", "flag", "logdir", "devices"}
    flags |= {option.name for table, found in TABLES.items() if table.startswith("llama_") for option in found}
    flags |= {"model", "model_args", "tasks", "output_path"}  # of EleutherAI's command
    flags |= {"no-deps", "local-dir"}  # of pip and huggingface-cli
    for program in ("benchmark/compare", "benchmark/layer", "benchmark/throughput", "benchmark/scaling_model"):
        flags |= options(f"tools/{program}.py")
    return flags | options("-m", "paddle_te.runs.convergence") | options("-m", "paddle_te", "plan")


@pytest.mark.parametrize("page", GUIDES)
def test_no_flag_is_invented(known, page):
    text = re.sub(r"--\[no-\]", "--", read([page]))
    assert set(re.findall(r"(?<![\w-])--([a-z][\w-]*\w)", text, re.IGNORECASE)) - known == set()
