"""TE's arguments of attention: pd's results are those of the formula in float64, and wrong values are refused."""

from types import SimpleNamespace

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_te.distributed import TensorParallel
from paddle_te.layers import DotProductAttention, MultiHeadAttention, RotaryPositionEmbedding, TransformerLayer
from paddle_te.ops import get_ops
from paddle_te.ops.heads import Heads
from paddle_te.ops.norms import QKNorm
from tests import emulated_te
from tests.layer_cases import weights
from tests.mask_cases import (
    CAUSAL,
    HEADS,
    KV_HEADS,
    MASKS,
    TOGETHER,
    B,
    D,
    S,
    arguments,
    check_mask,
    queries_that_see,
)
from tests.thread_ranks import Group, Rank

HIDDEN = 40
NORM = dict(qk_norm_type="RMSNorm")
SBHD = dict(attn_input_format="sbhd")


def rms_norm(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x, angles, interleaved, factor):
    """Number by number: pair i is turned by angles[…, i], and multiplied by the factor."""
    columns, width = list(x.unbind(-1)), angles.shape[-1]
    for i in range(width // 2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        a, b = columns[first], columns[second]
        cos, sin = (factor * part for part in (angles[..., i].cos(), angles[..., i].sin()))
        columns[first], columns[second] = a * cos - b * sin, a * sin + b * cos
    return paddle.stack(columns, -1)


def formula(x, values, angles, seen, options):
    """x + proj(attention(layernorm_qkv(x))), x [b, s, hidden]; seen: bool [b or 1, 1, s, s]."""
    b, s, _ = x.shape
    norms = options.get("norms", "before")
    normed = x if norms == "after" else rms_norm(x, values["layernorm_qkv.ln_weight"], 1e-5)
    qkv = paddle.matmul(normed, values["layernorm_qkv.weight"].T)
    d = qkv.shape[-1] // (HEADS + 2 * KV_HEADS)
    q, k, v = qkv.reshape([b, s, -1, d]).split([HEADS, KV_HEADS, KV_HEADS], 2)
    turn = options.get("rotary_pos_interleaved"), options.get("rotary_factor", 1.0)
    steps = [lambda x, name: x if angles is None else rotated(x, angles, *turn)]
    if "qk_norm_type" in options:
        eps = options.get("qk_norm_eps", 1e-6)
        before = options.get("qk_norm_before_rope", False)
        added = int(options.get("qk_norm_zero_centered_gamma", False))

        def norm(x, name):
            rows = x.flatten(2) if options.get("qk_norm_over") == "all" else x
            return rms_norm(rows, added + values[f"{name}_norm.weight"], eps).reshape(x.shape)

        steps.insert(0 if before else 1, norm)
    for step in steps:
        q, k = step(q, "q"), step(k, "k")
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2).transpose([0, 2, 1, 3]) for x in (k, v))
    scores = paddle.matmul(q.transpose([0, 2, 1, 3]), k, transpose_y=True) / d**0.5
    if cap := options.get("attn_logit_softcapping"):
        scores = cap * (scores / cap).tanh()
    softmax = F.softmax(paddle.where(paddle.to_tensor(seen), scores, paddle.full([], -1e300, "float64")), -1)
    context = paddle.matmul(softmax, v).transpose([0, 2, 1, 3]).flatten(2)
    out = paddle.matmul(context, values["proj.weight"].T)
    return x + (out if norms == "before" else rms_norm(out, values["post_norm.weight"], 1e-5))


