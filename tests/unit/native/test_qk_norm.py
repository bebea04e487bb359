"""The kernels that norm and rotate the heads of q and k: their own source run on the CPU against float64."""

import numpy as np
import pytest

from paddle_te.native import DType, qk_norm, rope
from tests.unit.native.cuda_on_cpu import OnCPU
from tests.unit.native.test_rope import address, aligned, rotated, split

EPSILON = 1e-3


@pytest.fixture(scope="module", params=[False, True], ids=["halves", "interleaved"])
def interleaved(request):
    return request.param


@pytest.fixture(scope="module")
def on_cpu(gxx, tmp_path_factory, interleaved):
    return OnCPU(gxx, tmp_path_factory.mktemp("qk_norm"), "qk_norm.cu", INTERLEAVED=int(interleaved))


@pytest.fixture
def te(on_cpu, monkeypatch):
    monkeypatch.setattr(qk_norm, "kernel", lambda *key, INTERLEAVED: key)
    monkeypatch.setattr(qk_norm, "_BLOCKS", 3)  # fewer than there are tokens in some cases
    return on_cpu


@pytest.fixture(
    params=[(2, 4, 4, 4, 16), (1, 7, 6, 2, 24), (1, 2, 40, 8, 128), (1, 3, 3, 1, 256), (1, 3, 4, 2, 128, 96)]
)
def case(request, seed, interleaved):
    """(packed q, k, v [b, s, heads, d], angles, both weights, the kernels' sizes, turn)."""
    b, s, heads, kv_heads, d, *width = request.param
    random, turn = np.random.default_rng(seed), rope.Turn(*width or [None], interleaved)
    half = random.uniform(-50, 50, (s, (turn.width or d) // 2)).astype("float32")
    angles, qkv = aligned((s, turn.width or d)), aligned((b, s, heads + 2 * kv_heads, d))
    angles[:], qkv[:] = np.concatenate([half, half], axis=1), random.standard_normal(qkv.shape)
    weights = [aligned((d,)) for _ in range(2)]
    for weight in weights:
        weight[:] = random.uniform(0.5, 1.5, d)
    return qkv, angles, weights, (b * s, s, heads, kv_heads, d, DType.FLOAT32), turn


def norm_of(weights, zero_centered=False):
    return qk_norm.QKNorm(*map(address, weights), EPSILON, zero_centered)


def normed(x, weight):
    x = x.astype("float64")
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight


def norm_backward(dy, x, weight):
    """(dx, dweight) by the Jacobian of each head."""
    x, d = x.astype("float64"), x.shape[-1]
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    jacobian = r[..., None] * np.eye(d) - r[..., None] ** 3 / d * x[..., :, None] * x[..., None, :]
    dx = np.einsum("...i,...ij->...j", dy * weight, jacobian)
    return dx, (dy * x * r).reshape(-1, d).sum(0)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_forward(te, case, packed, rotates, zero_centered):
    qkv, angles, weights, sizes, turn = case
    _, _, heads, kv_heads, _, _ = sizes
    out = aligned(qkv.shape)
    parts = [aligned(part.shape) for part in split(qkv, heads, kv_heads)]
    target = address(out) if packed else tuple(map(address, parts))
    given = address(qkv), target, address(angles) if rotates else 0, *sizes, turn
    norm_of(weights, zero_centered).forward(te, te, *given)
    got = split(out, heads, kv_heads) if packed else parts
    *of_heads, v = split(qkv, heads, kv_heads)
    for x, weight, found in zip(of_heads, weights, got, strict=False):
        want = normed(x, zero_centered + weight)
        want = rotated(want, angles, 1, turn.interleaved) if rotates else want
        np.testing.assert_allclose(found, want, atol=4e-5)
    np.testing.assert_array_equal(got[2], v)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_backward(te, case, seed, packed, trained, zero_centered):
    qkv, angles, weights, sizes, turn = case
    tokens, _, heads, kv_heads, d, dtype = sizes
    dy = aligned(qkv.shape)
    dy[:] = np.random.default_rng(seed + 1).standard_normal(dy.shape)
    of_parts = [aligned(part.shape) for part in split(dy, heads, kv_heads)]
    for part, values in zip(of_parts, split(dy, heads, kv_heads), strict=True):
        part[:] = values
    wanted = [part.copy() for part in of_parts]
    dqkv = dy if packed else aligned(qkv.shape)
    partials = aligned((qk_norm.partial_bytes(tokens, d) // 4,))
    given = address(dqkv) if packed else tuple(map(address, of_parts)), address(qkv), address(dqkv)
    given = *given, address(partials) if trained else 0, address(angles), *sizes, turn
    norm_of(weights, zero_centered).backward(te, te, *given)
    *got, dv = split(dqkv, heads, kv_heads)
    np.testing.assert_array_equal(dv, wanted[2])
    of_weights = [aligned((d,)) for _ in range(2)]
    if trained:
        qk_norm.weight_gradients(te, te, address(partials), *map(address, of_weights), tokens, d, dtype)
    else:
        assert np.isnan(partials).all()
    parts = zip(split(qkv, heads, kv_heads), wanted, weights, got, of_weights, strict=False)
    for x, grad, weight, dx, dweight in parts:
        want, want_weight = norm_backward(rotated(grad, angles, -1, turn.interleaved), x, zero_centered + weight)
        np.testing.assert_allclose(dx, want, atol=1e-4)
        if trained:
            np.testing.assert_allclose(dweight, want_weight, atol=2e-4)


@pytest.mark.parametrize("d", [20, 264])
def test_heads_that_it_does_not_take(te, d):
    with pytest.raises(ValueError, match=f"FLOAT32 need a head size that is a multiple of 8 up to 256, got {d}"):
        norm_of([np.zeros(d), np.zeros(d)]).forward(te, te, 0, 0, 0, 1, 1, 1, 1, d, DType.FLOAT32)
