"""What mixtures of experts call: the extension against the fake library, and our kernels run on the CPU."""

import numpy as np
import pytest

from paddle_te.native import DType, ScalingMode, TransformerEngineError, casts, experts
from tests.unit.native.casts_on_cpu import Output
from tests.unit.native.cuda_on_cpu import NUMPY, aligned

BF16, F32, I64, E4M3 = DType.BFLOAT16, DType.FLOAT32, DType.INT64, DType.FLOAT8_E4M3
STREAM, EXPERTS, ROWS, IN, OUT = 0x5000, 3, 40, 16, 24
SETUP, GEMM = 512, 32 * 2**20 + 1024  # the fake wants 100 bytes an expert, rounded up to 256
# name: (transa, transb, shapes of A, B and D); rows of tokens are ragged
GEMMS = {
    "forward": (True, False, (EXPERTS * OUT, IN), (ROWS, IN), (ROWS, OUT)),
    "dgrad": (False, False, (EXPERTS * OUT, IN), (ROWS, OUT), (ROWS, IN)),
    "wgrad": (False, True, (ROWS, IN), (ROWS, OUT), (EXPERTS * OUT, IN)),
}
COUNTS, OFFSETS, FACTORS = 0x7000, (0x7100, 0x7200, 0x7300), 0x7400


def flat(address, shape, dtype):
    return [address, int(dtype), [shape[0] * shape[1]]]


def shown(address, shape, ragged, dtype=BF16, columnwise=0, scale_inv=0):
    """How the fake prints a grouped tensor. ragged: the address of its offsets, or 0."""
    of = {"-1": [0, EXPERTS, list(shape)]}
    for data, factors, lies_at in (("0", "4", address), ("1", "5", columnwise)):
        of |= {data: flat(lies_at, shape, dtype)} if lies_at else {}
        of |= {factors: [scale_inv, int(F32), [EXPERTS]]} if lies_at and scale_inv else {}
    return of | ({"7": [COUNTS, int(I64), [EXPERTS]], "9": [ragged, int(I64), [EXPERTS + 1]]} if ragged else {})


@pytest.mark.parametrize("added", ["nothing", "D", "C"])
@pytest.mark.parametrize("kind", GEMMS)
def test_grouped_gemm(fake, kind, added):
    transa, transb, *shapes = GEMMS[kind]
    tensors = [fake.te.Tensor(0x1000 * (i + 1), shape, BF16) for i, shape in enumerate(shapes)]
    given = COUNTS, *OFFSETS, FACTORS, fake.stream, added == "D", True
    c = fake.te.Tensor(0x9000, shapes[2], BF16) if added == "C" else None
    fake.te.grouped_gemm(*tensors, transa, transb, EXPERTS, *given, C=c)
    ragged = [OFFSETS[0] * transb, OFFSETS[1], OFFSETS[2] * (not transb)]
    a, b, d = (shown(0x1000 * (i + 1), shape, ragged[i]) for i, shape in enumerate(shapes))
    alpha, beta = ({"0": [address, int(F32), [1]]} for address in (FACTORS, FACTORS + 16))
    sums = {"nothing": None, "D": d, "C": shown(0x9000, shapes[2], ragged[2])}
    spaces = {"0": [0xA000000, 0, [SETUP]]}, {"0": [0xA000000 + SETUP, 0, [GEMM]]}
    expected = [a, int(transa), b, int(transb), sums[added], d, alpha, beta, *spaces, {"4": 1}, STREAM]
    assert fake.calls() == [["nvte_grouped_gemm", *expected]]
    assert fake.allocated == [SETUP + GEMM]


