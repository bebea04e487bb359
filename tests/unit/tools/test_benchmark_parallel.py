"""tools/benchmark/parallel.py without GPUs: what it writes, and what it refuses."""

import json

import pytest

from tools.benchmark import parallel

LAYOUTS = {"tp2": {"max_relative_loss_difference_from_one_process": {"te_bf16": 1e-4}}}


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(parallel.library, "gpus", lambda: [None, None])
    monkeypatch.setattr(parallel.report, "hardware", lambda: {"name": "NVIDIA H200", "driver_version": "580"})


@pytest.mark.parametrize("status", [0, 1])
def test_result_file(monkeypatch, tmp_path, two_gpus, status):
    monkeypatch.setattr(parallel, "measure", lambda selected: (status, LAYOUTS if selected == "tp2" else None))
    monkeypatch.setattr(parallel.report, "ROOT", tmp_path)
    assert parallel.main(["-k", "tp2"]) == status
    [path] = (tmp_path / "benchmarks/parallel").glob("20??-??-??_h200x2_some-layouts.json")
    result = json.loads(path.read_text())
    assert result["layouts"] == LAYOUTS and result["passed"] == (status == 0)
    assert result["hardware"] == {"name": "NVIDIA H200", "driver_version": "580", "gpus": 2}
    assert result["command"] == "python tools/benchmark/parallel.py -k tp2"
    assert {"paddlenlp", "python"} <= result["versions"].keys()


def test_nothing_measured(monkeypatch, tmp_path, two_gpus, capsys):
    monkeypatch.setattr(parallel, "measure", lambda selected: (5, None))
    assert parallel.main(["--output", str(tmp_path / "x.json")]) == 5
    assert not list(tmp_path.iterdir()) and "nothing was measured" in capsys.readouterr().err


def test_two_gpus_are_needed(monkeypatch, capsys):
    monkeypatch.setattr(parallel.library, "gpus", lambda: [None])
    with pytest.raises(SystemExit):
        parallel.main([])
    assert "two GPUs or more are needed; visible here: 1" in capsys.readouterr().err
