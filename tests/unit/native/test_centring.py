"""The kernels for keys' and values' means: their sources on the CPU against NumPy in float64."""

import numpy as np
import pytest

from paddle_te.native import DType, qk_norm, rope
from paddle_te.native.centring import Means, partial_bytes
from tests.unit.native.cuda_on_cpu import address, aligned
from tests.unit.native.rotations import draw_angles, rotated, split

EPSILON = 1e-3
S = 70  # two chunks of 32 tokens and a part of one


def drawn(random, *shape):
    array = aligned(shape)
    array[:] = random.standard_normal(shape)
    return array


def filled(on_cpu, source, norm, angles, geometry, b):
    """The means that the kernels write."""
    means, partials = aligned((b, 2, geometry.kv_heads, geometry.d)), aligned((partial_bytes(S, geometry) // 4,))
    given = source, address(partials), norm, angles, geometry
    Means(address(means), S).fill(on_cpu, on_cpu, *given)
    return means


@pytest.mark.parametrize("interleaved, norms", [(False, False), (True, True)])
@pytest.mark.parametrize("kv_heads", [2, 3])  # a block has 32, or 21, tokens at once
def test_means_of_what_is_rotated(on_cpu, seed, interleaved, norms, kv_heads):
    b, heads, d, width = 2, 4, 32, 24
    random, turn = np.random.default_rng(seed), rope.Turn(width, interleaved, 1.25)
    angles, qkv = draw_angles(random, S, width), drawn(random, b, S, heads + 2 * kv_heads, d)
    qkv[:, :, heads:] += 3 * random.standard_normal([b, 1, 2 * kv_heads, d])
    weights = [aligned((d,)) for _ in range(2)]
    for weight in weights:
        weight[:] = random.uniform(0.5, 1.5, d)
    norm = qk_norm.QKNorm(*map(address, weights), EPSILON, True) if norms else None
    geometry = rope.Geometry(b * S, S, heads, kv_heads, d, DType.FLOAT32, turn)
    means = filled(on_cpu, address(qkv), norm, address(angles), geometry, b)

    _, k, v = (part.astype("float64") for part in split(qkv, heads, kv_heads))
    if norms:
        k = k / np.sqrt((k**2).mean(-1, keepdims=True) + EPSILON) * (1 + weights[1])
    want = np.stack([x.mean(1) for x in (rotated(k, angles, 1, turn), v)], 1)
    np.testing.assert_allclose(means, want, rtol=1e-5, atol=2e-6)


def test_more_heads_than_a_block_has_threads_for(on_cpu, seed):
    """A head of 256 numbers takes 32 threads, so that a block has 8 heads."""
    b, heads, d = 1, 9, 256
    tensors = [drawn(np.random.default_rng(seed + i), b, S, heads, d) for i in range(3)]
    geometry = rope.Geometry(b * S, S, heads, heads, d, DType.FLOAT32)
    means = filled(on_cpu, tuple(map(address, tensors)), None, 0, geometry, b)
    want = np.stack([x.astype("float64").mean(1) for x in tensors[1:]], 1)
    np.testing.assert_allclose(means, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("packed", [True, False])
def test_means_are_subtracted_and_added(on_cpu, seed, packed):
    b, heads, kv_heads, d = 2, 4, 2, 16
    random, tokens = np.random.default_rng(seed), b * S
    geometry = rope.Geometry(tokens, S, heads, kv_heads, d, DType.FLOAT32)
    given = drawn(random, b, 2, kv_heads, d)
    means, buffer = Means(address(given), S), drawn(random, tokens * (heads + 2 * kv_heads) * d)
    before, sizes = buffer.copy(), (heads, kv_heads, kv_heads)
    starts = np.cumsum([0, *sizes])[:3] * tokens * d * 4
    target = address(buffer) if packed else tuple(address(buffer) + int(start) for start in starts)
    means.subtract(on_cpu, on_cpu, target, geometry)

    def parts(array):
        if packed:
            return split(array.reshape(b, S, -1, d), heads, kv_heads)
        apart = np.split(array, np.cumsum(sizes)[:2] * tokens * d)
        return [part.reshape(b, S, -1, d) for part in apart]

    (q, *after), (q_before, *whole) = parts(buffer), parts(before)
    np.testing.assert_array_equal(q, q_before)
    for i, (x, y) in enumerate(zip(whole, after, strict=True)):
        np.testing.assert_array_equal(y, x - given[:, i, None])

    codes = aligned((tokens * heads * d // 4,)).view("uint8")
    codes[:] = random.choice([0x00, 0x38, 0xB8, 0x40, 0x7E, 0x01], codes.size)
    numbers = np.select([codes == code for code in (0x38, 0xB8, 0x40, 0x7E, 0x01)], [1, -1, 2, 448, 2.0**-9], 0)
    scale_inv, out = np.array([0.25], "float32"), aligned((b, S, heads, d))
    means.dequantize(on_cpu, on_cpu, address(codes), address(scale_inv), address(out), geometry)
    want = numbers.reshape(out.shape) / 4 + given[:, 1, None].repeat(heads // kv_heads, 2)
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)