def test_grouped_gemm_in_fp8(fake):
    """Each operand with its copies and a scale for each expert; the forward one sums fast."""
    transa, transb, *shapes = GEMMS["forward"]
    a, b = (fake.te.Tensor(i + 1, shapes[i], E4M3, columnwise=i + 9, scale_inv=0x9000) for i in range(2))
    d = fake.te.Tensor(3, shapes[2], BF16)
    given = COUNTS, *OFFSETS, FACTORS, fake.stream, False, False, 0x100, 0x200
    fake.te.grouped_gemm(a, b, d, transa, transb, EXPERTS, *given)
    (call,) = fake.calls()
    assert call[1] == shown(1, shapes[0], 0, E4M3, 9, 0x100) and call[3] == shown(
        2, shapes[1], OFFSETS[1], E4M3, 10, 0x200
    )
    assert call[11] == {"4": 0}
    transposed = fake.te.Tensor(0, shapes[0], E4M3, columnwise=9, scale_inv=0x9000)
    dx = fake.te.Tensor(3, shapes[1], BF16)
    fake.te.grouped_gemm(transposed, d, dx, False, False, EXPERTS, *given[:-2], 0x100, 0)
    assert fake.calls()[0][1] == shown(0, shapes[0], 0, E4M3, 9, 0x100)


BLOCK_MODES = {ScalingMode.BLOCK_SCALING_1D: (384, 384), ScalingMode.BLOCK_SCALING_2D: (3 * 4, 3 * 4)}


@pytest.mark.parametrize("mode", BLOCK_MODES)
def test_grouped_tensors_with_block_scaling(fake, mode):
    """Three matrices [128, 128], of which a ragged tensor's may have other rows; lines of 2D scales are filled up."""
    ragged, shape = mode == ScalingMode.BLOCK_SCALING_1D, (384, 128)
    x = fake.te.Tensor(0x1000, shape, BF16)
    factors = dict(columnwise=0x3000, scale_inv=0x4000, columnwise_scale_inv=0x5000, scaling_mode=mode)
    y = fake.te.Tensor(0x2000, shape, E4M3, **factors)
    counts, offsets = (COUNTS, OFFSETS[0]) if ragged else (0, 0)
    fake.te.quantize_grouped_blocks(x, y, EXPERTS, counts, offsets, True, 0.25, fake.stream)
    want = shown(0x2000, shape, offsets, E4M3, 0x3000) | {"mode": int(mode)}
    of_data, of_transpose = BLOCK_MODES[mode]
    scales = {"4": [0x4000, int(F32), [of_data]], "5": [0x5000, int(F32), [of_transpose]]}
    assert fake.calls() == [
        ["nvte_group_quantize", shown(0x1000, shape, offsets), want | scales, {"0": 1, "1": 0.25}, STREAM]
    ]
    slot = lambda number: number << 48  # noqa: E731
    addresses = {name: slot(i + 3) for i, name in enumerate(list(factors)[:3])}
    moved = fake.te.Tensor(slot(2), shape, E4M3, **addresses, scaling_mode=mode)
    places = (slot(6), slot(7)) if ragged else (0, 0)
    call = "quantize_grouped_blocks", (x, moved, EXPERTS, *places, True, 0.25, fake.stream)
    fake.te.Sequence((moved,), (call,)).run([0, 0x1000, 0x2000, 0x3000, 0x4000, 0x5000, COUNTS, OFFSETS[0]])
    assert fake.calls()[0][2] == want | scales


@pytest.mark.parametrize("kind", GEMMS)
def test_grouped_gemm_shapes_are_checked(fake, kind):
    transa, transb, *shapes = GEMMS[kind]
    for wrong in range(3):
        for axis in range(2):
            changed = [list(shape) for shape in shapes]
            changed[wrong][axis] += 1
            tensors = [fake.te.Tensor(0x1000, tuple(shape), BF16) for shape in changed]
            with pytest.raises(TransformerEngineError, match="shapes do not fit 3 experts"):
                fake.te.grouped_gemm(*tensors, transa, transb, EXPERTS, COUNTS, *OFFSETS, FACTORS, fake.stream)
    assert fake.calls() == []


