"""The rotary kernel: its own source run on the CPU against float64, and the arguments it is launched with."""

import numpy as np
import pytest

from paddle_te.native import DType, rope
from tests.unit.native.cuda_on_cpu import address, aligned
from tests.unit.native.rotations import draw_angles, rotated, split


@pytest.fixture(scope="module", params=[False, True], ids=["halves", "interleaved"])
def interleaved(request):
    return request.param


@pytest.fixture(
    params=[(2, 5, 4, 4, 16), (1, 7, 6, 2, 24), (3, 3, 3, 1, 128), (1, 2, 40, 40, 64), (1, 4, 2, 1, 32, 24, 1.25)]
)
def case(request, seed, interleaved):
    b, s, heads, kv_heads, d, *part = request.param
    random, turn = np.random.default_rng(seed), rope.Turn(*part[:1] or [None], interleaved, *part[1:])
    angles = draw_angles(random, s, turn.width or d)
    qkv = aligned((b, s, heads + 2 * kv_heads, d))
    qkv[:] = random.standard_normal(qkv.shape)
    return qkv, angles, rope.Geometry(b * s, s, heads, kv_heads, d, DType.FLOAT32, turn)


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2)])
def test_without_angles_all_stays_as_it_is(on_cpu, seed, heads, kv_heads, interleaved):
    geometry = rope.Geometry(6, 3, heads, kv_heads, 16, DType.FLOAT32, rope.Turn(interleaved=interleaved))
    shape = (2, 3, heads + 2 * kv_heads, 16)
    qkv, merged = aligned(shape), aligned(shape)
    qkv[:] = np.random.default_rng(seed).standard_normal(shape)
    parts = [aligned((2, 3, n, 16)) for n in (heads, kv_heads, kv_heads)]
    apart = tuple(map(address, parts))
    rope.rotate(on_cpu, on_cpu, address(qkv), apart, 0, geometry)
    for part, want in zip(parts, split(qkv, heads, kv_heads), strict=True):
        assert (part == want).all()
    rope.rotate(on_cpu, on_cpu, apart, address(merged), 0, geometry, True)
    assert (merged == qkv).all()


def test_split(on_cpu, case):
    qkv, angles, geometry = case
    _, _, heads, kv_heads, _, _, turn = geometry
    q, k, v = (aligned(part.shape) for part in split(qkv, heads, kv_heads))
    rope.rotate(on_cpu, on_cpu, address(qkv), (address(q), address(k), address(v)), address(angles), geometry)
    want_q, want_k, want_v = split(qkv, heads, kv_heads)
    np.testing.assert_allclose(q, rotated(want_q, angles, 1, turn), atol=1e-5)
    np.testing.assert_allclose(k, rotated(want_k, angles, 1, turn), atol=1e-5)
    np.testing.assert_array_equal(v, want_v)


def test_merge(on_cpu, case):
    """The backward of split: its transpose, so a rotation by the opposite angle."""
    packed, angles, geometry = case
    _, _, heads, kv_heads, _, _, turn = geometry
    grads = []
    for part in split(packed, heads, kv_heads):
        grads.append(aligned(part.shape))
        grads[-1][:] = part
    dqkv = aligned(packed.shape)
    rope.rotate(on_cpu, on_cpu, tuple(map(address, grads)), address(dqkv), address(angles), geometry, True)
    dq, dk, dv = split(dqkv, heads, kv_heads)
    np.testing.assert_allclose(dq, rotated(grads[0], angles, -1, turn), atol=1e-5)
    np.testing.assert_allclose(dk, rotated(grads[1], angles, -1, turn), atol=1e-5)
    np.testing.assert_array_equal(dv, grads[2])


@pytest.mark.parametrize("backward", [False, True])
def test_in_place(on_cpu, case, backward):
    qkv, angles, geometry = case
    _, _, heads, kv_heads, _, _, turn = geometry
    before = split(qkv.copy(), heads, kv_heads)
    rope.rotate(on_cpu, on_cpu, address(qkv), address(qkv), address(angles), geometry, backward)
    q, k, v = split(qkv, heads, kv_heads)
    sign = -1 if backward else 1
    np.testing.assert_allclose(q, rotated(before[0], angles, sign, turn), atol=1e-5)
    np.testing.assert_allclose(k, rotated(before[1], angles, sign, turn), atol=1e-5)
    np.testing.assert_array_equal(v, before[2])


@pytest.mark.parametrize("dtype, size, vector", [(DType.BFLOAT16, 2, 8), (DType.FLOAT16, 2, 8), (DType.FLOAT32, 4, 4)])
def test_addresses(fake, monkeypatch, dtype, size, vector):
    """Where q, k, v lie in the packed buffer follows from the dtype's size; through the extension's launch."""
    asked = []
    monkeypatch.setattr(rope, "kernel", lambda *key, **_: asked.append(key) or 0x700 + 19)
    rope.rotate(fake.te, fake.stream, 0x10000, 0x10000, 0x20000, rope.Geometry(10, 5, 4, 2, 32, dtype), True)
    chunks = 32 // 2 // vector
    packed = [0x10000, 0x10000 + 4 * 32 * size, 0x10000 + 6 * 32 * size, 256, 256, 256]
    arguments = [*packed, *packed, 0x20000, 5, 4, 2, 32 | 32 << 32, 0x3F800000, 1]
    assert fake.calls() == [["cuLaunchKernel", 10, 1, 1, 256 // chunks * chunks, 1, 1, 128, 0x5000, arguments, False]]
    name = {DType.BFLOAT16: "rope_bfloat16", DType.FLOAT16: "rope_float16", DType.FLOAT32: "rope_float"}[dtype]
    assert asked == [(name, "rope.cu", (9, 0))]


@pytest.mark.parametrize("d, dtype", [(24, DType.BFLOAT16), (12, DType.FLOAT32), (8, DType.FLOAT16)])
def test_head_sizes_refused(fake, d, dtype):
    with pytest.raises(ValueError, match=f"multiple of {16 if dtype != DType.FLOAT32 else 8}, got {d}"):
        rope.rotate(fake.te, fake.stream, 0x10000, 0x10000, 0x20000, rope.Geometry(10, 5, 4, 2, d, dtype))
