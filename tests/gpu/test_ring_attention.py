"""Ring attention on cuDNN's kernels: of several ranks, threads that share one GPU, against pd in float32."""

import paddle
import pytest

from paddle_te.ops import pd, te
from tests import ring_cases
from tests.te_weights import relative


@pytest.mark.parametrize("ranks, heads, kv_heads, head_dim, sequence", [(2, 4, 4, 64, 256), (3, 8, 2, 128, 384)])
def test_as_of_whole_sequences(gpu, poisoned, seed, ranks, heads, kv_heads, head_dim, sequence):
    paddle.set_device(gpu)
    tensors = [paddle.randn([2, sequence, n, head_dim]).astype("bfloat16") for n in (heads, kv_heads, kv_heads)]
    dout = paddle.randn([2, sequence, heads * head_dim]).astype("bfloat16")
    scale = head_dim**-0.5
    got = ring_cases.run(tensors, dout, ranks, scale, te)
    truth = ring_cases.reference([t.astype("float32") for t in tensors], dout.astype("float32"), scale, pd)
    at_once = ring_cases.reference(tensors, dout, scale, te)
    for mine, whole, true in zip(got, at_once, truth, strict=True):
        error, bound = relative(mine, true), relative(whole, true)
        assert error < 2e-2 and error <= 1.5 * bound + 1e-4, (error, bound)
