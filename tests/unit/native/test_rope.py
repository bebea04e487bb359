"""The rotary kernel: its own source run on the CPU against float64, and the arguments it is launched with."""

import numpy as np
import pytest

from paddle_te.native import DType, rope
from tests.unit.native.cuda_on_cpu import OnCPU


@pytest.fixture(scope="module", params=[False, True], ids=["halves", "interleaved"])
def interleaved(request):
    return request.param


@pytest.fixture(scope="module")
def cpu_kernel(gxx, tmp_path_factory, interleaved):
    return OnCPU(gxx, tmp_path_factory.mktemp("rope"), "rope.cu", INTERLEAVED=int(interleaved))


def address(array):
    return array.ctypes.data


def aligned(shape):
    """A poisoned float32 array at a 16-byte aligned address, as device memory is."""
    size = int(np.prod(shape))
    memory = np.full(size + 4, np.nan, "float32")
    start = -(address(memory) // 4) % 4
    return memory[start : start + size].reshape(shape)


def rotated(x, angles, sign, turn):
    """x: [b, s, h, d]; angles: [s, numbers that are turned], of which the first half is read. In float64."""
    width = angles.shape[1]
    interleaved = turn.interleaved
    turns = turn.factor * np.exp(1j * sign * angles[:, : width // 2].astype("float64"))[:, None]
    pairs = x[..., :width].reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1))).astype("float64")
    first, second = np.moveaxis(pairs, -1 if interleaved else -2, 0)
    turned = (first + 1j * second) * turns
    turned = np.stack([turned.real, turned.imag], -1 if interleaved else -2).reshape(*x.shape[:-1], width)
    return np.concatenate([turned, x[..., width:]], -1)


@pytest.fixture(
    params=[(2, 5, 4, 4, 16), (1, 7, 6, 2, 24), (3, 3, 3, 1, 128), (1, 2, 40, 40, 64), (1, 4, 2, 1, 32, 24, 1.25)]
)
def case(request, seed, interleaved):
    b, s, heads, kv_heads, d, *part = request.param
    random, turn = np.random.default_rng(seed), rope.Turn(*part[:1] or [None], interleaved, *part[1:])
    half = random.uniform(-50, 50, (s, (turn.width or d) // 2)).astype("float32")
    angles = aligned((s, turn.width or d))
    angles[:] = np.concatenate([half, half], axis=1)
    qkv = aligned((b, s, heads + 2 * kv_heads, d))
    qkv[:] = random.standard_normal(qkv.shape)
    return qkv, angles, rope.Geometry(b * s, s, heads, kv_heads, d, DType.FLOAT32, turn)


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2)])
def test_without_angles_all_stays_as_it_is(te, seed, heads, kv_heads, interleaved):
    geometry = rope.Geometry(6, 3, heads, kv_heads, 16, DType.FLOAT32, rope.Turn(interleaved=interleaved))
    shape = (2, 3, heads + 2 * kv_heads, 16)
    qkv, merged = aligned(shape), aligned(shape)
    qkv[:] = np.random.default_rng(seed).standard_normal(shape)
    parts = [aligned((2, 3, n, 16)) for n in (heads, kv_heads, kv_heads)]
    apart = tuple(map(address, parts))
    rope.rotate(te, te, address(qkv), apart, 0, geometry)
    for part, want in zip(parts, split(qkv, heads, kv_heads), strict=True):
        assert (part == want).all()
    rope.rotate(te, te, apart, address(merged), 0, geometry, True)
    assert (merged == qkv).all()


@pytest.fixture
def te(cpu_kernel, monkeypatch, interleaved):
    def kernel(*key, INTERLEAVED):
        assert INTERLEAVED == interleaved
        return key

    monkeypatch.setattr(rope, "kernel", kernel)
    return cpu_kernel


def split(x, heads, kv_heads):
    return np.split(x, [heads, heads + kv_heads], axis=2)


def test_split(te, case):
    qkv, angles, geometry = case
    _, _, heads, kv_heads, _, _, turn = geometry
    q, k, v = (aligned(part.shape) for part in split(qkv, heads, kv_heads))
    rope.rotate(te, te, address(qkv), (address(q), address(k), address(v)), address(angles), geometry)
    want_q, want_k, want_v = split(qkv, heads, kv_heads)
    np.testing.assert_allclose(q, rotated(want_q, angles, 1, turn), atol=1e-5)
    np.testing.assert_allclose(k, rotated(want_k, angles, 1, turn), atol=1e-5)
    np.testing.assert_array_equal(v, want_v)


def test_merge(te, case):
    """The backward of split: its transpose, so a rotation by the opposite angle."""
    packed, angles, geometry = case
    _, _, heads, kv_heads, _, _, turn = geometry
    grads = []
    for part in split(packed, heads, kv_heads):
        grads.append(aligned(part.shape))
        grads[-1][:] = part
    dqkv = aligned(packed.shape)
    rope.rotate(te, te, tuple(map(address, grads)), address(dqkv), address(angles), geometry, True)
    dq, dk, dv = split(dqkv, heads, kv_heads)
    np.testing.assert_allclose(dq, rotated(grads[0], angles, -1, turn), atol=1e-5)
    np.testing.assert_allclose(dk, rotated(grads[1], angles, -1, turn), atol=1e-5)
    np.testing.assert_array_equal(dv, grads[2])


@pytest.mark.parametrize("backward", [False, True])
def test_in_place(te, case, backward):
    qkv, angles, geometry = case
    _, _, heads, kv_heads, _, _, turn = geometry
    before = split(qkv.copy(), heads, kv_heads)
    rope.rotate(te, te, address(qkv), address(qkv), address(angles), geometry, backward)
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
