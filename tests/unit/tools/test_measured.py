"""tools/benchmark/measured.py: the planner against all that benchmarks/ has of whole trainings."""

import json
from dataclasses import replace

import pytest

from paddle_te import configs
from paddle_te.planner.gpus import GPUS
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.measured import all_that_ran
from paddle_te.planner.model import Model
from paddle_te.planner.speed import dispatch_ms, gradients_ms, layer_ms
from tools.benchmark import measured

POINTS = measured.all_points()


def bar(point):
    """Return how far off the time may be: preference tuning with current scaling takes 7 % less than planned."""
    return 0.08 if point.layout.prefers else 0.07


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.name}-{point.commit}")
def test_the_planner_says_what_was_measured(point):
    plan = measured.expected(point)
    assert point.memory is None or plan.memory.total == pytest.approx(point.memory, rel=0.02)
    assert point.ms is None or plan.milliseconds == pytest.approx(point.ms, rel=bar(point))


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_layers_on_ranks_that_divide_experts(dispatcher, precision):
    """Qwen3-30B's on two H200s, forward and backward, with main gradients that are read and written."""
    path = measured.BENCHMARKS / "expert_parallel/2026-11-28_h200x2_qwen3-30b.json"
    row = json.loads(path.read_text())["rows"][dispatcher]
    gpu, model = GPUS["h200"], replace(Model.of(configs.read("qwen3-30b-a3b")), layers=row["layers"])
    settings = dict(sharding=2, ep=2, batch=2, main_grads=True, moe_token_dispatcher_type=dispatcher)
    layout = layout_of(2, 4096, precision=precision, **settings)
    mine = model.layer_weights - model.experts / 2
    of_a_layer = layer_ms(model, layout, gpu, False) + dispatch_ms(model, layout, gpu) + gradients_ms(mine, layout, gpu)
    assert row["layers"] * of_a_layer == pytest.approx(row["precisions"][precision]["median_ms"], rel=0.06)


