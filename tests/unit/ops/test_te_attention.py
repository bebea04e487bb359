"""What te's attention asks of cuDNN, its kernels emulated in NumPy (tests/emulated_te.py): against pd."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_te import native
from paddle_te.layers import RotaryPositionEmbedding
from paddle_te.ops import pd
from paddle_te.ops import te as of_te
from paddle_te.ops.heads import Attention, Heads, Scores
from paddle_te.ops.te import attention, attention_support, rotation
from tests import emulated_te


@pytest.fixture
def te(monkeypatch):
    """The emulated module, with `keys`, the number of them in each forward."""
    emulated_te.install(monkeypatch.setattr)
    te = native.load()
    forward, te.keys = te.attention_fwd, []

    def attention_fwd(q, k, *arguments, **keywords):
        te.keys.append(k.shape[1])
        forward(q, k, *arguments, **keywords)

    te.attention_fwd = attention_fwd
    return te


def draw(*shape, dtype="float16"):
    tensor = paddle.randn(shape).astype(dtype).detach()
    tensor.stop_gradient = False
    return tensor


def both(function, inputs, *args, tokens=None, **kwargs):
    """[(output, gradients)] of te in float16 and pd in float32, as float32 arrays; of the first `tokens` outputs."""
    results = []
    for name, dtype in (("te", "float16"), ("pd", "float32")):
        tensors = [t.astype(dtype).detach() for t in inputs]
        for t in tensors:
            t.stop_gradient = False
        paddle.seed(3)
        out = getattr({"te": of_te, "pd": pd}[name], function)(*tensors, *args, **kwargs)
        outs = out if isinstance(out, tuple) else (out[:, :tokens],)
        paddle.autograd.backward(list(outs), [paddle.randn(o.shape).astype(dtype) for o in outs])
        results.append([t.astype("float32").numpy() for t in (*outs, *(t.grad for t in tensors))])
    return results


def close(results):
    for got, want in zip(*results, strict=True):
        assert np.linalg.norm(got - want) < 5e-3 * np.linalg.norm(want)


def documents(*lengths):
    """Mask [1, 1, s, s] that keeps documents apart, as PaddleNLP's models make it; the last token is padding."""
    number = np.repeat(np.arange(len(lengths)), lengths)
    seen = (number[:, None] == number) & np.tri(len(number), dtype=bool)
    seen[-1] = False
    return paddle.to_tensor(np.where(seen, 0, np.finfo("float32").min)[None, None].astype("float32"))


@pytest.mark.parametrize("batch", [1, 2])
def test_documents_stay_apart(seed, te, batch):
    mask = paddle.concat([documents(5, 8, 3), documents(2, 13, 1)][:batch])
    q, k, v = draw(2, 16, 4, 16), draw(2, 16, 2, 16), draw(2, 16, 2, 16)
    close(both("dot_product_attention", [q, k, v], Attention(Scores(0.25)), mask, tokens=15))
    assert te.keys == [64]


def test_one_bias_serves_all_layers(te):
    mask = documents(5, 11)
    tensors = [draw(1, 16, 2, 16) for _ in range(3)]
    for _ in range(2):
        attention.dot_product_attention(*tensors, Attention(Scores(0.25)), mask)
    ((_, first),) = mask._paddle_te_kept.values()
    assert first.dtype == paddle.float16 and np.isfinite(first.numpy()).all()
    attention.dot_product_attention(*tensors, Attention(Scores(0.25)), mask)
    ((_, again),) = mask._paddle_te_kept.values()
    assert again is first


@pytest.mark.parametrize("how", ["in place", "dtype"])
def test_a_bias_is_made_again_where_its_mask_has_changed(seed, te, how):
    mask, dtype = documents(5, 11), "float16"
    for changed in False, True:
        if changed and how == "in place":
            mask[..., :3] = float(np.finfo("float32").min)
        if changed and how == "dtype":
            dtype = "bfloat16"
        tensors = [draw(1, 16, 2, 16, dtype=dtype) for _ in range(3)]
        got, want = (
            attention.dot_product_attention(*tensors, Attention(Scores(0.25)), m) for m in (mask, mask.clone())
        )
        assert got.dtype == want.dtype and (got.astype("float32").numpy() == want.astype("float32").numpy()).all()


