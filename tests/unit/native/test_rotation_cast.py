"""The kernel that norms, rotates and casts q, k and v: its source on the CPU against the kernels that do so apart."""

import numpy as np
import pytest

from paddle_te.native import DType, qk_norm, rope, rotation_cast
from tests.unit.native.cuda_on_cpu import address, aligned
from tests.unit.native.rotations import draw_angles, rotated, split

EPSILON = 1e-3


@pytest.fixture(scope="module", params=[(0, 0), (1, 1)], ids=["plain", "interleaved with norms"])
def options(request):
    """Whether it is interleaved, and there are norms."""
    return request.param


def e4m3_of(codes):
    """The numbers of bytes."""
    sign, exponent, mantissa = codes >> 7, codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent.astype(int) - 7), np.ldexp(mantissa / 8, -6))
    return np.where(sign, -magnitude, magnitude)


@pytest.mark.parametrize("packed", [True, False])
def test_it_casts_what_the_others_write(on_cpu, seed, options, packed):
    b, s, heads, kv_heads, d, width = 2, 5, 6, 2, 32, 24
    random, turn = np.random.default_rng(seed), rope.Turn(width, bool(options[0]), 1.25)
    angles, qkv = draw_angles(random, s, width), aligned((b, s, heads + 2 * kv_heads, d))
    qkv[:] = random.standard_normal(qkv.shape)
    weights = [aligned((d,)) for _ in range(2)]
    for weight in weights:
        weight[:] = random.uniform(0.5, 1.5, d)
    norm = qk_norm.QKNorm(*map(address, weights), EPSILON, True) if options[1] else None

    codes = aligned((b * s * (heads + 2 * kv_heads) * d // 4,)).view("uint8")
    scale, amax, scale_inv = factors = [np.array([value], "float32") for value in (37.5, 0.5, np.nan)]
    sizes = [n * d for n in (heads, kv_heads, kv_heads)]
    starts = np.cumsum([0, *sizes])[:3] * (1 if packed else b * s)
    places = *(address(codes) + int(start) for start in starts), (sum(sizes),) * 3 if packed else tuple(sizes)
    target = rotation_cast.Float8Heads(*places, *map(address, factors))
    geometry = rope.Geometry(b * s, s, heads, kv_heads, d, DType.FLOAT32, turn)
    rotation_cast.rotation_cast(on_cpu, on_cpu, address(qkv), target, norm, address(angles), geometry)

    if packed:
        got = np.split(codes.reshape(b * s, -1), np.cumsum(sizes)[:2], 1)
    else:
        got = [part.reshape(b * s, -1) for part in np.split(codes, np.cumsum(sizes)[:2] * b * s)]
    *normed, v = (part.astype("float64") for part in split(qkv, heads, kv_heads))
    if norm:
        root = [np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) for x in normed]
        normed = [x / r * (1 + weight) for x, r, weight in zip(normed, root, weights, strict=True)]
    want = [*(rotated(x, angles, 1, turn) for x in normed), v]
    greatest = max(np.abs(x).max() for x in want)
    assert amax == pytest.approx(greatest, rel=1e-5) and scale_inv == np.float32(1) / scale
    for x, found in zip(want, got, strict=True):
        scaled = np.clip(x.reshape(b * s, -1) * scale, -448, 448)
        steps = np.maximum(np.exp2(np.floor(np.log2(np.maximum(np.abs(scaled), 1e-9)))), 2.0**-6) / 8
        assert (np.abs(e4m3_of(found.astype(int)) - scaled) <= steps * 0.51).all()