@pytest.mark.parametrize("options, what, seen", [
    (dict(kv_channels=24), None, CAUSAL),
    (dict(kv_channels=D), "no angles", CAUSAL),
    (NORM | dict(qk_norm_eps=0.1), None, CAUSAL),
    (NORM | dict(qk_norm_before_rope=True, kv_channels=D), None, CAUSAL),
    (NORM | dict(qk_norm_zero_centered_gamma=True), None, CAUSAL),
    (NORM | dict(qk_norm_before_rope=True, qk_norm_zero_centered_gamma=True), None, CAUSAL),
    (NORM | dict(qk_norm_before_rope=True, qk_norm_over="all"), None, CAUSAL),
    (dict(rotary_pos_interleaved=True), None, CAUSAL),
    (dict(kv_channels=24), "part of a head", CAUSAL),
    (dict(kv_channels=24, rotary_pos_interleaved=True), "part of a head", CAUSAL),
    (dict(kv_channels=24, rotary_factor=1.2), "part of a head", CAUSAL),
    (dict(attn_logit_softcapping=0.5), "cu_seqlens", CAUSAL & TOGETHER),
    (NORM, "cu_seqlens", CAUSAL & TOGETHER),
    (dict(norms="after"), None, CAUSAL),
    (dict(norms="both"), "cu_seqlens", CAUSAL & TOGETHER),
    (SBHD, None, CAUSAL),
    (SBHD, "flat", CAUSAL),
    *[(dict(attn_mask_type=mask_type), what, seen) for mask_type, what, seen in MASKS],
])  # fmt: skip
def test_as_the_formula_in_float64(seed, options, what, seen):
    """Output and all gradients."""
    generator, rows = np.random.default_rng(seed), queries_that_see(seen)
    layer = MultiHeadAttention(HIDDEN, HEADS, KV_HEADS, max_sequence_length=S, backend="paddle", **options)
    d, _ = layer.core_attention.channels
    assert d == options.get("kv_channels", HIDDEN // HEADS)
    percent = 0.75 if what == "part of a head" else 1.0
    angles = None if what == "no angles" else RotaryPositionEmbedding(d, rotary_percent=percent)(S)
    values = weights(layer, generator)
    for name, parameter in layer.named_parameters():
        parameter.set_value(values[name])
    x, dy = (generator.standard_normal([B, S, HIDDEN]).astype("float32") for _ in range(2))
    dy *= rows

    def given(array):
        array = array.swapaxes(0, 1) if options == SBHD else array
        return paddle.to_tensor(array.reshape([-1, HIDDEN]) if what == "flat" else array)

    def back(tensor):
        array = tensor.numpy().reshape([*((S, B) if options == SBHD else (B, S)), HIDDEN])
        return array.swapaxes(0, 1) if options == SBHD else array

    mine = given(x)
    mine.stop_gradient = False
    y = layer(mine, angles, **({} if what in ("flat", "no angles", "part of a head") else arguments(what)))
    y.backward(given(dy))
    got = {name: parameter.grad.numpy() for name, parameter in layer.named_parameters()}
    got |= {"y": back(y) * rows, "x": back(mine.grad)}

    tensors = {name: paddle.to_tensor(value.astype("float64")) for name, value in (values | {"x": x}).items()}
    for tensor in tensors.values():
        tensor.stop_gradient = False
    angles = None if angles is None else angles.astype("float64").unsqueeze([0, 2])
    want = formula(tensors["x"], tensors, angles, np.broadcast_to(seen, (B, 1, S, S)), options)
    want.backward(paddle.to_tensor(dy.astype("float64")))
    wanted = {name: tensor.grad.numpy() for name, tensor in tensors.items()} | {"y": want.numpy() * rows}
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.linalg.norm(got[name] - value) < 2e-5 * np.linalg.norm(value), name


@pytest.mark.parametrize("mask_type, what, seen", MASKS)
def test_te_sees_what_pd_sees(monkeypatch, seed, mask_type, what, seen):
    """In float16: Paddle's CPU joins no tensors of bf16, as masks want it."""
    emulated_te.install(monkeypatch.setattr)
    check_mask("cpu", "float16", mask_type, what, seen, seed)


def test_ranks_that_share_heads_sum_the_gradients_of_their_norms(monkeypatch, seed):
    """Each has all of the weight and uses it for its own heads. Here the other rank's gradient is this one's."""
    monkeypatch.setattr(TensorParallel, "all_reduce", lambda self, x: x.scale_(2.0))
    layer = MultiHeadAttention(HIDDEN, HEADS, KV_HEADS, backend="paddle", **NORM)
    x, grads = paddle.randn([B, S, HIDDEN]), []
    for tp in None, TensorParallel(SimpleNamespace(), 0, 2):
        layer.layernorm_qkv.tp = tp
        layer.clear_gradients()
        layer(x).sum().backward()
        grads.append([parameter.grad.clone() for parameter in (layer.q_norm.weight, layer.layernorm_qkv.weight)])
    (norm, weight), (norm_of_ranks, weight_of_rank) = grads
    assert (norm_of_ranks == 2 * norm).all() and (weight_of_rank == weight).all()


def test_ranks_that_share_heads_norm_them_together(seed):
    """pd's op on two ranks gives what it gives on one, with its gradients. te's: tests/unit/ops/test_te_parallel.py."""
    draw, group = np.random.default_rng(seed).standard_normal, Group(2)
    shapes = [B, S, 4, 8], [B, S, 4, 8], [B, S, 4, 8], [4, 8], [4, 8]
    q, k, dy, *weights = (draw(shape).astype("float32") for shape in shapes)

    def run(heads, ranks=None):
        """q, k and the gradients of what they are made of, of these heads."""
        parts = q[:, :, heads], k[:, :, heads], *(weight[heads].ravel() for weight in weights)
        parts = [paddle.to_tensor(np.ascontiguousarray(part), stop_gradient=False) for part in parts]
        norm, n = QKNorm(*parts[2:], 1e-3, True, True, ranks), parts[0].shape[2]
        qkv = paddle.concat([*parts[:2], parts[1].detach()], 2).flatten(2)
        *normed, _ = get_ops("paddle").rotary_qkv(qkv, None, Heads(n, n, norm))
        paddle.autograd.backward(normed, [paddle.to_tensor(np.ascontiguousarray(dy[:, :, heads]))] * 2)
        return [part.numpy().reshape([-1, n, 8]) for part in (*normed, *(part.grad for part in parts))]

    of_ranks = group.run(lambda rank: run(slice(2 * rank, 2 * rank + 2), Rank(group, rank, 2, True)))
    for want, *got in zip(run(slice(None)), *of_ranks, strict=True):
        np.testing.assert_allclose(np.concatenate(got, 1), want, atol=2e-5)


def attend(mask_type, *mask, **options):
    ones = paddle.ones([1, 4, 2, 16])
    return DotProductAttention(16, "paddle", attn_mask_type=mask_type)(ones, ones, ones, *mask, **options)


BOOL = paddle.zeros([1, 1, 1, 4], "bool")


@pytest.mark.parametrize("call, message", [
    (lambda: TransformerLayer(32, 48, 4, self_attn_mask_type="arbitrary"), "attn_mask_type='arbitrary'; .*'no_mask'"),
    (lambda: TransformerLayer(32, 48, 4, attn_input_format="thd"), "attn_input_format='thd'; .*'sbhd'"),
    (lambda: TransformerLayer(32, 48, 4, qk_norm_type="LayerNorm"), "qk_norm_type='LayerNorm'; .*'RMSNorm'"),
    (lambda: TransformerLayer(32, 48, 4, qk_norm_over="all", **NORM), "qk_norm_over='all' with qk_norm_before_rope=F"),
    (lambda: DotProductAttention(16, window_size=(4, 0), attn_mask_type="no_mask"), "only causal .* has a window"),
    (lambda: attend("padding"), "needs an attention_mask"),
    (lambda: attend("causal", BOOL), "attention_mask is paddle.bool and .*'causal'"),
    (lambda: attend("padding", BOOL[0]), r"\[b, 1, 1, keys\]"),
    (lambda: attend("no_mask", cu_seqlens=paddle.to_tensor([0, 4], dtype="int32")), "documents see each other"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
