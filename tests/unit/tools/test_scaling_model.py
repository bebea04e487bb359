"""tools/benchmark/scaling_model.py: the planner against all that was measured, and its tables."""

import json
from dataclasses import replace

import pytest

from paddle_te.planner import Layout
from tools.benchmark import scaling_model

POINTS = scaling_model.measured_points([json.loads(path.read_text()) for path in scaling_model.THROUGHPUT])


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_the_planner_says_what_was_measured(point):
    plan = scaling_model.predicted(point.model, point.layout)
    assert plan.memory.total == pytest.approx(point.memory, rel=0.02)
    assert point.ms is None or plan.milliseconds == pytest.approx(point.ms, rel=0.08)


def test_there_are_points_of_each_kind():
    layouts = [point.layout for point in POINTS]
    assert {layout.gpus for layout in layouts} == {1, 2, 4} and {layout.tp for layout in layouts} == {1, 2, 4}
    assert {layout.recompute for layout in layouts} == {"none", "core_attn", "full"}
    assert {layout.precision for layout in layouts} == {"bf16", "fp8"}


def test_a_row_is_read():
    """As throughput.py writes it; what failed and what is a peer's is left out."""
    dims = dict(hidden=64, ffn=256, heads=4, kv_heads=2, sequence=100, batch=1)
    run = {
        "size": {"dims": dims, "vocabulary": 1000, "layers": 2},
        "gpus": 2,
        "tp": 1,
        "sharding": 2,
        "stage": "stage2",
    }
    flags = "--amp_master_grad true x_overlap --recompute_modules layernorm mlp --offload_activations 1"
    run |= {"batch": 3, "precision": "bf16", "recompute": "none", "flags": f"{flags} --optim_moments bfloat16", "cp": 1}
    good = {"status": "ok", "run": run, "step_ms": {"median": 20.0}, "peak_bytes": 7}
    rows = {"one": good, "other": {"status": "failed", "run": run}}
    rows["peer"] = good | {"run": run | {"framework": "torchtitan"}}
    tries = {"try": good}
    timed, tried = scaling_model.measured_points([{"runs": rows, "tries": tries}])
    expected = Layout(2, 100, sharding=2, stage=2, batch=3, precision="bf16", overlap=True, main_grads=True)
    expected = replace(
        expected, recompute_modules=("layernorm", "mlp"), offload_activations=1, optim_moments="bfloat16"
    )
    assert timed.layout == tried.layout == expected
    assert (timed.name, timed.ms, timed.memory, tried.ms) == ("one", 20.0, 7, None)


def test_nothing_measured_is_said():
    assert scaling_model.check_table([])[0].startswith("No measured points")


def test_a_missing_input_is_named(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        scaling_model.main(["--throughput", str(tmp_path / "throughput.json")])
    assert stopped.value.code == 2 and f"there is no file {tmp_path / 'throughput.json'}" in capsys.readouterr().err


def test_main_prints_all_tables(capsys, tmp_path):
    path = tmp_path / "model.md"
    assert scaling_model.main(["--output", str(path), "--throughput"]) == 0
    text = capsys.readouterr().out
    assert path.read_text() == text and "No measured points" in text
    assert all(f"## Llama-3-{size}, {kind}" in text for size in ("8B", "70B") for kind in ("fp8", "bf16"))
    assert text.count("| 512 | ") == 4
