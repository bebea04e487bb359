"""te's ops against pd's, on the emulated library, whichever of their tensors want gradients and however these lie."""

import itertools

import numpy as np
import paddle
import pytest

from paddle_te.layers import RotaryPositionEmbedding
from paddle_te.ops import documents, get_ops
from tests import emulated_te
from tests.bfloat16 import truncated
from tests.poison import poison_allocations

HEADS = dict(num_heads=4, num_kv_heads=2)
ATTENTION = dict(scale=0.25, **HEADS)
EPS = dict(eps=1e-5)
X, QKV = (2, 8, 32), (2, 8, 128)
DOCUMENTS = dict(documents=[[3, 5], [1, 7]])
# op, the tensor that it can do without: how many there are with it, and its name
LAST = {"linear": (3, "residual"), "layernorm_linear": (4, "bias"), "self_attention": (5, "qkv_bias")}
# op, shapes of its tensors (weights after the first), arguments, which of its outputs go on
CASES = {
    "rms_norm": ("rms_norm", [X, (32,)], EPS, [0]),
    "linear": ("linear", [X, (48, 32)], {}, [0]),
    "linear_with_residual": ("linear", [X, (48, 32), (2, 8, 48)], {}, [0]),
    "linear_in_out": ("linear", [X, (32, 48)], dict(transpose_y=False), [0]),
    "linear_in_out_with_residual": ("linear", [X, (32, 48), (2, 8, 48)], dict(transpose_y=False), [0]),
    "layernorm_linear": ("layernorm_linear", [X, (32,), (48, 32)], EPS, [0, 1]),
    "layernorm_linear_without_residual": ("layernorm_linear", [X, (32,), (48, 32)], EPS, [0]),
    "layernorm_linear_with_bias": ("layernorm_linear", [X, (32,), (48, 32), (48,)], EPS, [0, 1]),
    "layernorm_mlp": ("layernorm_mlp", [X, (32,), (96, 32), (32, 48)], EPS, [0]),
    "rotary_qkv": ("rotary_qkv", [QKV], HEADS, [0, 1, 2]),
    "rotary_qkv_without_q": ("rotary_qkv", [QKV], HEADS, [1, 2]),
    "dot_product_attention": ("dot_product_attention", [(2, 8, 4, 16), *[(2, 8, 2, 16)] * 2], dict(scale=0.25), [0]),
    "rotary_attention": ("rotary_attention", [QKV], ATTENTION, [0]),
    "rotary_attention_packed": ("rotary_attention", [(2, 8, 192)], ATTENTION | dict(num_kv_heads=4), [0]),
    "rotary_attention_of_documents": ("rotary_attention", [QKV], ATTENTION | DOCUMENTS, [0]),
    "rotary_attention_packed_of_documents": (
        "rotary_attention", [(2, 8, 192)], ATTENTION | DOCUMENTS | dict(num_kv_heads=4), [0]
    ),
    "dot_product_attention_of_documents": (
        "dot_product_attention", [(2, 8, 4, 16), *[(2, 8, 2, 16)] * 2], dict(scale=0.25) | DOCUMENTS, [0]
    ),
    "self_attention": ("self_attention", [X, (32,), (128, 32), (32, 64)], ATTENTION | EPS, [0]),
    "rotary_attention_of_documents_in_a_window": (
        "rotary_attention", [QKV], ATTENTION | DOCUMENTS | dict(window=2), [0]
    ),
    "self_attention_with_bias_of_documents": (
        "self_attention", [X, (32,), (128, 32), (32, 64), (128,)], ATTENTION | EPS | DOCUMENTS, [0]
    ),
    "self_attention_with_bias": ("self_attention", [X, (32,), (128, 32), (32, 64), (128,)], ATTENTION | EPS, [0]),
    "self_attention_flat": (
        "self_attention", [(16, 32), (32,), (128, 32), (32, 64)], ATTENTION | EPS | dict(max_sequence_length=8), [0]
    ),
    "self_attention_of_documents": (
        "self_attention", [X, (32,), (128, 32), (32, 64)], ATTENTION | EPS | DOCUMENTS, [0]
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)


def half(generator, shape):
    """float32 numbers that bfloat16 holds."""
    values = generator.standard_normal(shape, "float32") / (len(shape) == 2 and shape[-1] ** 0.5 or 1)
    return truncated(values)


def tensor(array, dtype, dense):
    """Or the transpose of a transposed copy."""
    if dense:
        return paddle.to_tensor(array).astype(dtype).detach()
    axes = list(range(array.ndim))[::-1]
    result = paddle.to_tensor(array.transpose(axes).copy()).astype(dtype).detach().transpose(axes).detach()
    assert array.ndim == 1 or not result.is_contiguous()
    return result


def run(backend, case, arrays, frozen, dense, generator):
    """Outputs and gradients, float32 arrays or None."""
    name, _, arguments, used = case
    arguments = dict(arguments)
    if rows := arguments.pop("documents", None):
        arguments["cu_seqlens"] = paddle.to_tensor(documents.cu_seqlens(rows))
    dtype = {"paddle": "float32", "transformer_engine": "bfloat16"}[backend]
    tensors = [tensor(array, dtype, dense) for array in arrays]
    for x, stop in zip(tensors, frozen, strict=True):
        x.stop_gradient = stop
    given, (count, optional) = list(tensors), LAST.get(name, (0, None))
    if len(given) == count:
        arguments[optional] = given.pop()
    if name.startswith("rotary") or name == "self_attention":
        given.insert(3 if name == "self_attention" else 1, RotaryPositionEmbedding(16)(8))
    outputs = getattr(get_ops(backend), name)(*given, **arguments)
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    flowing = [outputs[i] for i in used if not outputs[i].stop_gradient]
    grads = [tensor(half(generator, y.shape), dtype, dense) for y in flowing]
    if flowing:
        paddle.autograd.backward(flowing, grads)
    return [None if x is None else x.astype("float32").numpy() for x in (*outputs, *(x.grad for x in tensors))]


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "strided"])
@pytest.mark.parametrize("name", CASES)
def test_all_patterns_of_frozen_tensors(seed, name, dense):
    case = CASES[name]
    arrays = [half(np.random.default_rng([seed, i]), shape) for i, shape in enumerate(case[1])]
    for frozen in itertools.product([False, True], repeat=len(arrays)):
        got, want = (
            run(backend, case, arrays, frozen, dense, np.random.default_rng(seed))
            for backend in ("transformer_engine", "paddle")
        )
        for i, (mine, other) in enumerate(zip(got, want, strict=True)):
            assert (mine is None) == (other is None), (frozen, i)
            if mine is not None:
                assert np.linalg.norm(mine - other) <= 3e-2 * np.linalg.norm(other), (frozen, i)
