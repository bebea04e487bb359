"""States of AdamW in host memory give the bits of states on the device, at whatever time the copies run."""

import numpy as np
import paddle
import pytest

from paddle_te.optimizer import FactorAdamW, offloaded_states
from paddle_te.optimizer.compact_states import keep_compact
from paddle_te.optimizer.in_backward import OptimizerInBackward
from paddle_te.optimizer.offloaded_states import keep_on_host, spread
from paddle_te.options.training import MASTER_WEIGHTS, MOMENTS
from tests import emulated_te

# In pieces of 256 elements, of rows or of a flat weight; experts' matrices are larger than a piece
SHAPES = [(40, 24), (24,), (700,), (3, 512), (9, 30), (2, 30, 24)]
STEPS = 4
KINDS = [(moments, master) for moments in MOMENTS for master in MASTER_WEIGHTS]


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Copies run when they are waited for, and not before."""
    emulated_te.install(monkeypatch.setattr)
    monkeypatch.setattr(offloaded_states, "PIECE", 256)
    monkeypatch.setattr(offloaded_states, "OFFLOADED_AT_ONCE", 4 * 256)
    monkeypatch.setattr(offloaded_states, "LEAST", 100)


def make(seed, kept, fraction, dtype="float32"):
    """(parameters, an AdamW)"""
    paddle.utils.unique_name.switch()
    draw = np.random.default_rng(seed).standard_normal
    tensors = [paddle.to_tensor(draw(shape, "float32")).astype(dtype) for shape in SHAPES]
    parameters = [paddle.base.framework.EagerParamBase.from_tensor(tensor) for tensor in tensors]
    for number, parameter in enumerate(parameters):
        parameter.stop_gradient, parameter.name = False, f"weight_{number}"
    schedule = paddle.optimizer.lr.LinearWarmup(1e-2, 3, 1e-3, 1e-2)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=parameters, weight_decay=0.1, multi_precision=True)
    optimizer.__class__ = FactorAdamW
    keep_compact(optimizer, *kept)
    keep_on_host(optimizer, fraction)
    return parameters, optimizer


def step(parameters, optimizer, seed, without=()):
    draw = np.random.default_rng(seed).standard_normal
    for number, parameter in enumerate(parameters):
        grad = paddle.to_tensor(draw(parameter.shape, "float32")).astype(parameter.dtype)
        if number not in without:
            parameter.grad = grad
    optimizer.step()
    optimizer.clear_grad(set_to_zero=False)
    optimizer._learning_rate.step()


def state_of(parameters, optimizer):
    """{name: bits of weights and states}"""
    states = optimizer.state_dict()
    masters = states.pop("master_weights", {})
    states.pop("LR_Scheduler")
    tensors = {p.name: p for p in parameters} | states | {f"{name} master": value for name, value in masters.items()}
    return {name: tensor.numpy().copy() for name, tensor in tensors.items()}


def assert_equal_bits(one, other):
    assert one.keys() == other.keys() and len(one) >= 5 * len(SHAPES)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def train(seed, kept, fraction):
    """State after some steps. In the third a weight has no gradient, so that the order is another one."""
    dtype = "bfloat16" if kept[1] == "bf16_remainder" else "float32"
    parameters, optimizer = make(seed, kept, fraction, dtype)
    for number in range(STEPS):
        step(parameters, optimizer, seed + number, without={2} if number == 2 else ())
    return state_of(parameters, optimizer)


@pytest.mark.parametrize("kept", KINDS)
def test_the_same_bits(seed, kept, monkeypatch):
    want = train(seed, kept, 0)
    assert_equal_bits(train(seed, kept, 1.0), want)
    monkeypatch.setattr(emulated_te.CopyStream, "_add", lambda self, function, *given: function(*given))  # at once
    assert_equal_bits(train(seed, kept, 0.5), want)


def test_the_device_has_pieces_of_rows(seed):
    """A row of 512 elements is the largest, with two float32 moments: a slot has no whole matrix of an expert."""
    parameters, optimizer = make(seed, KINDS[0], 1.0)
    step(parameters, optimizer, seed)
    sizes = [sum(memory.size for memory in slot.memories) for slot in optimizer.host_states._free]
    assert sizes and max(sizes) == 2 * 4 * 512


@pytest.mark.parametrize(
    "missing", [(emulated_te.Event, "hold"), (emulated_te.CopyStream, "copy"), (emulated_te.CopyStream, "follow")]
)
def test_each_wait_is_needed(seed, monkeypatch, missing):
    """The test above would see numbers that come too late, or not at all."""
    want = train(seed, KINDS[0], 0)
    monkeypatch.setattr(*missing, lambda *arguments: None)
    got = train(seed, KINDS[0], 1.0)
    assert any((want[name] != got[name]).any() for name in want)


@pytest.mark.parametrize("kept", KINDS[::3])
def test_updates_in_backward(seed, kept):
    """Of a network in which the last weights are updated first."""
    found = []
    for fraction in (0, 1.0):
        parameters, optimizer = make(seed, kept, 0)
        first, scale, *_ = parameters
        updating = OptimizerInBackward(optimizer)
        keep_compact(optimizer, *kept)
        keep_on_host(optimizer, fraction)
        updating.attach()
        draw = np.random.default_rng(seed).standard_normal
        for _ in range(STEPS):
            x = paddle.to_tensor(draw([4, 40], "float32"))
            (paddle.tanh(x @ first * scale) @ first.T).square().mean().backward()
            assert first.grad is None
            optimizer.step()
            optimizer._learning_rate.step()
        found.append(state_of(parameters, optimizer))
    assert_equal_bits(*found)


def test_states_are_saved_and_restored(seed):
    """Into an optimizer that has made steps, too, whose copies are ahead."""
    found = []
    for fraction in (0, 1.0):
        parameters, optimizer = make(seed, ("bfloat16", "float32"), fraction)
        step(parameters, optimizer, seed)
        weights = [parameter.clone() for parameter in parameters]
        saved = {
            name: value.clone() if isinstance(value, paddle.Tensor) else value
            for name, value in optimizer.state_dict().items()
        }
        step(parameters, optimizer, seed + 1)
        optimizer.set_state_dict(saved)
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.set_value(weight)
        step(parameters, optimizer, seed + 2)
        found.append(state_of(parameters, optimizer))
    assert_equal_bits(*found)


def test_the_fraction_is_met_and_spread_over_the_layers():
    layer = [6 * 2**20, 2**20, 64]
    sizes = [40 * 2**20, *16 * layer]
    for fraction in (0.1, 0.25, 0.5, 0.9):
        chosen = spread(sizes, fraction)
        moved = sum(size for size, there in zip(sizes, chosen, strict=True) if there)
        assert abs(moved / sum(sizes) - fraction) < 0.02
        places = [number for number, there in enumerate(chosen[1::3]) if there]
        gaps = np.diff(places)
        assert len(places) < 2 or gaps.max() - gaps.min() <= 1
    assert not any(spread(sizes, 0)) and spread(sizes, 1) == [size >= 2**20 for size in sizes]
