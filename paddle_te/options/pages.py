"""Make the documentation's tables of options.

They stand between markers in llm/llama/README_TE.md and README_TE_zh.md, and are all of docs/reference/options.md and
docs/reference/recipes.md.

A marker is a line `<!-- options: NAME -->`, with NAME of TABLES; what follows, up to `<!-- end -->`, is replaced.
"""

from __future__ import annotations

import re
from pathlib import Path

from paddle_te.options import launcher, scripts
from paddle_te.options.option import FLAG, REQUIRED, TEXT, Option
from paddle_te.recipes import COLUMNS, Recipe, recipes

ROOT = Path(__file__).resolve().parents[2]
READMES = {"en": "llm/llama/README_TE.md", "zh": "llm/llama/README_TE_zh.md"}
REFERENCE = "docs/reference/options.md"
RECIPES = "docs/reference/recipes.md"
SAID = [option for option in scripts.PADDLENLPS if option.doc]  # PaddleNLP's own that need a word
_TRAINING = (*scripts.LAYERS, *SAID, *scripts.TRAINING)
TABLES = {
    "llama_single_node_interactive.sh": launcher.PRETRAIN,
    "llama_single_node_interactive.sh, variables": (*launcher.PRETRAIN_VARIABLES, *launcher.VARIABLES),
    "llama_finetune.sh": launcher.FINETUNE,
    "llama_finetune.sh, variables": (*launcher.FINETUNE_VARIABLES, *launcher.VARIABLES),
    "llama_dpo.sh, llama_kto.sh": launcher.PREFERENCE,
    "run_pretrain.py": (*_TRAINING, *scripts.PRETRAIN_MODEL, *scripts.PRETRAIN_DATA, *scripts.PRETRAINING),
    "run_finetune.py": (*scripts.FINETUNE_MODEL, *scripts.FINETUNE_DATA),
    "run_dpo.py": (*scripts.DPO, *scripts.PREFERENCE_DATA),
    "run_kto.py": tuple(option for option in scripts.KTO if option not in scripts.DPO),
    "run_eval.py": (*scripts.EVALUATED_MODEL, *scripts.EVALUATION_TASKS),
}
_HEADS = {
    "en": {
        "argument": "| | argument | default | |",
        "variable": "| variable | default | |",
        "flag": "| flag | default | |",
    },
    "zh": {"argument": "| | 参数 | 默认值 | |", "variable": "| 变量 | 默认值 | |", "flag": "| 参数 | 默认值 | |"},
}


def _what(name: str) -> str:
    """Return what the options of a table are: argument, variable or flag."""
    return "variable" if name.endswith("variables") else "argument" if name.endswith(".sh") else "flag"


def _default(option: Option, language: str) -> str:
    shown = language == "zh" and option.shown_zh or option.shown
    if shown or option.default in (None, "", REQUIRED):
        return shown
    text = str(option.default).lower() if isinstance(option.default, bool) else str(option.default)
    is_word = isinstance(option.default, str) and not text.isdigit()
    return f"`{text}`" if is_word else text


def _row(option: Option, what: str, position: int, language: str) -> str:
    text = option.doc or option.help
    if language == "zh":
        text = option.zh or text
    name = f"`--{option.name}`" if what == "flag" else f"`{option.name}`"
    cells = [*([str(position)] if what == "argument" else []), name, _default(option, language), text]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |".replace("|  |", "| |")


def table(name: str, language: str) -> str:
    """Return a table of TABLES in Markdown; language: "en" or "zh"."""
    what = _what(name)
    head = _HEADS[language][what]
    rows = [_row(option, what, position, language) for position, option in enumerate(TABLES[name], 1)]
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])


def filled(text: str, language: str) -> str:
    """Return a page with its tables as they should be."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n{table(match[2], language)}\n<!-- end -->"

    return re.sub(r"(<!-- options: ([^>]+) -->)\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def reference() -> str:
    """Return docs/reference/options.md: every option, its values, its default and the text of --help."""
    parts = [
        "# Options",
        "Made by `python -m paddle_te.options` from `paddle_te/options`; edit that instead. What the options are for, "
        "with examples: [llm/llama/README_TE.md](../../llm/llama/README_TE.md). A value that an option may not have is "
        "refused in one line, with exit status 2, before work starts.",
    ]
    for name, options in TABLES.items():
        what = _what(name)
        rows = [_reference_row(option, what) for option in options if option not in SAID]
        parts += [f"## {name}", "\n".join([f"| {what} | values | default | |", "|---|---|---|---|", *rows])]
    kinds: dict[str, list[str]] = {}
    for option in (each for each in scripts.PADDLENLPS if each.kind not in (FLAG, TEXT)):
        kinds.setdefault(option.kind.words, []).append(f"`--{option.name}`")
    rows = [f"| {words} | {', '.join(names)} |" for words, names in kinds.items()]
    parts += [
        "## PaddleNLP's flags",
        "run_pretrain.py and run_finetune.py take all flags of PaddleNLP's TrainingArguments. These are checked:",
        "\n".join(["| values | flags |", "|---|---|", *rows]),
    ]
    return "\n\n".join(parts) + "\n"


def _reference_row(option: Option, what: str) -> str:
    name = f"`--{option.name}`" if what == "flag" else f"`{option.name}`"
    unit = f", in {option.kind.unit}" if option.kind.unit else ""
    cells = [name, option.kind.words + unit, _default(option, "en"), option.help]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |".replace("|  |", "| |")


def recipes_page() -> str:
    """Return docs/reference/recipes.md: the run files that come with the package."""
    header = f"| {' | '.join(COLUMNS)} | tokens/s per GPU, measured |"
    rows = "\n".join([header, "|---" * (header.count("|") - 1) + "|", *map(_recipe_row, recipes())])
    parts = [
        "# Recipes",
        "Made by `python -m paddle_te.options` from `paddle_te/recipes`; edit that instead. `paddle-te recipes` prints "
        "this table, also for one model, card, number of GPUs or task. [Run files](../install.md#run-files) says how "
        "to run a recipe and how to change it.",
        "A recipe with a figure was measured, on the page that the figure links to. The [planner](../planner.md) chose "
        "the layouts of the others, and computes for each recipe that it fits its card. `sft` trains all weights, "
        "`lora` an adapter, and `lora-fp8` an adapter over a base that exists in fp8 only.",
        rows,
    ]
    return "\n\n".join(parts) + "\n"


def _recipe_row(recipe: Recipe) -> str:
    measured = f"[{recipe.measured:,}](../../{recipe.source})" if recipe.measured else ""
    name, *cells = recipe.cells()
    return f"| {' | '.join((f'`{name}`', *cells, measured))} |".replace("|  |", "| |")


def pages() -> dict[Path, str]:
    """Return {path: what the file should hold}."""
    readmes = {ROOT / path: filled((ROOT / path).read_text(), language) for language, path in READMES.items()}
    return readmes | {ROOT / REFERENCE: reference(), ROOT / RECIPES: recipes_page()}