def test_a_recorded_grouped_gemm_moves(fake):
    transa, transb, *shapes = GEMMS["wgrad"]
    slot = lambda number: number << 48  # noqa: E731
    tensors = tuple(fake.te.Tensor(slot(i + 1), shape, BF16) for i, shape in enumerate(shapes))
    addresses = slot(4), slot(5) + 32, slot(5) + 64, 0, FACTORS
    call = "grouped_gemm", (*tensors, transa, transb, EXPERTS, *addresses, fake.stream, False, True)
    fake.te.Sequence(tensors, (call,)).run([0, 0x1000, 0x2000, 0x3000, COUNTS, 0x7700])
    ((_, a, _, b, *_),) = fake.calls()
    assert a == shown(0x1000, shapes[0], 0x7720) and b == shown(0x2000, shapes[1], 0x7740)


def test_handles_of_groups_do_not_leak(fake):
    transa, transb, *shapes = GEMMS["forward"]
    tensors = [fake.te.Tensor(0x1000, shape, BF16) for shape in shapes]
    before = fake.library.fake_live_tensors()
    fake.fail("nvte_grouped_gemm", "no cuBLAS")
    with pytest.raises(TransformerEngineError, match="(?s)nvte_grouped_gemm failed: no cuBLAS.*A: .*24"):
        fake.te.grouped_gemm(*tensors, transa, transb, EXPERTS, COUNTS, *OFFSETS, FACTORS, fake.stream)
    assert fake.library.fake_live_tensors() == before


def test_router_and_activation(fake):
    row = lambda t: {"0": [t.data_ptr, t.dtype, list(t.shape)]}  # noqa: E731
    logits, probs, scores, dprobs, dlogits = (fake.te.Tensor(i, (40, 8), F32) for i in range(1, 6))
    routing_map, bias = fake.te.Tensor(6, (40, 8), DType.BYTE), fake.te.Tensor(7, (8,), F32)
    fake.te.topk_forward(logits, bias, probs, routing_map, scores, 2, True, 4, 1, 2.5, True, fake.stream)
    fake.te.topk_forward(logits, None, probs, routing_map, scores, 2, False, -1, -1, 1.0, False, fake.stream)
    fake.te.topk_backward(routing_map, scores, dprobs, dlogits, 2, False, 2.5, False, fake.stream)
    name, outputs = "nvte_fused_topk_with_score_function", [row(probs), row(routing_map), row(scores), STREAM]
    assert fake.calls() == [
        [f"{name}_forward", row(logits), 40, 8, 2, 1, 4, 1, 2.5, 0, row(bias), *outputs],
        [f"{name}_forward", row(logits), 40, 8, 2, 0, -1, -1, 1.0, 1, {}, *outputs],
        [f"{name}_backward", row(routing_map), row(scores), row(dprobs), 40, 8, 2, 0, 2.5, 1, row(dlogits), STREAM],
    ]
    grad, hidden, dhidden = (
        fake.te.Tensor(i, shape, BF16) for i, shape in ((1, (40, 8)), (2, (40, 16)), (3, (40, 16)))
    )
    of_rows, dof_rows = (fake.te.Tensor(i, (40,), F32) for i in (4, 5))
    fake.te.scaled_swiglu(hidden, of_rows, grad, fake.stream)
    fake.te.scaled_dswiglu(grad, hidden, of_rows, dhidden, dof_rows, fake.stream)
    assert fake.calls() == [
        ["nvte_scaled_swiglu", row(hidden), row(of_rows), row(grad), 0, STREAM],
        ["nvte_scaled_dswiglu", row(grad), row(hidden), row(of_rows), row(dhidden), row(dof_rows), 0, STREAM],
    ]


def draw_map(seed, tokens, count):
    """A routing_map in which the second expert has no tokens."""
    chosen = np.random.default_rng(seed).random([tokens, count]) < 0.4
    chosen[:, 1] = False
    return chosen


def rows_of(chosen, probs, multiple, rows):
    """What `place` must write: (counts, place, token_of, prob_of), a token or an expert at a time."""
    tokens, count = chosen.shape
    place, token_of, prob_of = (
        np.full(chosen.shape, -7, "int32"),
        np.full(rows, tokens, "int32"),
        np.zeros(rows, "float32"),
    )
    counts, row = [], 0
    for expert in range(count):
        first = row
        for token in np.flatnonzero(chosen[:, expert]):
            place[token, expert], token_of[row], prob_of[row] = row, token, probs[token, expert]
            row += 1
        row = first - (first - row) // multiple * multiple
        counts.append(row - first)
    return counts, place, token_of, prob_of


