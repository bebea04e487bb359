"""Ring attention of several ranks, threads of this process, against attention to whole sequences."""

import paddle
import pytest

from paddle_te.ops import get_ops, pd
from tests import emulated_te, ring_cases
from tests.te_weights import relative


@pytest.mark.parametrize("backend, dtype, tolerance", [
    ("paddle", "float32", 1e-5),
    ("transformer_engine", "float16", 5e-3),
])  # fmt: skip
@pytest.mark.parametrize("ranks, kv_heads", [(2, 4), (3, 2), (4, 1)])
def test_as_of_whole_sequences(seed, monkeypatch, ranks, kv_heads, backend, dtype, tolerance):
    emulated_te.install(monkeypatch.setattr)
    b, s, h, d = 2, 6 * ranks, 4, 16
    tensors = [paddle.randn([b, s, heads, d]).astype(dtype) for heads in (h, kv_heads, kv_heads)]
    dout = paddle.randn([b, s, h * d]).astype(dtype)
    got = ring_cases.run(tensors, dout, ranks, d**-0.5, get_ops(backend))
    want = ring_cases.reference([t.astype("float32") for t in tensors], dout.astype("float32"), d**-0.5, pd)
    for mine, true in zip(got, want, strict=True):
        assert relative(mine, true) < tolerance
