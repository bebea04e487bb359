"""Newton–Schulz of the real library, by each of its ways, beside the polynomial of the singular values."""

import numpy as np
import paddle
import pytest

from paddle_te.native import newton_schulz as kernels
from paddle_te.ops import get_ops
from paddle_te.ops.te import grouped_gemms, runtime
from tests.unit.ops.test_newton_schulz import FACTOR, STEPS, reference, relative

# (shape of each matrix or of a stack of them, the block rows of a symmetric product at least)
WAYS = {
    "singly": ((72, 200), 2048),
    "singly, steps at once": ((136, 400), 2048),
    "grouped": ((256, 256), 2048),
    "grouped, steps at once": ((256, 384), 2048),
    "grouped, tall, steps at once": ((384, 256), 2048),
    "grouped, many experts": ((200, 64, 96), 2048),
    "symmetric": ((384, 512), 128),
    "symmetric, square": ((256, 256), 64),
    "symmetric, tall, steps at once": ((512, 256), 128),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_polynomial(gpu, way, seed, monkeypatch):
    shape, height = WAYS[way]
    if way.startswith("grouped") and not grouped_gemms.has_grouped_gemms(runtime.current()):
        pytest.skip("the loaded cuBLAS has no grouped GEMMs for this GPU")
    monkeypatch.setattr(kernels, "BLOCK_ROWS", height)
    if way.startswith("singly"):
        monkeypatch.setattr(kernels, "GROUPED_MOST", 0)
    matrices = np.random.default_rng(seed).standard_normal((3, *shape)).astype("float32")
    tensors = [paddle.to_tensor(matrix).astype("bfloat16") for matrix in matrices]
    got = get_ops("transformer_engine").newton_schulz(tensors, STEPS, FACTOR).astype("float32").numpy()
    given = np.concatenate([tensor.astype("float32").numpy().reshape(-1, *shape[-2:]) for tensor in tensors])
    for matrix, result in zip(given, got, strict=True):
        assert relative(result, reference(matrix)) < 0.042  # as on the emulated library
