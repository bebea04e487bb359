"""Make the pages of options, in English and in Chinese, and of recipes: docs/reference and docs/zh/reference."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from paddle_te.options import launcher
from paddle_te.options.evaluation import EVALUATED_MODEL, EVALUATION_TASKS
from paddle_te.options.layers import LAYERS
from paddle_te.options.option import FLAG, REQUIRED, TEXT, Option
from paddle_te.options.pretraining import PRETRAIN_DATA, PRETRAIN_MODEL, PRETRAINING
from paddle_te.options.training import PADDLENLPS, TRAINING
from paddle_te.options.tuning import DPO, FINETUNE_DATA, FINETUNE_MODEL, KTO, PREFERENCE_DATA
from paddle_te.recipes import COLUMNS, Recipe, recipes

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "docs/reference/options.md"
CHINESE = "docs/zh/reference/options.md"
RECIPES = "docs/reference/recipes.md"
SAID = [option for option in PADDLENLPS if option.doc]  # PaddleNLP's own that need a word
_TRAINING = (*LAYERS, *SAID, *TRAINING)
TABLES = {
    "llama_single_node_interactive.sh": launcher.PRETRAIN,
    "llama_single_node_interactive.sh, variables": (*launcher.PRETRAIN_VARIABLES, *launcher.VARIABLES),
    "llama_finetune.sh": launcher.FINETUNE,
    "llama_finetune.sh, variables": (*launcher.FINETUNE_VARIABLES, *launcher.VARIABLES),
    "llama_dpo.sh, llama_kto.sh": launcher.PREFERENCE,
    "run_pretrain.py": (*_TRAINING, *PRETRAIN_MODEL, *PRETRAIN_DATA, *PRETRAINING),
    "run_finetune.py": (*FINETUNE_MODEL, *FINETUNE_DATA),
    "run_dpo.py": (*DPO, *PREFERENCE_DATA),
    "run_kto.py": tuple(option for option in KTO if option not in DPO),
    "run_eval.py": (*EVALUATED_MODEL, *EVALUATION_TASKS),
}
_HEADS = {"argument": "| | 参数 | 默认值 | |", "variable": "| 变量 | 默认值 | |", "flag": "| 参数 | 默认值 | |"}


def _what(name: str) -> str:
    """Return what the options of a table are: argument, variable or flag."""
    return "variable" if name.endswith("variables") else "argument" if name.endswith(".sh") else "flag"


def _default(option: Option, shown: str | None) -> str:
    if shown or option.default in (None, "", REQUIRED):
        return shown or ""
    text = str(option.default).lower() if isinstance(option.default, bool) else str(option.default)
    is_word = isinstance(option.default, str) and not text.isdigit()
    return f"`{text}`" if is_word else text


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |".replace("|  |", "| |")


def _table(head: str, rows: Iterable[str]) -> str:
    """Return a table of Markdown. head: its first row."""
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])


def _name(option: Option, what: str) -> str:
    return f"`--{option.name}`" if what == "flag" else f"`{option.name}`"


def chinese_reference() -> str:
    """Return docs/zh/reference/options.md: every option, its default, and what to know of it, in Chinese."""
    parts = [
        "# 选项",
        "本页由 `python -m paddle_te.options` 根据 `paddle_te/options` 生成，请修改后者。[脚本与指南]"
        "(../../../llm/llama/README_TE_zh.md)。取值不合法的选项会在开始工作之前被拒绝：一行错误信息，退出码 2。"
        "各选项可取的值见[英文页](../../reference/options.md)。",
    ]
    for name, options in TABLES.items():
        what = _what(name)
        head = _HEADS[what]
        rows = [_chinese_row(option, what, position) for position, option in enumerate(options, 1)]
        anchor = re.sub(r"[^\w -]", "", name).replace(" ", "-")  # the English heading's
        title = name.replace(", variables", "，环境变量").replace(", ", "、")
        parts += [f'<a id="{anchor}"></a>', f"## {title}", _table(head, rows)]
    return "\n\n".join(parts) + "\n"


def _chinese_row(option: Option, what: str, position: int) -> str:
    number = [str(position)] if what == "argument" else []
    default = _default(option, option.shown_zh or option.shown)
    said = option.zh or option.doc or option.help
    return _row(*number, _name(option, what), default, re.sub(r"\]\((\.\./[^)]*)\)", _from_chinese, said))


def _from_chinese(link: re.Match[str]) -> str:
    """Return a link of docs/reference as it is in docs/zh/reference: to the page in Chinese where there is one."""
    page = link[1].removeprefix("../").partition("#")[0]
    return link[0] if (ROOT / "docs/zh" / page).is_file() else f"](../{link[1]})"


def reference() -> str:
    """Return docs/reference/options.md: every option, its values, its default, and what to know of it."""
    parts = [
        "# Options",
        "Made by `python -m paddle_te.options` from `paddle_te/options`; edit that instead. [The scripts and their "
        "guides](../../llm/llama/README_TE.md). A value that an option may not have is refused in one line, with exit "
        "status 2, before work starts.",
    ]
    for name, options in TABLES.items():
        what = _what(name)
        numbered = what == "argument"
        head = f"| {'| ' if numbered else ''}{what} | values | default | |"
        rows = [_reference_row(option, what, position) for position, option in enumerate(options, 1)]
        parts += [f"## {name}", _table(head, rows)]
    kinds: dict[str, list[str]] = {}
    for option in (each for each in PADDLENLPS if each.kind not in (FLAG, TEXT)):
        kinds.setdefault(option.kind.words, []).append(f"`--{option.name}`")
    rows = [f"| {words} | {', '.join(names)} |" for words, names in kinds.items()]
    parts += [
        "## PaddleNLP's flags",
        "run_pretrain.py and run_finetune.py take all flags of PaddleNLP's TrainingArguments. These are checked:",
        _table("| values | flags |", rows),
    ]
    return "\n\n".join(parts) + "\n"


def _reference_row(option: Option, what: str, position: int) -> str:
    number = [str(position)] if what == "argument" else []
    unit = f", in {option.kind.unit}" if option.kind.unit else ""
    default = _default(option, option.shown)
    return _row(*number, _name(option, what), option.kind.words + unit, default, option.doc or option.help)


def recipes_page() -> str:
    """Return docs/reference/recipes.md: the run files that come with the package."""
    header = f"| {' | '.join(COLUMNS)} | tokens/s per GPU, measured |"
    rows = _table(header, map(_recipe_row, recipes()))
    parts = [
        "# Recipes",
        "Made by `python -m paddle_te.options` from `paddle_te/recipes`; edit that instead. `paddle-te recipes` prints "
        "this table, also for one model, card, number of GPUs or task. "
        "[Run files](../get-started/install.md#run-files) says how to run a recipe and how to change it.",
        "A recipe with a figure was measured, on the page that the figure links to. The [planner](../guides/plan.md) "
        "computes that each recipe fits its card. It chose the layouts of recipes without a figure when they were "
        "added; `paddle-te plan` may name faster ones today. `sft` trains all weights. `lora` trains an adapter, and "
        "`lora-fp8` an adapter over a base that exists in fp8 only.",
        rows,
    ]
    return "\n\n".join(parts) + "\n"


def _recipe_row(recipe: Recipe) -> str:
    measured = f"[{recipe.measured:,}](../../{recipe.source})" if recipe.measured else ""
    name, *cells = recipe.cells()
    return _row(f"`{name}`", *cells, measured)


def pages() -> dict[Path, str]:
    """Return {path: what the file should hold}."""
    return {ROOT / REFERENCE: reference(), ROOT / CHINESE: chinese_reference(), ROOT / RECIPES: recipes_page()}
