"""tools/benchmark/ladder.py: every rung of Paddle's side computes the same, and a run leaves its table."""

import json
from functools import partial

import pytest

from tests.te_weights import relative
from tools.benchmark import ladder
from tools.benchmark.peers import PaddleTE
from tools.benchmark.problem import Dims, Problem

SMALL = Dims(2, 24, 64, 112, 4, 2)
CPU = dict(backend="paddle", dtype="float32")


def results(make, layers=2, **options):
    stack = ladder.Stack(Problem(SMALL, 3), make, layers, device="cpu", **CPU, **options)
    stack.members[0].to_torch = lambda tensor: tensor.numpy()
    for _ in range(2):
        found = stack.results()
    return found


def test_rungs_compute_the_same():
    want = results(ladder.PaddleNLP)
    for make in (partial(ladder.PaddleNLP, te_linear=True), PaddleTE):
        got = results(make)
        assert got.keys() == want.keys() == {"y", "dx"}
        for name in want:
            assert relative(got[name], want[name]) < 1e-5, name


def test_layers_follow_each_other():
    assert relative(results(PaddleTE, 1)["y"], results(PaddleTE, 2)["y"]) > 5e-3


def test_fp8_rounds():
    exact = results(PaddleTE)
    for make in (partial(ladder.PaddleNLP, te_linear=True), PaddleTE):
        assert 2e-4 < relative(results(make, precision=ladder.FP8)["y"], exact["y"]) < 0.1


def test_a_run_leaves_its_table(monkeypatch, tmp_path):
    rungs = {
        "paddlenlp_bf16": (partial(ladder.PaddleNLP, **CPU), "native"),
        "paddle_te_bf16": (partial(PaddleTE, **CPU), "the whole layer"),
        "paddle_te_fp8": (partial(PaddleTE, backend="nothing"), "fails"),
    }
    monkeypatch.setattr(ladder, "RUNGS", rungs)
    monkeypatch.setattr(ladder, "SIZES", {"small": SMALL})
    monkeypatch.setattr(ladder, "float32_results", lambda *_: None)
    path = tmp_path / "new/ladder.json"
    assert ladder.main(["--quick", "--device", "cpu", "--layers", "2", "--output", str(path)]) == 0
    size = json.loads(path.read_text())["sizes"]["small"]
    assert size["flops"] == 2 * SMALL.flops
    assert {name: row["status"] for name, row in size["peers"].items()} == dict(
        paddlenlp_bf16="ok", paddle_te_bf16="ok", paddle_te_fp8="failed"
    )
    table = path.with_suffix(".md").read_text()
    assert "2 decoder layers of Llama-2-7B" in table and "**failed**" in table
    native = next(line for line in table.splitlines() if line.startswith("| paddlenlp_bf16 |")).split("|")
    assert native[2].strip() == "native" and native[5].strip() == "1.00" and native[8].strip() == "not measured"


def test_unknown_rungs_are_refused(capsys):
    with pytest.raises(SystemExit):
        ladder.parse_arguments(["--rungs", "te"])
    assert "paddle_te_fp8" in capsys.readouterr().err
