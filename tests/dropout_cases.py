"""Cases of dropout, which tests/gpu runs with the real library and tests/unit with the emulated one.

Each finds out which numbers were dropped, and compares output and gradients with the formula in which these are 0.
"""

import numpy as np
import paddle
import paddle.nn.functional as F

from paddle_te import fp8
from paddle_te.distributed import recompute
from paddle_te.layers import DotProductAttention, LayerNormMLP, MultiHeadAttention, TransformerLayer
from paddle_te.layers import RotaryPositionEmbedding as Rotary
from tests.layer_cases import RECIPES, weights
from tests.te_weights import relative

DTYPE = {"paddle": "float32", "transformer_engine": "bfloat16"}
ERROR = {"paddle": 1e-5, "transformer_engine": 2e-2}
SIZES = dict(b=2, s=48, h=4, h_kv=2, d=64)


def _wanting_gradients(array, dtype):
    tensor = paddle.to_tensor(array).astype(dtype).detach()
    tensor.stop_gradient = False
    return tensor


def _seen(how, b, s):
    """(what DotProductAttention takes besides, what a query sees, [b, 1, s, s])."""
    seen = np.broadcast_to(np.tri(s, dtype=bool), (b, 1, s, s)).copy()
    if how == "documents":
        ends = [0, 20, s, s + 30, b * s]
        number = (np.searchsorted(ends, np.arange(b * s), "right")).reshape(b, 1, s, 1)
        seen &= number == number.swapaxes(2, 3)
        return dict(cu_seqlens=paddle.to_tensor(np.array(ends, "int32"))), seen
    if how == "mask":
        seen[1, ..., :5] = np.eye(s, dtype=bool)[:, :5]
        return dict(attention_mask=paddle.to_tensor(np.where(seen, 0, -1e9).astype("float32"))), seen
    return {}, seen