@pytest.fixture(params=[(50, 5, 1), (700, 3, 16), (3, 9, 128)], ids=str)
def placed(request, on_cpu, seed, monkeypatch):
    """(chosen, probs, rows, multiple, what the kernels wrote)."""
    monkeypatch.setattr(experts, "_BLOCK", 8)
    tokens, count, multiple = request.param
    monkeypatch.setattr(experts, "_PLACING_BLOCK", 64 if tokens < 512 else 32)  # two warps, or one that takes two turns
    chosen = draw_map(seed, tokens, count)
    probs = np.random.default_rng(seed + 1).random(chosen.shape, "float32")
    rows = experts.most_rows(tokens, count, min(3, count), multiple)
    rows = max(rows, sum(rows_of(chosen, probs, multiple, 10**4)[0]))
    counts, offsets = np.full(count, -7, "int64"), np.full([3, count + 1], -7, "int64")
    place, token_of, prob_of = (
        np.full(shape, -7, kind) for shape, kind in ((chosen.shape, "int32"), (rows, "int32"), (rows, "float32"))
    )
    places = experts.Places(*[a.ctypes.data for a in (counts, offsets, place, token_of, prob_of)])
    sizes = experts.Sizes(tokens, count, rows, multiple)
    experts.place(on_cpu, on_cpu, chosen.ctypes.data, probs.ctypes.data, places, sizes, (8, 12, 5))
    return chosen, probs, sizes, places, (counts, offsets, place, token_of, prob_of)


def test_place(placed):
    chosen, probs, sizes, _, (counts, offsets, *written) = placed
    want_counts, *want = rows_of(chosen, probs, sizes.multiple, sizes.rows)
    assert counts.tolist() == want_counts
    first = np.cumsum([0, *want_counts])
    assert (offsets == first * np.array([[8], [12], [5]])).all()
    for found, expected in zip(written, want, strict=True):
        assert (found == expected).all()


def test_gather_and_combine(on_cpu, placed, seed):
    chosen, _, sizes, places, (_, _, place, token_of, _) = placed
    random = np.random.default_rng(seed + 2)
    x = random.standard_normal([sizes.tokens, 12]).astype("float32")
    y = np.full([sizes.rows, 12], np.nan, "float32")
    rows = experts.Rows(x.ctypes.data, places.token_of, 0, sizes.tokens, sizes.experts, sizes.rows, 12)
    experts.gather(on_cpu, on_cpu, rows, y.ctypes.data, F32)
    assert (y == np.concatenate([x, np.zeros([1, 12], "float32")])[token_of]).all()
    rows = random.standard_normal(y.shape).astype("float32")
    out = np.full_like(x, np.nan)
    for residual in (None, x):
        added = 0 if residual is None else residual.ctypes.data
        experts.combine(
            on_cpu, on_cpu, rows.ctypes.data, chosen.ctypes.data, places, added, out.ctypes.data, sizes, 12, F32
        )
        for token in range(sizes.tokens):
            total = np.zeros(12, "float32") if residual is None else residual[token].copy()
            for row in place[token][chosen[token]]:
                total += rows[row]
            assert (out[token] == total).all()


def test_gradients_of_probabilities(on_cpu, placed, seed):
    chosen, _, sizes, places, (_, _, place, *_) = placed
    of_rows = np.random.default_rng(seed + 3).standard_normal(sizes.rows).astype("float32")
    dprobs = np.full(chosen.shape, np.nan, "float32")
    experts.scatter_probs(on_cpu, on_cpu, of_rows.ctypes.data, chosen.ctypes.data, places, dprobs.ctypes.data, sizes)
    assert (dprobs == np.where(chosen, of_rows[np.where(chosen, place, 0)], 0)).all()


