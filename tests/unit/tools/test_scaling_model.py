"""tools/benchmark/scaling_model.py: its formulas against numbers worked out by hand."""

import json
from dataclasses import replace

import pytest

from tools.benchmark import scaling_model, step
from tools.benchmark.problem import Dims
from tools.benchmark.scaling_model import Assumptions, Inputs, Layout

ROUND = Assumptions(nvlink=100, network=10, nvlink_hop=0, network_hop=0, overlap=1, slowdown=0, hbm=1000)
# 1 ms a layer and micro-batch, 2 ms the head, no optimizer but the clearing of gradients
SMALL = step.Size(Dims(1, 1000, 1000, 4000, 10, 10), 10_000, 10)
INPUTS = Inputs(flops_per_ms=SMALL.dims.flops, head_ms=2 / 1000, optimizer_ms=0)


def predict(**layout):
    return scaling_model.predict(SMALL, Layout(**layout), INPUTS, ROUND)


def test_parameters():
    """Meta's 8.03 and 70.6 billion."""
    assert scaling_model.parameters(scaling_model.LLAMA_8B) == 8_030_261_248
    assert scaling_model.parameters(scaling_model.LLAMA_70B) == 70_553_706_496


def test_one_gpu_is_the_sum_of_what_was_measured():
    parts = predict(gpus=1, microbatches=3, stage=0)
    assert parts["layers"] == pytest.approx(30) and parts["head"] == pytest.approx(6)
    assert sum(parts.values()) == pytest.approx(36)


@pytest.mark.parametrize(
    "ranks, stride, ms",
    [
        (1, 1, 0),
        (4, 1, 7.5),  # 1 GB · 3/4 / 100 GB/s
        (8, 1, 8.75),
        (16, 1, 15 / 16 / 80 * 1e3),  # 8 cards of 10 GB/s in each node
        (4, 8, 75),  # one rank a node: one card
        (4, 2, 7.5),
    ],
)
def test_ring(ranks, stride, ms):
    assert scaling_model.ring_ms(1e9, ranks, stride, 1, ROUND) == pytest.approx(ms)


def test_hops_of_a_ring():
    """16 ranks in two nodes: 14 steps of 1 µs and 2 of 5 µs, for each of 3 messages."""
    assume = replace(ROUND, nvlink_hop=1, network_hop=5)
    assert scaling_model.ring_ms(0, 16, 1, 3, assume) == pytest.approx(3 * (14 + 10) / 1e3)
    assert scaling_model.ring_ms(0, 8, 1, 1, assume) == pytest.approx(7 / 1e3)


def test_sharding_moves_six_bytes_a_parameter_and_stage_3_eight():
    """Reduce-scatter of float32 gradients, all-gather of bf16 weights: 3/4 of 6 GB over 4 ranks at 100 GB/s."""
    scatter, gather = scaling_model.sharding_ms(1e9, Layout(4), ROUND)
    assert (scatter, gather) == pytest.approx((30, 15))
    assert sum(scaling_model.sharding_ms(1e9, Layout(4, stage=3), ROUND)) == pytest.approx(60)
    assert scaling_model.sharding_ms(1e9, Layout(4, stage=0), ROUND) == pytest.approx((30, 0))  # 2 · 2 GB · 3/4


def test_exposed_communication():
    assume = replace(ROUND, overlap=0.75, slowdown=0.1)
    exposed = scaling_model.exposed_ms
    assert exposed(8, 100, Layout(4), assume) == pytest.approx(2 + 0.6)
    assert exposed(8, 3, Layout(4), assume) == pytest.approx(5 + 0.3)
    assert exposed(8, 100, Layout(4, overlap=False), assume) == 8


def test_bubble():
    """(p-1)/(v·m) of the time without it: 3/(2·12) with 4 stages of 2 virtual ones and 12 micro-batches."""
    parts = predict(gpus=4, pp=4, vp=2, microbatches=12)
    without = parts["layers"] + parts["head"] + parts["stage transfers"]
    assert parts["layers"] == pytest.approx(12 * 10 / 4) and parts["head"] == pytest.approx(12 * 2)
    assert parts["bubble"] == pytest.approx(without * 3 / 24)
    # activation and gradient, 2 MB each, twice for two virtual stages, at 10 GB/s
    assert parts["stage transfers"] == pytest.approx(12 * 2 * 2 * 0.2)


def test_tensor_parallel():
    """Half the layer; 6 all-gathers and 4 reduce-scatters of 2 MB over 2 ranks, 1 MB / 100 GB/s each, of which 4 are
    half hidden; in fp8 half as much is gathered."""
    parts = predict(gpus=2, tp=2)
    assert parts["layers"] == pytest.approx(5) and parts["head"] == pytest.approx(1)
    assert parts["tensor parallel"] == pytest.approx(10 * 8 * 0.01)
    assert parts["sharding"] == 0
    in_fp8 = scaling_model.predict(SMALL, Layout(2, tp=2), replace(INPUTS, gathered_bytes=1), ROUND)
    assert in_fp8["tensor parallel"] == pytest.approx(10 * (5 / 2 + 3) * 0.01)