def _softmax(q, k, seen):
    """float64 [b, h, s, s], differentiable."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose([0, 2, 3, 1])
    scores = paddle.matmul(q.transpose([0, 2, 1, 3]), k) / q.shape[-1] ** 0.5
    return F.softmax(paddle.where(paddle.to_tensor(seen), scores, paddle.full([], -1e300, "float64")), -1)


def check_attention(device, backend, how, seed, dropout=0.3):
    """With the identity for v the output is the softmax with what was dropped. Equal random numbers drop the same of
    any v: output and gradients are those of the formula in float64."""
    generator, (b, s, h, h_kv, d) = np.random.default_rng(seed), SIZES.values()
    shapes = (b, s, h, d), (b, s, h_kv, d), (b, s, h_kv, d)
    dtype = DTYPE[backend]
    paddle.set_device(device)
    arrays = [paddle.to_tensor(generator.standard_normal(shape).astype("float32")).astype(dtype) for shape in shapes]
    arrays = [x.astype("float32").numpy() for x in arrays]
    dout = generator.standard_normal((b, s, h * d)).astype("float32")
    options, seen = _seen(how, b, s)
    layer = DotProductAttention(d, backend, attention_dropout=dropout)

    def run(v):
        tensors = [_wanting_gradients(x, dtype) for x in (*arrays[:2], v)]
        return layer(*tensors, **options), tensors

    identity = np.broadcast_to(np.eye(s, d, dtype="float32")[:, None], shapes[2])
    state = paddle.get_rng_state()
    shown, other = (run(identity)[0].astype("float32").numpy().reshape(b, s, h, d) for _ in range(2))
    paddle.set_rng_state(state)
    out, tensors = run(arrays[2])
    out.backward(paddle.to_tensor(dout).astype(dtype))
    got = [t.astype("float32").numpy() for t in (out, *[t.grad for t in tensors])]

    paddle.set_device("cpu")
    q, k, v = (_wanting_gradients(x, "float64") for x in arrays)
    softmax = _softmax(q, k, seen)
    kept, kept_by_others = (np.moveaxis(x[..., :s], 1, 2) > 0.5 * softmax.numpy() for x in (shown, other))
    counted = np.broadcast_to(seen, kept.shape)
    n = counted.sum()
    off = (kept[counted].sum() - n * (1 - dropout)) / (n * dropout * (1 - dropout)) ** 0.5
    assert abs(off) < 5, f"of {n} numbers {kept[counted].mean():.4f} were kept, {off:.1f} standard deviations off"
    assert 0.3 < (kept != kept_by_others)[counted].mean() / (2 * dropout * (1 - dropout)) < 3
    values = v.repeat_interleave(h // h_kv, 2).transpose([0, 2, 1, 3])
    want = paddle.matmul(softmax * paddle.to_tensor(kept / (1 - dropout)), values).transpose([0, 2, 1, 3]).flatten(2)
    want.backward(paddle.to_tensor(dout).astype("float64"))
    for x, y in zip(got, (want, q.grad, k.grad, v.grad), strict=True):
        assert relative(x, y.numpy()) < ERROR[backend]

    paddle.set_device(device)
    layer.eval()
    plain = DotProductAttention(d, backend)
    inputs = [paddle.to_tensor(x).astype(dtype) for x in arrays]
    assert (layer(*inputs, **options) == plain(*inputs, **options)).all()


HALVES = {
    "multi_head_attention": lambda **options: MultiHeadAttention(256, 4, 2, **options),
    "layernorm_mlp": lambda **options: LayerNormMLP(256, 448, **options),
}


def _run(layer, x, dy, recipe, seed, masked=lambda x, y: y, again=False):
    """{"y": …, "dx": …, "d<parameter>": …} as float32 arrays, with the random numbers of a seed."""
    arguments = (Rotary(64)(x.shape[1]),) if isinstance(layer, MultiHeadAttention) else ()
    if isinstance(layer, TransformerLayer):
        arguments = (None, Rotary(64)(x.shape[1]), again == "core_attn")
    x = x.detach()
    x.stop_gradient = False
    layer.clear_gradients()
    paddle.seed(seed)
    with fp8.fp8_autocast(recipe is not None, recipe):
        y = masked(x, recompute(layer, x, *arguments) if again == "full" else layer(x, *arguments))
        y.backward(dy)
    found = {"y": y, "dx": x.grad} | {f"d{name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {name: value.astype("float32").numpy() for name, value in found.items()}


def _layer(make, seed, backend, **options):
    """One with the numbers of a seed, that all which are made alike have."""
    layer, generator = make(params_dtype=DTYPE[backend], backend=backend, **options), np.random.default_rng(seed)
    values = weights(layer, generator)
    for name, parameter in layer.named_parameters():
        parameter.set_value(paddle.to_tensor(values[name]).astype(parameter.dtype))
    return layer


def _tensors(seed, backend):
    generator = np.random.default_rng(seed)
    draw = lambda: paddle.to_tensor(generator.standard_normal([2, 32, 256]).astype("float32"))  # noqa: E731
    return [draw().astype(DTYPE[backend]) for _ in range(2)]


def check_hidden(device, backend, kind, recipe, seed, dropout=0.4):
    """What a layer adds to its input is that of one without dropout, with the mask of the same random numbers."""
    paddle.set_device(device)
    recipe, (x, dy) = RECIPES.get(recipe), _tensors(seed, backend)
    layer, plain = (_layer(HALVES[kind], seed, backend, hidden_dropout=p) for p in (dropout, 0.0))
    paddle.seed(seed)
    mask = F.dropout(paddle.ones_like(x), dropout)
    assert 0.5 < float((mask > 0).astype("float32").mean()) < 0.7
    got = _run(layer, x, dy, recipe, seed)
    want = _run(plain, x, dy, recipe, seed, lambda x, y: x + (y - x) * mask)
    for name, value in want.items():
        # Where a tensor's scale differs in its last bit, all its numbers are rounded anew. Rounding to E5M2 changes a
        # number by 5 % (root mean square), so two roundings differ by 7 %, and a product of two such tensors by more.
        assert relative(got[name], value) < (15e-2 if recipe else ERROR[backend]), name
    layer.eval()
    with paddle.no_grad(), fp8.fp8_autocast(recipe is not None, recipe):
        plain.eval()
        arguments = (Rotary(64)(x.shape[1]),) if kind == "multi_head_attention" else ()
        assert (layer(x, *arguments) == plain(x, *arguments)).all()


def check_recompute(device, backend, recipe, seed):
    """Computed again, a layer drops the same; other random numbers drop others."""
    paddle.set_device(device)
    recipe, (x, dy) = RECIPES.get(recipe), _tensors(seed, backend)
    options = dict(hidden_dropout=0.1, attention_dropout=0.1)

    def run(seed_of_run, again=False):
        layer = _layer(lambda **given: TransformerLayer(256, 448, 4, 2, **given), seed, backend, **options)
        return _run(layer, x, dy, recipe, seed_of_run, again=again)

    want, other = run(seed), run(seed + 1)
    assert relative(other["y"], want["y"]) > 0.05
    for again in "core_attn", "full":
        for name, value in run(seed, again).items():
            assert (value == want[name]).all(), (again, name)
