"""paddle_te.optimizer.in_backward: an ordinary step's bits, one gradient at a time, the last step's norm."""

import numpy as np
import paddle
import pytest

from paddle_te.optimizer.compact_states import keep_compact
from paddle_te.optimizer.in_backward import OptimizerInBackward
from paddle_te.options.training import MOMENTS
from tests.pretraining import numbers, run

SHAPES = [(8, 16), (16,), (16, 16)]
STEPS = 4


def make(arrays):
    """(parameters, of which the last is frozen; an AdamW)."""
    paddle.utils.unique_name.switch()
    parameters = [paddle.base.framework.EagerParamBase.from_tensor(paddle.to_tensor(array)) for array in arrays]
    for number, parameter in enumerate(parameters):
        parameter.stop_gradient, parameter.name = number == len(arrays) - 1, f"weight_{number}"
    schedule = paddle.optimizer.lr.LinearWarmup(1e-2, 3, 1e-3, 1e-2)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=parameters, weight_decay=0.1)
    return parameters, optimizer


def backward(parameters, x):
    """Of a small network that uses its first weight twice, as models with tied embeddings do."""
    first, scale, second, frozen = parameters
    hidden = paddle.tanh(x @ first * scale) @ second @ frozen
    (hidden @ first.T).square().mean().backward()


@pytest.fixture
def given(seed):
    """(arrays of the weights, inputs of the steps)"""
    generator = np.random.default_rng(seed)
    shapes = [*SHAPES, (16, 16)]
    arrays = [generator.standard_normal(shape).astype("float32") for shape in shapes]
    return arrays, generator.standard_normal((STEPS, 4, 8)).astype("float32")


def state_of(parameters, optimizer):
    tensors = {p.name: p for p in parameters} | {
        name: value for name, value in optimizer.state_dict().items() if isinstance(value, paddle.Tensor)
    }
    return {name: tensor.astype("float32").numpy() for name, tensor in tensors.items()}


def assert_equal_bits(one, other):
    assert one.keys() == other.keys() and len(one) == 4 + 3 * 4
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def ordinary(given, kept, factors=None):
    """(state after ordinary steps, norms of their gradients). kept: arguments of keep_compact. factors: what a step's
    gradients are multiplied by, of each step."""
    arrays, inputs = given
    parameters, optimizer = make(arrays)
    keep_compact(optimizer, **kept)
    norms = []
    for step, x in enumerate(inputs):
        backward(parameters, paddle.to_tensor(x))
        trained = parameters[:3]
        norms.append(np.sqrt(sum(np.square(p.grad.numpy().astype("float64")).sum() for p in trained)))
        for p in trained if factors else ():
            p.grad.set_value(p.grad * factors[step])
        optimizer.step()
        optimizer.clear_grad()
        optimizer._learning_rate.step()
    return state_of(parameters, optimizer), norms


def in_backward(given, kept, max_norm=None):
    """(state after steps in backward, the norms that the optimizer knows, how many gradients there were at a time)."""
    arrays, inputs = given
    parameters, optimizer = make(arrays)
    updating = OptimizerInBackward(optimizer, max_norm)
    keep_compact(optimizer, **kept)
    there, norms, update = [], [], optimizer._append_optimize_op

    def counted(block, param_and_grad):
        there.append(sum(p.grad is not None for p in parameters))
        update(block, param_and_grad)

    optimizer._append_optimize_op = counted
    updating.attach()
    for x in inputs:
        backward(parameters, paddle.to_tensor(x))
        assert all(p.grad is None for p in parameters)
        optimizer.step()
        optimizer.clear_grad()
        optimizer._learning_rate.step()
        norms.append(float(updating.norm))
    return state_of(parameters, optimizer), norms, there


@pytest.mark.parametrize("kept", [dict(moments=moments, master_weights="float32") for moments in MOMENTS])
def test_unclipped_steps_are_ordinary_ones_with_one_gradient_at_a_time(given, kept):
    want, want_norms = ordinary(given, kept)
    got, norms, there = in_backward(given, kept)
    assert_equal_bits(got, want)
    np.testing.assert_allclose(norms, want_norms, rtol=1e-4)
    assert there == [1] * STEPS * 3


@pytest.mark.parametrize("kept", [dict(moments=moments, master_weights="float32") for moments in MOMENTS])
def test_gradients_are_clipped_by_the_norm_of_the_step_before(given, kept):
    """The first step's count as zeros. A factor is a float32 number, computed as Paddle's clipping computes it."""
    _, norms, _ = in_backward(given, kept)
    max_norm = np.float32(np.median(norms))  # clips about half of the steps
    got, norms, _ = in_backward(given, kept, float(max_norm))
    factors = [0.0, *(float(max_norm / max(np.float32(norm), max_norm)) for norm in norms)]
    want, _ = ordinary(given, kept, factors)
    assert_equal_bits(got, want)


def test_a_gradient_that_no_hook_has_seen_is_refused(given):
    parameters, optimizer = make(given[0])
    OptimizerInBackward(optimizer)
    backward(parameters, paddle.to_tensor(given[1][0]))
    with pytest.raises(RuntimeError, match="past the update in backward: weight_0, weight_1, weight_2"):
        optimizer.step()


def test_pretraining_gives_the_same_checkpoint_and_resumes_bit_for_bit(monkeypatch, tmp_path, request):
    model = request.config.rootpath / "tests/model"
    flags = dict(model_name_or_path=model, max_seq_length=16, max_steps=4, save_steps=2, gradient_accumulation_steps=1)
    flags |= dict(transformer_engine_backend="paddle", use_fp8="true", fp8_amax_history_len=4, recompute="true")
    flags |= dict(optim_moments="bfloat16")
    ordinary = run(monkeypatch, tmp_path / "ordinary", max_grad_norm=0, **flags)
    unclipped = dict(max_grad_norm=0, optimizer_in_backward="unclipped")
    assert run(monkeypatch, tmp_path / "unclipped", **unclipped, **flags) == ordinary
    want = numbers(tmp_path / "ordinary")
    assert want == numbers(tmp_path / "unclipped") and len(want) > 50
    flags |= dict(max_grad_norm=0.1, optimizer_in_backward="last_norm")
    run(monkeypatch, tmp_path / "whole", **flags)
    middle = tmp_path / "whole/checkpoint-2"
    run(monkeypatch, tmp_path / "resumed", resume_from_checkpoint=middle, **flags)
    assert numbers(tmp_path / "resumed") == numbers(tmp_path / "whole") != want
