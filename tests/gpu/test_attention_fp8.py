"""Attention in fp8 with centred keys and values, and our kernels that centre them."""

import numpy as np
import paddle
import pytest

from paddle_te.layers import RotaryPositionEmbedding
from paddle_te.native.centring import Means
from paddle_te.ops.heads import Heads
from paddle_te.ops.norms import QKNorm
from paddle_te.ops.te import rotation, runtime
from tests import centred_attention


@pytest.mark.parametrize("recipe", centred_attention.RECIPES)
@pytest.mark.parametrize("common", centred_attention.COMMON)
def test_what_keys_and_values_have_in_common_costs_no_accuracy(gpu, poisoned, seed, common, recipe):
    centred_attention.check(gpu, "transformer_engine", recipe, common, seed)


def means_of(turned, sizes, source):
    """The means that the kernels compute of what `turned`, a Rotation, makes of the tensors of source."""
    rt, (b, s, h_kv, d) = runtime.current(), sizes.kv
    means = rt.empty([b, 2, h_kv, d], paddle.float32)
    addresses = tuple(tensor.data_ptr() for tensor in source)
    turned.fill_means(rt, sizes, addresses if len(addresses) == 3 else addresses[0], Means(means.data_ptr(), s))
    return means.numpy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("b, s, heads, kv_heads, d", [
    (1, 8192, 32, 8, 128),
    (2, 1000, 8, 8, 128),
    (3, 77, 6, 3, 64),
    (1, 300, 40, 40, 256),
])  # fmt: skip
def test_means_are_those_of_the_rotated_keys(gpu, poisoned, seed, b, s, heads, kv_heads, d, norms, dtype):
    """Those of q, k and v in one buffer, normed and rotated in passing, have the bits of those of three tensors."""
    qkv = (paddle.randn([b, s, (heads + 2 * kv_heads) * d]) + 0.5).astype(dtype)
    angles = RotaryPositionEmbedding(d)(s)
    norm = None
    if norms:
        norm = QKNorm(*((1 + 0.1 * paddle.randn([d])).astype(dtype) for _ in "qk"), 1e-5, False)
    of_heads = Heads(heads, kv_heads, norm)
    weights = (None, None) if norm is None else norm[:2]
    turned = rotation.Rotation(angles, *weights, rotation.RotationSettings.of(of_heads))
    sizes = rotation.heads_of(qkv, angles, heads, kv_heads)
    got = means_of(turned, sizes, [qkv])
    np.testing.assert_array_equal(got, means_of(turned, sizes, [qkv]))
    q, k, v = rotation.rotary_qkv(qkv, angles, of_heads)
    np.testing.assert_array_equal(got, means_of(rotation.UNCHANGED, sizes, [q, k, v]))
    want = [x.astype("float32").numpy().astype("float64").mean(1) for x in (k, v)]
    np.testing.assert_allclose(got, np.stack(want, 1), rtol=1e-5, atol=2e-6)
