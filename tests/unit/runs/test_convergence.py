import json
import subprocess
import sys

import numpy as np
import pytest

from paddle_te.runs.convergence import (
    TRAIN_LOG,
    TRAIN_SUMMARY,
    compare,
    format_table,
    main,
    max_relative_difference,
    read_run,
    smoothed,
)


def write_run(folder, losses, speed=1000.0, backend=None):
    folder.mkdir(parents=True)
    with open(folder / TRAIN_LOG, "w") as log:
        for step, loss in enumerate(losses, 1):
            # the first step is warm-up: slow, and not to be counted
            record = {"step": step, "loss": loss, "lr": 1e-3, "tokens_per_second": 1.0 if step == 1 else speed}
            log.write(json.dumps(record) + "\n")
    if backend:
        (folder / TRAIN_SUMMARY).write_text(json.dumps({"backend": backend}))
    return folder


@pytest.fixture
def losses(seed):
    return np.random.default_rng(seed).uniform(1, 10, 20).tolist()


def apart(losses, difference, step):
    return [loss * (1 + difference) if index == step - 1 else loss for index, loss in enumerate(losses)]


def test_agreeing_runs(tmp_path, losses):
    runs = [
        write_run(tmp_path / "a", losses, 1000, "none"),
        write_run(tmp_path / "b", apart(losses, 4e-6, step=7), 2000, "pd"),
        write_run(tmp_path / "c", apart(losses, -8e-6, step=13), 3000, "te"),
    ]
    output = tmp_path / "out"
    assert main([*map(str, runs), "--tolerance", "1e-5", "--output", str(output)]) == 0
    summary = json.loads((output / "summary.json").read_text())
    assert summary["backends"] == ["none", "pd", "te"]
    assert summary["tolerance"] == 1e-5 and summary["agree"] is True
    assert summary["max_relative_difference"] == pytest.approx(8e-6, rel=1e-6)
    assert summary["relative_difference"] == pytest.approx({"none": 0, "pd": 4e-6, "te": 8e-6}, rel=1e-6)
    assert summary["tokens_per_second"] == pytest.approx({"none": 1000, "pd": 2000, "te": 3000})
    assert summary["steps"] == list(range(1, 21))
    assert summary["losses"]["none"] == losses and summary["losses"]["te"][12] == losses[12] * (1 - 8e-6)
    picture = (output / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_command_line_fails_when_a_curve_parts(tmp_path, losses):
    runs = [write_run(tmp_path / "none", losses), write_run(tmp_path / "pd", apart(losses, 2e-5, step=20))]
    command = [sys.executable, "-m", "paddle_te.runs.convergence", *map(str, runs), "--output", tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "the curves part: greatest relative difference 2.0e-05, tolerance 1e-05" in result.stderr
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["agree"] is False


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_a_loss_that_is_no_number_is_no_agreement(tmp_path, losses, wrong, side):
    curves = [list(losses), list(losses)]
    curves[side][5] = wrong
    runs = [write_run(tmp_path / str(index), curve) for index, curve in enumerate(curves)]
    assert main([*map(str, runs), "--output", str(tmp_path / "out")]) == 1
    assert (tmp_path / "out" / "loss.png").exists()


def test_two_diverged_runs_do_not_agree():
    assert max_relative_difference({1: float("nan")}, {1: float("nan")}) == float("inf")


def test_losses_of_zero(tmp_path, losses):
    assert max_relative_difference({1: 0.0}, {1: 0.0}) == 0 == max_relative_difference({1: 0.0, 2: 1.0}, {1: 0, 2: 1})
    assert max_relative_difference({1: 1e-9}, {1: 0.0}) == float("inf")
    runs = [write_run(tmp_path / name, [*losses, 0.0]) for name in "ab"]
    assert main([*map(str, runs), "--output", str(tmp_path / "out")]) == 0


def test_runs_of_different_length_cannot_be_compared(tmp_path, losses, capsys):
    runs = [write_run(tmp_path / "none", losses), write_run(tmp_path / "pd", losses[:15])]
    assert main(list(map(str, runs))) == 2
    assert "first step that only one has: 16" in capsys.readouterr().err


def test_table(tmp_path, losses):
    runs = [write_run(tmp_path / "none", losses, 1234), write_run(tmp_path / "pd", apart(losses, 5e-7, 3), 5678)]
    header, rule, none, pd = format_table(compare(runs, 1e-5)).splitlines()
    assert header.split() == ["backend", "loss@1", "loss@10", "loss@20", "max", "rel.", "diff.", "tokens/s"]
    shown = [f"{losses[step - 1]:.6f}" for step in (1, 10, 20)]
    assert none.split() == ["none", *shown, "reference", "1234"]
    assert pd.split() == ["pd", *shown, "5.0e-07", "5678"]
    assert len({line.find(cell) for line, cell in ((header, "tokens/s"), (none, "1234"), (pd, "5678"))}) == 1


def test_short_runs_have_no_tenth_step(tmp_path, losses):
    runs = [write_run(tmp_path / name, losses[:1]) for name in ("none", "pd")]
    assert "loss@10" not in format_table(summary := compare(runs, 0.0))
    assert summary["agree"]


def test_runs_of_one_backend_are_told_apart_by_their_folders(tmp_path, losses):
    runs = [write_run(tmp_path / name, losses, backend="te") for name in ("bf16", "fp8")]
    assert compare(runs, 0)["backends"] == ["bf16", "fp8"]
    again = [write_run(tmp_path / name / "run", losses, backend="te") for name in ("x", "y")]
    assert main([*map(str, runs), "--tolerance", "0", "--output", str(tmp_path / "out")]) == 0
    with pytest.raises(ValueError, match="rename a folder"):
        compare(again, 0)


def test_unusable_logs_are_named(tmp_path, losses, capsys):
    good = write_run(tmp_path / "good", losses)
    empty = write_run(tmp_path / "empty", [])
    broken = write_run(tmp_path / "broken", losses)
    with open(broken / TRAIN_LOG, "a") as log:
        log.write('{"step": 21, "lo')
    for bad, message in (
        (tmp_path / "nowhere", "not found: is"),
        (empty, "is empty"),
        (broken, "line 21: not a record"),
    ):
        assert main([str(good), str(bad)]) == 2
        assert f"error: {bad / TRAIN_LOG}" in (error := capsys.readouterr().err) and message in error
        with pytest.raises((OSError, ValueError), match=message):
            read_run(bad)


@pytest.mark.parametrize(
    "arguments", [["one"], ["one", "two", "--tolerance", "-1"], ["one", "two", "--tolerance", "nan"]]
)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_smoothing_compares_moving_averages():
    assert smoothed({1: 1.0, 2: 3.0, 3: 5.0}, 2) == {1: 1.0, 2: 2.0, 3: 4.0}
    assert smoothed({1: 1.0, 2: 3.0}, 1) == {1: 1.0, 2: 3.0}
