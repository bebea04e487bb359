"""tools/benchmark/expert_parallel.py without GPUs: its rows, and how it finds the number of layers."""

from pathlib import Path

import pytest

from tools.benchmark import expert_parallel
from tools.benchmark.expert_parallel import Case


def cases(*layers):
    return [Case("qwen3-30b", each, 1, 4096, "allgather", ("bf16",), 2, 1) for each in layers]


def test_fewer_layers_are_tried_where_memory_lacks(monkeypatch):
    tried = []

    def run(case, ranks, folder):
        tried.append(case.layers)
        if case.layers > 12:
            return {"status": "failed", "reason": "Out of memory error on nvgpu:0"}
        return {"status": "ok", "layers": case.layers}

    monkeypatch.setattr(expert_parallel, "run_ranks", run)
    assert expert_parallel.most_layers(cases(16, 14, 12, 10), 2, Path()) == {"status": "ok", "layers": 12}
    assert tried == [16, 14, 12]


def test_another_fault_ends_the_search(monkeypatch):
    monkeypatch.setattr(expert_parallel, "run_ranks", lambda *_: {"status": "failed", "reason": "no GPU"})
    assert expert_parallel.most_layers(cases(16, 14), 2, Path())["reason"] == "no GPU"


def test_shares_of_the_floor_and_of_communication():
    """Half as fast as the floor, which by hand is 0.96 + 1.76 + 0.32 + 0.48 ms a layer on an H200."""
    found = {"ms": [9.0, 7.04, 5.0], "ms_without_sending": [6.336], "peak_bytes": 1}
    row = {"status": "ok", "layers": 1, "precisions": {"bf16": found}}
    expert_parallel.with_floors(row, cases(1)[0], 2, "NVIDIA H200")
    assert found["tokens_per_second_per_gpu"] == pytest.approx(4096 / 7.04e-3)
    assert found["exposed"] == pytest.approx(0.1) and found["of_floor"] == pytest.approx(0.5, rel=0.01)
    result = expert_parallel.report.header("expert_parallel", [], expert_parallel.DEFINITIONS)
    table = expert_parallel.markdown(result | {"libraries": {}, "rows": {"allgather": row}})
    assert "| allgather | 1 | bf16 | 7.04 | 581818 | 50." in table and "| 10.0% |" in table
