"""tools/benchmark/measured.py: the planner against all that benchmarks/ has of whole trainings."""

import pytest

from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.measured import all_that_ran
from tools.benchmark import measured

POINTS = measured.all_points()


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.name}-{point.commit}")
def test_the_planner_says_what_was_measured(point):
    plan = measured.expected(point)
    assert point.memory is None or plan.memory.total == pytest.approx(point.memory, rel=0.02)
    assert point.ms is None or plan.milliseconds == pytest.approx(point.ms, rel=0.07)


def test_memory_is_closer_where_no_rank_has_more_than_others():
    """Nine points of ten within 0.5 %: the tensors are counted one by one."""
    errors = sorted(abs(measured.expected(point).memory.total / point.memory - 1) for point in POINTS if point.memory)
    assert errors[len(errors) * 9 // 10] < 0.005


@pytest.mark.parametrize("point", [point for point in POINTS if point.gpu == "h100"], ids=lambda point: point.name)
def test_an_h100(point):
    """TP 2, PP 2 and one card, with main gradients where the launcher keeps them, and moments in 8 bits."""
    plan = measured.expected(point)
    assert point.memory is None or plan.memory.total == pytest.approx(point.memory, rel=0.01)
    assert plan.milliseconds == pytest.approx(point.ms, rel=0.06)


def test_the_planner_has_what_was_measured():
    """`python -m tools.benchmark.measured` writes it."""
    assert measured.FILE.read_text(encoding="utf-8") == measured.as_text(POINTS)
    rows = {(ran.gpu.title, ran.layout.pp, ran.layout.tp) for ran in all_that_ran()}
    assert {("H100", 2, 1), ("H100", 1, 2), ("H200", 1, 1)} <= rows


def test_there_are_points_of_each_kind():
    layouts = [point.layout for point in POINTS]
    assert {layout.pp for layout in layouts} == {1, 2} and {point.gpu for point in POINTS} == {"h100", "h200"}
    assert {layout.world for layout in layouts} == {1, 2, 4} and {layout.tp for layout in layouts} == {1, 2}
    assert {layout.recomputed for layout in layouts} == {"none", "full"}
    assert {layout.precision for layout in layouts} == {"bf16", "fp8"}
    names = {point.name for point in POINTS}
    assert {"8b-x1-offload", "8b-x2-tp2-accumulated", "lora-70b-x1-fp8-base-lean"} <= names
    assert any(name.startswith("3. PP2") for name in names), "of planned.py"
    assert not any("titan" in name or "formers" in name for name in names)


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
    flags = "--amp_master_grad true enable_x_overlap --recompute_modules layernorm mlp --offload_activations 1"
    run |= {"batch": 3, "precision": "bf16", "recompute": "none", "flags": f"{flags} --optim_moments bfloat16", "cp": 1}
    times = {"median": 20.0, "min": 19.0, "max": 24.0, "all": [19.0, 20.0, 24.0]}
    good = {"status": "ok", "run": run, "step_ms": times, "peak_bytes": 7}
    rows = {"one": good, "other": {"status": "failed", "run": run}}
    rows["peer"] = good | {"run": run | {"framework": "torchtitan"}}
    rows["unpacked"] = good | {"run": run | {"method": "full", "packed": False}}
    tries = {"try": good}
    hardware = {"name": "NVIDIA H100 80GB HBM3"}
    timed, tried = measured.points_of(
        {"benchmark": "throughput", "commit": "1234567890", "hardware": hardware, "runs": rows, "tries": tries}
    )
    expected = layout_of(2, 100, sharding=2, stage=2, batch=3, precision="bf16", overlap=True, main_grads=True)
    expected = expected.but(recompute_modules=("layernorm", "mlp"), offload_activations=1, optim_moments="bfloat16")
    assert timed.layout == tried.layout == expected
    assert (timed.name, timed.commit, timed.ms, timed.memory) == ("one", "1234567", 20.0, 7) and tried.ms is None
    assert timed.gpu == "h100"


def test_times_that_say_little_are_left_out():
    """Of two steps that differ by a tenth, and of a GPU that waited for its host for a tenth of a step."""
    row = {"run": {}, "step_ms": {"min": 10.0, "max": 12.0, "all": [10.0, 12.0]}}
    assert not measured._is_steady(row)
    assert measured._is_steady(row | {"step_ms": {"min": 10.0, "max": 10.5, "all": [10.0, 10.5]}})
    three = row | {"step_ms": {"min": 10.0, "max": 12.0, "all": [10.0, 10.0, 12.0]}}
    assert measured._is_steady(three)
    assert not measured._is_steady(three | {"timeline": {"status": "ok", "total_ms": 10.0, "ms": {"gaps": 1.5}}})
    assert measured._is_steady(three | {"timeline": {"status": "ok", "total_ms": 10.0, "ms": {"gaps": 0.5}}})


def test_rows_of_documents_count_as_their_sequences():
    """As many tokens, and as many pairs of tokens that see each other."""
    _, layout = measured.of_run(measured.FINETUNING_RUNS["sft-7b-x2"].described)
    lengths = measured.finetuning.lengths_of_samples(4096) - 1
    assert layout.batch * layout.sequence == pytest.approx(4096)
    assert layout.sequence == pytest.approx((lengths.astype(float) ** 2).mean() / lengths.mean())
