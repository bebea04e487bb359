"""Packed documents of fresh random lengths, and a layer that computes them: for the emulated and for the real te."""

import numpy as np
import paddle

from paddle_te import fp8
from paddle_te.layers import RotaryPositionEmbedding, TransformerLayer
from paddle_te.ops import documents
from tests.bfloat16 import truncated
from tests.layer_cases import weights

ROWS, TOKENS, HEADS, HEAD_DIM = 3, 32, 4, 16
HIDDEN = HEADS * HEAD_DIM


def random_rows(generator, rows=ROWS, tokens=TOKENS):
    """Lengths of the documents of each row: a row is one whole document, another has one of a single token."""
    assert rows > 1 < tokens
    result = [[tokens]]
    while len(result) < rows:
        cuts = {0, 1, tokens, *generator.integers(1, tokens, generator.integers(1, 5)).tolist()}
        result.append(generator.permutation(np.diff(sorted(cuts))).tolist())
    return [result[i] for i in generator.permutation(rows)]


def spans(rows):
    """(row, start, end) of each document in its row."""
    for i, row in enumerate(rows):
        ends = np.cumsum([0, *row]).tolist()
        yield from ((i, start, end) for start, end in zip(ends, ends[1:], strict=False))


def dense_mask(rows):
    """Additive float32 [b, 1, s, s] that keeps the documents apart."""
    ends, tokens = documents.flash_mask(rows), np.arange(sum(rows[0]))
    seen = (tokens[:, None] >= tokens) & (tokens[:, None] < ends)
    return paddle.to_tensor(np.where(seen, 0, np.finfo("float32").min)[:, None].astype("float32"))


def transformer(generator, backend, dtype, kv_heads=2, **options):
    """A TransformerLayer with weights that bfloat16 can hold."""
    layer = TransformerLayer(HIDDEN, 48, HEADS, kv_heads, backend=backend, params_dtype=dtype, **options)
    for name, value in weights(layer, generator).items():
        layer.state_dict()[name].set_value(paddle.to_tensor(truncated(value)).astype(dtype))
    return layer


def draw(generator, rows=ROWS, tokens=TOKENS):
    """x and dy, which bfloat16 can hold."""
    return (truncated(generator.standard_normal([rows, tokens, HIDDEN], "float32")) for _ in range(2))


def run(layer, x, dy, rows, recipe=None, masked=False, **options):
    """{name: float32 array} of the output and all gradients; masked: with a dense mask in the place of cu_seqlens."""
    dtype = next(iter(layer.parameters())).dtype
    shape, x = x.shape, paddle.to_tensor(x).astype(dtype).detach()
    if layer.self_attention.max_sequence_length:
        x = x.flatten(0, 1)
    x.stop_gradient = False
    layer.clear_gradients()
    freqs = RotaryPositionEmbedding(HEAD_DIM).at(paddle.to_tensor(documents.positions(rows)))
    cu_seqlens = None if masked else paddle.to_tensor(documents.cu_seqlens(rows))
    mask = dense_mask(rows) if masked else None
    with fp8.fp8_autocast(recipe is not None, recipe):
        y = layer(x, mask, freqs, cu_seqlens=cu_seqlens, **options)
    y.backward(paddle.to_tensor(dy).astype(dtype).reshape(y.shape))
    tensors = {"y": y.reshape(shape), "dx": x.grad.reshape(shape)}
    tensors |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: tensor.astype("float32").numpy() for name, tensor in tensors.items()}
