"""tools/benchmark/experts.py: its problem, its peers and its program, on the emulated library."""

import json

import numpy as np
import pytest

from tests import emulated_te
from tools.benchmark import expert_peers, experts, grouped_gemms
from tools.benchmark.expert_peers import ExpertDims, ExpertProblem, PaddleExperts, PlainExperts
from tools.benchmark.problem import EPSILON, as_float32

DIMS = ExpertDims(tokens=64, hidden=64, ffn=128, experts=4, topk=2)


def test_sizes_are_the_models():
    """Weights of one layer, from the models' published shapes."""
    count = {
        name: sum(int(np.prod(shape)) for shape in dims.shapes.values()) for name, dims in expert_peers.SIZES.items()
    }
    assert count["mixtral"] == 8 * 3 * 4096 * 14336 + 8 * 4096 + 4096
    assert count["qwen3-30b"] == 128 * 3 * 2048 * 768 + 128 * 2048 + 2048
    assert count["olmoe"] == 64 * 3 * 2048 * 1024 + 64 * 2048 + 2048


def expected(problem):
    """The output in NumPy, token by token."""
    x, weights = as_float32(problem.x), {name: as_float32(bits) for name, bits in problem.weights.items()}
    out = x.copy()
    probs = np.exp(-np.arange(DIMS.topk) / DIMS.experts)
    probs /= probs.sum()
    for token, row in enumerate(x):
        z = row / np.sqrt((row**2).mean() + EPSILON) * weights["ln"]
        for number, prob in enumerate(probs):
            expert = (token * DIMS.topk + number) % DIMS.experts
            gate, up = np.split(weights["fc1"][expert] @ z, 2)
            out[token] += weights["fc2"][expert] @ (gate / (1 + np.exp(-gate)) * up) * prob
    return out


def test_peers_compute_the_problem(seed, monkeypatch):
    problem = ExpertProblem(DIMS, seed)
    truth = expected(problem)
    peer = PaddleExperts(problem, backend="paddle", device="cpu", dtype="float32")
    assert np.abs(peer.forward().numpy() - truth).max() < 1e-5
    peer.step()
    assert {name: tuple(p.grad.shape) for name, p in peer.parameters.items()} == DIMS.shapes
    emulated_te.install(monkeypatch.setattr)
    found = PaddleExperts(problem, device="cpu").forward().astype("float32").numpy()
    assert np.abs(found - truth).max() < 2e-2 * np.abs(truth).max()


def test_the_reference_computes_the_problem(seed):
    pytest.importorskip("torch", reason="the float32 reference is PyTorch's")
    problem = ExpertProblem(DIMS, seed)
    peer = PlainExperts(problem, device="cpu", dtype="float32")
    assert np.abs(peer.forward().detach().numpy() - expected(problem)).max() < 1e-5


@pytest.mark.parametrize("rows", grouped_gemms.ROWS)
def test_rows_of_experts_sum_up(rows, seed):
    counts = grouped_gemms.counts_of(expert_peers.SIZES["olmoe"], rows, seed)
    assert counts.sum() == 16384 * 8 and (counts >= 0).all() and not (counts % 16).any()
    assert (len(set(counts)) == 1) == (rows == "even")


def test_the_program_writes_layers_and_gemms(monkeypatch, tmp_path, capsys):
    emulated_te.install(monkeypatch.setattr)
    monkeypatch.setitem(experts.SIZES, "mixtral", DIMS)
    chosen = ["--peers", "paddle_te_bf16", "paddle_te_fp8_current", "--sizes", "mixtral", "--device", "cpu", "--quick"]
    chosen.append("--kernels")
    assert experts.main([*chosen, "--output", str(tmp_path / "found.json")]) == 0
    size = json.loads((tmp_path / "found.json").read_text())["sizes"]["mixtral"]
    assert [row["status"] for row in size["peers"].values()] == ["ok", "ok"]
    assert len(size["gemms"]) == 2 * 2 * 2 * 3 and all(row["grouped_us"] > 0 for row in size["gemms"].values())
    assert all(row["us"] > 0 and row["bytes"] > 0 for row in size["kernels"].values())
    table = (tmp_path / "found.md").read_text()
    assert "| gather and cast |" in table
    assert "| paddle_te_fp8_current |" in table and "| fc2 wgrad, fp8, uneven |" in table
