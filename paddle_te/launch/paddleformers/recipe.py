"""A job's flags, in PaddleNLP's names, as the lines of a recipe of PaddleFormers (`paddle_te.hosts.paddleformers`)."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddle_te.data.records import DEV, TRAIN
from paddle_te.job import Job, words
from paddle_te.job.paddleformers import LINES, recompute_lines
from paddle_te.job.record import PREFERENCES
from paddle_te.launch import JobModule
from paddle_te.launch.arguments import ROOT
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.names import arguments_of, name_of
from paddle_te.launch.nodes import Nodes
from paddle_te.launch.tuning_data import questions
from paddle_te.options import LAYER_OPTIONS, Option, launcher
from paddle_te.options.lora import LoRA
from paddle_te.options.option import HOSTED, SAME, SILENT, options_of, word
from paddle_te.options.pretraining import PretrainData, Schedule
from paddle_te.options.tuning import FinetuneData
from paddle_te.runs.checkpoints import find_checkpoint

RECIPE = "recipe.json"  # in the run's folder
SCRIPT = ROOT / "paddle_te/hosts/paddleformers/__main__.py"
WITHOUT = "PaddleFormers has nothing like it; leave it out, or take HOST=paddlenlp"

# What says nothing to PaddleFormers: it decides itself, or `start` has put it into the folder that it reads
_SILENT = {"pipeline_parallel_config", "use_fused_rope", "use_fused_rms_norm"}
_SILENT |= {name for name, option in words.options().items() if option.line == SILENT}
# The sections of each job whose lines a recipe always has, since PaddleFormers' own defaults are others
_WRITTEN: dict[str, tuple[type, ...]] = {
    "pretrain": (PretrainData, Schedule),
    "finetune": (FinetuneData,),
}
# Others of PaddleNLP's that may be asked for: the value that asks for nothing
_REFUSED = {
    "expert_parallel_degree": 1,
    "sharding_parallel_config": "",
    "unified_checkpoint": False,
    "unified_checkpoint_config": "",
} | {
    name: option.default
    for name, option in words.options().items()
    if not (option.source or option.line or name in LAYER_OPTIONS)
}
# What the launcher itself must know: the flag, and its argument or variable for it
_LAUNCHERS = {
    "model_name_or_path": "model_name",
    "tokenizer_name_or_path": "tokenizer_name",
    "te_init_weight_path": "init_weight",
    "continue_training": "init_weight",
    "resume_from_checkpoint": "resume_step",
    "sharding": "FSDP and sharding_stage",
    "output_dir": "OUTPUT_DIR or output",
    "device": "DEVICE",
    "bf16": "precision",
    "fp16": "precision",
    "use_fp8": "precision",
}
# The launcher's variables and arguments without a counterpart
_NOT_THERE = ("nsys_profile", "PROFILER", "OVERLAP")


def check_arguments(job: JobModule, args: argparse.Namespace, device: str, nodes: Nodes) -> None:
    """Raise LaunchError for what the launcher's arguments ask for and PaddleFormers does not have.

    Parallel degrees are not looked at: job.rules says which ones it has.
    """
    if (name := name_of(job)) in PREFERENCES:
        raise LaunchError(f"HOST=paddleformers: paddle-te {name} tunes with PaddleNLP only; use HOST=paddlenlp")
    options = {option.name: option for option in arguments_of(job)}
    for name in filter(options.get, _NOT_THERE):
        if _asks(options[name], getattr(args, name)):
            raise LaunchError(f"{name}={str(getattr(args, name)).lower()}: {WITHOUT}")
    for name in options:
        if getattr(args, name) == launcher.AUTO and name not in ("OVERLAP", "resume_step"):
            raise LaunchError("auto: the planner knows PaddleNLP's layouts, not PaddleFormers'; give numbers")
    if nodes.count > 1:
        raise LaunchError(f"NNODES={nodes.count}: with PaddleFormers the launcher has one node; use HOST=paddlenlp")
    if device == "cpu" and args.GA > 1:
        raise LaunchError(f"GA={args.GA}: PaddleFormers fails with GA above 1 on DEVICE=cpu; use 1, or DEVICE=nvgpu")
    if args.recompute == "core_attn" and args.backend == "none":
        raise LaunchError("recompute=core_attn: PaddleFormers' own layers have full; or use backend te or pd")


def _asks(option: Option, value: object) -> bool:
    default = option.default_text()
    return value not in (None, False, launcher.AUTO) and str(value).lower() != default


def recipe_text(
    job: str, args: argparse.Namespace, flags: dict[str, Any], extra: list[str], device: str, start: Path, output: Path
) -> str:
    """Return the recipe as JSON.

    job: pretrain or finetune. flags: what the job makes of args, {PaddleNLP's name: value}, None leaves one out. extra:
    EXTRA_ARGS' words, of which the last of two counts. start: the folder that `start` fills.
    Raises LaunchError for a flag without a counterpart.
    """
    given, said = _typed(words.printed(flags)), _typed(extra)
    for name, value in said.items():
        if name in _LAUNCHERS and value not in (False, 0):
            raise LaunchError(f"EXTRA_ARGS: --{name}: with PaddleFormers say it by {_LAUNCHERS[name]}")
    given |= said
    for name, nothing in _REFUSED.items():
        if given.get(name, nothing) != nothing:
            raise LaunchError(f"{name}={word(given[name])}: {WITHOUT}")
    asked = Job.of(given, script=job)
    if asked.lora and asked.adapter.numerator != replace(asked.adapter, alpha=None).numerator:
        usual = "4 with rslora" if asked.adapter.rslora else "twice lora_rank"
        raise LaunchError(f"lora_alpha={asked.adapter.alpha}: in PaddleFormers it is {usual}; leave it out")
    sections = (*_WRITTEN[job], *((LoRA,) if asked.lora else ()))
    written = {each.name: getattr(asked, each.name) for each in options_of(*sections) if each.line in (SAME, HOSTED)}
    known = {"pretrain": _pretraining, "finetune": _fine_tuning}[job](args, given)
    lines = written | known | _precision(given) | recompute_lines(asked)
    # PaddleFormers would shard over all ranks unless told not to
    lines |= {"sharding": args.sharding_stage if args.FSDP > 1 else ""} | _resume(args, output)
    lines |= {"model_name_or_path": str(start), "_attn_implementation": _attention(given, device)}
    combined = _SILENT | _REFUSED.keys() | {"bf16", "recompute", "resume_from_checkpoint", "fp16_opt_level"}
    passed = {LINES.get(name, name): value for name, value in given.items() if name not in combined}
    recipe = passed | {name: value for name, value in lines.items() if value is not None}
    return json.dumps(recipe, indent=1) + "\n"


def _pretraining(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    return {
        "stage": "PT",
        "fine_tuning": "full",
        "dataset_type": "pretrain",
        "input_dir": None if args.MOCK_DATA else corpora(given["input_dir"]),
        "continue_training": args.init_weight != "none",
        "dataloader_shuffle": False,  # the index is shuffled
    }


def _fine_tuning(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    folder = Path(given["dataset_name_or_path"])
    files = {"train": questions(folder, TRAIN), "eval": questions(folder, DEV if given.get("do_eval") else TRAIN)}
    lora = given.get("lora", False)
    data = {
        f"{part}_dataset_{name}": value
        for part, path in files.items()
        for name, value in (("type", "erniekit"), ("path", str(path)), ("prob", "1.0"))
    }
    return data | {
        "stage": "SFT",
        "fine_tuning": "lora" if lora else "full",
        "lora": None,
        "num_train_epochs": given.get("num_train_epochs", 3),  # PaddleNLP's default; PaddleFormers' is 1
        "packing": given.get("zero_padding", False),
        **({"evaluation_strategy": given.get("evaluation_strategy", "epoch")} if given.get("do_eval") else {}),
    }


def _precision(given: dict[str, Any]) -> dict[str, Any]:
    half = given.get("bf16", False)
    return {
        "compute_type": "bf16" if half else "float32",
        "fp16_opt_level": "O2" if half else None,
        "amp_master_grad": half and given.get("amp_master_grad", False),
    }


def _attention(given: dict[str, Any], device: str) -> str:
    """Return the attention of PaddleFormers' own layers; on a CPU only eager keeps documents apart."""
    if device == "gpu":
        return "flashmask"
    return "eager" if given.get("reset_attention_mask") or given.get("zero_padding") else "sdpa"


def _resume(args: argparse.Namespace, output: Path) -> dict[str, Any]:
    """The checkpoint is named, as PaddleFormers by itself would take the newest one, complete or not."""
    checkpoint = find_checkpoint(str(args.resume_step), output)
    return {"resume_from_checkpoint": checkpoint, "overwrite_output_dir": True, "disable_tqdm": True}


def corpora(folder: str) -> str:
    """Weights and prefixes in turn, equal ones, of the .bin/.idx pairs in a folder; as they are, where they are given.

    Raises LaunchError for a prefix that the separator, a blank, would divide.
    """
    if not Path(folder).is_dir():
        return folder
    prefixes = sorted(str(path.with_suffix("")) for path in Path(folder).glob("*.idx"))
    if not prefixes:
        raise LaunchError(f"DATA_PATH: {folder} holds no .idx file, which PaddleFormers reads")
    if any(" " in prefix for prefix in prefixes):
        raise LaunchError(f"DATA_PATH: {folder}: PaddleFormers reads no paths with blanks; rename the folder")
    return " ".join(f"1.0 {prefix}" for prefix in prefixes)


def _typed(said: list[str]) -> dict[str, Any]:
    """{name: value} of a script's words, as JSON has them; a flag without a value is true."""
    try:
        found, others = words.read(said)
        further = words.pairs(others)
    except ValueError as error:
        raise LaunchError(f"EXTRA_ARGS: {error}") from error
    return found | {name: _value(value) for name, value in further.items()}


def _value(text: str) -> object:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
