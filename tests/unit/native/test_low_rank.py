"""The kernels of low_rank.cu: their own source run on the CPU, and how they are launched."""

import numpy as np
import pytest

from paddle_te.native import DType, low_rank
from paddle_te.native.low_rank import Part, Sizes

FACTOR = 0.3


@pytest.fixture(
    params=[(1, (5,)), (3, (4, None, 7)), (2, (6, 5, 4)), (8, (3, 3)), (4, (4, None, 12)), (8, (12, 8, 4))], ids=str
)
def case(request, seed):
    """(Sizes, [(A, B, first column)] of the parts that are there)."""
    random, inputs, (r, part_sizes) = np.random.default_rng(seed), 9, request.param
    parts, start = [], 0
    for size in part_sizes:
        if size:
            a, b = (random.standard_normal(shape).astype("float32") for shape in ((inputs, r), (r, size)))
            parts.append((a, b, start))
        start += size or 4  # the columns of a part without factors
    return Sizes.of(inputs, start, r, len(parts)), parts


def launch(function, te, parts, a, b, sizes):
    parts = [Part(x.ctypes.data, y.ctypes.data, start, y.shape[1]) for x, y, start in parts]
    function(te, te, parts, a.ctypes.data, b.ctypes.data, sizes, FACTOR, DType.FLOAT32)


def test_pack(on_cpu, case):
    """Each factor in its place, zeros elsewhere, nothing behind them."""
    sizes, parts = case
    assert sizes.width % 8 == 0 and 0 <= sizes.width - sizes.r * len(parts) < 8
    a, b = (
        np.full((sizes.inputs + 1, sizes.width), 7, "float32"),
        np.full((sizes.width + 1, sizes.outputs), 7, "float32"),
    )
    launch(low_rank.pack, on_cpu, parts, a, b, sizes)
    want_a, want_b = np.zeros_like(a[:-1]), np.zeros_like(b[:-1])
    for i, (x, y, start) in enumerate(parts):
        rows = slice(i * sizes.r, (i + 1) * sizes.r)
        want_a[:, rows], want_b[rows, start : start + y.shape[1]] = x, np.float32(FACTOR) * y
    assert (a[:-1] == want_a).all() and (b[:-1] == want_b).all() and (a[-1] == 7).all() and (b[-1] == 7).all()


def test_unpack(on_cpu, case, seed):
    """The adjoint of pack: the same sum of products."""
    sizes, parts = case
    random = np.random.default_rng([seed, 1])
    da, db = (random.standard_normal(shape).astype("float32") for shape in (
        (sizes.inputs, sizes.width), (sizes.width, sizes.outputs)
    ))  # fmt: skip
    gradients = [(np.full_like(x, np.nan), np.full_like(y, np.nan), start) for x, y, start in parts]
    launch(low_rank.unpack, on_cpu, gradients, da, db, sizes)
    for i, (dx, dy, start) in enumerate(gradients):
        rows = slice(i * sizes.r, (i + 1) * sizes.r)
        assert (dx == da[:, rows]).all()
        assert (dy == np.float32(FACTOR) * db[rows, start : start + dy.shape[1]]).all()


def test_a_gradient_that_is_not_wanted(on_cpu, case):
    sizes, parts = case
    da, db = np.ones((sizes.inputs, sizes.width), "float32"), np.ones((sizes.width, sizes.outputs), "float32")
    of_b = np.full_like(parts[0][1], np.nan)
    part = Part(0, of_b.ctypes.data, parts[0][2], of_b.shape[1])
    low_rank.unpack(on_cpu, on_cpu, [part], da.ctypes.data, db.ctypes.data, sizes, FACTOR, DType.FLOAT32)
    assert (of_b == np.float32(FACTOR)).all()


@pytest.mark.parametrize(
    "part_sizes, r, run", [((64, 8), 16, 8), ((64, 4), 16, 1), ((64, 8), 12, 1)], ids=["all", "a part", "r"]
)
def test_a_thread_moves_16_bytes_where_these_divide_all_sizes(on_cpu, monkeypatch, part_sizes, r, run):
    launched = []
    monkeypatch.setattr(on_cpu, "launch", lambda kernel, grid, *rest: launched.append((kernel[-1], grid)))
    sizes = Sizes.of(512, sum(part_sizes), r, len(part_sizes))
    parts = [Part(16, 16, start, size) for start, size in zip((0, part_sizes[0]), part_sizes, strict=True)]
    low_rank.pack(on_cpu, on_cpu, parts, 16, 16, sizes, FACTOR, DType.BFLOAT16)
    numbers = sizes.width * (sizes.inputs + sizes.outputs)
    assert launched == [({"RUN": run}, -(-numbers // (256 * run)))]


def test_more_numbers_than_a_kernel_counts(on_cpu):
    with pytest.raises(ValueError, match=r"low rank: A and B have \d+ numbers side by side; the kernel counts to"):
        low_rank.pack(on_cpu, on_cpu, [Part(16, 16, 0, 8)], 16, 16, Sizes.of(2**28, 8, 8, 1), FACTOR, DType.BFLOAT16)
