"""Runs kernels of the nvgpu plug-in against Paddle's CPU kernels: python nvgpu_cases.py SEED

Prints one line of JSON: {"case dtype": null, or what was wrong}. Started by nvgpu/tests/test_plugin.py, because
the plug-in is loaded when Paddle is imported; tests/gpu/test_nvgpu.py runs the cases on a GPU.
"""

import json
import sys

import numpy as np
import paddle
import paddle.nn.functional as F

FLOATS = ("float32", "bfloat16", "float16")


def index(values):
    """An integer input: no gradient, no rounding."""
    return np.asarray(values, "int64")


def positive(*shape):
    return ("positive", shape)


def apart(x, axis=-1):
    """x with numbers along an axis added between which there are no ties."""
    numbers = 16.0 * np.random.default_rng(5).permutation(x.shape[axis]) - 256
    shape = [-1 if axis % x.ndim == i else 1 for i in range(x.ndim)]
    return x + paddle.to_tensor(numbers.reshape(shape).astype("float32")).astype(x.dtype)


class Fused:
    """A function that only the device has, and a reference of plain operations, which the CPU computes in float64."""

    def __init__(self, function, reference):
        self.function, self.reference = function, reference

    def __call__(self, *tensors):
        return self.function(*tensors)


def rms_norm(x, weight, epsilon=1e-3):
    return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight


def causal_softmax(x):
    return F.softmax(paddle.where(paddle.tril(paddle.ones_like(x)) > 0, x, paddle.full_like(x, -np.inf)))


def hidden_by(bound, causal, queries):
    """Which scores FlashMask's bounds [b, heads, keys, n] hide, [b, heads, queries, keys]; as math/math.h has them."""
    query, bound = np.arange(queries)[:, None], np.moveaxis(bound, -1, 0)[:, :, :, None]
    if len(bound) == 1:
        return query >= bound[0]
    if len(bound) == 2:
        return (query >= bound[0]) & (query < bound[1]) if causal else (query >= bound[0]) | (query < bound[1])
    return ((query >= bound[0]) & (query < bound[1])) | ((query >= bound[2]) & (query < bound[3]))


