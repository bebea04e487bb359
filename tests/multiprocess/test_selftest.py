"""paddle-te selftest: what it finds on a CPU, that it sees wrong numbers, and its parts for GPUs with stand-ins."""

import json

import numpy as np
import paddle
import pytest

from paddle_te import fp8, selftest
from tests import emulated_te, nvgpu_processes
from tests.poison import poison_allocations

RECIPE = fp8.DelayedScaling(amax_history_len=4)


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(selftest.env, "training_device", lambda: "cpu")
    monkeypatch.setattr(selftest, "time_of_layer", lambda *arguments: 1.5)


def test_on_a_cpu_it_checks_pd_and_says_what_it_did_not_test(on_a_cpu, tmp_path, seed, capsys):
    assert selftest.main(["--report", str(tmp_path / "report.json"), "--seed", str(seed)]) == 0
    table = capsys.readouterr().out
    assert "TransformerLayer, pd in float32" in table and "not tested: te in bf16 and fp8: Paddle has no GPU" in table
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["checks"]) == len(selftest.LAYERS) and all(check["right"] for check in report["checks"])
    assert all(0 < check["error"] for check in report["checks"]), "float64 is computed in float64"
    assert "collectives" in report["not_tested"] and report["machine"]["python"]


class Scaled(paddle.nn.Linear):
    """A linear layer that is off by a thousandth in float32 alone."""

    def __init__(self, backend, params_dtype):
        paddle.set_default_dtype(params_dtype)
        super().__init__(selftest.HIDDEN, selftest.FFN, bias_attr=False)
        paddle.set_default_dtype("float32")

    def forward(self, x):
        return super().forward(x) * (1.001 if x.dtype == paddle.float32 else 1)


def test_a_number_that_is_off_is_named(on_a_cpu, monkeypatch, capsys):
    monkeypatch.setattr(selftest, "LAYERS", {**selftest.LAYERS, "Linear": selftest.Layer(Scaled)})
    assert selftest.main([]) == 1
    out, err = capsys.readouterr()
    assert err == f"error: 1 of {len(selftest.LAYERS)} are off: Linear, pd in float32\n"
    assert "OFF: " in out


def test_what_is_not_finite_is_off(seed):
    truth = {"output 0": np.ones(4), "gradient of input 0": np.ones(4)}
    found = truth | {"output 0": np.array([1, 1, np.nan, 1])}
    check = selftest.worst("a layer", found, truth, dict.fromkeys(truth, 1e-3))
    assert not check.right and check.where == "output 0"


def test_wrong_arguments(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        selftest.main(["--report", str(tmp_path / "file/report.json")])
    assert ended.value.code == 2 and "file is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Linear", "TransformerLayer"])
def test_te_in_fp8_is_compared_with_the_emulation(name, seed, monkeypatch):
    """With TE's kernels emulated in NumPy; weights that are off by a tenth are seen."""
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)
    assert selftest.check_on_gpu(name, seed, "cpu", RECIPE).right
    run = selftest.Case.run

    def off(case, backend, *arguments):
        if backend == selftest.TE:
            case.weights = {key: value * 1.25 for key, value in case.weights.items()}
        return run(case, backend, *arguments)

    monkeypatch.setattr(selftest.Case, "run", off)
    assert not selftest.check_on_gpu(name, seed, "cpu", RECIPE).right


def test_collectives_of_two_devices(tmp_path, monkeypatch):
    """On nvgpu's host runtime, whose devices are plain memory."""
    for name, value in nvgpu_processes.environment(nvgpu_processes.build_host()).items():
        monkeypatch.setenv(name, value)
    checks = selftest.check_collectives(["0", "1"], tmp_path)
    assert {check.error for check in checks} == {0.0} and len(checks) == 8, checks
