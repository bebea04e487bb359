"""PaddleFormers' words for a run: the names of a recipe's lines, and the Job that a recipe asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddle_te.host import PADDLEFORMERS
from paddle_te.job.doors import Door, Name
from paddle_te.job.record import FINETUNE, PRETRAIN, Job
from paddle_te.job.words import options
from paddle_te.options.layers import AGAIN
from paddle_te.options.option import HOSTED, SAME, SILENT
from paddle_te.options.training import BOUNDS

# PaddleNLP's flag, or ours: PaddleFormers' line, where they mean the same under other names
LINES = {name: each.line for name, each in options().items() if each.line not in ("", SAME, HOSTED, SILENT)}
FLEX = "flex_checkpoint"  # PaddleFormers' default format of checkpoints
RECIPE = Door(
    mark="",
    between=": ",
    names={flag: Name(line) for flag, line in LINES.items()}
    | {"lora": Name("fine_tuning", {True: "lora", False: "full"}), "bf16": Name("compute_type", {True: "bf16"})},
)


def job_of_recipe(recipe: Mapping[str, object], world: int = 1, **known: Any) -> Job:
    """Return the Job of a recipe, {line: value}.

    world: processes. known: what no line says. Raises ValueError for a stage of sharding that there is not, and for
    main gradients, which are PaddleFormers' default, in float32.
    """
    flags = {flag: recipe[line] for flag, line in LINES.items() if recipe.get(line) is not None}
    # PaddleFormers' "selective" is a granularity of parts only; min_lr is another name of its own
    granularity = recipe.get("recompute_granularity")
    flags |= {
        # PaddleFormers' defaults
        "sharding": recipe.get("sharding", "stage1") or "",
        "amp_master_grad": recipe.get("amp_master_grad", True),
        "lora": recipe.get("fine_tuning") == "lora",
        "bf16": recipe.get("compute_type") == "bf16" or bool(recipe.get("bf16")),
        "recompute": granularity == "full",
        "recompute_granularity": "full",
        AGAIN: recipe.get(AGAIN) if granularity == "selective" else None,
        "min_learning_rate": recipe.get("min_learning_rate", recipe.get("min_lr", 0.0)),
    }
    if isinstance(reports := recipe.get("report_to"), str):
        flags["report_to"] = tuple(reports.split())
    every = {name: value for name, value in {**recipe, **flags}.items() if value is not None}
    if flags["amp_master_grad"] and recipe.get("compute_type") == "float32":
        raise ValueError("compute_type: float32 needs amp_master_grad: false; PaddleFormers has true by default")
    if fault := BOUNDS["sharding"].fault(flags["sharding"]):
        raise ValueError(f"sharding: {flags['sharding']!r}: it must be {fault}")
    script = FINETUNE if recipe.get("stage") == "SFT" else PRETRAIN
    flex = (recipe.get("load_checkpoint_format") or FLEX) == FLEX
    return Job.of(every, script=script, host=PADDLEFORMERS, world=world, loads_flex=flex, **known)


# Options of our layers that PaddleFormers has itself, under the same name, and passes on
ITS_OWN = (AGAIN,)


def recompute_lines(job: Job) -> dict[str, object]:
    """Return the lines that say what backward computes again; its "selective" is a granularity of parts only."""
    if job.recomputed == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    modules = sorted({*job.recomputed_modules})
    return dict.fromkeys(ITS_OWN, modules) | {"recompute_granularity": "selective"} if modules else {}
