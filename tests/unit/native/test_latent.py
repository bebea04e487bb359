"""Latent attention's kernels: their own source run on the CPU against float64, and the arguments of their launches."""

import numpy as np
import pytest

from paddle_te.native import DType, latent, rope
from tests.unit.native.cuda_on_cpu import address, aligned
from tests.unit.native.rotations import draw_angles, rotated


@pytest.fixture(scope="module", params=[False, True], ids=["halves", "interleaved"])
def interleaved(request):
    return request.param


@pytest.fixture(params=[(2, 5, 4, 16, 8, 12, 1.0), (1, 3, 20, 128, 64, 128, 1.25), (1, 2, 3, 4, 40, 8, 1.0)])
def case(request, seed, interleaved):
    b, s, heads, plain, turned, value, factor = request.param
    random = np.random.default_rng(seed)
    angles = draw_angles(random, s, turned)
    sizes = latent.Latent(b * s, s, heads, plain, turned, value, DType.FLOAT32, interleaved, factor)
    key = (b, s, heads, plain + turned)
    shapes = [key, (b, s, heads, plain + value), (b, s, 1, turned)], [key, key, (b, s, heads, value)]
    inputs, results = ([aligned(shape) for shape in each] for each in shapes)
    for array in (*inputs, *results):
        array[:] = random.standard_normal(array.shape)
    return inputs, results, angles, sizes


def test_forward(on_cpu, case):
    (q, kv, position), results, angles, sizes = case
    turn = rope.Turn(sizes.turned, sizes.interleaved, sizes.factor)
    plain, value = sizes.plain, sizes.value
    found = [aligned(each.shape) for each in results]
    latent.forward(
        on_cpu, on_cpu, tuple(map(address, (q, kv, position))), tuple(map(address, found)), address(angles), sizes
    )
    np.testing.assert_array_equal(found[0][..., :plain], q[..., :plain])
    np.testing.assert_array_equal(found[1][..., :plain], kv[..., :plain])
    np.testing.assert_array_equal(found[2], kv[..., plain : plain + value])
    np.testing.assert_allclose(found[0][..., plain:], rotated(q[..., plain:], angles, 1, turn), atol=1e-5)
    shared = np.broadcast_to(rotated(position, angles, 1, turn), found[1][..., plain:].shape)
    np.testing.assert_allclose(found[1][..., plain:], shared, atol=1e-5)


def test_backward(on_cpu, case):
    """The transpose of forward: the heads' gradients of what they share are added up."""
    inputs, (dq, dk, dv), angles, sizes = case
    turn, plain = rope.Turn(sizes.turned, sizes.interleaved, sizes.factor), sizes.plain
    found = [aligned(each.shape) for each in inputs]
    latent.backward(
        on_cpu, on_cpu, tuple(map(address, (dq, dk, dv))), tuple(map(address, found)), address(angles), sizes
    )
    np.testing.assert_array_equal(found[0][..., :plain], dq[..., :plain])
    np.testing.assert_allclose(found[0][..., plain:], rotated(dq[..., plain:], angles, -1, turn), atol=1e-5)
    np.testing.assert_array_equal(found[1], np.concatenate([dk[..., :plain], dv], -1))
    summed = dk[..., plain:].astype("float64").sum(2, keepdims=True)
    np.testing.assert_allclose(found[2], rotated(summed, angles, -1, turn), atol=2e-5)


@pytest.mark.parametrize("direction, block, shared", [("forward", 256, 256), ("backward", 256, 1280)])
def test_arguments(fake, monkeypatch, direction, block, shared):
    """What the kernels are launched with, through the extension's launch."""
    asked = []
    monkeypatch.setattr(latent, "kernel", lambda *key, **_: asked.append(key) or 0x700 + 12)
    sizes = latent.Latent(10, 5, 4, 128, 64, 128, DType.BFLOAT16)
    addresses = tuple(range(0x10000, 0x40000, 0x10000)), tuple(range(0x50000, 0x80000, 0x10000))
    getattr(latent, direction)(fake.te, fake.stream, *addresses, 0x90000, sizes)
    arguments = [*addresses[0], *addresses[1], 0x90000, 5, 4, 128 | 64 << 32, 128, 0x3F800000]
    assert fake.calls() == [["cuLaunchKernel", 10, 1, 1, block, 1, 1, shared, 0x5000, arguments, False]]
    assert asked == [(f"latent_{direction}_bfloat16", "latent.cu", (9, 0))]


@pytest.mark.parametrize("widths", [(12, 64, 128), (128, 24, 128), (128, 64, 4), (128, 0, 128), (128, 512, 128)])
def test_widths_refused(fake, widths):
    with pytest.raises(ValueError, match="multiples of 8 numbers, of which a multiple of 16 up to 256 is rotated"):
        latent.forward(fake.te, fake.stream, (1, 2, 3), (4, 5, 6), 7, latent.Latent(10, 5, 4, *widths, DType.FLOAT16))
