"""The recipes' list: what each file says of itself, and which ones the command shows. launch/test_run_files.py starts
each."""

import sys
from pathlib import Path

import pytest

from paddle_te import configs, recipes
from paddle_te.recipes import command

ROOT = Path(__file__).parents[2]
each_recipe = pytest.mark.parametrize("recipe", recipes.recipes(), ids=lambda recipe: recipe.name)


@each_recipe
def test_a_file_says_what_it_is_for(recipe):
    assert recipe.task in recipes.TASKS and recipe.card in recipes.CARDS
    assert recipe.model in configs.known_names()
    assert f"-{recipe.gpus}x{recipe.card}-{recipe.precision}" in recipe.name
    assert ("model" in recipe.values) == (recipe.command == "finetune"), "the user's folder is no name"


@each_recipe
def test_a_figure_stands_in_its_source(recipe):
    if not recipe.source:
        assert recipe.measured is None
        return
    rows = [row for row in (ROOT / recipe.source).read_text().splitlines() if f"| {recipe.measured} |" in row]
    assert [row for row in rows if f" {recipe.precision}, " in row and f" over {recipe.gpus} |" in row], recipe.source


def listed(monkeypatch, capsys, *words):
    """The names that the command prints, and its exit status."""
    monkeypatch.setattr(sys, "argv", ["paddle-te recipes", *words])
    status = command.main()
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]], status


def test_the_command_lists_all_and_those_asked_for(monkeypatch, capsys):
    everything, status = listed(monkeypatch, capsys)
    assert sorted(everything) == recipes.names() and status == 0
    tasks = {task: listed(monkeypatch, capsys, "--task", task)[0] for task in recipes.TASKS}
    assert sum(map(len, tasks.values())) == len(everything) and all(tasks.values())
    for card in ("80", "h100"):
        assert listed(monkeypatch, capsys, "--card", card, "--task", "lora", "--gpus", "1", "--model", "qwen2.5") == (
            ["qwen2.5-7b-1xh100-bf16-lora"],
            0,
        )
    assert listed(monkeypatch, capsys, "--gpus", "3") == ([], 1)


def test_those_measured_are_marked(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["paddle-te recipes", "--model", "llama-2-7b", "--card", "141"])
    command.main()
    assert "18,103 tokens/s per GPU (benchmarks/throughput/2026-11-22_h200x4_layouts.md)" in capsys.readouterr().out