@pytest.fixture
def of_rows(placed, seed):
    """(experts.Rows of tokens, the same in NumPy with zeros for padding, each row's expert, prob_of, a bias)."""
    chosen, _, sizes, places, (counts, _, _, token_of, prob_of) = placed
    random, columns = np.random.default_rng(seed + 4), 140  # more vectors than lanes
    x, bias = (random.standard_normal([n, columns]).astype("float32") for n in (sizes.tokens, len(counts)))
    begins = np.cumsum([0, *counts]) * columns
    rows = experts.Rows(
        x.ctypes.data, places.token_of, begins.ctypes.data, sizes.tokens, len(counts), sizes.rows, columns
    )
    expert_of = np.repeat(np.arange(len(counts)), counts)
    values = np.concatenate([x, np.zeros([1, columns], "float32")])[token_of[: len(expert_of)]]
    return rows, values, expert_of, prob_of[: len(expert_of)], bias, (x, begins)


@pytest.mark.parametrize("times_probs", [False, True])
def test_biases_and_their_gradients(on_cpu, placed, of_rows, times_probs, monkeypatch):
    rows, values, expert_of, prob_of, bias, _ = of_rows
    address, factors = (placed[3].prob_of, prob_of[:, None]) if times_probs else (0, 1)
    y = np.full([rows.rows, rows.columns], np.nan, "float32")
    y[: len(values)] = values
    experts.add_bias(on_cpu, on_cpu, rows._replace(x=y.ctypes.data, token_of=0), bias.ctypes.data, address, F32)
    assert np.allclose(y[: len(values)], values + factors * bias[expert_of], atol=1e-6)
    assert np.isnan(y[len(values) :]).all()
    monkeypatch.setattr(experts, "_BLOCK", 64)  # two threads for a vector
    expected = np.stack([(factors * values)[expert_of == e].sum(0) for e in range(rows.experts)])
    for given in (rows, rows._replace(x=values.ctypes.data, token_of=0)):
        sums = np.full(bias.shape, np.nan, "float32")
        experts.sum_rows(on_cpu, on_cpu, given, address, sums.ctypes.data, F32)
        assert np.allclose(sums, expected, atol=1e-4)


def test_what_comes_through_a_bias_to_the_probabilities(on_cpu, of_rows):
    rows, values, expert_of, _, bias, _ = of_rows
    found = np.arange(rows.rows, dtype="float32")
    expected = found.copy()
    expected[: len(values)] += (values * bias[expert_of]).sum(1)
    experts.add_bias_products(on_cpu, on_cpu, rows, bias.ctypes.data, found.ctypes.data, F32)
    assert np.allclose(found, expected, atol=1e-4)


def test_gelu_times_the_probabilities(on_cpu, placed, seed):
    """Beside float64, with differences for the derivative. Padding becomes zeros, whatever is there."""
    *_, (_, _, _, _, prob_of) = placed
    rows, columns = len(prob_of), 20
    draw = np.random.default_rng(seed + 5).standard_normal
    x, dy = (np.where(prob_of[:, None], draw([rows, columns]), np.nan).astype("float32") for _ in range(2))
    gelu = lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))  # noqa: E731
    exact, step, real = x.astype("float64"), 1e-5, prob_of > 0
    y, dx = (np.full(x.shape, -7, "float32") for _ in range(2))
    dprob = np.full(rows, -7, "float32")
    address = placed[3].prob_of
    experts.scaled_gelu(on_cpu, on_cpu, x.ctypes.data, address, y.ctypes.data, rows, columns, F32)
    given = dy.ctypes.data, x.ctypes.data, address, dx.ctypes.data, dprob.ctypes.data
    experts.scaled_dgelu(on_cpu, on_cpu, *given, rows, columns, F32)
    probs = prob_of[real, None]
    assert np.allclose(y[real], probs * gelu(exact[real]), atol=1e-6)
    derivative = (gelu(exact[real] + step) - gelu(exact[real] - step)) / (2 * step)
    assert np.allclose(dx[real], probs * dy[real] * derivative, atol=1e-5)
    assert np.allclose(dprob[real], (dy[real] * gelu(exact[real])).sum(1), atol=1e-5)
    assert not y[~real].any() and not dx[~real].any()


