"""paddle-te inspect, on logs as `training.fp8_statistics` writes them."""

import builtins
import importlib.util
import json

import pytest

from paddle_te.runs import inspect
from paddle_te.runs.fp8_log import FP8_LOG, FP8Log, kept_lines, line_of, line_of_switch

COLUMNS = ("amax", "scale_min", "scale_max", "underflows", "saturated", "relative_error", "range")


def values(underflows=0.0, saturated=0.0, error=0.0225, amax=2.0, range=1.0):
    return (amax, 100.0, 200.0, underflows, saturated, error, range)


@pytest.fixture
def run(tmp_path):
    """Twelve layers and the head; layer 10 worsens until it leaves fp8, and one amax is not finite."""
    lines = []
    for step in (50, 100, 150):
        tensors = {f"{layer}.fc2.input": values(underflows=1e-4 * layer) for layer in range(12)}
        tensors["10.fc2.grad_output"] = values(underflows=0.001 * step, saturated=0.02, range=None)
        tensors["head.weight"] = values(amax=float("inf"))
        if step == 150:
            tensors = {name: each for name, each in tensors.items() if not name.startswith("10.")}
        lines.append(line_of(step, COLUMNS, tensors))
        if step == 100:
            lines.append(line_of_switch(step, {10: "fc2.grad_output: underflows 0.1, more than 0.09"}))
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / FP8_LOG).write_text("\n".join(lines) + "\n")
    return tmp_path


def test_table(run, capsys):
    assert inspect.main([str(run), "--step", "100", "--top", "3"]) == 0
    shown = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in shown[4:7]]
    assert [row[:2] for row in rows] == [["10", "fc2.grad_output"], ["11", "fc2.input"], ["10", "fc2.input"]]
    assert rows[0][2:6] == ["10", "%", "2", "%"] and "100 to 200" in shown[4] and shown[5].endswith("1.00")
    assert "layer 10 is in 16 bits since step 101: fc2.grad_output: underflows 0.1, more than 0.09" in shown


def test_the_head_comes_last_and_what_is_not_finite_is_said(run, capsys):
    assert inspect.main([str(run), "--sort", "relative_error", "--top", "20"]) == 0
    (head,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("head")]
    assert "not finite" in head
    log = FP8Log.read(run / "output" / FP8_LOG)
    assert [*inspect.worst(log, "underflows")] == [*map(str, range(12)), "head"]


def test_text_instead_of_a_picture(run, capsys, monkeypatch):
    """Darker where more is lost, and "b" where the layer is in 16 bits."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert inspect.main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert "   10 |=@b|" in shown and "    0 |   |" in shown and not (run / "output" / inspect.PICTURE).exists()


def test_picture(run):
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    assert inspect.main([str(run), "--output", str(run / "map.png")]) == 0
    assert (run / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content, message", [
    (None, "has no fp8_statistics.jsonl: was the run given --fp8_statistics N?"),
    ("{}\n", "line 1: no record of fp8 statistics"),
    ('{"step":1,"columns":[],"tensors":{}}\n', "has no tensor in fp8 yet"),
])  # fmt: skip
def test_nothing_to_read(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / FP8_LOG).write_text(content)
    assert inspect.main([str(tmp_path)]) == 2 and message in capsys.readouterr().err
    assert inspect.main([str(tmp_path / "no")]) == 2 and "no such folder" in capsys.readouterr().err


def test_a_step_that_was_not_counted(run, capsys):
    assert inspect.main([str(run), "--step", "7"]) == 2 and "counted were 50, 100, 150" in capsys.readouterr().err


def test_a_resumed_run_keeps_the_lines_before(run):
    """Also where a crash has cut the last one short."""
    path = run / "output" / FP8_LOG
    with builtins.open(path, "a") as log:
        log.write('{"step": 200, "col')
    assert [json.loads(line)["step"] for line in kept_lines(path, 100)] == [50, 100, 100]
    assert kept_lines(path, 0) == [] == kept_lines(run / "none", 3)
