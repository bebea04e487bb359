"""--fp8_statistics and --fp8_fallback in a run: its files and logs, and resume with layers that have left fp8."""

import json

import pytest

from paddle_te import manifest
from paddle_te.fp8.statistics import Place, Statistics
from paddle_te.options.fp8 import Fallback
from paddle_te.runs.fp8_log import FP8_LOG, FP8Log
from paddle_te.training.fp8_statistics import WORST, Faults, tensor_name
from tests.pretraining import run

FLAGS = dict(transformer_engine_backend="paddle", use_fp8="true", fp8_lm_head="true", fp8_skip_layers="first:1")
FLAGS |= dict(max_steps=4, save_steps=2)
COUNTED = FLAGS | dict(fp8_statistics=2)
SWITCHED = COUNTED | dict(fp8_fallback="bf16:relative_error=0.01")


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """(losses, folder) of a run with statistics."""
    folder = tmp_path_factory.mktemp("counted")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run(monkeypatch, folder, **COUNTED), folder


def log_of(folder):
    return FP8Log.read(folder / FP8_LOG)


def test_a_run_with_statistics_is_the_run_without(monkeypatch, tmp_path, counted):
    """Its files say what it counted: all layers in fp8 and the head, and the worst stand in the train log."""
    losses, folder = counted
    assert losses == run(monkeypatch, tmp_path, **FLAGS)
    log = log_of(folder)
    tensors = log.steps[4]
    assert [*log.steps] == [2, 4] and {name.partition(".")[0] for name in tensors} == {"1", "2", "3", "head"}
    gemms = {name.partition(".")[2] for name in tensors if name.startswith("1.")}
    of_gemm = ("input", "weight", "grad_output")
    assert gemms == {f"{gemm}.{tensor}" for gemm in ("qkv", "proj", "fc1", "fc2") for tensor in of_gemm}
    assert all(0 < each["relative_error"] < 0.1 and each["range"] > 0 for each in tensors.values())
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if {*WORST} <= line.keys()] == [2, 4]
    worst = max(each["relative_error"] for each in tensors.values())
    assert lines[3]["fp8_relative_error"] == pytest.approx(worst, rel=1e-3)


def test_layers_leave_fp8_and_resume_is_exact(monkeypatch, tmp_path, caplog, counted):
    whole = run(monkeypatch, tmp_path / "whole", **SWITCHED)
    assert [step for step in whole if whole[step] != counted[0][step]] == [3, 4]
    assert "layer 2, qkv.input: relative_error" in caplog.text and "in 16 bits from step 3 on" in caplog.text
    log = log_of(tmp_path / "whole")
    assert log.in_16_bits.keys() == {"1", "2", "3"} and {step for step, _ in log.in_16_bits.values()} == {2}
    assert {name.partition(".")[0] for name in log.steps[4]} == {"head"}  # which stays, with a warning
    checkpoint = tmp_path / "whole/checkpoint-2"
    assert manifest.read(checkpoint).run["in_16_bits"] == [1, 2, 3]
    resumed = run(monkeypatch, tmp_path / "resumed", **SWITCHED, resume_from_checkpoint=checkpoint)
    assert resumed == {step: whole[step] for step in (3, 4)}


def test_faults():
    fine = Statistics(1, 1, 1, 0.01, 0, 0.02)
    bad = Statistics(1, 1, 1, 0.5, 0.2, 0.02)
    fallback = Fallback.of("warn:underflows=0.1,saturated=0.1")
    tensors = {"0.qkv.input": fine, "3.fc2.weight": bad, "3.fc1.weight": bad, "head.weight": bad}
    assert Faults(tensors, fallback).found == {
        3: "fc2.weight: underflows 0.5, more than 0.1",
        None: "weight: underflows 0.5, more than 0.1",
    }


@pytest.mark.parametrize("module, gemm, gemms, attention, name", [
    ("llama.layers.7.transformer.self_attention.layernorm_qkv", 0, 1, False, "7.qkv.weight"),
    ("llama.layers.7.transformer.self_attention.proj", 0, 1, False, "7.proj.weight"),
    ("llama.layers.7.transformer.layernorm_mlp", 1, 2, False, "7.fc2.weight"),
    ("llama.layers.7.transformer.moe_layer.experts", 0, 2, False, "7.experts.fc1.weight"),
    ("llama.layers.7.transformer.self_attention.core_attention", 2, 3, True, "7.attention.output.weight"),
    ("lm_head", 0, 1, False, "head.weight"),
])  # fmt: skip
def test_names(module, gemm, gemms, attention, name):
    assert tensor_name(Place("stage", gemm, "weight"), {"stage": module}, gemms, attention) == name
