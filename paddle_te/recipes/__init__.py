"""Run files that come with the package, each for a model, a task and so many GPUs of a kind.

Beside a job's arguments each says what it is for, in the keys of `ABOUT`. One that was measured has the figure and the
page of benchmarks/ that it is from. The planner chose the layouts of the others when they were added.

Imports no Paddle: the launcher reads run files with this.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
# A task: the command that runs it. "lora-fp8" is LoRA over a base that exists in fp8 only.
TASKS = {"pretrain": "pretrain", "sft": "finetune", "lora": "finetune", "lora-fp8": "finetune"}
CARDS = {"h100": 80, "h200": 141}  # GB, as NVIDIA counts them
# What a file says of itself; all other keys are a job's arguments
ABOUT = ("task", "model", "card", "gpus", "tokens_per_second_per_gpu", "measured_in")
LIKE = 0.8  # difflib's ratio from which a recipe is offered for a wrong name
COLUMNS = ("recipe", "command", "task", "model", "GPUs", "precision", "layout", "batch × GA × tokens")


@dataclass(frozen=True)
class Recipe:
    """A run file of the package. name: of the file, without .json."""

    name: str

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.json"

    @cached_property
    def values(self) -> dict[str, Any]:
        """The whole file."""
        return json.loads(self.path.read_text(encoding="utf-8"))

    @property
    def task(self) -> str:
        """One of TASKS."""
        return self.values["task"]

    @property
    def command(self) -> str:
        """The command that runs it."""
        return TASKS[self.task]

    @property
    def model(self) -> str:
        """Fine-tuning takes the user's folder of weights as model_name, so its files name the model beside it."""
        return self.values.get("model") or self.values["model_name"]

    @property
    def card(self) -> str:
        """One of CARDS."""
        return self.values["card"]

    @property
    def gpus(self) -> int:
        """How many it is for."""
        return self.values["gpus"]

    @property
    def precision(self) -> str:
        """The precision of the GEMMs: bf16 or fp8."""
        return self.values["precision"]

    @property
    def layout(self) -> str:
        """How its GPUs share the work, and what backward computes again."""
        values = self.values
        words = [f"{name}{values[name]}" for name in ("TP", "PP") if values.get(name, 1) > 1]
        words += [f"{values['sharding_stage']} over {values['FSDP']}"] * (values["FSDP"] > 1)
        again = " + ".join(values.get("recompute_modules", ())) or values["recompute"]
        return " × ".join(words or ["one GPU"]) + f", recompute {again}" * (again != "none")

    @property
    def batch(self) -> str:
        """What a step takes of each GPU's sequences."""
        values = self.values
        return f"{values['batch_size_per_device']} × {values['GA']} × {values['max_seqlen']}"

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table with COLUMNS."""
        gpus = f"{self.gpus} × {self.card.upper()} {CARDS[self.card]} GB"
        about = (self.name, self.command, self.task, self.model, gpus, self.precision)
        return (*about, self.layout, self.batch)

    @property
    def measured(self) -> int | None:
        """Tokens per second of each GPU, where it was measured."""
        return self.values.get("tokens_per_second_per_gpu")

    @property
    def source(self) -> str:
        """The page of benchmarks/ that has the figure; "" for what was not measured."""
        return self.values.get("measured_in", "")


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def recipes() -> list[Recipe]:
    """Return all of them, by task, model and GPUs."""
    order = list(TASKS)
    found = [Recipe(name) for name in names()]
    return sorted(found, key=lambda each: (order.index(each.task), each.model, each.card, each.gpus, each.name))


def find(name: str) -> Path | None:
    """Return the file of a recipe, from its name with or without .json; None where there is no such recipe."""
    stem = name.removesuffix(".json")
    return Recipe(stem).path if stem in names() else None


def like(name: str) -> list[str]:
    """Return at most two recipes whose names differ little from a wrong one, with or without .json."""
    return get_close_matches(name.removesuffix(".json").lower(), names(), n=2, cutoff=LIKE)
