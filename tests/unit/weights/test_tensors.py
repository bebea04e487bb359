import io

import numpy as np
import pytest

from paddle_te.weights import CheckpointError
from paddle_te.weights.tensors import TensorRef, write_array
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
