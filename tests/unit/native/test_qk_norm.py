"""The kernels that norm and rotate the heads of q and k: their own source run on the CPU against float64."""

import numpy as np
import pytest

from paddle_te.native import DType, qk_norm, rope
from tests.unit.native.cuda_on_cpu import address, aligned
from tests.unit.native.rotations import draw_angles, rotated, split

EPSILON = 1e-3


@pytest.fixture(
    scope="module", params=[(0, 0), (1, 0), (0, 1), (1, 1)], ids=["heads", "interleaved", "all", "all interleaved"]
)
def options(request):
    """Whether it is interleaved, and over all heads."""
    return request.param


@pytest.fixture
def te(on_cpu, monkeypatch):
    monkeypatch.setattr(qk_norm, "_BLOCKS", 3)  # fewer than there are tokens in some cases
    return on_cpu


@pytest.fixture(
    params=[(2, 4, 4, 4, 16), (1, 7, 6, 2, 24), (1, 2, 10, 2, 128), (1, 3, 3, 1, 256), (1, 3, 4, 2, 128, 96, 1.25)]
)
def case(request, seed, options):
    """(packed q, k, v [b, s, heads, d], angles, both weights, the kernels' sizes, turn)."""
    b, s, heads, kv_heads, d, *part = request.param
    random = np.random.default_rng(seed)
    turn = rope.Turn(*part[:1] or [None], bool(options[0]), *part[1:])
    angles, qkv = draw_angles(random, s, turn.width or d), aligned((b, s, heads + 2 * kv_heads, d))
    qkv[:] = random.standard_normal(qkv.shape)
    weights = [aligned((n, d) if options[1] else (d,)) for n in (heads, kv_heads)]
    for weight in weights:
        weight[:] = random.uniform(0.5, 1.5, weight.shape)
    return qkv, angles, weights, rope.Geometry(b * s, s, heads, kv_heads, d, DType.FLOAT32, turn)


def norm_of(weights, zero_centered=False, ranks=1):
    over_all = weights[0].ndim == 2
    return qk_norm.QKNorm(*map(address, weights), EPSILON, zero_centered, over_all, ranks)


def rows(x, weight):
    """x [b, s, heads, d] as rows that are normed, and the weights beside them."""
    return (x.reshape(*x.shape[:2], 1, -1), weight.ravel()) if weight.ndim == 2 else (x, weight)


def normed(x, weight):
    shape, (x, weight) = x.shape, rows(x.astype("float64"), weight)
    return (x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight).reshape(shape)


def norm_backward(dy, x, weight):
    """(dx, dweight), from the derivative of each row by each of its numbers."""
    shape, of_weight = x.shape, weight.shape
    (x, weight), (dy, _) = rows(x.astype("float64"), weight), rows(dy, weight)
    d = x.shape[-1]
    r = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    jacobian = r[..., None] * np.eye(d) - r[..., None] ** 3 / d * x[..., :, None] * x[..., None, :]
    dx = np.einsum("...i,...ij->...j", dy * weight, jacobian)
    return dx.reshape(shape), (dy * x * r).reshape(-1, d).sum(0).reshape(of_weight)


def summed(te, norm, grads, qkv, angles, geometry):
    """The address of what `sums` makes, twice as much for two ranks, and its memory; 0 for norms of each head."""
    if not norm.over_all:
        return 0, None
    memory = aligned((geometry.tokens, 4))
    norm.sums(te, te, grads, qkv, address(memory), angles, geometry)
    memory *= norm.ranks
    return address(memory), memory


@pytest.mark.parametrize("packed, rotates, zero_centered", [(True, True, False), (False, False, True)])
def test_forward(te, case, packed, rotates, zero_centered):
    qkv, angles, weights, geometry = case
    _, _, heads, kv_heads, _, _, turn = geometry
    out = aligned(qkv.shape)
    parts = [aligned(part.shape) for part in split(qkv, heads, kv_heads)]
    target = address(out) if packed else tuple(map(address, parts))
    angles_at, norm = address(angles) if rotates else 0, norm_of(weights, zero_centered, ranks=2)
    sums, _kept = summed(te, norm, None, address(qkv), angles_at, geometry)
    norm.forward(te, te, address(qkv), target, angles_at, geometry, sums)
    got = split(out, heads, kv_heads) if packed else parts
    *of_heads, v = split(qkv, heads, kv_heads)
    for x, weight, found in zip(of_heads, weights, got, strict=False):
        want = normed(x, zero_centered + weight)
        want = rotated(want, angles, 1, turn) if rotates else want
        np.testing.assert_allclose(found, want, atol=4e-5)
    np.testing.assert_array_equal(got[2], v)


@pytest.mark.parametrize(
    "packed, trained, zero_centered", [(True, False, True), (False, True, True), (True, True, False)]
)
def test_backward(te, case, seed, packed, trained, zero_centered):
    qkv, angles, weights, geometry = case
    tokens, _, heads, kv_heads, d, dtype, turn = geometry
    dy = aligned(qkv.shape)
    dy[:] = np.random.default_rng(seed + 1).standard_normal(dy.shape)
    of_parts = [aligned(part.shape) for part in split(dy, heads, kv_heads)]
    for part, values in zip(of_parts, split(dy, heads, kv_heads), strict=True):
        part[:] = values
    wanted = [part.copy() for part in of_parts]
    dqkv = dy if packed else aligned(qkv.shape)
    numbers = [weight.size for weight in weights]
    partials = aligned((qk_norm.partial_bytes(tokens, sum(numbers)) // 4,))
    given = address(dqkv) if packed else tuple(map(address, of_parts)), address(qkv), address(dqkv)
    norm = norm_of(weights, zero_centered, ranks=2)
    sums, _kept = summed(te, norm, *given[:2], address(angles), geometry)
    norm.backward(te, te, *given, address(partials) if trained else 0, address(angles), geometry, sums)
    *got, dv = split(dqkv, heads, kv_heads)
    np.testing.assert_array_equal(dv, wanted[2])
    of_weights = [aligned(weight.shape) for weight in weights]
    if trained:
        qk_norm.weight_gradients(te, te, address(partials), *map(address, of_weights), tokens, numbers, dtype)
    else:
        assert np.isnan(partials).all()
    parts = zip(split(qkv, heads, kv_heads), wanted, weights, got, of_weights, strict=False)
    for x, grad, weight, dx, dweight in parts:
        want, want_weight = norm_backward(rotated(grad, angles, -1, turn), x, zero_centered + weight)
        np.testing.assert_allclose(dx, want, atol=1e-4)
        if trained:
            np.testing.assert_allclose(dweight, want_weight, atol=2e-4)


@pytest.mark.parametrize("d", [20, 264])
def test_heads_that_it_does_not_take(te, d):
    with pytest.raises(ValueError, match=f"FLOAT32 need a head size that is a multiple of 8 up to 256, got {d}"):
        norm_of([np.zeros(d), np.zeros(d)]).forward(te, te, 0, 0, 0, rope.Geometry(1, 1, 1, 1, d, DType.FLOAT32))
