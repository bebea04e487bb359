"""Muon's matrices among ranks: two tensor parallel ranks, and sharding ranks with slices, in threads of one process."""

import math
from itertools import pairwise

import numpy as np
import paddle
import pytest

from paddle_te.ops import get_ops
from paddle_te.optimizer.holding import Shares
from paddle_te.optimizer.muon import plan
from paddle_te.optimizer.muon.exchange import balanced
from paddle_te.optimizer.muon.matrices import units_of
from paddle_te.optimizer.muon.plan import TensorRanks, chunks_of
from tests.thread_ranks import Group, Rank
from tests.unit.optimizer.muon.cases import LLAMA, MOE, draw, make, matrices, share, train


@pytest.fixture
def counted(monkeypatch):
    """The shapes of the matrices that were made orthogonal, in stacks or singly."""
    shapes, original = [], get_ops("paddle").newton_schulz

    def newton_schulz(tensors, steps, factor):
        for tensor in tensors:
            shapes.extend([tuple(tensor.shape[-2:])] * math.prod(tensor.shape[:-2]))
        return original(tensors, steps, factor)

    monkeypatch.setattr(get_ops("paddle"), "newton_schulz", newton_schulz)
    return shapes


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama", "experts"])
def test_tensor_parallel_ranks_are_one_process(config, seed, counted):
    case, group = draw(seed, config), Group(2)
    whole = train(case, *make(case))
    of_one, _ = sorted(counted), counted.clear()

    def run(rank):
        tp = Rank(group, rank, 2)
        return train(case, *make(case, tp), tp=tp)

    for rank, mine in enumerate(group.run(run)):
        for name, value in mine.items():
            want = share(case, name, whole[name], Rank(group, rank, 2))
            np.testing.assert_allclose(value, want, atol=1e-6, err_msg=name)
    assert sorted(counted) == of_one  # each matrix whole, by one of the ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_of_sharding_ranks_come_back(ranks, seed, monkeypatch, counted):
    """Ranks have arbitrary ranges of flat weights, some of them nothing; so small chunks are several.

    Some have fewer matrices than there are ranks, and a rank has no element of some.
    """
    monkeypatch.setattr(plan, "CHUNK", 700)
    case, group, random, idle, empty = draw(seed, MOE), Group(ranks), np.random.default_rng(seed), [], []
    parameters, _ = make(case)
    names = [name for name in parameters if case.layout.is_matrix(name)]
    units = [units_of(name, parameters[name], case.layout, ranks) for name in names]
    updates = {parameters[name].name: case.grads[0][name].reshape(-1) for name in names}
    edges = {
        name: [0, *sorted(random.integers(0, flat.size + 1, ranks - 1)), flat.size] for name, flat in updates.items()
    }
    for of_weight in units[:3]:
        edges[of_weight[0].weight] = [0] * ranks + [updates[of_weight[0].weight].size]

    def run(rank):
        mine = Rank(group, rank, ranks)
        shares = {name: Shares(mine, [*pairwise(map(int, at))]) for name, at in edges.items()}
        chunks = [*chunks_of(units, shares, TensorRanks(case.dims, None))]
        assert len(chunks) > 2
        idle.extend(chunk for chunk in chunks if not chunk.own)
        cut = {name: paddle.to_tensor(flat[slice(*shares[name].ranges[rank])]) for name, flat in updates.items()}
        results: dict = {}
        for chunk in chunks:
            theirs = {name: cut[name] for name in chunk.sizes}
            empty.extend([chunk] * (not theirs))
            results |= chunk.orthogonal(theirs, get_ops("paddle"), "float32")
        return {name: result.numpy() for name, result in results.items()}

    of_ranks = group.run(run)
    assert idle and empty and len(counted) == len(matrices(case, case.weights))
    whole = {}
    units = [units_of(name, parameters[name], case.layout) for name in names]
    for chunk in chunks_of(units, {}, TensorRanks(case.dims, None)):
        flat = {name: paddle.to_tensor(array) for name, array in updates.items()}
        whole |= {name: result.numpy() for name, result in chunk.orthogonal(flat, get_ops("paddle"), "float32").items()}
    for name, want in whole.items():
        got = np.concatenate([mine[name] for mine in of_ranks if name in mine])
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_weight_of_experts_is_one_view(seed, monkeypatch):
    """Its update reaches Newton–Schulz as it is, and comes back as it was made."""
    case = draw(seed, MOE)
    parameters, _ = make(case)
    (name,) = [name for name in parameters if name.endswith("layers.0.transformer.moe_layer.experts.fc1_weight")]
    (chunk,) = chunks_of([units_of(name, parameters[name], case.layout)], {}, TensorRanks(case.dims, None))
    update, made = paddle.to_tensor(case.grads[0][name].reshape(-1)), paddle.ones([8, 12, 24])

    def newton_schulz(tensors, steps, factor):
        (stack,) = tensors
        assert stack.data_ptr() == update.data_ptr() and stack.shape == made.shape
        return made

    monkeypatch.setattr(get_ops("paddle"), "newton_schulz", newton_schulz)
    (result,) = chunk.orthogonal({parameters[name].name: update}, get_ops("paddle"), "float32").values()
    assert result.data_ptr() == made.data_ptr() and result.shape == [made.size]


@pytest.mark.parametrize("ranks", [1, 3, 16])
def test_ranks_get_experts_evenly(ranks, seed):
    """Gate and up of four experts: eight matrices, all of them in order."""
    case = draw(seed, MOE)
    parameters, _ = make(case)
    name = next(name for name in parameters if name.endswith("experts.fc1_weight"))
    units = units_of(name, parameters[name], case.layout, ranks)
    assert [unit.shape[0] for unit in units] == {1: [8], 3: [2, 3, 3], 16: [1] * 8}[ranks]
    ends = [unit.begin + unit.size for unit in units]
    assert [unit.begin for unit in units] == [0, *ends[:-1]] and ends[-1] == parameters[name].size


def test_works_are_balanced():
    assert balanced([5, 1, 1, 1, 2], 2) == [0, 1, 1, 1, 1]
    assert sorted(balanced([1.0] * 8, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]
