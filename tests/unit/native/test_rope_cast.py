"""The kernel of rope_cast.cu on the CPU: the bits of rope.cu's kernel, whose result is rounded and cast afterwards."""

import numpy as np
import pytest

from paddle_te.native import DType, casts, rope
from tests.unit.native.casts_on_cpu import NUMPY, CastsOnCPU, Output, aligned
from tests.unit.native.cuda_on_cpu import OnCPU


@pytest.fixture(scope="module")
def on_cpu(gxx, tmp_path_factory):
    return CastsOnCPU(gxx, tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def unfused(gxx, tmp_path_factory):
    return OnCPU(gxx, tmp_path_factory.mktemp("rope"), "rope.cu")


@pytest.fixture
def te(monkeypatch, on_cpu):
    on_cpu.install(monkeypatch)
    monkeypatch.setattr(rope, "kernel", lambda *key: key)
    return on_cpu


CASES = pytest.mark.parametrize(
    "b, s, heads, kv_heads, d, tiles", [(1, 80, 4, 2, 64, 3), (2, 24, 2, 2, 48, 2), (1, 16, 3, 1, 16, 1)]
)


def inputs(seed, b, s, heads, kv_heads, d, dtype):
    """(the packed gradients, [dq, dk, dv], angles)."""
    random = np.random.default_rng(seed)
    packed = aligned((b * s, heads + 2 * kv_heads, d), NUMPY[dtype])
    packed[:] = random.standard_normal(packed.shape) * np.exp2(random.integers(-8, 4, packed.shape))
    packed.reshape(-1)[random.integers(0, packed.size, 9)] = random.choice([0.0, -0.0, 300], 9)
    parts = []
    for part in np.split(packed, [heads, heads + kv_heads], 1):
        parts.append(aligned(part.shape, NUMPY[dtype]))
        parts[-1][:] = part
    angles = aligned((s, d), np.float32)
    angles[:] = random.uniform(0, 300, angles.shape)
    return packed, parts, angles


def address(array):
    return array.ctypes.data


@CASES
@pytest.mark.parametrize("rotated", [True, False])
def test_bits(te, unfused, monkeypatch, seed, b, s, heads, kv_heads, d, tiles, rotated):
    """Of packed gradients and of three: both copies, amax and scale_inv; tiles divide the sizes or not."""
    monkeypatch.setattr(rope, "CAST_TILING", casts.Tiling(64, 2, 1, tiles))
    packed, parts, angles = inputs(seed, b, s, heads, kv_heads, d, DType.FLOAT32)
    sizes = address(angles) if rotated else 0, b * s, s, heads, kv_heads, d, DType.FLOAT32
    want = aligned(packed.shape, np.float32)
    rope.rope_merge(unfused, unfused, *map(address, (*parts, want)), *sizes)
    want = want.reshape(b * s, -1)
    for source in address(packed), tuple(map(address, parts)):
        out = Output(want.shape, DType.FLOAT8_E5M2, 0.7)
        rope.rope_cast_transpose(te, te, source, out.target, *sizes, DType.FLOAT8_E5M2)
        np.testing.assert_array_equal(out.data, out.bits(want))
        np.testing.assert_array_equal(out.transposed, out.data.T)
        assert out.amax == np.abs(want).max() and out.scale_inv == np.float32(1) / out.scale


def test_rounded_to_16_bits(te, unfused, monkeypatch, seed):
    """Before they are measured and cast, as if they had been stored: the data alone, and the amax alone."""
    monkeypatch.setattr(rope, "CAST_TILING", casts.Tiling(64, 2, 1, 2))
    sizes = 2, 24, 4, 2, 64
    packed, parts, angles = inputs(seed, *sizes, DType.BFLOAT16)
    of_float32 = [aligned(part.shape, np.float32) for part in parts]
    for wide, part in zip(of_float32, parts, strict=True):
        wide[:] = part
    rotated, rest = aligned(packed.shape, np.float32), (48, *sizes[1:])
    rope.rope_merge(unfused, unfused, *map(address, (*of_float32, rotated, angles)), *rest, DType.FLOAT32)
    want = rotated.astype(NUMPY[DType.BFLOAT16]).astype(np.float32).reshape(48, -1)
    out, amax = Output(want.shape, DType.FLOAT8_E4M3, 3), np.zeros(1, np.float32)
    for target in out.target._replace(transposed=0), casts.CastTarget.only_amax(address(amax)):
        given = te, te, address(packed), target, address(angles)
        rope.rope_cast_transpose(*given, *rest, DType.BFLOAT16, DType.FLOAT8_E4M3)
    np.testing.assert_array_equal(out.data, out.bits(want))
    assert (out.transposed == 0x55).all() and amax == out.amax == np.abs(want).max()


def test_which_heads_fit():
    """Where the table of a tile's rows fits beside the tile."""
    assert [d for d in range(8, 264, 8) if rope.casts_head(d, DType.BFLOAT16)] == [*range(16, 145, 16)]
