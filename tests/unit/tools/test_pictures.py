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
    words = texts(tmp_path / "speed.svg")
    measured = [row for row in pictures.speeds(pictures.load(pictures.TITAN_ONE)) if (row.layers, row.gpus) == (16, 1)]
    assert {"paddle_te", "torchtitan"} == {row.framework for row in measured}
    for row in measured:
        assert row.label in words and f"{row.tokens:,.0f}" in words


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """speed_panel of a result that is given as a dict."""
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()

    def draw(result, title="", **wanted):
        (tmp_path / "benchmarks/a.json").write_text(json.dumps(result))
        panel = pictures.speed_panel(title, "a.json", **wanted)
        return panel.title, [(bar.label, bar.value, bar.ours) for bar in panel.bars]

    return draw


def training(framework, precision, speed, layers=2, flags="", **more):
    run = dict(framework=framework, precision=precision, gpus=2, flags=flags)
    run |= dict(size=dict(layers=layers, micro_batches=1))
    return dict(status="ok", run=run, tokens_per_second_per_gpu=speed) | more


def test_a_result_of_throughput(draw):
    runs = {
        "8b": training("paddle_te", "fp8", 20, flags="--fp8_lm_head true"),
        "titan": training("torchtitan", "fp8 tensorwise", 10),
        "titan-bf16": dict(status="missing", reason="not installed here"),
        "titan-32": training("torchtitan", "bf16", 30, layers=4),
    }
    del runs["8b"]["run"]["framework"]  # as results were before there was another
    assert draw(dict(runs=runs), layers=2, gpus=2)[1] == [
        ("torchtitan, fp8 tensorwise", 10, False),
        ("paddle_te (this project), fp8 with head", 20, True),
    ]
    with pytest.raises(ValueError, match="a.json has no two contestants with {'layers': 4}"):
        draw(dict(runs=runs), layers=4)
    runs["titan-2"] = runs["titan"]
    with pytest.raises(ValueError, match="more than one row with {'layers': 2} for torchtitan, fp8 tensorwise"):
        draw(dict(runs=runs), layers=2)


def test_a_result_of_step(draw):
    peers = {
        "te_torch_fp8_head": dict(status="ok", step_ms=dict(median=500.0)),
        "paddle_te_fp8_head": dict(status="ok", step_ms=dict(median=400.0)),
        "te_torch_fp8": dict(status="failed", reason="out of memory"),
        "paddle_te_fp8_unrecorded": dict(status="ok", step_ms=dict(median=1.0)),
    }
    size = dict(peers=peers, layers=16, micro_batches=1, tokens=1000)
    assert draw(dict(sizes={"8b": size}), "A step, {micro_batches}", layers=16) == (
        "A step, one micro-batch",
        [("TE's PyTorch layers, fp8 with head", 2000, False), ("paddle_te (this project), fp8 with head", 2500, True)],
    )


def test_parts_add_up_to_the_step():
    step = pictures.load(pictures.STEP)["sizes"]["8b-s8192"]["peers"]["paddle_te_fp8"]
    assert sum(pictures.step_parts()["paddle_te, fp8"].values()) == pytest.approx(step["step_ms"]["median"], rel=0.01)


def test_predictions_are_near_what_is_drawn_as_measured():
    for precision in ("fp8", "bf16"):
        [predicted], (gpus, measured) = pictures.scaling_points(precision, (4,))
        assert gpus == 4 and predicted == pytest.approx(measured, rel=0.05)
