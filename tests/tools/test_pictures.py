"""tools/benchmark/pictures.py: what it draws is what benchmarks/ says."""

import json
import re

import pytest

from tools.benchmark import pictures


def texts(path):
    """All words and numbers of a picture, in their order; fonts and coordinates may differ between machines."""
    return re.findall(r"<!-- ([^>]*) -->", path.read_text())


def test_the_committed_pictures_are_of_the_committed_results(tmp_path):
    assert pictures.main(["--folder", str(tmp_path)]) == 0
    for name in pictures.PICTURES:
        drawn = texts(tmp_path / f"{name}.svg")
        assert drawn == texts(pictures.ROOT / f"docs/images/{name}.svg"), f"draw {name} again"
    assert {"26,000", "torchtitan, fp8"} <= set(texts(tmp_path / "speed.svg"))


def test_rows_are_chosen_by_what_they_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    rows = [
        {"peer": "paddle_te", "precision": "fp8", "layers": 2, "tokens_per_second_per_gpu": 20},
        {"peer": "torchtitan", "precision": "fp8", "layers": 2, "tokens_per_second_per_gpu": 10},
        {"peer": "torchtitan", "precision": "fp8", "layers": 4, "tokens_per_second_per_gpu": 30},
    ]
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/a.json").write_text(json.dumps({"rows": rows}))
    panel = pictures.speed_panel("", "a.json", layers=2)
    assert [(bar.label, bar.value, bar.ours) for bar in panel.bars] == [
        ("torchtitan, fp8", 10, False),
        ("paddle_te (this project), fp8", 20, True),
    ]
    with pytest.raises(ValueError, match="a.json has no two contestants with {'layers': 4}"):
        pictures.speed_panel("", "a.json", layers=4)


def test_parts_add_up_to_the_step():
    step = pictures.load(pictures.STEP)["sizes"]["8b-s8192"]["peers"]["paddle_te_fp8"]
    assert sum(pictures.step_parts()["paddle_te, fp8"].values()) == pytest.approx(step["step_ms"]["median"], rel=0.01)


def test_predictions_are_near_what_is_drawn_as_measured():
    for precision in ("fp8", "bf16"):
        [predicted], (gpus, measured) = pictures.scaling_points(precision, (4,))
        assert gpus == 4 and predicted == pytest.approx(measured, rel=0.05)
