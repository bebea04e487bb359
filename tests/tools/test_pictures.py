"""tools/benchmark/pictures.py: what it draws is what benchmarks/ says."""

import json
import re

import pytest

from tools.benchmark import pictures


def test_the_committed_picture_is_of_the_committed_results(tmp_path):
    """Its bars, in their order and lengths; fonts and versions of matplotlib may differ."""
    assert pictures.main(["--output", str(tmp_path / "speed.svg")]) == 0
    drawn, committed = (path.read_text() for path in (tmp_path / "speed.svg", pictures.ROOT / "docs/images/speed.svg"))
    numbers = [re.findall(r"<!-- ([^>]*) -->", text) for text in (drawn, committed)]
    assert numbers[0] == numbers[1] and "26,000" in numbers[0]


def test_rows_are_chosen_by_what_they_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    rows = [
        {"peer": "paddle_te", "precision": "fp8", "layers": 2, "tokens_per_second_per_gpu": 20},
        {"peer": "torchtitan", "precision": "fp8", "layers": 2, "tokens_per_second_per_gpu": 10},
        {"peer": "torchtitan", "precision": "fp8", "layers": 4, "tokens_per_second_per_gpu": 30},
    ]
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/a.json").write_text(json.dumps({"rows": rows}))
    panel = pictures.read_panel("", "a.json", layers=2)
    assert [(bar.label, bar.speed) for bar in panel.bars] == [
        ("torchtitan, fp8", 10),
        ("paddle_te (this project), fp8", 20),
    ]
    with pytest.raises(ValueError, match="a.json has no two contestants with {'layers': 4}"):
        pictures.read_panel("", "a.json", layers=4)
