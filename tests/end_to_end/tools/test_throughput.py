"""tools/benchmark/throughput.py: two small runs for real on nvgpu's host runtime."""

import json
import shlex

import pytest

from tools.benchmark import throughput


def test_runs_for_real(tmp_path, monkeypatch, nvgpu_host, fake_cupti):
    """Two processes with overlapping communication, and their profile; a run that cannot be."""
    monkeypatch.setenv("LD_PRELOAD", str(fake_cupti))
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", nvgpu_host["CUSTOM_DEVICE_ROOT"])
    monkeypatch.setenv("NVGPU_HOST_DEVICES", "2")
    monkeypatch.setitem(throughput.RUNS, "odd", throughput.replace(throughput.RUNS["8b-l16-x2"], tp=3))
    path = tmp_path / "throughput.json"
    arguments = ["--tiny", "--runs", "odd", "8b-l16-x2", "--steps", "6", "--warmup", "2", "--profile", "1"]
    arguments += ["--output", str(path)]
    assert throughput.main(arguments) == 0
    result = json.loads(path.read_text())
    row, odd = result["runs"]["8b-l16-x2"], result["runs"]["odd"]
    assert result["hardware"]["gpus"] == 2 and result["command"].endswith(shlex.join(arguments))
    assert row["status"] == "ok" and len(row["step_ms"]["all"]) == 2  # of two steps each
    assert row["tokens_per_second"] == pytest.approx(2 * 64 * 1000 / row["step_ms"]["median"])
    assert row["tokens_per_second_per_gpu"] == row["tokens_per_second"] / 2
    assert row["peak_bytes"] > 0 and 0 < row["start_seconds"] < row["seconds"]
    assert all(4 < loss < 6 for loss in row["loss"])  # log 128 = 4.85
    account = row["timeline"]
    assert account["status"] == "ok" and account["steps"] == 1
    # of the stand-in one kernel of 7 µs, and 21.5 µs from its start to the last memset's end
    assert ["scale(float*, int)", pytest.approx(0.007, abs=1e-4), 1] in account["kernels"]
    assert account["total_ms"] == pytest.approx(0.0215, abs=1e-4)
    assert sum(account["ms"].values()) == pytest.approx(account["total_ms"])
    assert odd["status"] == "failed" and "TP=3" in odd["reason"] and "exit status 2" in odd["reason"]
    table = path.with_suffix(".md").read_text()
    assert "stage1 over 2" in table and "**failed**: error:" in table
    assert "| gaps | 0.01 (" in table and "Longest kernels of 8b-l16-x2:" in table