def attention_in_float64(q, k, v, causal, bound=None):
    (queries, heads), (keys, kv_heads) = q.shape[1:3], k.shape[1:3]
    hidden = np.zeros([1, 1, queries, keys], bool)
    if bound is not None:
        hidden = hidden | np.repeat(hidden_by(bound, causal, queries), heads // bound.shape[1], 1)
    if causal:
        hidden = hidden | ~np.tri(queries, keys, keys - queries, dtype=bool)
    q, k, v = (x.transpose([0, 2, 1, 3]) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = q @ k.transpose([0, 1, 3, 2]) / q.shape[-1] ** 0.5
    seen = paddle.to_tensor(~hidden).astype(scores.dtype)  # zeros for a query that sees nothing
    weights = paddle.exp(scores - scores.detach().max(-1, keepdim=True)) * seen
    return (weights / weights.sum(-1, keepdim=True).clip(min=1e-30) @ v).transpose([0, 2, 1, 3])


def attention(causal, *bounds):
    """Paddle's FlashAttention, or FlashMask with these bounds, of q, k and v, and its reference."""

    def fused(q, k, v):
        settings = (None, 0.0, causal, False, False, "")  # seed, dropout, causal, return_softmax, is_test, rng_name
        if not bounds:
            return paddle._C_ops.flash_attn(q, k, v, settings[0], None, *settings[1:])[0]
        return paddle._C_ops.flashmask_attention(q, k, v, paddle.to_tensor(bounds[0].astype("int32")), *settings)[0]

    return Fused(fused, lambda q, k, v: attention_in_float64(q, k, v, causal, *bounds))


# Documents of 4, 2 and 3 tokens, and of 9; and bounds at random, one of them for each of two heads
DOCUMENTS = np.array([[4] * 4 + [6] * 2 + [9] * 3, [9] * 9]).reshape([2, 1, 9, 1])
BOUNDS = np.random.default_rng(7).integers(0, 10, [2, 2, 9, 4])
QKV = [(2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)]


def assigned(x, where, value):
    y = x.detach().clone()
    y[where] = value.detach() if isinstance(value, paddle.Tensor) else value
    return y


# name: (function, inputs); an input is a shape (normal numbers), positive(...) or an index
# equal within rows and between the two: who gets the gradient?
TIES = [np.array(rows, "float32") for rows in ([[1, 2, 2, -0.5], [3, 3, 3, 0]], [[1, 1, 2, -1], [3, 4, 0, 0]])]
# -inf before, between and behind what counts
MASK = np.where((np.arange(2000) > 700) & (np.arange(2000) % 7 > 0) & (np.arange(2000) < 1800), 0, -np.inf)
CASES = {
    "add broadcast": (lambda x, y: x + y, [(3, 1, 5), (4, 1)]),
    "subtract broadcast": (lambda x, y: x - y, [(2, 3), (3,)]),
    "multiply broadcast": (lambda x, y: x * y, [(2, 3, 4), (3, 1)]),
    "divide broadcast": (lambda x, y: x / y, [(2, 3), positive(2, 1)]),
    "maximum": (paddle.maximum, [(4, 5), (4, 5)]),
    "maximum_of_equals": (paddle.maximum, TIES),
    "minimum_of_equals": (paddle.minimum, TIES),
    "minimum broadcast": (paddle.minimum, [(4, 5), (5,)]),
    "scale": (lambda x: paddle.scale(x, 2.5, 0.5, bias_after_scale=False), [(7,)]),
    "div_scale": (lambda x: x / 2.5, [(7,)]),
    "pow": (lambda x: x.pow(3), [(4, 4)]),
    "square": (paddle.square, [(4, 4)]),
    "rsqrt": (paddle.rsqrt, [positive(9)]),
    "sqrt": (paddle.sqrt, [positive(9)]),
    "exp": (paddle.exp, [(9,)]),
    "log": (paddle.log, [positive(9)]),
    "sin": (paddle.sin, [(9,)]),
    "cos": (paddle.cos, [(9,)]),
    "tanh": (paddle.tanh, [(9,)]),
    "abs": (paddle.abs, [(9,)]),
    "sigmoid": (F.sigmoid, [(9,)]),
    "silu": (F.silu, [(9,)]),
    "gelu": (F.gelu, [(9,)]),
    "gelu tanh": (lambda x: F.gelu(x, approximate=True), [(9,)]),
    "relu": (F.relu, [(9,)]),
    "clip": (lambda x: paddle.clip(x, -0.5, 0.7), [(9,)]),
    "clip_at_its_bounds": (lambda x: paddle.clip(x, -0.5, 2.0), [TIES[0]]),
    "swiglu": (F.swiglu, [(3, 4), (3, 4)]),
    "swiglu halves": (F.swiglu, [(3, 8)]),
    "remainder": (lambda x, y: paddle.remainder(x.detach(), y.detach()), [(9,), positive(9)]),
    "floor": (paddle.floor, [(9,)]),
    "compare": (lambda x, y: (x > y).astype("float32") + (x == x).astype("float32"), [(3, 4), (4,)]),
    "logical": (lambda x, y: paddle.logical_and(x > 0, y > 0).astype("float32"), [(3, 4), (3, 4)]),
    "isfinite": (lambda x: paddle.isfinite(x / 0.0).astype("float32"), [(5,)]),
    "cast": (lambda x: x.astype("float32").astype("int32").astype("float32"), [(3, 5)]),
    "add_n": (lambda x, y, z: paddle.add_n([x, y, z]), [(3, 2), (3, 2), (3, 2)]),
    "sum all": (lambda x: x.sum(), [(3, 5, 2)]),
    "sum first": (lambda x: x.sum(0), [(33, 5)]),
    "sum middle": (lambda x: x.sum(1, keepdim=True), [(3, 17, 2)]),
    "sum outer": (lambda x: x.sum([0, 2]), [(3, 4, 5)]),
    "sum int": (lambda x: x.sum(-1).astype("float32"), [index([[1, 2], [3, 4]])]),
    "mean": (lambda x: x.mean(-1, keepdim=True), [(3, 40)]),
    "mean all": (paddle.mean, [(3, 4)]),
    "max": (lambda x: x.max(-1), [(3, 40)]),
    "max_of_equals": (lambda x: x.max(-1), [TIES[0]]),
    "min": (lambda x: x.min(0), [(3, 40)]),
    "prod": (lambda x: paddle.prod(x.detach(), 1), [(3, 4)]),
    "any all": (lambda x: (x > 1).any(1).astype("float32") + (x > -9).all(1).astype("float32"), [(3, 4)]),
    "argmax": (lambda x: x.argmax(1).astype("float32"), [(3, 40)]),
    "matmul": (paddle.matmul, [(7, 5), (5, 3)]),
    "matmul batch": (paddle.matmul, [(2, 3, 7, 5), (2, 3, 5, 3)]),
    "matmul weight": (paddle.matmul, [(2, 7, 5), (5, 3)]),
    "matmul transposed weight": (lambda x, y: paddle.matmul(x, y, transpose_y=True), [(2, 7, 5), (3, 5)]),
    "matmul transposed x": (lambda x, y: paddle.matmul(x, y, transpose_x=True), [(2, 5, 7), (2, 5, 3)]),
    "matmul both transposed": (lambda x, y: paddle.matmul(x, y, True, True), [(5, 7), (3, 5)]),
    # forward only: Paddle's CPU kernel has no such gradient
    "matmul broadcast": (lambda x, y: paddle.matmul(x.detach(), y.detach()), [(2, 1, 4, 5), (3, 5, 6)]),
    "matmul vector": (paddle.matmul, [(2, 4, 5), (5,)]),
    "matmul vectors": (paddle.matmul, [(5,), (5,)]),
    "matmul row": (paddle.matmul, [(5,), (5, 3)]),
    "bmm": (paddle.bmm, [(2, 4, 5), (2, 5, 6)]),
    "linear bias": (F.linear, [(2, 4, 5), (5, 3), (3,)]),
    "softmax": (F.softmax, [(3, 4, 33)]),
    "log_softmax": (F.log_softmax, [(3, 33)]),
    "cross_entropy": (
        lambda x, y: F.cross_entropy(x, y, reduction="none", ignore_index=-100),
        [(5, 11), index([3, 10, -100, 0, 7])],
    ),
    "cross_entropy mean": (lambda x, y: F.cross_entropy(x, y), [(2, 3, 11), index([[3, 10, 1], [0, 7, 2]])]),
    "embedding": (lambda i, w: F.embedding(i, w), [index([[0, 3, 3], [9, 3, 1]]), (10, 6)]),
    "embedding padding": (lambda i, w: F.embedding(i, w, padding_idx=3), [index([0, 3, 3, 9]), (10, 6)]),
    "one_hot": (lambda i: F.one_hot(i, 5), [index([0, 4, 2])]),
    "gather": (lambda x, i: paddle.gather(x, i, axis=1), [(3, 5, 2), index([4, 0, 0])]),
    "index_select": (lambda x, i: paddle.index_select(x, i, axis=0), [(5, 2), index([4, 0, 0])]),
    "index_sample": (paddle.index_sample, [(3, 5), index([[4, 0], [0, 0], [2, 4]])]),
    "advanced index": (lambda x, i: x[i], [(6, 3), index([[0, 5], [-1, 2]])]),
    "advanced index inner": (lambda x, i: x[:, i], [(2, 6, 3), index([0, 5, -1])]),
    "advanced index pair": (lambda x, i, j: x[i, j], [(4, 6, 3), index([0, 3]), index([5, -2])]),
    "slice": (lambda x: x[1:3, ::2], [(4, 6)]),
    "set scalar": (lambda x: assigned(x, (slice(1, 3), slice(None, None, 2)), 5.0), [(4, 6)]),
    "set tensor": (lambda x, y: assigned(x, (slice(None), 2), y), [(4, 6, 3), (4, 3)]),
    "set broadcast": (lambda x, y: assigned(x, (slice(-1, 0, -2), slice(1, 5)), y), [(5, 6), (4,)]),
    "set row": (lambda x, y: assigned(x, 1, y), [(4, 6), (6,)]),
    "transpose contiguous": (lambda x: x.transpose([2, 0, 1]).contiguous() * 1, [(3, 4, 5)]),
    "heads transposed": (lambda x: x.transpose([0, 2, 1, 3]).contiguous() * 1, [(2, 3, 4, 8)]),
    "concat": (lambda x, y: paddle.concat([x, y], axis=1), [(2, 3, 4), (2, 1, 4)]),
    "concat of rows": (lambda x, y: paddle.concat([x, y], axis=-1), [(3, 8), (3, 4)]),
    "concat of odd rows": (lambda x, y: paddle.concat([x, y], axis=-1), [(3, 6), (3, 3)]),
    "split": (lambda x: paddle.concat(paddle.split(x, [1, 4], axis=1)[::-1], axis=1), [(2, 5)]),
    "stack": (lambda x, y: paddle.stack([x, y], axis=1), [(2, 3), (2, 3)]),
    "expand": (lambda x: x.expand([4, 2, 3]), [(2, 1)]),
    "tile": (lambda x: x.tile([2, 1, 3]), [(2, 3)]),
    "tile of five axes": (lambda x: x.tile([1, 1, 1, 2, 1]), [(2, 3, 2, 1, 4)]),
    "where": (lambda x, y: paddle.where(x > 0, x, y), [(3, 4), (3, 4)]),
    "tril": (lambda x: paddle.tril(x, -1), [(2, 4, 4)]),
    "triu": (lambda x: paddle.triu(x, 1), [(4, 6)]),
    "masked_fill": (lambda x: paddle.masked_fill(x.detach(), x > 0, 2.0), [(3, 4)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, 8, w, b), [(3, 8), (8,), (8,)]),
    "cumsum": (lambda x: paddle.cumsum(x, -1), [(3, 8)]),
    "cumsum in the middle": (lambda x: paddle.cumsum(x, 1), [(3, 37, 2)]),
    "cumsum of all": (lambda x: paddle.cumsum(x), [(3, 5)]),
    "cumsum, exclusive": (lambda x: paddle._C_ops.cumsum(x, 1, False, True, False), [(3, 8)]),
    "cumsum, exclusive from the end": (lambda x: paddle._C_ops.cumsum(x, 0, False, True, True), [(7, 3)]),
    "topk": (lambda x: paddle.topk(apart(x), 3)[0], [(3, 8)]),
    "topk, least along the first axis": (lambda x: paddle.topk(apart(x, 0), 5, 0, False)[0], [(8, 3)]),
    "topk's places": (lambda x: paddle.topk(apart(x), 9)[1].detach(), [(4, 33)]),
    "sort": (lambda x: paddle.sort(apart(x), -1), [(4, 33)]),
    "sort down in the middle": (lambda x: paddle.sort(apart(x, 1), 1, descending=True), [(2, 33, 3)]),
    "argsort": (lambda x: paddle.argsort(apart(x)).detach(), [(4, 33)]),
    "argsort keeps equals in order": (
        lambda i: paddle.argsort(i, stable=True).detach(),
        [index([[2, 1, 2, 1, 0, 2, 0]])],
    ),
    "scatter": (lambda x, i, u: paddle.scatter(x, i, u), [(5, 4), index([3, 0, 4]), (3, 4)]),
    "scatter, the last counts": (
        lambda i, x, u: paddle.scatter(x, i, u).detach(),
        [index([3, 0, 3, 3]), (5, 4), (4, 4)],
    ),
    "scatter's sums": (
        lambda i, x, u: paddle.scatter(x, i, u, overwrite=False).detach(),
        [index([3, 0, 3, 3]), (5, 4), (4, 4)],
    ),
    "take_along_axis, twice the same": (
        lambda x, i: paddle.take_along_axis(x, i, 1),
        [(2, 4, 3), index(np.arange(24).reshape(2, 4, 3) * 7 % 4)],
    ),
    "put_along_axis": (
        lambda i, x, y: paddle.put_along_axis(x.detach(), i, y.detach(), 1),
        [index([[0, 5], [7, 1], [2, 3]]), (3, 8), (3, 2)],
    ),
    "put_along_axis, the last counts": (
        lambda i, x, y: paddle.put_along_axis(x.detach(), i, y.detach(), 0),
        [index([[1, 0], [3, 0], [1, 2]]), (4, 2), (3, 2)],
    ),
    "put_along_axis's sums": (
        lambda i, x, y: paddle.put_along_axis(x.detach(), i, y.detach(), 0, "add"),
        [index([[1, 0], [3, 0], [1, 2]]), (4, 2), (3, 2)],
    ),
    "index_select in the middle": (lambda x, i: paddle.index_select(x, i, 1), [(2, 5, 3), index([4, 0, 4, 4, 2, 0])]),
    "take_along_axis": (lambda x, i: paddle.take_along_axis(x, i, 1), [(3, 8), index([[0], [7], [2]])]),
    # more than one pack of elements, and not all at addresses that packs need
    "multiply by one": (lambda x, y: x * y, [(67, 61), (1,)]),
    "add many": (lambda x, y: x + y, [(67, 61), (67, 61)]),
    "unaligned": (lambda x, y: x.flatten()[3:] * y.flatten()[1:-2], [(61, 41), (61, 41)]),
    "cast many": (lambda x: (x * 8).astype("float32").astype("int16").astype("bool").astype("float32"), [(61, 67)]),
    "sum many": (lambda x: (x / 300).sum(), [(300, 301)]),
    "sum many first": (lambda x: (x / 300).sum(0), [(300, 301)]),
    "mean of long rows": (lambda x: x.mean(-1), [(3, 20008)]),
    "max of long rows": (lambda x: x.detach().max(-1), [(2, 40003)]),
    "squared_l2_norm": (lambda x: paddle._C_ops.squared_l2_norm(x.detach() / 4).astype("float32"), [(300, 301)]),
    "softmax of long rows": (F.softmax, [(2, 1999)]),
    "log_softmax of long rows": (F.log_softmax, [(2, 2000)]),
    "softmax masked": (lambda x: F.softmax(x.detach() + paddle.to_tensor(MASK).astype(x.dtype)), [(3, 2000)]),
    "cross_entropy of long rows": (
        lambda x, y: F.cross_entropy(x, y, reduction="none", ignore_index=-100),
        [(4, 2000), index([1999, -100, 0, 1000])],
    ),
    "rms_norm": (
        Fused(lambda x, w: paddle.incubate.nn.functional.fused_rms_norm_ext(x, w, 1e-3)[0], rms_norm),
        [(2, 3, 8), (8,)],
    ),
    "rms_norm of many rows": (
        Fused(lambda x, w: paddle.incubate.nn.functional.fused_rms_norm_ext(x, w, 1e-3)[0], rms_norm),
        [(67, 61), (61,)],
    ),
    "causal softmax": (Fused(paddle.incubate.softmax_mask_fuse_upper_triangle, causal_softmax), [(1, 3, 33, 33)]),
    "attention": (attention(False), QKV),
    "attention causal": (attention(True), QKV),
    # several stretches of queries, and keys before the first query, as from a cache
    "attention of more keys": (attention(True), [(1, 40, 4, 4), (1, 300, 2, 4), (1, 300, 2, 6)]),
    "attention of documents": (attention(True, DOCUMENTS), QKV),
    "attention causal, two bounds": (attention(True, BOUNDS[..., :2]), QKV),
    "attention with two bounds": (attention(False, BOUNDS[:, :1, :, :2]), QKV),
    "attention with four bounds": (attention(False, BOUNDS), QKV),
    "arange": (lambda x: paddle.arange(0, 9, 2).astype("float32") + x.sum(), [(2,)]),
}
# Rounding to the type, and a few operations on rounded numbers.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}


def make_inputs(specifications, generator):
    for specification in specifications:
        if isinstance(specification, np.ndarray):
            yield specification
        elif specification[0] == "positive":
            # from 1 on: a quotient's gradient is divided by the square, and its sums cancel in 16 bits
            yield generator.uniform(1.0, 2.0, specification[1]).astype("float32")
        else:
            yield generator.standard_normal(specification).astype("float32")


def run(function, arrays, weights, device, dtype, compute):
    """Output and gradients as float64, from inputs rounded to `dtype` and computed in `compute`."""
    paddle.set_device(device)
    tensors = []
    for array in arrays:
        tensor = paddle.to_tensor(array)
        if array.dtype == np.float32:
            tensor = tensor.astype(dtype).astype(compute)
            tensor.stop_gradient = False
        tensors.append(tensor)
    out = function(*tensors)
    results = [out]
    if not out.stop_gradient:
        # a loss of the output's own type, so that its gradient is the same in both
        loss = (out * paddle.to_tensor(weights[: out.size].reshape(out.shape)).astype(out.dtype)).sum()
        loss.backward()
        results += [t.grad for t in tensors if not t.stop_gradient and t.grad is not None]
    if device != "cpu":
        assert all("nvgpu" in str(r.place) for r in results), f"left the device: {[str(r.place) for r in results]}"
    return [r.astype("float64" if r.dtype == paddle.float64 else "float32").numpy().astype("float64") for r in results]


def check(name, dtype, generator):
    function, specifications = CASES[name]
    arrays = list(make_inputs(specifications, generator))
    weights = generator.choice([-1.0, 0.5, 1.0, 2.0], 4096).astype("float32")  # exact in every type
    fused = isinstance(function, Fused)
    want = run(
        function.reference if fused else function, arrays, weights, "cpu", dtype, "float64" if fused else "float32"
    )
    got = run(function, arrays, weights, "nvgpu:0", dtype, dtype)
    assert len(got) == len(want), f"{len(got)} results, {len(want)} on the CPU"
    for position, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, f"result {position}: shape {a.shape}, {b.shape} on the CPU"
        scale = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0)))
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale, err_msg=str(position))


