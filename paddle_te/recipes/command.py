"""List the run files that come with the package, all or those for a model, a card, a number of GPUs or a task.

`paddle-te pretrain NAME` runs a recipe of pretraining, `paddle-te finetune NAME --model_name FOLDER --dataset FOLDER
--output FOLDER` one of the others. --print-config behind NAME prints the file, to be changed. A measured recipe has its
figure and the page of benchmarks/ that the figure is from. The planner chose the layouts of the others when they were
added.
"""

from __future__ import annotations

import argparse
import sys

from paddle_te.recipes import CARDS, COLUMNS, TASKS, Recipe, recipes
from paddle_te.table import in_columns

_CARDS = {name: card for card, memory in CARDS.items() for name in (card, str(memory))}


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="paddle-te recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", metavar="TEXT", help="those whose model's name has this, as qwen or 8b")
    parser.add_argument("--card", choices=[*_CARDS], help="those for this GPU, by its name or its memory in GB")
    parser.add_argument("--gpus", type=int, metavar="N", help="those for so many GPUs")
    parser.add_argument("--task", choices=[*TASKS], help="those that do this; lora-fp8 is LoRA over a base in fp8")
    return parser


def chosen(args: argparse.Namespace) -> list[Recipe]:
    """Return the recipes that are asked for."""
    return [
        each
        for each in recipes()
        if args.model.lower() in each.model.lower()
        and args.card in (None, *(name for name, card in _CARDS.items() if card == each.card))
        and args.gpus in (None, each.gpus)
        and args.task in (None, each.task)
    ]


def row(recipe: Recipe) -> tuple[str, ...]:
    """Return a recipe's cells, and its figure with the source."""
    measured = f"{recipe.measured:,} tokens/s per GPU ({recipe.source})" if recipe.measured else ""
    return (*recipe.cells(), measured)


def main() -> int:
    """Run the command. Return the exit status: 0; 1 where no recipe is as asked."""
    if found := chosen(make_parser().parse_args()):
        print("\n".join(in_columns([(*COLUMNS, "measured"), *map(row, found)])))
        return 0
    print(
        "error: there is no such recipe; paddle-te recipes lists all, and paddle-te plan finds other layouts",
        file=sys.stderr,
    )
    return 1
