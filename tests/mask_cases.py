"""Cases of attention with each attn_mask_type, of which te's results are compared with pd's.

tests/gpu runs them with the real library, tests/unit with the emulated one.
"""

import numpy as np
import paddle

from paddle_te.layers import DotProductAttention
from tests.te_weights import relative

B, S, HEADS, KV_HEADS, D = 2, 12, 4, 2, 16
CAUSAL = np.tri(S, dtype=bool)[None, None]
PADDING = np.zeros((B, 1, 1, S), bool)
PADDING[0, ..., 9:] = True
PADDING[1, ..., :2] = True
ENDS = [0, 5, S, S, S + 1, B * S]
_DOCUMENT = np.searchsorted(ENDS, np.arange(B * S), "right").reshape(B, 1, S, 1)
TOGETHER = _DOCUMENT == _DOCUMENT.swapaxes(2, 3)
ALL = CAUSAL | True

# (attn_mask_type, what comes with it, what a query sees)
MASKS = [
    ("causal", None, CAUSAL),
    ("no_mask", None, ALL),
    ("padding", "attention_mask", ~PADDING),
    ("padding_causal", "attention_mask", CAUSAL & ~PADDING),
    ("causal", "additive", ~PADDING),
    ("padding", "cu_seqlens", TOGETHER),
    ("padding_causal", "cu_seqlens", CAUSAL & TOGETHER),
]


def arguments(what):
    """What comes with a mask type as forward takes it."""
    make = {
        None: lambda: {},
        "attention_mask": lambda: dict(attention_mask=paddle.to_tensor(PADDING)),
        "additive": lambda: dict(attention_mask=paddle.to_tensor(np.where(PADDING, -1e9, 0).astype("float32") + ~ALL)),
        "cu_seqlens": lambda: dict(cu_seqlens=paddle.to_tensor(ENDS, dtype="int32")),
    }
    return make[what]()


def queries_that_see(seen):
    """bool [B, S, 1]: those that see anything. What the others give means nothing."""
    return np.broadcast_to(seen, (B, 1, S, S)).any(-1).reshape(B, S, 1)


def check_mask(device, dtype, mask_type, what, seen, seed):
    """te's output and gradients are pd's."""
    generator, rows = np.random.default_rng(seed), queries_that_see(seen)
    arrays = [generator.standard_normal([B, S, heads, D]) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    dout, results = generator.standard_normal([B, S, HEADS * D]) * rows, []
    for place, backend, precision in ("cpu", "paddle", "float32"), (device, "transformer_engine", dtype):
        paddle.set_device(place)
        tensors = [paddle.to_tensor(array.astype("float32")).astype(precision).detach() for array in arrays]
        for tensor in tensors:
            tensor.stop_gradient = False
        out = DotProductAttention(D, backend, attn_mask_type=mask_type)(*tensors, **arguments(what))
        out.backward(paddle.to_tensor(dout.astype("float32")).astype(precision))
        values = [x.astype("float32").numpy() for x in (out, *(tensor.grad for tensor in tensors))]
        results.append([values[0] * rows, *values[1:]])
    for want, got in zip(*results, strict=True):
        assert relative(got, want) < 2e-2
