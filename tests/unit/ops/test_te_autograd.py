"""te's ops against pd's, on the emulated library, whichever of their tensors want gradients and however these lie."""

import itertools
import random

import numpy as np
import paddle
import pytest

from paddle_te.layers import RotaryPositionEmbedding
from paddle_te.ops import documents, get_ops
from paddle_te.ops.heads import Attention, Heads, Scores
from paddle_te.ops.low_rank import LowRankUpdate
from paddle_te.ops.norms import Norm, QKNorm
from paddle_te.ops.projection import Projection
from tests import emulated_te
from tests.bfloat16 import truncated
from tests.poison import poison_allocations

HEADS = dict(num_heads=4, num_kv_heads=2)
ATTENTION = dict(scale=0.25, **HEADS)
PACKED = ATTENTION | dict(num_kv_heads=4)
DOCUMENTS = dict(documents=[[3, 5], [1, 7]])
MOST_PATTERNS = 32  # of an op with many tensors
X, QKV = dict(x=(2, 8, 32)), dict(qkv=(2, 8, 128))
RMS_NORM = X | dict(ln_weight=(32,))
LAYER_NORM = RMS_NORM | dict(ln_bias=(32,))
LINEAR = dict(weight=(48, 32))
QKV_IN_THREE = dict(q=(2, 8, 4, 16), k=(2, 8, 2, 16), v=(2, 8, 2, 16))
QK_NORM = dict(q_weight=(16,), k_weight=(16,))
SELF_ATTENTION = dict(qkv_weight=(128, 32), proj_weight=(32, 64))
MLP = dict(fc1_weight=(96, 32), fc2_weight=(32, 48))
PLAIN_MLP = dict(fc1_weight=(48, 32), fc2_weight=(32, 48), fc1_bias=(48,), fc2_bias=(32,))
FACTORS = dict(a0=(32, 3), b0=(3, 16), a2=(32, 3), b2=(3, 8))  # of the first and the third of three parts
OF_QKV = dict(qkv_a0=(32, 3), qkv_b0=(3, 64), qkv_a2=(32, 3), qkv_b2=(3, 32))
OF_PROJ = dict(proj_a0=(64, 4), proj_b0=(4, 32))
# op, shapes of its tensors, arguments, which of its outputs go on
CASES = {
    "rms_norm": ("normalize", RMS_NORM, {}, [0]),
    "rms_norm_with_residual": ("normalize", RMS_NORM | dict(residual=(2, 8, 32)), {}, [0]),
    "layer_norm": ("normalize", LAYER_NORM, dict(zero_centered_gamma=True), [0]),
    "swiglu": ("activate", X, dict(activation="swiglu"), [0]),
    "geglu": ("activate", X, dict(activation="geglu"), [0]),
    "gelu": ("activate", X, dict(activation="gelu"), [0]),
    "relu": ("activate", X, dict(activation="relu"), [0]),
    "linear": ("linear", X | LINEAR, {}, [0]),
    "linear_with_residual": ("linear", X | LINEAR | dict(residual=(2, 8, 48)), {}, [0]),
    "linear_with_bias_and_residual": ("linear", X | LINEAR | dict(bias=(48,), residual=(2, 8, 48)), {}, [0]),
    "linear_in_out": ("linear", X | dict(weight=(32, 48)), dict(transpose_y=False), [0]),
    "linear_in_out_with_residual": (
        "linear", X | dict(weight=(32, 48), residual=(2, 8, 48)), dict(transpose_y=False), [0]
    ),
    "linear_with_low_rank": ("linear", X | LINEAR | FACTORS, dict(sizes=(16, 24, 8), scaling=0.75), [0]),
    "linear_with_low_rank_of_dropped": (
        "linear", X | LINEAR | dict(residual=(2, 8, 48), dropped=(2, 8, 32), a0=(32, 8), b0=(8, 48)),
        dict(sizes=(48,), scaling=2.0), [0]
    ),
    "layernorm_linear": ("layernorm_linear", RMS_NORM | LINEAR, {}, [0, 1]),
    "layernorm_linear_without_residual": ("layernorm_linear", RMS_NORM | LINEAR, {}, [0]),
    "layernorm_linear_with_bias": ("layernorm_linear", RMS_NORM | LINEAR | dict(bias=(48,)), {}, [0, 1]),
    "layernorm_linear_of_layer_norm": ("layernorm_linear", LAYER_NORM | LINEAR, {}, [0, 1]),
    "layernorm_linear_without_norm": ("layernorm_linear", X | LINEAR, dict(norm=None), [0, 1]),
    "layernorm_mlp_without_norm": ("layernorm_mlp", X | MLP, dict(norm=None), [0]),
    "layernorm_mlp_without_norm_nor_residual": (
        "layernorm_mlp", X | MLP, dict(norm=None, add_residual=False), [0, 1]
    ),
    "layernorm_mlp": ("layernorm_mlp", RMS_NORM | MLP, {}, [0]),
    "layernorm_mlp_of_gpt": ("layernorm_mlp", LAYER_NORM | PLAIN_MLP, dict(activation="gelu"), [0]),
    "rotary_qkv": ("rotary_qkv", QKV, HEADS, [0, 1, 2]),
    "rotary_qkv_without_q": ("rotary_qkv", QKV, HEADS, [1, 2]),
    "dot_product_attention": ("dot_product_attention", QKV_IN_THREE, dict(scale=0.25), [0]),
    "rotary_qkv_with_norms": ("rotary_qkv", QKV | QK_NORM, HEADS, [0, 1, 2]),
    "rotary_attention": ("rotary_attention", QKV, ATTENTION, [0]),
    "rotary_attention_with_norms": ("rotary_attention", QKV | QK_NORM, ATTENTION, [0]),
    "rotary_attention_packed_with_norms": ("rotary_attention", dict(qkv=(2, 8, 192)) | QK_NORM, PACKED, [0]),
    "self_attention_with_norms": ("self_attention", RMS_NORM | SELF_ATTENTION | QK_NORM, ATTENTION, [0]),
    "rotary_attention_packed": ("rotary_attention", dict(qkv=(2, 8, 192)), PACKED, [0]),
    "rotary_attention_of_documents": ("rotary_attention", QKV, ATTENTION | DOCUMENTS, [0]),
    "rotary_attention_packed_of_documents": ("rotary_attention", dict(qkv=(2, 8, 192)), PACKED | DOCUMENTS, [0]),
    "dot_product_attention_of_documents": (
        "dot_product_attention", QKV_IN_THREE, dict(scale=0.25) | DOCUMENTS, [0]
    ),
    "self_attention": ("self_attention", RMS_NORM | SELF_ATTENTION, ATTENTION, [0]),
    "rotary_attention_of_documents_in_a_window": (
        "rotary_attention", QKV, ATTENTION | DOCUMENTS | dict(window=2), [0]
    ),
    "self_attention_with_bias_of_documents": (
        "self_attention", RMS_NORM | SELF_ATTENTION | dict(qkv_bias=(128,)), ATTENTION | DOCUMENTS, [0]
    ),
    "self_attention_of_gpt": (
        "self_attention", LAYER_NORM | SELF_ATTENTION | dict(qkv_bias=(128,), proj_bias=(32,)), ATTENTION, [0]
    ),
    "self_attention_flat": (
        "self_attention", RMS_NORM | SELF_ATTENTION | dict(x=(16, 32)), ATTENTION | dict(max_sequence_length=8), [0]
    ),
    "self_attention_of_documents": ("self_attention", RMS_NORM | SELF_ATTENTION, ATTENTION | DOCUMENTS, [0]),
    "self_attention_with_low_rank": (
        "self_attention", RMS_NORM | SELF_ATTENTION | OF_QKV | OF_PROJ,
        ATTENTION | DOCUMENTS | dict(qkv_sizes=(64, 32, 32), proj_sizes=(32,)), [0]
    ),
    "self_attention_with_low_rank_of_qkv": (
        "self_attention", LAYER_NORM | SELF_ATTENTION | dict(qkv_bias=(128,)) | OF_QKV,
        ATTENTION | dict(qkv_sizes=(64, 32, 32)), [0]
    ),
    "self_attention_with_low_rank_of_proj": (
        "self_attention", RMS_NORM | SELF_ATTENTION | dict(x=(16, 32)) | OF_PROJ,
        ATTENTION | dict(max_sequence_length=8, proj_sizes=(32,)), [0]
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


def projection(arguments, prefix):
    """The Projection of arguments whose names begin with the prefix, which go."""
    take = lambda name: arguments.pop(f"{prefix}{name}", None)  # noqa: E731
    weight, bias, sizes, low_rank = take("weight"), take("bias"), take("sizes"), None
    if sizes is not None:
        a, b = (tuple(take(f"{name}{part}") for part in range(len(sizes))) for name in "ab")
        low_rank = LowRankUpdate(a, b, sizes, take("scaling") or 0.75, take("dropped"))
    return Projection(weight, bias, low_rank=low_rank)


def run(backend, case, arrays, frozen, dense, generator):
    """Outputs and gradients, float32 arrays or None."""
    name, shapes, arguments, used = case
    arguments = dict(arguments)
    if rows := arguments.pop("documents", None):
        arguments["cu_seqlens"] = paddle.to_tensor(documents.cu_seqlens(rows))
    dtype = {"paddle": "float32", "transformer_engine": "bfloat16"}[backend]
    tensors = [tensor(array, dtype, dense) for array in arrays]
    for x, stop in zip(tensors, frozen, strict=True):
        x.stop_gradient = stop
    arguments |= dict(zip(shapes, tensors, strict=True))
    if "ln_weight" in shapes:
        centered = arguments.pop("zero_centered_gamma", False)
        arguments["norm"] = Norm(arguments.pop("ln_weight"), 1e-5, arguments.pop("ln_bias", None), centered)
    for argument, prefix in dict(projection="", fc1="fc1_", fc2="fc2_", qkv="qkv_", proj="proj_").items():
        if f"{prefix}weight" in shapes:
            arguments[argument] = projection(arguments, prefix)
    if "q_weight" in shapes:
        arguments["qk_norm"] = QKNorm(arguments.pop("q_weight"), arguments.pop("k_weight"), 1e-6)
    if "scale" in arguments:
        scores = Scores(arguments.pop("scale"), window=arguments.pop("window", -1))
        arguments["attention"] = Attention(scores, cu_seqlens=arguments.pop("cu_seqlens", None))
    if "num_heads" in arguments:
        arguments["heads"] = Heads(**{field: arguments.pop(field) for field in Heads._fields if field in arguments})
    if name.startswith("rotary") or name == "self_attention":
        arguments["freqs"] = RotaryPositionEmbedding(16)(8)
    outputs = getattr(get_ops(backend), name)(**arguments)
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    grads = [(outputs[i], tensor(half(generator, outputs[i].shape), dtype, dense)) for i in used]
    if flowing := [pair for pair in grads if not pair[0].stop_gradient]:  # te's may be more: those of one PyLayer
        paddle.autograd.backward(*map(list, zip(*flowing, strict=True)))
    return [None if x is None else x.astype("float32").numpy() for x in (*outputs, *(x.grad for x in tensors))]


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "strided"])
@pytest.mark.parametrize("name", CASES)
def test_patterns_of_frozen_tensors(seed, name, dense):
    case = CASES[name]
    arrays = [half(np.random.default_rng([seed, i]), shape) for i, shape in enumerate(case[1].values())]
    patterns = list(itertools.product([False, True], repeat=len(arrays)))
    if len(patterns) > MOST_PATTERNS:
        patterns = [patterns[0], *random.Random(seed).sample(patterns[1:], MOST_PATTERNS)]
    for frozen in patterns:
        got, want = (
            run(backend, case, arrays, frozen, dense, np.random.default_rng(seed))
            for backend in ("transformer_engine", "paddle")
        )
        for i, (mine, other) in enumerate(zip(got, want, strict=True)):
            assert (mine is None) == (other is None), (frozen, i)
            if mine is not None:
                assert np.linalg.norm(mine - other) <= 3e-2 * np.linalg.norm(other), (frozen, i)