def test_a_mask_gets_no_gradient_in_silence(te):
    mask = documents(5, 11)
    mask.stop_gradient = False
    tensors = [draw(1, 16, 2, 16) for _ in range(3)]
    with pytest.raises(ValueError, match="attention_mask wants a gradient"):
        attention.dot_product_attention(*tensors, Attention(Scores(0.25)), mask)
    with paddle.no_grad():
        attention.dot_product_attention(*tensors, Attention(Scores(0.25)), mask)


@pytest.mark.parametrize("k, v, dtype, error, message", [
    ((2, 16, 2, 16), (2, 16, 2, 16), "bfloat16", TypeError, "key_layer is paddle.bfloat16; it must be float16"),
    ((1, 16, 2, 16), (2, 16, 2, 16), "float16", ValueError, r"key_layer is \[1, 16, 2, 16\]; .* \[2, 16, 2, 16\]"),
    ((2, 16, 2, 16), (2, 16, 1, 8), "float16", ValueError, "value_layer is"),
    ((2, 16, 2, 16), (2, 12, 2, 16), "float16", ValueError, "value_layer is"),
    ((2, 16, 3, 16), (2, 16, 3, 16), "float16", ValueError, "4 heads and 3 key-value heads"),
    ((2, 0, 2, 16), (2, 0, 2, 16), "float16", ValueError, "16 tokens and 0 keys"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(te, k, v, dtype, error, message):
    """cuDNN would read their memory all the same."""
    tensors = draw(2, 16, 4, 16), draw(*k, dtype=dtype), draw(*v)
    with pytest.raises(error, match=message):
        attention.dot_product_attention(*tensors, Attention(Scores(0.25)))
    assert te.keys == []


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries, keys", [(1, 20), (1, 64), (5, 70)])
def test_a_cache_is_rounded_up(seed, te, queries, keys, masked):
    q, k, v = draw(2, queries, 4, 16), draw(2, keys, 2, 16), draw(2, keys, 2, 16)
    hidden = np.zeros([2, 1, queries, keys], "float32")
    hidden[1, ..., :3] = np.finfo("float32").min  # padding on the left
    mask = paddle.to_tensor(hidden) if masked else None
    close(both("dot_product_attention", [q, k, v], Attention(Scores(0.25)), mask))
    assert te.keys == [-(-keys // 64) * 64]


def test_masks_of_another_shape_are_refused(te):
    tensors = [draw(1, 16, 2, 16) for _ in range(3)]
    with pytest.raises(ValueError, match=r"must be \[b or 1, 1, 16, 16\]"):
        attention.dot_product_attention(*tensors, Attention(Scores(0.25)), paddle.zeros([1, 16]))


@pytest.mark.parametrize("own", [False, True])
def test_positions_of_their_own(seed, te, own):
    rope = RotaryPositionEmbedding(16)
    positions = paddle.to_tensor([[0, 1, 2, 0, 1, 2], [3, 4, 5, 6, 7, 8]])
    freqs = rope.at(positions) if own else rope(9)[3:]  # a view, as behind a cache
    close(both("rotary_qkv", [draw(2, 6, 8 * 16)], freqs, Heads(4, 2)))


def test_angles_of_another_shape_are_refused(te):
    for shape in ([2, 5, 16], [5, 16], [6], [6, 32]):
        with pytest.raises(ValueError, match="angles"):
            rotation.rotary_qkv(draw(2, 6, 8 * 16), paddle.zeros(shape), Heads(4, 2))


@pytest.mark.parametrize(
    "capability, widths, message",
    [
        ((9, 0), (192, 128), None),
        ((10, 0), (192, 128), None),
        ((9, 0), (96, 64), None),
        ((8, 0), (192, 128), "heads have 192 numbers; .* 8.0 cuDNN's attention takes multiples of 8 up to 128"),
        ((9, 0), (256, 128), "queries and keys have 256 numbers, those of values 128; .* trains 192 with 128 only"),
        ((9, 0), (192, 132), "heads have 132 numbers"),
    ],
)
def test_widths_of_latent_attention(te, monkeypatch, capability, widths, message):
    stream = SimpleNamespace(capability=capability)
    monkeypatch.setattr(attention_support.runtime, "current", lambda: SimpleNamespace(stream=stream))
    head_dim, value_dim = widths
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        attention_support.check_attention(head_dim, -1, False, 0.0, value_dim=value_dim)