def test_what_experts_without_rows_have_is_zeroed(on_cpu, monkeypatch):
    monkeypatch.setattr(experts, "_BLOCK", 8)
    counts, gradients = np.array([3, 0, 5, 0], "int64"), np.ones([4, 5000], "float32")
    experts.zero_empty(on_cpu, on_cpu, gradients.ctypes.data, counts.ctypes.data, 4, 20000)
    assert (gradients == [[1], [0], [1], [0]]).all()


def test_offsets(on_cpu, monkeypatch):
    monkeypatch.setattr(experts, "_BLOCK", 2)
    counts, found = np.array([3, 0, 5], "int64"), np.full([2, 4], -7, "int64")
    experts.offsets(on_cpu, on_cpu, counts.ctypes.data, found[0].ctypes.data, found[1].ctypes.data, 3, 10, 2)
    assert found.tolist() == [[0, 30, 30, 80], [0, 6, 6, 16]]


@pytest.mark.parametrize("float8", [DType.FLOAT8_E4M3, DType.FLOAT8_E5M2])
@pytest.mark.parametrize("gathers", [False, True])
def test_cast_transpose(on_cpu, monkeypatch, seed, gathers, float8):
    """Ragged experts, some of them empty, whose rows do not fill the tiles; behind them nothing is touched."""
    monkeypatch.setattr(experts, "CAST_TILING", casts.Tiling(64, 2, 1))
    random, counts, columns, tokens, rows = np.random.default_rng(seed), [48, 0, 16, 80, 0], 144, 50, 176
    first = np.cumsum([0, *counts])
    token_of, source = np.full(rows, tokens, "int32"), aligned((tokens if gathers else rows, columns), NUMPY[BF16])
    token_of[random.permutation(144)[:100]] = random.integers(0, tokens, 100)
    source[:] = random.standard_normal(source.shape)
    values = source.astype("float32")
    if gathers:
        values = np.concatenate([values, np.zeros([1, columns], "float32")])[token_of]
    values[first[-1] :] = 0
    if not gathers:
        source[first[-1] :] = np.nan
    begins, scale_inv = first * columns, np.full(6, np.nan, "float32")
    out = Output((rows, columns), float8, 3.0)
    of_rows = experts.Rows(
        source.ctypes.data, token_of.ctypes.data * gathers, begins.ctypes.data, len(source), 5, rows, columns
    )
    target = experts.ExpertsTarget(out.target, scale_inv.ctypes.data)
    experts.cast_transpose(on_cpu, on_cpu, of_rows, target, casts.Form(BF16, float8))
    used = first[-1]
    assert (out.data[:used] == out.bits(values[:used])).all() and (out.data[used:] == 0x55).all()
    flat = out.transposed.reshape(-1)
    for begin, end in zip(first, first[1:], strict=False):
        mine = flat[begin * columns : end * columns].reshape(columns, end - begin)
        assert (mine == out.data[begin:end].T).all()
    assert (flat[used * columns :] == 0x55).all()
    assert out.amax == np.abs(values).max()
    assert (scale_inv[:5] == np.float32(1) / np.float32(3)).all() and np.isnan(scale_inv[5])


def activations(seed, counts, rows, columns):
    """(dy, z, prob_of, y, dz and dprob in float32) of experts with such counts of rows; NaN behind these."""
    random, used = np.random.default_rng(seed), sum(counts)
    dy, z = aligned((rows, columns), NUMPY[BF16]), aligned((rows, 2 * columns), NUMPY[BF16])
    dy[:], z[:] = random.standard_normal(dy.shape), 3 * random.standard_normal(z.shape)
    dy[used:], z[used:] = np.nan, np.nan
    prob_of = np.where(random.random(rows) < 0.1, 0, random.random(rows)).astype("float32")
    one, grad, prob = np.float32(1), dy[:used].astype("float32"), prob_of[:used, None]
    gate, up = np.split(z[:used].astype("float32"), 2, 1)
    s = one / (one + np.exp(-gate.astype("float64")).astype("float32"))
    silu, scaled = gate * s, grad * prob
    dz = np.concatenate([(gate * (s * (one - s)) + s) * scaled * up, scaled * silu], 1)
    return dy, z, prob_of, silu * up * prob, dz, (grad * (silu * up)).sum(1)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("columns", [64, 192])
