"""Weights in MXFP4 against the specification's tables, in float64."""

from pathlib import Path

import numpy as np
import pytest

from paddle_te.weights import CheckpointError, mxfp4
from paddle_te.weights.tensors import TensorRef

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@pytest.mark.parametrize("scales", [range(2, 253), range(256)])
def test_all_bytes_with_all_scales(scales):
    """Each byte under each scale; only 255 is NaN, and only beyond bfloat16's numbers is one infinite."""
    powers = np.repeat(np.array(scales, "u1")[:, None], 16, 1)
    blocks = np.broadcast_to(np.arange(256, dtype="u1").reshape(1, 16, 16), (len(scales), 16, 16))
    found = (mxfp4.dequantized(np.ascontiguousarray(blocks), powers).astype("<u4") << 16).view("<f4")
    numbers = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], -1).reshape(*powers.shape, 32)
    expected = numbers * 2.0 ** (powers.astype("f8")[..., None] - 127)
    expected[powers == 255] = np.nan
    expected = np.where(np.abs(expected) < 2.0**128, expected, np.sign(expected) * np.inf)
    assert (
        np.array_equal(found, expected, equal_nan=True)
        and (np.signbit(found) == np.signbit(expected))[expected == 0].all()
    )


def ref(name, dtype, *shape):
    return TensorRef(Path(f"{name}.safetensors"), 0, dtype, shape)


def test_pairs_become_one_tensor():
    blocks, scales = ref("blocks", "uint8", 3, 8, 2, 16), ref("scales", "uint8", 3, 8, 2)
    found = mxfp4.joined({"w_blocks": blocks, "w_scales": scales, "w_bias": (bias := ref("bias", "bfloat16", 3, 8))})
    assert found.keys() == {"w", "w_bias"} and found["w_bias"] is bias
    assert (found["w"].shape, found["w"].dtype, found["w"].path) == ((3, 64, 8), "bfloat16", blocks.path)


@pytest.mark.parametrize("tensors, words", [
    ({"w_blocks": ref("x", "uint8", 3, 8, 2, 16)}, "'w_blocks' of MXFP4 stands without 'w_scales'"),
    ({"w_scales": ref("x", "uint8", 3, 8, 2)}, "'w_scales' of MXFP4 stands without 'w_blocks'"),
    (
        {"w_blocks": ref("x", "uint8", 3, 8, 2, 16), "w_scales": ref("x", "uint8", 3, 8, 4)},
        r"'w' in MXFP4 has blocks uint8 \[3, 8, 2, 16\] and scales uint8 \[3, 8, 4\]; they must be",
    ),
    (
        {"w_blocks": ref("x", "uint8", 3, 8, 2, 16), "w_scales": ref("x", "float32", 3, 8, 2)},
        "scales float32",
    ),
])  # fmt: skip
def test_what_does_not_fit(tensors, words):
    with pytest.raises(CheckpointError, match=words):
        mxfp4.joined(tensors)