def check_no_class(dtype, generator):
    """Labels that are neither a class nor ignored: NaN in their rows, and there alone. Paddle on a CPU raises."""
    paddle.set_device("nvgpu:0")
    x = paddle.to_tensor(generator.standard_normal((6, 11)).astype("float32")).astype(dtype)
    x.stop_gradient = False
    labels, no_class = paddle.to_tensor([3, -1, -100, 11, 2**40, 10]), [False, True, False, True, True, False]
    loss = F.cross_entropy(x, labels, reduction="none", ignore_index=-100)
    loss.sum().backward()
    assert paddle.isnan(loss).tolist() == no_class, loss
    nans = paddle.isnan(x.grad)
    assert nans.any(1).tolist() == nans.all(1).tolist() == no_class, x.grad


def main():
    seed, results = int(sys.argv[1]), {}
    for dtype in FLOATS:
        try:
            results[f"labels that are no class {dtype}"] = check_no_class(dtype, np.random.default_rng(seed))
        except AssertionError as error:
            results[f"labels that are no class {dtype}"] = str(error)
    for name in CASES:
        for dtype in FLOATS:
            try:
                results[f"{name} {dtype}"] = check(name, dtype, np.random.default_rng(seed))
            except Exception as error:  # noqa: BLE001 every case is reported
                results[f"{name} {dtype}"] = f"{type(error).__name__}: {str(error).strip()[-800:]}"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