def test_activations_of_ragged_experts(on_cpu, monkeypatch, seed, gradient, columns):
    """Some experts are empty, rows do not fill the tiles; behind them nothing is touched."""
    for name in "SWIGLU_TILING", "DSWIGLU_TILING":
        monkeypatch.setattr(experts, name, casts.Tiling(64, 2, 1))
    counts, rows = [48, 0, 16, 80, 0], 176
    dy, z, prob_of, y, dz, dprob = activations(seed, counts, rows, columns)
    first, scale_inv = np.cumsum([0, *counts]), np.full(6, np.nan, "float32")
    used, want = first[-1], dz if gradient else y
    begins, width = first * columns, want.shape[1]
    out = Output((rows, width), float8 := DType.FLOAT8_E5M2 if gradient else E4M3, 3.0)
    of_rows = experts.Rows(z.ctypes.data, 0, begins.ctypes.data, rows, 5, rows, columns)
    target, form = experts.ExpertsTarget(out.target, scale_inv.ctypes.data), casts.Form(BF16, float8)
    given = of_rows, prob_of.ctypes.data
    if gradient:
        assert experts.shares_of_row(columns, BF16) == columns // 64
        shares, found = np.full((rows, columns // 64), np.nan, "float32"), np.full(rows, np.nan, "float32")
        target = target._replace(shares=shares.ctypes.data)
        experts.dswiglu_cast_transpose(on_cpu, on_cpu, dy.ctypes.data, *given, target, form)
        experts.row_sums(on_cpu, on_cpu, shares.ctypes.data, found.ctypes.data, *shares.shape)
        assert np.allclose(found[:used], dprob, atol=1e-4 * np.abs(dprob).max())
    else:
        experts.swiglu_cast_transpose(on_cpu, on_cpu, *given, target, form)
    assert (out.data[:used] == out.bits(want)).all() and (out.data[used:] == 0x55).all()
    flat = out.transposed.reshape(-1)
    for begin, end in zip(first, first[1:], strict=False):
        mine = flat[begin * width : end * width].reshape(width, end - begin)
        assert (mine == out.data[begin:end].T).all()
    assert (flat[used * width :] == 0x55).all()
    assert out.amax == np.abs(want).max()
    assert (scale_inv[:5] == np.float32(1) / np.float32(3)).all() and np.isnan(scale_inv[5])


def test_columns_that_tiles_do_not_divide_have_no_shares():
    assert experts.shares_of_row(80, BF16) == 0 and experts.shares_of_row(96, F32) == 3


def test_cast_transpose_of_weights(on_cpu, monkeypatch, seed):
    monkeypatch.setattr(experts, "CAST_TILING", casts.Tiling(64, 2, 1))
    source, scale_inv = aligned((3 * 48, 80), NUMPY[BF16]), np.zeros(3, "float32")
    source[:] = np.random.default_rng(seed).standard_normal(source.shape)
    out = Output(source.shape, DType.FLOAT8_E4M3, 2.0)
    of_rows = experts.Rows.of_weight(source.ctypes.data, 3, 144, 80)
    target = experts.ExpertsTarget(out.target, scale_inv.ctypes.data)
    experts.cast_transpose(on_cpu, on_cpu, of_rows, target, casts.Form(BF16, DType.FLOAT8_E4M3))
    assert (out.data == out.bits(source.astype("float32"))).all() and (scale_inv == 0.5).all()
    assert (out.transposed.reshape(3, 80, 48) == out.data.reshape(3, 48, 80).transpose(0, 2, 1)).all()


def test_most_rows():
    assert experts.most_rows(100, 8, 2, 1) == 200
    assert experts.most_rows(100, 8, 2, 16) == 320  # each expert may be filled up by 15, in whole 16s
    assert experts.most_rows(3, 8, 2, 16) == 96  # no more than six experts have rows
    assert experts.most_rows(100, 8, 2, 16, 40) == 160 and experts.most_rows(3, 8, 2, 1, 40) == 6