def test_memory_is_closer_where_no_rank_has_more_than_others():
    """Nine points of ten within 0.5 %: the tensors are counted one by one."""
    errors = sorted(abs(measured.expected(point).memory.total / point.memory - 1) for point in POINTS if point.memory)
    assert errors[len(errors) * 9 // 10] < 0.005


@pytest.mark.parametrize("point", [point for point in POINTS if point.gpu == "h100"], ids=lambda point: point.name)
def test_an_h100(point):
    """TP 2, PP 2 and one card, with main gradients where the launcher keeps them, and moments in 8 bits."""
    plan = measured.expected(point)
    assert point.memory is None or plan.memory.total == pytest.approx(point.memory, rel=0.01)
    assert point.ms is None or plan.milliseconds == pytest.approx(point.ms, rel=max(bar(point) - 0.01, 0.06))


def test_the_planner_has_what_was_measured():
    """`python -m tools.benchmark.measured` writes it."""
    assert measured.FILE.read_text(encoding="utf-8") == measured.as_text(POINTS)
    rows = {(ran.gpu.title, ran.layout.pp, ran.layout.tp) for ran in all_that_ran()}
    assert {("H100", 2, 1), ("H200", 1, 2), ("H200", 1, 1)} <= rows
    assert ("H100", 1, 2) not in rows, "its times are of code whose collectives ran by themselves"


def test_there_are_points_of_each_kind():
    layouts = [point.layout for point in POINTS]
    assert {layout.pp for layout in layouts} == {1, 2, 4} and {point.gpu for point in POINTS} == {"h100", "h200"}
    assert {layout.world for layout in layouts} == {1, 2, 4} and {layout.tp for layout in layouts} == {1, 2}
    assert {layout.recomputed for layout in layouts} == {"none", "full"}
    assert {layout.precision for layout in layouts} == {"bf16", "fp8"}
    names = {point.name for point in POINTS}
    assert {"8b-x1-offload", "8b-x2-tp2-accumulated", "lora-70b-x1-fp8-base-lean"} <= names
    assert any(name.startswith("3. PP2") for name in names), "of planned.py"
    assert {"dpo-qwen2.5-7b-x1-bf16", "olmoe-s4096-paddle_te_fp8_compact"} <= names
    assert not any("titan" in name or "formers" in name or "trl" in name or "te_torch" in name for name in names)


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
    code = {"commit": "1234567890", "date": "2026-11-28T12:00:00+00:00"}
    result = {"benchmark": "throughput", "hardware": hardware, "runs": rows, "tries": tries}
    timed, tried = measured.points_of(result | code)
    expected = layout_of(2, 100, sharding=2, stage=2, batch=3, precision="bf16", overlap=True, main_grads=True)
    expected = expected.but(recompute_modules=("layernorm", "mlp"), offload_activations=1, optim_moments="bfloat16")
    assert timed.layout == tried.layout == expected
    assert (timed.name, timed.commit, timed.ms, timed.memory) == ("one", "1234567", 20.0, 7) and tried.ms is None
    assert (timed.gpu, timed.date) == ("h100", code["date"])


def test_a_point_has_the_additions_of_its_code():
    """Those that Paddle made in one process before GEMMs did; neither changes main gradients, nor one micro-batch."""
    old = next(point for point in POINTS if point.name == "8b-x1-compact-accumulated")
    new = replace(old, date=measured.GEMMS_ADD_SINCE)
    assert (old.fuses_wgrad, new.fuses_wgrad) == (False, "grad")
    slow, fast = map(measured.expected, (old, new))
    added = 2 * 15 * old.model.parameters / GPUS["h100"].hbm / 1e6  # 6 bytes instead of 4
    assert slow.milliseconds - fast.milliseconds == pytest.approx(added)
    main, one = old.layout.but(amp_master_grad=True), old.layout.but(gradient_accumulation_steps=1)
    assert [replace(old, layout=each).fuses_wgrad for each in (main, one)] == [True, False]


def test_times_that_say_little_are_left_out():
    """Of two steps that differ by a tenth, and of a GPU that waited for its host for a tenth of a step."""
    row = {"run": {}, "step_ms": {"min": 10.0, "max": 12.0, "all": [10.0, 12.0]}}
    assert not measured._is_steady(row)
    assert measured._is_steady(row | {"step_ms": {"min": 10.0, "max": 10.5, "all": [10.0, 10.5]}})
    three = row | {"step_ms": {"min": 10.0, "max": 12.0, "all": [10.0, 10.0, 12.0]}}
    assert measured._is_steady(three)
    assert not measured._is_steady(three | {"timeline": {"status": "ok", "total_ms": 10.0, "ms": {"gaps": 1.5}}})
    assert measured._is_steady(three | {"timeline": {"status": "ok", "total_ms": 10.0, "ms": {"gaps": 0.5}}})


def test_ranks_that_divide_experts_are_read():
    described = measured.OUR_RUNS["8b-x2-stage2"].described
    size = described["size"] | dict(family="mixtral", mixture=dict(experts=8, topk=2, words=[]))
    model, layout = measured.of_run(described | dict(size=size, ep=2, stage="stage1"))
    assert layout.ep == 2 and (model.topk, model.outputs, model.sparse) == (2, 8, 1)


def test_pipelines_are_read():
    runs = [measured.OUR_RUNS[f"8b-x4-accumulated-{name}"] for name in ("pp4-vp2", "pp2-stage1")]
    virtual, overlapping = (measured.of_run(run.described)[1] for run in runs)
    assert (virtual.pp, virtual.vp, virtual.overlaps) == (4, 2, False)
    assert (overlapping.pp, overlapping.vp, overlapping.sharding_ranks, overlapping.overlaps) == (2, 1, 2, True)


def test_preference_tuning_is_read():
    """As many tokens as its rows have, in documents of a question and an answer; an adapter, and a loss in chunks."""
    run = measured.preferences.Preferences(measured.OUR_RUNS["8b-x2-stage2"].size, flags="--lora_rank 32")
    _, layout = measured.of_run(run.described)
    assert (layout.script, layout.lora, layout.lora_rank) == ("dpo", True, 32) and layout.use_fused_linear_cross_entropy
    assert layout.tokens == pytest.approx(8192) and layout.sequence < 1024


def test_rows_of_documents_count_as_their_sequences():
    """As many tokens, and as many pairs of tokens that see each other."""
    _, layout = measured.of_run(measured.FINETUNING_RUNS["sft-7b-x2"].described)
    lengths = measured.finetuning.lengths_of_samples(4096) - 1
    assert layout.batch * layout.sequence == pytest.approx(4096)
    assert layout.sequence == pytest.approx((lengths.astype(float) ** 2).mean() / lengths.mean())