@pytest.mark.parametrize(
    "layout, shards, bytes_each",
    [
        (Layout(4), 4, 8 / 4),  # a quarter of the main gradients is divided
        (Layout(4, stage=2), 4, 4 + 4 + 8 / 4),  # they are cleared, and read as wgrad adds to them
        (Layout(4, stage=0), 1, 4 + 4 + 4),  # into a buffer, out of it, divided
        (Layout(4, tp=4), 1, 0),
    ],
)
def test_optimizer_and_gradients(layout, shards, bytes_each):
    inputs, weights = replace(INPUTS, optimizer_ms=1e-6), scaling_model.parameters(SMALL) / layout.tp
    parts = scaling_model.predict(SMALL, layout, inputs, ROUND)
    assert parts["optimizer"] == pytest.approx(weights / shards * 1e-6 + bytes_each * weights / 1000 / 1e6)


def test_full_recompute_adds_a_forward():
    assert predict(gpus=1, recompute="full")["layers"] == pytest.approx(10 * 4 / 3)


def test_memory():
    weights = scaling_model.parameters(SMALL)
    kept = 34 * 1000 * 1000 * 10
    assert scaling_model.memory_gb(SMALL, Layout(4), ROUND) == pytest.approx((weights * (8 + 3) + kept) / 1e9)
    assert scaling_model.best_layout(SMALL, 8, INPUTS, replace(ROUND, memory=0)) is None


def test_best_layout_keeps_the_tokens():
    best = scaling_model.best_layout(SMALL, 16, INPUTS, ROUND)["layout"]
    assert best.data * best.microbatches == 16


LAYER = {
    "sizes": {
        "small": {
            "dims": vars(SMALL.dims),
            "flops": SMALL.dims.flops,
            "peers": {"paddle_te_bf16": {"status": "ok", "step_ms": {"median": 1.0}}},
        }
    }
}
PARTS = {part: {"median": 1.0} for part in step.PARTS}
STEP = {
    "sizes": {
        "small": {
            "dims": vars(SMALL.dims),
            "vocabulary": SMALL.vocabulary,
            "layers": SMALL.layers,
            "tokens": 1000,
            "peers": {"paddle_te_bf16": {"status": "ok", "parts_ms": PARTS}},
        }
    }
}


def test_inputs_from_files():
    inputs = scaling_model.inputs_for(SMALL, "bf16", False, LAYER, STEP, ROUND)
    assert inputs == Inputs(SMALL.dims.flops, 4 / 1000, 2 / scaling_model.parameters(SMALL))
    with pytest.raises(ValueError, match="no measured paddle_te_fp8_delayed_cached layer with hidden=1000"):
        scaling_model.inputs_for(SMALL, "fp8", True, LAYER, STEP, ROUND)


def test_nothing_measured_is_said():
    assert scaling_model.check_table([], LAYER, None, ROUND)[0].startswith("No measured points")


def test_relative_error(tmp_path):
    """Of a point as throughput.py writes it: 10 layers of 1 ms, the head's 4."""
    run = {"size": {"dims": vars(SMALL.dims), "vocabulary": 10_000, "layers": 10}, "gpus": 1, "tp": 1, "sharding": 1}
    run |= {"stage": "stage1", "batch": 1, "precision": "bf16", "recompute": "none", "flags": ""}
    rows = {"one": {"status": "ok", "run": run, "step_ms": {"median": 20.0}}, "other": {"status": "failed", "run": run}}
    rows["head"] = rows["one"] | {"run": run | {"flags": "--fp8_lm_head true"}}
    points = scaling_model.measured_points([{"runs": rows}])
    [*_, line] = scaling_model.check_table(points, LAYER, STEP, ROUND)
    assert line == "| one | 1 | one GPU | 16.0 | 20.0 | -20.0% |"


def test_a_missing_input_is_named(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        scaling_model.main(["--layer", str(tmp_path / "layer.json")])
    assert stopped.value.code == 2 and f"there is no file {tmp_path / 'layer.json'}" in capsys.readouterr().err


def test_main_prints_all_tables(capsys, tmp_path):
    path = tmp_path / "model.md"
    assert scaling_model.main(["--output", str(path), "--throughput"]) == 0
    text = capsys.readouterr().out
    assert path.read_text() == text and "No measured points" in text
    assert all(f"## Llama-3-{size}, {kind}" in text for size in ("8B", "70B") for kind in ("fp8", "bf16"))
    assert json.dumps(text).count("| 512 | ") == 4
