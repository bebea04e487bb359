"""A step of Muon in one process equals torch.optim.Muon's, and Paddle's AdamW elsewhere; a run resumes exactly.

PADDLE_TE_HF_PYTHON names a Python that has torch 2.9 or later; without it this one is tried.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_te.optimizer.muon import Muon
from tests.unit.optimizer.muon.cases import DECAY, LLAMA, MOE, MOMENTUM, RATE, draw, make, matrices, train

PYTHON = os.environ.get("PADDLE_TE_HF_PYTHON", sys.executable)
PEERS = Path(__file__).parents[3] / "muon_peers.py"


def formula(weight, grads):
    """Moonlight's update of a matrix in float64, with Newton–Schulz as the quintic of its singular values."""
    weight, momentum = weight.astype("float64"), np.zeros(weight.shape)
    for grad in grads:
        momentum = MOMENTUM * momentum + grad
        u, s, v = np.linalg.svd(grad + MOMENTUM * momentum, full_matrices=False)
        s = s / np.linalg.norm(s)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        weight = weight * (1 - RATE * DECAY) - RATE * 0.2 * np.sqrt(max(weight.shape)) * (u * s) @ v
    return weight


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama", "experts"])
def test_each_matrix_by_the_formula_and_the_rest_by_adamw(config, seed):
    case = draw(seed, config)
    got = train(case, *make(case))
    mine, before = matrices(case, got), matrices(case, case.weights)
    of_steps = [matrices(case, grads) for grads in case.grads]
    names = {part.name for _, part in mine}
    assert names == {"q", "k", "v", "o", "gate", "up", "down"}
    for key, value in mine.items():
        np.testing.assert_allclose(value, formula(before[key], [grads[key] for grads in of_steps]), atol=1e-5)
    others = {name for name in got if not case.layout.is_matrix(name)}
    # embedding, head, norms, routers; experts' model also norms q and k
    assert len(others) == (13 if config is MOE else 7)
    parameters, optimizer = make(case)
    optimizer.matrices, optimizer.chunks = set(), ()
    adamw = train(case, parameters, optimizer)
    for name in others:
        np.testing.assert_array_equal(got[name], adamw[name])


def has_torch():
    code = "import torch; torch.optim.Muon"
    return PYTHON and subprocess.run([PYTHON, "-c", code], capture_output=True).returncode == 0


@pytest.mark.skipif(not has_torch(), reason=f"{PYTHON} lacks torch.optim.Muon; PADDLE_TE_HF_PYTHON may name another")
@pytest.mark.parametrize("wide", [True, False], ids=["float32", "bfloat16"])
def test_it_is_torchs_muon(wide, tmp_path, seed):
    case = draw(seed)
    arrays = {f"weight.{n}": array for n, array in enumerate(matrices(case, case.weights).values())}
    for step, grads in enumerate(case.grads):
        arrays |= {f"grad.{step}.{n}": array for n, array in enumerate(matrices(case, grads).values())}
    np.savez(tmp_path / "in.npz", rate=RATE, decay=DECAY, momentum=MOMENTUM, wide=wide, **arrays)
    subprocess.run([PYTHON, PEERS, tmp_path / "in.npz", tmp_path / "out.npz"], check=True)
    want = np.load(tmp_path / "out.npz")
    for number, value in enumerate(matrices(case, train(case, *make(case))).values()):
        difference = np.linalg.norm(value - want[str(number)]) / np.linalg.norm(want[str(number)])
        # 200 seeds: at most 4e-8, and 1.2e-4 of torch's bfloat16 beside our float32
        assert difference < (1e-6 if wide else 5e-4), number


def state_of(optimizer):
    return {key: value for key, value in optimizer.state_dict().items() if isinstance(value, paddle.Tensor)}


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_run(moments, seed):
    case = draw(seed)
    whole = train(case, *make(case, moments=moments))
    parameters, optimizer = make(case, moments=moments)
    case.weights = train(case, parameters, optimizer, case.grads[:2])
    again, resumed = make(case, moments=moments)
    resumed.set_state_dict(optimizer.state_dict())
    got = train(case, again, resumed, case.grads[2:])
    for name in whole:
        np.testing.assert_array_equal(got[name], whole[name])
    state = state_of(resumed)
    by_kind = {kind: [t for key, t in state.items() if key.endswith(kind)] for kind in ("moment1_0", "moment2_0")}
    assert len(by_kind["moment1_0"]) == len(whole) and len(by_kind["moment2_0"]) == 7
    assert {str(t.dtype) for t in by_kind["moment1_0"]} == {f"paddle.{moments}"}


def test_clipping_and_a_weight_without_gradient(seed):
    """The update does not depend on a gradient's size, the momentum does; without a gradient nothing changes."""
    case = draw(seed, steps=1)
    parameters, optimizer = make(case, clip=paddle.nn.ClipGradByGlobalNorm(0.5))
    train(case, parameters, optimizer)
    squares = sum(float((grad.astype("float64") ** 2).sum()) for grad in case.grads[0].values())
    name = next(filter(case.layout.is_matrix, parameters))
    momentum = next(v for key, v in state_of(optimizer).items() if key == f"{parameters[name].name}_moment1_0")
    np.testing.assert_allclose(momentum.numpy(), case.grads[0][name] * 0.5 / np.sqrt(squares), rtol=1e-5)
    before = {key: value.numpy() for key, value in parameters.items()}
    pairs = [(p, None if n == name else paddle.ones(p.shape)) for n, p in parameters.items()]
    optimizer._apply_optimize(None, None, pairs)
    assert (parameters[name].numpy() == before[name]).all()
    assert all((parameters[other].numpy() != before[other]).any() for other in before if other != name)
    assert isinstance(optimizer, Muon)
