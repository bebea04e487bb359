"""An embedding's gradient that is added to the float32 main gradient, for tests on nvgpu: of its host runtime as a
program, `python embedding_cases.py DEVICE SEED`, because nvgpu is loaded when Paddle is imported, and of a GPU."""

import sys

import numpy as np
import paddle
from paddle.distributed.fleet.utils import mix_precision_utils

from paddle_te.ops.embedding import adds_to_main_grad, embedding

VOCABULARY, WIDTH, TOKENS = 40, 1100, (3, 50)  # wider than one team's stretch of columns; tokens come several times


class Embedding(paddle.nn.Layer):
    """A slice of a vocabulary, and with `tied` a head of the same weight."""

    def __init__(self, dtype, ours, first, padding, tied):
        super().__init__()
        self.weight = self.create_parameter([VOCABULARY, WIDTH], dtype=dtype)
        self.ours, self.first, self.padding, self.tied = ours, first, padding, tied

    def forward(self, ids, x):
        if self.ours:
            y = embedding(self.weight, ids, self.look_up, self.first, self.padding)
        else:
            y = self.look_up(ids)
        return y, paddle.matmul(x, self.weight, transpose_y=True) if self.tied else None

    def look_up(self, ids):
        if self.first:
            return paddle._C_ops.c_embedding(self.weight, ids, self.first, -1)
        return paddle.nn.functional.embedding(ids, self.weight, self.padding)


def main_gradient(random, dtype, ours, first, padding, tied, index_type):
    """(main gradient, the exact one) after three micro-batches, and after another step of one that begins anew."""
    layer = mix_precision_utils.MixPrecisionLayer(Embedding(dtype, ours, first, padding, tied), "bfloat16")
    weight, found = layer._layers.weight, []
    exact = np.zeros([VOCABULARY, WIDTH])
    for step in range(4):
        if step == 3:
            found.append((weight.main_grad.numpy(), exact))
            exact = np.zeros([VOCABULARY, WIDTH])
            if ours and not tied:
                weight.overwrite_main_grad = True
            else:
                weight.main_grad.zero_()
        ids = random.integers(0, first + VOCABULARY + 5 if first else VOCABULARY, TOKENS)
        dy, dz, x = (
            paddle.to_tensor(random.standard_normal(shape), "float32").astype(dtype)
            for shape in ((*TOKENS, WIDTH), (*TOKENS, VOCABULARY), (*TOKENS, WIDTH))
        )
        y, z = layer(paddle.to_tensor(ids).astype(index_type), x)
        want = layer._layers.look_up(paddle.to_tensor(ids).astype(index_type))
        assert (y == want).all()
        paddle.autograd.backward([y, z] if tied else [y], [dy, dz] if tied else [dy])
        dy, dz, x = (tensor.astype("float32").numpy().astype("float64") for tensor in (dy, dz, x))
        here = (ids >= first) & (ids < first + VOCABULARY) & (ids != (-1 if padding is None else padding))
        np.add.at(exact, ids[here] - first, dy[here])
        if tied:
            exact = exact + np.einsum("bsv,bsw->vw", dz, x)
        assert weight.grad is None and weight.main_grad.dtype == paddle.float32
    return [*found, (weight.main_grad.numpy(), exact)]


CASES = [
    dict(dtype="bfloat16", first=0, padding=None, tied=False, index_type="int64"),
    dict(dtype="bfloat16", first=30, padding=None, tied=False, index_type="int32"),
    dict(dtype="float16", first=0, padding=7, tied=False, index_type="int64"),
    dict(dtype="bfloat16", first=0, padding=None, tied=True, index_type="int64"),
]


def check(seed):
    """Against a sum in float64; beside Paddle's own, which is rounded to the weight's type."""
    for case in CASES:
        ours = main_gradient(np.random.default_rng(seed), ours=True, **case)
        paddles = main_gradient(np.random.default_rng(seed), ours=False, **case)
        for (got, exact), (theirs, same) in zip(ours, paddles, strict=True):
            assert (exact == same).all()
            scale = np.abs(exact).max()
            error, of_paddles = (np.abs(array - exact).max() / scale for array in (got, theirs))
            # 150 terms of at most the scale's size in float32; a head's product is rounded to 16 bits in any case
            assert error < (2**-8 if case["tied"] else 2**-20), (case, error)
            assert of_paddles > 2**-13 and error <= of_paddles, (case, error, of_paddles)
    frozen = paddle.create_parameter([2, 2], "float32")
    assert adds_to_main_grad(frozen)
    with paddle.no_grad():
        assert not adds_to_main_grad(frozen)
    frozen.stop_gradient = True
    assert not adds_to_main_grad(frozen)


if __name__ == "__main__":
    paddle.set_device(sys.argv[1])
    check(int(sys.argv[2]))
    print("EXACT")
