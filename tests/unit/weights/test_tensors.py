import io

import ml_dtypes
import numpy as np
import pytest

from paddle_te.weights import CheckpointError
from paddle_te.weights.tensors import STORAGE, TensorRef, TensorSpec, cast, write_array
from tests.unit.weights.models import random_bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1), (1024, 128), (2050, 3), (3, 300), (1500, 257), (7,)])
def test_write_array(rng, shape, dtype):
    array = random_bits(rng, shape, dtype)
    double = random_bits(rng, tuple(2 * n for n in shape), dtype)
    for view in (array, array.T, np.asfortranarray(array), double[::2], double.T[: shape[0]], double[..., : shape[-1]]):
        file = io.BytesIO()
        write_array(file, view)
        assert file.getvalue() == view.tobytes()


def test_a_file_that_became_shorter(tmp_path):
    (tmp_path / "x").write_bytes(bytes(10))
    with pytest.raises(CheckpointError, match="x: truncated while it was being read"):
        TensorRef(tmp_path / "x", 4, "float32", (2,)).read()


NUMBERS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("target", NUMBERS)
@pytest.mark.parametrize("source", NUMBERS)
def test_cast(rng, source, target):
    """Against ml_dtypes and NumPy, for arrays that lie in any order, with infinities and NaNs."""
    numbers = rng.normal(size=(40, 30)).astype(NUMBERS[source])
    numbers[0, :4] = np.nan, np.inf, -np.inf, -0.0
    got = cast(numbers.view(STORAGE[source]).T, TensorSpec("w", target, (30, 40)))
    assert got.dtype == STORAGE[target]
    wanted = numbers.T.astype(np.float32).astype(NUMBERS[target])
    np.testing.assert_array_equal(got.view(NUMBERS[target]).astype(np.float32), wanted.astype(np.float32))


def test_cast_keeps_every_nan(rng):
    bits = rng.integers(1, 2**23, 1000, "<u4") | 0x7F800000
    got = cast(bits.view("<f4"), TensorSpec("w", "bfloat16", (1000,)))
    assert np.isnan(got.view(ml_dtypes.bfloat16).astype(np.float32)).all()


@pytest.mark.parametrize("source, target, number", [
    ("float32", "float16", 65520.0), ("bfloat16", "float16", -1e20), ("float32", "bfloat16", 3.4e38)
])  # fmt: skip
def test_numbers_that_are_too_large(source, target, number):
    array = np.array([1, number], NUMBERS[source]).view(STORAGE[source])
    with pytest.raises(CheckpointError, match=f"'w' has numbers up to .*too large for {target}"):
        cast(array, TensorSpec("w", target, (2,)))
