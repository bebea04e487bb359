"""The extension against a fake library: arguments, workspaces, errors, handles. Needs g++, no GPU."""

import ctypes
import gc
import re
import subprocess
from collections import Counter

import pytest

from paddle_te.native import DType, Mask, QKVLayout, ScalingMode, TransformerEngineError
from paddle_te.ops.activations import FC1_WIDTHS
from tests.exports import exported

BF16, F32, E4M3 = DType.BFLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3
STREAM = 0x5000
WORKSPACE = {"0": [0xA000000, 0, [3, 1000]]}


def row(address, shape, dtype=BF16):
    """How the fake prints a tensor with row-wise data only."""
    return {"0": [address, int(dtype), list(shape)]}


def scalar(address):
    return [address, int(F32), [1]]


@pytest.fixture
def make(fake):
    """make(shape, dtype) -> (Tensor at a fresh address, what the fake shows of it)."""
    addresses = iter(range(0x100000, 0x10000000, 0x1000))

    def make(*shape, dtype=BF16):
        address = next(addresses)
        return fake.te.Tensor(address, shape, dtype), row(address, shape, dtype)

    return make


def test_only_pythons_entry_is_exported(fake_shim):
    """Also where the compiler links its C++ library in: other libraries' calls must not reach that copy."""
    assert exported(fake_shim.__file__) == {"PyInit__shim"}


def test_struct_sizes(fake):
    """Of TE 2.20's headers; test_headers.py compares with the headers themselves."""
    assert fake.te.SIZES == {"NVTEShape": 128, "NVTEBasicTensor": 144, "NVTETensorPack": 88}


def test_tensor_parameters(fake):
    t = fake.te.Tensor(0x1000, (6, 4), E4M3, columnwise=0x2000, scale=0x3004, amax=0x3008, scale_inv=0x4000)
    assert (t.data_ptr, t.columnwise, t.shape, t.dtype) == (0x1000, 0x2000, (6, 4), E4M3)
    fake.te.quantize(t, t, fake.stream)
    shown = {
        "0": [0x1000, 7, [6, 4]],
        "1": [0x2000, 7, [4, 6]],
        "2": scalar(0x3004),
        "3": scalar(0x3008),
        "4": scalar(0x4000),
        "5": scalar(0x4000),
    }
    assert fake.calls() == [["nvte_quantize", shown, shown, STREAM]]
    assert repr(t) == "Tensor(fp8_e4m3 [6, 4] with columnwise copy)"


def test_tensor_columnwise_only(fake):
    t = fake.te.Tensor(0, (6, 4), E4M3, columnwise=0x2000, scale_inv=0x4000)
    fake.te.quantize(t, t, fake.stream)
    shown = {"1": [0x2000, 7, [4, 6]], "5": scalar(0x4000)}
    assert fake.calls() == [["nvte_quantize", shown, shown, STREAM]]


@pytest.mark.parametrize("mode, scales, transposed_scales", [
    (ScalingMode.BLOCK_SCALING_1D, [3, 256], [2, 384]),
    (ScalingMode.BLOCK_SCALING_2D, [2, 4], [3, 4]),
])  # fmt: skip
def test_tensors_with_block_scaling(fake, mode, scales, transposed_scales):
    """[256, 384] has 2 x 3 blocks of 128 x 128, and the rows of their scales are filled up to 4."""
    addresses = dict(columnwise=0x2000, scale_inv=0x3000, columnwise_scale_inv=0x4000)
    whole = fake.te.Tensor(0x1000, (256, 384), E4M3, **addresses, scaling_mode=mode)
    transpose = fake.te.Tensor(0, (256, 384), E4M3, **addresses, scaling_mode=mode)
    shown_transpose = {"mode": mode, "1": [0x2000, 7, [384, 256]], "5": [0x4000, F32, transposed_scales]}
    shown = shown_transpose | {"0": [0x1000, 7, [256, 384]], "4": [0x3000, F32, scales]}
    for force, epsilon in ((True, 0.0), (False, 0.25)):
        fake.te.quantize_blocks(whole, transpose, force, epsilon, fake.stream)
        config = {"0": int(force), "1": epsilon}
        assert fake.calls() == [["nvte_quantize_v2", shown, shown_transpose, config, STREAM]]
    slot = lambda number: number << 48  # noqa: E731
    moved = fake.te.Tensor(
        slot(1), (256, 384), E4M3, slot(2), scale_inv=slot(3), columnwise_scale_inv=slot(4), scaling_mode=mode
    )
    call = "quantize_blocks", (moved, moved, True, 0.0, fake.stream)
    fake.te.Sequence((moved,), (call,)).run([0, 0x1000, 0x2000, 0x3000, 0x4000])
    assert fake.calls()[0][1] == shown


def test_tensor_refusals(fake):
    with pytest.raises(ValueError, match="16-byte aligned"):
        fake.te.Tensor(0x1000, (6, 4), E4M3, scale_inv=0x4004)
    with pytest.raises(ValueError, match="16-byte aligned"):
        fake.te.Tensor(0, (6, 4), E4M3, 0x2000, columnwise_scale_inv=0x4004, scaling_mode=ScalingMode.BLOCK_SCALING_1D)
    with pytest.raises(ValueError, match="2 dimensions"):
        fake.te.Tensor(0x1000, (2, 3, 4), E4M3, columnwise=0x2000)
    with pytest.raises(ValueError, match="14 dimensions"):
        fake.te.Tensor(0x1000, (1,) * 15, BF16)
    with pytest.raises((TypeError, RuntimeError)):
        fake.te.Tensor(0x1000, ("a",), BF16)


def test_rmsnorm(fake, make):
    (x, sx), (g, sg), (z, sz), (rs, srs) = make(9, 32), make(32), make(9, 32), make(9, dtype=F32)
    # nine rows: no other test has them, and the workspace's shape is remembered in the process
    fake.te.rmsnorm_fwd(x, g, 0.125, z, rs, fake.stream)
    query, call = fake.calls()
    assert query == ["nvte_rmsnorm_fwd query"]
    assert call == ["nvte_rmsnorm_fwd", sx, sg, 0.125, sz, srs, WORKSPACE, 132, False, STREAM]
    fake.te.rmsnorm_fwd(x, g, 0.125, z, rs, fake.stream)
    assert [c[0] for c in fake.calls()] == ["nvte_rmsnorm_fwd"], "the workspace's shape is asked for once"
    assert fake.allocated == [3000]

    (dz, sdz), (dx, sdx), (dg, sdg), (add, sadd) = make(9, 32), make(9, 32), make(32), make(9, 32)
    fake.te.rmsnorm_bwd(dz, x, rs, g, dx, dg, fake.stream)
    assert fake.calls()[-1] == ["nvte_rmsnorm_bwd", sdz, sx, srs, sg, sdx, sdg, WORKSPACE, 132, False, STREAM]
    fake.te.rmsnorm_bwd(dz, x, rs, g, dx, dg, fake.stream, add)
    query, call = fake.calls()
    assert query == ["nvte_rmsnorm_bwd_add query"]
    assert call == ["nvte_rmsnorm_bwd_add", sdz, sx, sadd, srs, sg, sdx, sdg, WORKSPACE, 132, False, STREAM]
    fake.te.rmsnorm_bwd(dz, x, rs, g, dx, dg, fake.stream, None, True)
    fake.te.rmsnorm_fwd(x, g, 0.125, z, rs, fake.stream, True)
    assert [call[-2] for call in fake.calls() if len(call) > 1] == [True, True], "zero_centered_gamma"


@pytest.mark.parametrize("options, zero_centered", [((), False), ((True,), True)])
def test_layernorm(fake, make, options, zero_centered):
    shapes = dict(x=(11, 32), dz=(11, 32), z=(11, 32), dx=(11, 32), gamma=(32,), beta=(32,), dgamma=(32,), dbeta=(32,))
    made = {name: make(*shape) for name, shape in shapes.items()}
    made |= {name: make(11, dtype=F32) for name in ("mu", "rsigma")}
    tensors, shown = ({name: pair[i] for name, pair in made.items()} for i in range(2))
    pick = lambda source, names: [source[name] for name in names.split()]  # noqa: E731

    inputs, outputs = "x gamma beta", "z mu rsigma"
    fake.te.layernorm_fwd(*pick(tensors, inputs), 0.125, *pick(tensors, outputs), fake.stream, *options)
    expected = [*pick(shown, inputs), 0.125, *pick(shown, outputs), WORKSPACE, 132, zero_centered, STREAM]
    assert fake.calls()[-1] == ["nvte_layernorm_fwd", *expected]

    names = "dz x mu rsigma gamma dx dgamma dbeta"
    fake.te.layernorm_bwd(*pick(tensors, names), fake.stream, *options)
    assert fake.calls()[-1] == ["nvte_layernorm_bwd", *pick(shown, names), WORKSPACE, 132, zero_centered, STREAM]


@pytest.mark.parametrize("change", ["rows", "cols", "z dtype", "alignment"])
def test_workspace_shape_is_asked_again(fake, change):
    """The norm's plan, and so its workspace, depends on these."""

    def run(rows, cols, z_dtype, offset):
        tensor = fake.te.Tensor
        x = tensor(0x1000 + offset, (rows, cols), BF16)
        fake.te.rmsnorm_fwd(
            x,
            tensor(0x2000, (cols,), BF16),
            1e-5,
            tensor(0x3000, (rows, cols), z_dtype),
            tensor(0x4000, (rows,), F32),
            fake.stream,
        )
        return [call[0] for call in fake.calls()]

    base = dict(rows=24, cols=48, z_dtype=BF16, offset=0)
    other = {"rows": dict(rows=40), "cols": dict(cols=64), "z dtype": dict(z_dtype=E4M3), "alignment": dict(offset=2)}
    run(**base)
    run(**{**base, **other[change]})
    assert run(**base) == ["nvte_rmsnorm_fwd"]
    assert run(**{**base, **other[change]}) == ["nvte_rmsnorm_fwd"]
    # A first call with yet another number of rows does ask.
    assert run(**{**base, **other[change], "rows": 1000 + sum(map(ord, change))})[0] == "nvte_rmsnorm_fwd query"


GATED = [name for name, width in FC1_WIDTHS.items() if width == 2]
PLAIN = [name for name, width in FC1_WIDTHS.items() if width == 1]
TWO_TENSORS = ["quantize", "dequantize", "transpose", *FC1_WIDTHS, "compute_amax"]
THREE_TENSORS = [*[f"d{name}" for name in FC1_WIDTHS], *[f"d{name}_cast_transpose" for name in GATED]]


def test_the_shim_has_the_activations_of_the_table(fake):
    """Both lists are written by hand, one in C++ and one in Python."""
    casts = {re.fullmatch("d(.*)_cast_transpose|quantize_dbias_d(.*)", name) for name in dir(fake.te)} - {None}
    assert {match[1] for match in casts} - {None} == {*GATED}
    assert {match[2] for match in casts} - {None} == {*PLAIN}


@pytest.mark.parametrize("name", TWO_TENSORS)
def test_two_tensors(fake, make, name):
    (a, sa), (b, sb) = make(4, 8), make(4, 8)
    getattr(fake.te, name)(a, b, fake.stream)
    assert fake.calls() == [[f"nvte_{name}", sa, sb, STREAM]]


@pytest.mark.parametrize("name", THREE_TENSORS)
def test_three_tensors(fake, make, name):
    (a, sa), (b, sb), (c, sc) = make(4, 8), make(4, 16), make(4, 16)
    getattr(fake.te, name)(a, b, c, fake.stream)
    assert fake.calls() == [[f"nvte_{name}", sa, sb, sc, STREAM]]


GEMMS = {  # transa, transb, A, B, D for tokens 6, in 4, out 10
    "forward": (True, False, (10, 4), (6, 4), (6, 10)),
    "dgrad": (False, False, (10, 4), (6, 10), (6, 4)),
    "wgrad": (False, True, (6, 4), (6, 10), (10, 4)),
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", GEMMS)
def test_gemm(fake, make, kind, accumulate, split):
    transa, transb, *shapes = GEMMS[kind]
    (a, sa), (b, sb), (d, sd) = (make(*shape) for shape in shapes)
    fake.te.gemm(a, b, d, transa, transb, fake.stream, accumulate, split)
    size = 32 * 2**20 + 1024
    workspace = {"0": [0xA000000, 0, [size]]}
    config = {"5": int(split)}
    beta = float(accumulate)
    expected = ["nvte_cublas_gemm_v2", transa, transb, 1.0, sa, sb, beta, sd, sd, workspace, config, STREAM]
    assert fake.calls() == [expected]
    assert fake.allocated == [size]


@pytest.mark.parametrize("kind, vector, size", [("forward", "bias", 10), ("wgrad", "dbias", 10)])
def test_gemm_with_a_bias_or_its_gradient(fake, make, kind, vector, size):
    """In an epilogue; the next GEMM, without, does not get the last one's."""
    transa, transb, *shapes = GEMMS[kind]
    (tensor, shown), *operands = make(size), *[make(*shape)[0] for shape in shapes]
    attribute = {"bias": "0", "dbias": "1"}[vector]
    for options, config in (({vector: tensor}, {attribute: shown, "5": 0}), ({}, {"5": 0})):
        fake.te.gemm(*operands, transa, transb, fake.stream, **options)
        assert fake.calls()[0][10] == config


@pytest.mark.parametrize("kind, vector, shape, dtype", [
    ("forward", "bias", 6, BF16),
    ("forward", "bias", 10, F32),
    ("wgrad", "dbias", 4, BF16),
    ("wgrad", "dbias", 10, F32),
])  # fmt: skip
def test_gemm_refuses_a_bias_of_another_size_or_dtype(fake, make, kind, vector, shape, dtype):
    """cuBLAS reads and writes it in D's dtype, whatever it is."""
    transa, transb, *shapes = GEMMS[kind]
    operands, tensor = [make(*shape)[0] for shape in shapes], make(shape, dtype=dtype)[0]
    with pytest.raises(TransformerEngineError, match=rf"(?s)D's dtype.*{vector}: "):
        fake.te.gemm(*operands, transa, transb, fake.stream, **{vector: tensor})
    with pytest.raises(TransformerEngineError, match="two GEMMs' epilogues"):
        fake.te.gemm(*operands, transa, transb, fake.stream, bias=tensor, dbias=tensor)
    assert fake.calls() == []


@pytest.mark.parametrize("name, inputs", [("", 1), *[(f"_d{name}", 2) for name in PLAIN]])
def test_casts_with_dbias(fake, make, name, inputs):
    made = *[make(24, 40) for _ in range(inputs)], make(24, 40, dtype=E4M3), make(40)
    (*tensors, dbias), shown = zip(*made, strict=True)
    name = f"quantize_dbias{name}"
    cast, stream = getattr(fake.te, name), fake.te.Stream(STREAM, fake.allocate)
    cast(*tensors, dbias, stream)
    query, call = fake.calls()
    assert query == [f"nvte_{name} query"]
    workspace = {"0": [0xA000000, F32, [3, 1000]]}  # the library wants float32 here, and bytes elsewhere
    assert call == [f"nvte_{name}", *shown, workspace, STREAM]
    assert fake.allocated[-1] == 4 * 3000
    with pytest.raises(TransformerEngineError, match="one number for each of input's columns"):
        cast(*tensors, make(24)[0], stream)


@pytest.mark.parametrize("kind", GEMMS)
def test_gemm_shapes_are_checked(fake, make, kind):
    """TE trusts D's shape: too small a D would be written past its end."""
    transa, transb, *shapes = GEMMS[kind]
    for i in range(3):
        wrong = list(shapes)
        wrong[i] = (wrong[i][0], wrong[i][1] + 1) if i != 2 else (wrong[i][0] - 1, wrong[i][1])
        tensors = [make(*shape)[0] for shape in wrong]
        with pytest.raises(TransformerEngineError, match=r"(?s)do not fit.*A: bfloat16 \[.*D: bfloat16 \["):
            fake.te.gemm(*tensors, transa, transb, fake.stream)
    assert fake.calls() == []


def test_gemm_flattens_leading_dimensions(fake, make):
    (a, _), (b, _), (d, _) = make(10, 4), make(2, 3, 4), make(2, 3, 10)
    fake.te.gemm(a, b, d, True, False, fake.stream)
    assert fake.calls()[0][0] == "nvte_cublas_gemm_v2"


def test_scaling(fake, make):
    (h, sh), (s, ss) = make(16, 5, dtype=F32), make(5, dtype=F32)
    fake.te.amax_and_scale_update(h, s, "most_recent", DType.FLOAT8_E5M2, 0.5, fake.stream)
    name = "nvte_delayed_scaling_recipe_amax_and_scale_update"
    assert fake.calls() == [[name, sh, ss, sh, ss, "most_recent", 8, 0.5, STREAM]]
    out = fake.te.Tensor(0x1000, (4, 4), E4M3, amax=0x2000, scale=0x3000)
    fake.te.compute_scale_from_amax(out, fake.stream)
    shown = {"0": [0x1000, 7, [4, 4]], "2": scalar(0x3000), "3": scalar(0x2000)}
    assert fake.calls() == [["nvte_compute_scale_from_amax", shown, {"0": 0, "1": 0}, STREAM]]


@pytest.mark.parametrize("backward", [False, True])
def test_te_rope(fake, make, backward):
    (x, sx), (f, sf), (y, sy) = make(2, 6, 4, 16), make(6, 1, 1, 16, dtype=F32), make(2, 6, 4, 16)
    fake.te.rope(x, f, y, backward, fake.stream)
    name = "nvte_fused_rope_backward" if backward else "nvte_fused_rope_forward"
    sizes = [6, 2, 4, 16, 16, 64, 384, 16, 1]  # s b h d d2, strides s b h d
    assert fake.calls() == [[name, sx, {}, sf, {}, sy, 1, False, 1, 0, *sizes, STREAM]]


def test_attention_forward(fake, make):
    q, k, v, out = make(2, 6, 4, 16), make(2, 6, 2, 16), make(2, 6, 2, 16), make(2, 6, 4, 16)
    stats = make(2, 4, 6, 1, dtype=F32)
    tensors, shown = zip(q, k, v, out, stats, strict=True)
    fake.te.attention_fwd(*tensors, 0.25, QKVLayout.BSHD_BSHD_BSHD, Mask.CAUSAL, True, fake.stream)
    query, (name, params) = fake.calls()
    assert query == ["nvte_fused_attn_fwd_v2 query"] and name == "nvte_fused_attn_fwd_v2"
    sq, sk, sv, so, sst = shown
    # kNVTEFusedAttnFwdParams...: number -> value
    assert params == {
        **{"0": sq, "1": sk, "2": sv, "3": {}, "4": {}, "5": {}, "6": so, "7": [sst, {}]},
        **{str(i): {} for i in range(8, 15)},  # cumulative lengths, page tables, random state
        **{"15": 1, "16": 0, "17": 0, "18": 2, "19": 0, "20": -1, "21": 0, "22": 0, "23": 0, "24": 0, "25": 0.25},
        **{"26": 9, "27": 1, "28": 8, "29": 6, "30": 6, "31": WORKSPACE, "32": STREAM},
    }


def test_attention_of_values_of_another_width(fake, make):
    """Each width has a workspace of its own."""
    for width in (8, 24):
        tensors = [make(2, 6, heads, d)[0] for heads, d in ((4, 16), (2, 16), (2, width), (4, width))]
        stats, _ = make(2, 4, 6, 1, dtype=F32)
        fake.te.attention_fwd(*tensors, stats, 0.25, QKVLayout.BSHD_BSHD_BSHD, Mask.CAUSAL, True, fake.stream)
        grads = [make(2, 6, heads, d)[0] for heads, d in ((4, width), (4, 16), (2, 16), (2, width))]
        given = *tensors, grads[0], stats, *grads[1:], 0.25, QKVLayout.BSHD_BSHD_BSHD, Mask.CAUSAL
        fake.te.attention_bwd(*given, fake.stream, 0.0, True)
    names = [call[0] for call in fake.calls()]
    once = [name for way in ("fwd", "bwd") for name in (f"nvte_fused_attn_{way}_v2 query", f"nvte_fused_attn_{way}_v2")]
    assert names == 2 * once


def test_attention_backward(fake, make):
    names = ["q", "k", "v", "out", "dout", "stats", "dq", "dk", "dv"]
    big, small = (2, 6, 4, 16), (2, 6, 2, 16)
    shapes = [big, small, small, big, big, (2, 4, 6, 1), big, small, small]
    made = [make(*shape, dtype=F32 if name == "stats" else BF16) for name, shape in zip(names, shapes, strict=True)]
    tensors, shown = zip(*made, strict=True)
    by_name = dict(zip(names, shown, strict=True))
    rng, cu = make(2, dtype=DType.INT64), make(3, dtype=DType.INT32)
    layout = QKVLayout.BSHD_BSHD_BSHD
    fake.te.attention_bwd(
        *tensors, 0.25, layout, Mask.PADDING, fake.stream, 0.125, True, rng_state=rng[0], cu_seqlens=cu[0]
    )
    (name, params) = fake.calls()[-1]
    assert name == "nvte_fused_attn_bwd_v2"
    order = ["q", "k", "v", "out", "dout", None, None, None, "dq", "dk", "dv"]
    assert params == {
        **{str(i): by_name.get(key, {}) for i, key in enumerate(order)},
        **{"7": [by_name["stats"], rng[1]], "11": {}, "12": {}, "13": cu[1], "14": cu[1], "15": {}, "16": {}},
        **{"17": 1, "18": 0, "19": 1, "20": 0, "21": -1, "22": -1, "23": 0, "24": 0, "25": 0.125, "26": 0.25},
        **{"27": 9, "28": 1, "29": 1, "30": 9, "31": 8, "32": 8, "33": 6, "34": 6, "35": WORKSPACE, "36": STREAM},
    }


@pytest.mark.parametrize("layout, kv_heads", [(QKVLayout.T3HD, 4), (QKVLayout.THD_THD_THD, 2)])
def test_attention_over_documents(fake, make, layout, kv_heads):
    """The tokens of all documents in a row: where they lie is told by the same numbers as how long they are."""
    (q, _), (k, _), (out, _), (stats, _) = make(12, 4, 16), make(12, kv_heads, 16), make(12, 4, 16), make(12, 4, 1)
    padding = Mask.PADDING_CAUSAL
    for documents in 8, 16:
        cu, shown = make(documents + 1, dtype=DType.INT32)
        fake.te.attention_fwd(q, k, k, out, stats, 0.25, layout, padding, True, fake.stream, cu_seqlens=cu)
        query, (_, params) = fake.calls()  # the workspace's size depends on the number of documents
        assert query == ["nvte_fused_attn_fwd_v2 query"]
        assert [params[str(i)] for i in (8, 9, 10, 11)] == [shown] * 4  # lengths, and where they begin, of q and k
        assert [params[str(i)] for i in (18, 20, 21, 26, 27, 29, 30)] == [3, -1, 0, layout, 2, 12, 12]
        grads = q, k, k
        fake.te.attention_bwd(
            q, k, k, out, out, stats, *grads, 0.25, layout, padding, fake.stream, 0.0, False, cu_seqlens=cu
        )
        query, (_, params) = fake.calls()
        assert query == ["nvte_fused_attn_bwd_v2 query"]
        assert [params[str(i)] for i in (13, 14, 15, 16)] == [shown] * 4
        assert [params[str(i)] for i in (19, 21, 22, 27, 28, 29, 30, 33, 34)] == [
            3,
            -1,
            0,
            layout,
            2,
            2,
            layout,
            12,
            12,
        ]


def test_attention_bias(fake, make):
    """In its own place forward, among the auxiliary tensors backward, with room for its gradient."""
    big, rows = (2, 6, 4, 16), (2, 4, 6, 1)
    (q, _), (out, _), (stats, shown_stats) = make(*big), make(*big), make(*rows, dtype=F32)
    (bias, shown), (dbias, shown_gradient) = make(2, 1, 6, 6), make(2, 1, 6, 6)
    layout = QKVLayout.BSHD_BSHD_BSHD
    fake.te.attention_fwd(q, q, q, out, stats, 0.25, layout, Mask.NONE, True, fake.stream, bias=bias)
    params = fake.calls()[-1][1]
    assert (params["3"], params["7"], params["18"], params["19"]) == (shown, [shown_stats, {}, shown], 0, 2)
    fake.te.attention_bwd(
        q, q, q, out, out, stats, q, q, q, 0.25, layout, Mask.NONE, fake.stream, bias=bias, dbias=dbias
    )
    params = fake.calls()[-1][1]
    assert (params["7"], params["11"], params["20"]) == ([shown_stats, {}, shown], shown_gradient, 2)
    with pytest.raises(TransformerEngineError, match="needs dbias"):
        fake.te.attention_bwd(q, q, q, out, out, stats, q, q, q, 0.25, layout, Mask.NONE, fake.stream, bias=bias)


def test_attention_with_a_softmax_offset(fake, make):
    """In its own place forward, behind the bias among the auxiliary tensors, with room for its gradient."""
    big, rows, plain = (2, 6, 4, 16), (2, 4, 6, 1), (QKVLayout.BSHD_BSHD_BSHD, Mask.CAUSAL)
    (q, _), (out, _), (stats, shown_stats) = make(*big), make(*big), make(*rows, dtype=F32)
    (offset, shown), (gradient, shown_gradient) = make(4, dtype=F32), make(4, dtype=F32)
    fake.te.attention_fwd(q, q, q, out, stats, 0.25, *plain, True, fake.stream, window=3, softmax_offset=offset)
    query, (_, params) = fake.calls()
    assert query == ["nvte_fused_attn_fwd_v2 query"]
    assert (params["4"], params["7"], params["20"], params["23"]) == (shown, [shown_stats, {}, shown], 3, 2)
    given = q, q, q, out, out, stats, q, q, q, 0.25, *plain, fake.stream
    fake.te.attention_bwd(*given, softmax_offset=offset, dsoftmax_offset=gradient)
    params = fake.calls()[-1][1]
    assert (params["7"], params["12"], params["24"]) == ([shown_stats, {}, shown], shown_gradient, 2)
    fake.te.attention_fwd(q, q, q, out, stats, 0.25, *plain, True, fake.stream, window=3)
    assert fake.calls()[0] == ["nvte_fused_attn_fwd_v2 query"]  # another plan, with another workspace
    for wrong in (None, make(3, dtype=F32)[0], make(4)[0]):
        with pytest.raises(TransformerEngineError, match="needs dsoftmax_offset, of its shape and dtype"):
            fake.te.attention_bwd(*given, softmax_offset=offset, dsoftmax_offset=wrong)


def test_a_clamped_activation_times_a_number_for_each_row(fake, make):
    (x, sx), (y, sy), (dy, sdy), (dx, sdx) = make(6, 32), make(6, 16), make(6, 16), make(6, 32)
    (scales, ss), (dscales, sds) = make(6, dtype=F32), make(6, dtype=F32)
    fake.te.scaled_clamped_swiglu(x, scales, y, 7.0, 1.75, 1.0, fake.stream)
    fake.te.scaled_clamped_dswiglu(dy, x, scales, dx, dscales, 7.0, 1.75, 1.0, fake.stream)
    assert fake.calls() == [
        ["nvte_scaled_clamped_swiglu", sx, ss, sy, 7.0, 1.75, 1.0, 0, STREAM],
        ["nvte_scaled_clamped_dswiglu", sdy, sx, ss, sdx, sds, 7.0, 1.75, 1.0, 0, STREAM],
    ]


def factors(address, fp8_dtype=E4M3, shape=(0,), data=0):
    """(arguments of a Tensor, what the fake shows of it), with scale, amax and scale_inv."""
    arguments = data, shape, fp8_dtype, 0, address, address + 4, address + 16
    shown = {"0": [data, int(fp8_dtype), list(shape)], "2": scalar(address), "3": scalar(address + 4)}
    return arguments, shown | {"4": scalar(address + 16)}


def fp8_attention(fake):
    """({name: Tensor}, {name: what the fake shows}) of an attention in fp8."""
    q, k, rows = (2, 6, 4, 16), (2, 6, 2, 16), (2, 4, 6, 1)
    forward, backward = dict(q=q, k=k, v=k, out=q, s=(0,)), dict(dout=q, dq=q, dk=k, dv=k, dp=(0,))
    tensors, shown, addresses = {}, {}, iter(range(0x100000, 0x10000000, 0x1000))
    for shapes, dtype in ((forward, E4M3), (backward, DType.FLOAT8_E5M2)):
        for name, shape in shapes.items():
            data = 0 if shape == (0,) else next(addresses)
            arguments, shown[name] = factors(next(addresses), dtype, shape, data)
            tensors[name] = fake.te.Tensor(*arguments)
    address = next(addresses)
    tensors["stats"], shown["stats"] = fake.te.Tensor(address, rows, F32), row(address, rows, F32)
    return tensors, shown


def attention_fwd(fake, t, **kwargs):
    positional = [t[name] for name in ("q", "k", "v", "out", "stats")]
    fake.te.attention_fwd(*positional, 0.25, 9, Mask.CAUSAL, True, fake.stream, s=t["s"], **kwargs)


def attention_bwd(fake, t):
    positional = [t[name] for name in ("q", "k", "v", "out", "dout", "stats", "dq", "dk", "dv")]
    fake.te.attention_bwd(*positional, 0.25, 9, Mask.CAUSAL, fake.stream, s=t["s"], dp=t["dp"])


def test_attention_in_fp8(fake):
    """TE's PyTorch gives the softmax and its gradient as tensors without data too."""
    tensors, shown = fp8_attention(fake)
    attention_fwd(fake, tensors)
    name, params = fake.calls()[-1]
    order = ["q", "k", "v", None, None, "s", "out"]
    assert name == "nvte_fused_attn_fwd_v2" and params["7"] == [shown["stats"], {}]
    assert {str(i): params[str(i)] for i in range(7)} == {str(i): shown.get(key, {}) for i, key in enumerate(order)}
    attention_bwd(fake, tensors)
    name, params = fake.calls()[-1]
    order = ["q", "k", "v", "out", "dout", "s", "dp", None, "dq", "dk", "dv"]
    assert name == "nvte_fused_attn_bwd_v2" and params["7"] == [shown["stats"], {}]
    for i, key in enumerate(order):
        assert key is None or params[str(i)] == shown[key], key


@pytest.mark.parametrize("name, change, message", [
    ("k", "dtype", "all operands in fp8"),
    ("v", "scale_inv", "with scale_inv"),
    ("out", "dtype", "results are in fp8"),
    ("out", "amax", "with scale and amax"),
    ("s", "none", "fp8 needs s"),
    ("s", "scale_inv", "with scale, amax and scale_inv"),
    ("dout", "scale_inv", "with scale_inv"),
    ("dq", "scale", "with scale and amax"),
    ("dp", "none", "in backward dp"),
    ("dp", "amax", "with scale, amax and scale_inv"),
])  # fmt: skip
def test_factors_that_are_missing(fake, name, change, message):
    """TE would follow null pointers on the device."""
    tensors, _ = fp8_attention(fake)
    shape, data = tensors[name].shape, tensors[name].data_ptr
    pointers = {key: 0x900000 + 16 * i for i, key in enumerate(("scale", "amax", "scale_inv")) if key != change}
    if change == "none":
        tensors[name] = None
    elif change == "dtype":
        tensors[name] = fake.te.Tensor(data, shape, BF16)
    else:
        tensors[name] = fake.te.Tensor(data, shape, E4M3, **pointers)
    run = attention_bwd if name.startswith("d") else attention_fwd
    with pytest.raises(TransformerEngineError, match=rf"(?s){message}.*\n  q: fp8_e4m3"):
        run(fake, tensors)
    assert fake.calls() == []


def test_other_dtypes_have_no_softmax_in_fp8(fake, make):
    q, _ = make(2, 6, 4, 16)
    stats, _ = make(2, 4, 6, 1, dtype=F32)
    softmax = fake.te.Tensor(*factors(0x900000)[0])
    with pytest.raises(TransformerEngineError, match="other dtypes take none"):
        fake.te.attention_fwd(q, q, q, q, stats, 0.25, 9, Mask.CAUSAL, True, fake.stream, s=softmax)


def test_attention_refusals(fake, make):
    def run(stats=(2, 4, 6, 1), q=(2, 6, 4, 16), k=(2, 6, 4, 16), out=(2, 6, 4, 16), v=(2, 6, 4, 16), **kwargs):
        tensors = [make(*shape)[0] for shape in (q, k, v, out, stats)]
        mask, layout = kwargs.pop("mask", Mask.CAUSAL), kwargs.pop("layout", QKVLayout.BSHD_BSHD_BSHD)
        fake.te.attention_fwd(*tensors, 1.0, layout, mask, True, fake.stream, **kwargs)

    tokens = dict.fromkeys("qkv", (12, 4, 16)) | dict(out=(12, 4, 16), layout=QKVLayout.THD_THD_THD)

    for kwargs, message in [
        (dict(stats=(2, 4, 5, 1)), r"stats must be \[b, h, s, 1\]"),
        (dict(q=(12, 4, 16)), r"must be \[b, s, h, d\]"),
        (dict(out=(2, 5, 4, 16)), "shapes do not fit"),
        (dict(v=(2, 6, 2, 16)), "shapes do not fit"),
        (dict(v=(2, 6, 4, 8)), "shapes do not fit"),
        (dict(dropout=0.5), "needs rng_state"),
        (dict(mask=Mask.PADDING_CAUSAL), "needs cu_seqlens"),
        (dict(mask=Mask.PADDING_CAUSAL, cu_seqlens=make(3)[0]), "cu_seqlens must be int32"),
        (dict(mask=Mask.PADDING_CAUSAL, cu_seqlens=make(1, dtype=DType.INT32)[0]), "cu_seqlens must be int32"),
        (dict(layout=QKVLayout.THD_THD_THD), r"with a layout of THD \[tokens, h, d\]"),
        (tokens, "a layout of THD needs a padding mask"),
        (dict(tokens, mask=Mask.PADDING_CAUSAL), "needs cu_seqlens"),
        (dict(softmax_offset=make(3, dtype=F32)[0]), r"softmax_offset must be float32 \[heads of q\]"),
        (dict(softmax_offset=make(4)[0]), r"softmax_offset must be float32 \[heads of q\]"),
        (dict(bias=make(2, 1, 6, 5)[0]), "bias must be"),
        (dict(bias=make(2, 1, 6, 6, dtype=F32)[0]), "bias must have q's dtype"),
    ]:
        with pytest.raises(TransformerEngineError, match=rf"(?s)nvte_fused_attn_fwd_v2: .*{message}.*\n  q: bfloat16"):
            run(**kwargs)
    assert fake.calls() == []


def test_memory(fake):
    to, from_ = fake.te.Tensor(0x100, (7, 11), BF16), fake.te.Tensor(0x200, (77,), BF16)
    fake.te.memcpy_async(to, from_, fake.stream)
    fake.te.memset_async(0x100, 3, 78, fake.stream)
    assert fake.calls() == [
        ["cudaMemcpyAsync", 0x100, 0x200, 154, 4, STREAM],
        ["cudaMemsetAsync", 0x100, 3, 78, STREAM],
    ]
    with pytest.raises(TransformerEngineError, match=r"(?s)sizes differ.*bfloat16 \[7, 11\].*float32 \[77\]"):
        fake.te.memcpy_async(to, fake.te.Tensor(0x200, (77,), F32), fake.stream)
    fake.library.fake_cuda_error(2)
    with pytest.raises(TransformerEngineError, match="cudaMemcpyAsync failed: out of memory"):
        fake.te.memcpy_async(to, from_, fake.stream)
    fake.calls()


def test_copies_beside_other_work(fake):
    """A copy waits for what the stream has been given; what the stream is given later waits for the copy."""
    memory, copies = fake.te.HostMemory(154), fake.te.CopyStream()
    assert (memory.bytes, memory.data_ptr()) == (154, 0x7000)
    non_blocking, untimed, own = 1, 2, 0x6000
    assert fake.calls() == [["cudaMallocHost", 154], ["cudaStreamCreateWithFlags", non_blocking]]
    copies.follow(fake.stream)
    (_, before, flags), *calls = fake.calls()
    assert flags == untimed
    assert calls == [
        ["cudaEventRecord", before, STREAM],
        ["cudaStreamWaitEvent", own, before, 0],
        ["cudaEventDestroy", before],
    ]
    copies.copy(memory.data_ptr(), 0x100, 154)
    event = copies.mark()
    copied, (_, after, _), *calls = fake.calls()
    assert copied == ["cudaMemcpyAsync", 0x7000, 0x100, 154, 4, own]
    assert calls == [["cudaEventRecord", after, own]]
    event.hold(fake.stream)
    copies.follow(event)  # as another stream's copies do
    event.wait()
    del event, memory
    gc.collect()
    assert fake.calls() == [
        ["cudaStreamWaitEvent", STREAM, after, 0],
        ["cudaStreamWaitEvent", own, after, 0],
        ["cudaEventSynchronize", after],
        ["cudaEventDestroy", after],
        ["cudaFreeHost", 0x7000],
    ]
    fake.library.fake_cuda_error(2)
    with pytest.raises(TransformerEngineError, match="cudaMallocHost failed: out of memory"):
        fake.te.HostMemory(1)
    fake.calls()


def test_sequence_makes_its_calls_on_other_memory(fake):
    slot = lambda number, offset=0: number << 48 | offset  # noqa: E731
    x = fake.te.Tensor(slot(1), (6, 4), BF16)
    y = fake.te.Tensor(slot(2), (6, 4), E4M3, slot(2, 32), slot(3), slot(4), slot(5, 16))
    sequence = fake.te.Sequence((x, y), (("quantize", (x, y, fake.stream)), ("transpose", (x, x, fake.stream))))
    for bases in [0, 0x1000, 0x2000, 0x3004, 0x3008, 0x4000], [0, 0x9000, 0x2000, 0x5004, 0x5008, 0x6000]:
        sequence.run(bases)
        _, source, target, scale, amax, inverse = bases
        shown = {
            "0": [target, 7, [6, 4]], "1": [target + 32, 7, [4, 6]], "2": scalar(scale), "3": scalar(amax),
            "4": scalar(inverse + 16), "5": scalar(inverse + 16),
        }  # fmt: skip
        x_shown = row(source, (6, 4), BF16)
        assert fake.calls() == [
            ["nvte_quantize", x_shown, shown, STREAM],
            ["nvte_transpose", x_shown, x_shown, STREAM],
        ]
    assert (y.data_ptr, y.columnwise) == (0x2000, 0x2020)
    launch = fake.te.Sequence((), (("launch", (0x700 + 3, 5, 256, 64, fake.stream, slot(2, 8), -2, True)),))
    for target in 0x10000000000, 0x20000000000:
        launch.run([0, 0, target])
        fake.te.launch(0x700 + 3, 5, 256, 64, fake.stream, target + 8, -2, True)
        got, want = fake.calls()
        assert got == want
    fake.fail("nvte_quantize", "no")
    with pytest.raises(TransformerEngineError, match=r"(?s)nvte_quantize failed: no\n  input: bfloat16 \[6, 4\]"):
        sequence.run(bases)
    with pytest.raises(IndexError, match="index 2"):
        sequence.run([0, 0x1000])
    fake.calls()


def test_steps_allocate_what_their_calls_need_and_let_it_go(fake):
    """What is kept lies in memories[0], which another Steps is given; a function's result is memory as well."""
    at = {"kept": 0x1000000, "temporary": 0x2000000, "y": 0x3000000, "z": 0x4000000}

    class Memory:
        def __init__(self, name):
            self.name = name

        def data_ptr(self):
            return at[self.name]

    slot = lambda number, offset=0: number << 48 | offset  # noqa: E731
    launch = lambda *slots: fake.te.Sequence((), (("launch", (0x703, 1, 32, 0, fake.stream, *map(slot, slots))),))  # noqa: E731
    seen = []

    def doubled(memories):
        seen.append([memory.name if isinstance(memory, Memory) else memory for memory in memories])
        return Memory("z")

    steps = [
        ([(3, ("y",))], launch(1, 2, 3), -1, []),
        ([], launch(3, 4, 5), -1, [1]),
        ([], doubled, 6, [3]),
        ([], launch(2, 4, 6), -1, []),
    ]
    forward = fake.te.Steps((("kept",), [(4, 0x100)]), [(5, 0x200)], steps)
    memories = [None, Memory("y"), 0x77, None, None, None, None]
    forward.run(memories, Memory, Memory("temporary"))
    kept, temporary = at["kept"] + 0x100, at["temporary"] + 0x200
    for arguments in (at["y"], 0x77, at["y"]), (at["y"], kept, temporary), (0x77, kept, at["z"]):
        fake.te.launch(0x703, 1, 32, 0, fake.stream, *arguments)
    got = fake.calls()
    assert got[:3] == got[3:]
    assert seen == [["kept", None, 0x77, "y", None, None, None]]
    assert [memory and getattr(memory, "name", memory) for memory in memories] == [
        "kept",
        *[None, 0x77],
        *[None] * 3,
        "z",
    ]
    backward = fake.te.Steps((None, [(4, 0x100)]), [], [([], launch(2, 3, 4), -1, [])])
    backward.run([memories[0], None, 0x77, Memory("y"), None], Memory, None)
    fake.te.launch(0x703, 1, 32, 0, fake.stream, 0x77, at["y"], kept)
    got, want = fake.calls()
    assert got == want
    with pytest.raises(KeyError):
        fake.te.Steps((("nowhere",), []), [], []).run([None], Memory, None)
    with pytest.raises(IndexError, match="index 9"):
        fake.te.Steps((None, []), [], [([], launch(0, 0, 9), -1, [])]).run([None], Memory, None)


def test_what_cannot_be_recorded_is_refused_before_it_runs(fake, make):
    (x, _), (y, _) = make(8, 32), make(8, 32)
    with pytest.raises(AttributeError, match="quantise"):
        fake.te.Sequence((), (("quantise", ()),))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        fake.te.Sequence((), (("quantize", (x, y)),))
    with pytest.raises(ValueError, match="counts cannot be recorded"):
        fake.te.Sequence((), (("counts", ()),))
    fake.te.Sequence((), (("quantize", (x, y, fake.stream)),))
    assert fake.calls() == []
    fake.te.quantize(x, y, fake.stream)  # and the next call is none of a Sequence's
    assert [call[0] for call in fake.calls()] == ["nvte_quantize"]


def test_a_sequence_keeps_what_it_was_made_of(fake, make):
    (x, _), (y, _) = make(8, 32), make(8, 32)
    sequence = fake.te.Sequence((), (("quantize", (x, y, fake.stream)),))
    fake.te.quantize(x, y, fake.stream)
    want = fake.calls()
    del x, y
    gc.collect()
    sequence.run([0])
    assert fake.calls() == want


def test_calls_are_counted_by_precision(fake, make):
    """Those of a Sequence as well; what raises has not run."""
    before = Counter(fake.te.counts())
    (x, _), (y, _) = make(8, 32), make(8, 32)
    quantized = fake.te.Tensor(0x1000, (8, 32), E4M3, 0, 0x2000, 0x3000, 0x4000)
    fake.te.quantize(x, quantized, fake.stream)
    sequence = fake.te.Sequence((), (("quantize", (x, quantized, fake.stream)), ("transpose", (x, y, fake.stream))))
    for _ in range(2):
        sequence.run([0])
    fake.te.memset_async(0x1000, 0, 16, fake.stream)
    fake.fail("nvte_quantize", "no")
    with pytest.raises(TransformerEngineError):
        fake.te.quantize(x, quantized, fake.stream)
    fake.fail("nvte_quantize", "no")
    with pytest.raises(TransformerEngineError):
        sequence.run([0])
    assert Counter(fake.te.counts()) - before == {
        ("quantize", "fp8"): 3,
        ("transpose", "bfloat16"): 2,
        ("memset_async", ""): 1,
    }
    fake.calls()


def test_launch(fake):
    function = 0x700 + 3  # three arguments: see the fake
    fake.te.launch(function, 5, 256, 64, fake.stream, 0x10000000000, -2, True)
    arguments = [0x10000000000, -2, 1]
    assert fake.calls() == [["cuLaunchKernel", 5, 1, 1, 256, 1, 1, 64, STREAM, arguments, False]]
    fake.library.fake_cuda_error(1)
    with pytest.raises(TransformerEngineError, match="cuLaunchKernel failed: launch failed"):
        fake.te.launch(function, 1, 1, 0, fake.stream, 1, 2, 3)
    fake.calls()


def test_exception_becomes_python_error(fake, make):
    """The message names the entry point, TE's words, and dtype and shape of each tensor."""
    (x, _), (g, _), (z, _), (rs, _) = make(8, 36), make(36), make(8, 36), make(8, dtype=F32)
    fake.fail("nvte_rmsnorm_fwd query", "rmsnorm.cpp:12 in function f: Assertion failed: reasons")
    with pytest.raises(TransformerEngineError) as error:
        fake.te.rmsnorm_fwd(x, g, 1e-5, z, rs, fake.stream)
    assert str(error.value) == (
        "nvte_rmsnorm_fwd failed: rmsnorm.cpp:12 in function f: Assertion failed: reasons\n"
        "  x: bfloat16 [8, 36]\n  gamma: bfloat16 [36]\n  z: bfloat16 [8, 36]\n  rsigma: float32 [8]"
    )
    assert isinstance(error.value, RuntimeError)
    fake.te.rmsnorm_fwd(x, g, 1e-5, z, rs, fake.stream)  # and the next call works
    assert [call[0] for call in fake.calls()] == ["nvte_rmsnorm_fwd query", "nvte_rmsnorm_fwd"]


def test_foreign_exception(fake, make):
    (x, _), (y, _) = make(8, 32), make(8, 32)
    fake.fail("nvte_quantize", "", as_int=True)
    with pytest.raises(TransformerEngineError, match="nvte_quantize failed with an unknown C"):
        fake.te.quantize(x, y, fake.stream)


def test_no_handle_left(fake):
    fake.fail("nvte_create_tensor", "Maximum number of tensors reached")
    with pytest.raises(TransformerEngineError, match="Maximum number of tensors reached"):
        fake.te.Tensor(0x1000, (1,), BF16)


def test_workspace_grows_and_waits(fake, make):
    """A larger workspace replaces the old one only after the stream has finished with it; the owner is kept."""

    class Memory:
        alive = 0

        def __init__(self):
            Memory.alive += 1

        def __del__(self):
            Memory.alive -= 1

        def data_ptr(self):
            return 0xB000000

    stream = fake.te.Stream(0x6000, lambda size: sizes.append(size) or Memory())
    sizes = []
    (x, _), (g, _), (z, _), (rs, _) = make(8, 32), make(32), make(8, 32), make(8, dtype=F32)
    fake.te.rmsnorm_fwd(x, g, 1e-5, z, rs, stream)
    assert sizes == [3000] and stream.workspace_size == 3000
    assert not any(call[0] == "cudaStreamSynchronize" for call in fake.calls())
    (a, _), (b, _), (d, _) = make(4, 4), make(4, 4), make(4, 4)
    for _ in range(2):
        fake.te.gemm(a, b, d, True, False, stream)
    assert [call[0] for call in fake.calls()] == ["cudaStreamSynchronize", *["nvte_cublas_gemm_v2"] * 2]
    assert sizes == [3000, 32 * 2**20 + 1024]
    gc.collect()
    assert Memory.alive == 1
    del stream
    gc.collect()
    assert Memory.alive == 0


def test_allocator_errors(fake, make):
    (a, _), (b, _), (d, _) = make(4, 4), make(4, 4), make(4, 4)

    def fails(size):
        raise MemoryError(f"no {size} bytes")

    with pytest.raises(MemoryError, match="no 33555456 bytes"):
        fake.te.gemm(a, b, d, True, False, fake.te.Stream(0, fails))

    class Odd:
        def data_ptr(self):
            return 0xB000010

    with pytest.raises(TransformerEngineError, match="256-byte aligned"):
        fake.te.gemm(a, b, d, True, False, fake.te.Stream(0, lambda size: Odd()))
    assert fake.calls() == []


def test_stream(fake):
    stream = fake.te.Stream(0x77, fake.allocate)
    assert (stream.handle, stream.sm_count, stream.capability, stream.workspace_size) == (0x77, 132, (9, 0), 0)


def test_sms_left_to_other_kernels(fake, make, monkeypatch):
    """TE's variables, which a stream reads when it is made."""
    (x, _), (w, _), (y, _) = make(8, 32), make(32, 32), make(8, 32)
    (g, _), (rs, _), (dg, _) = make(32), make(8, dtype=F32), make(32)

    def sms(stream):
        fake.te.gemm(w, x, y, True, False, stream)
        fake.te.rmsnorm_fwd(x, g, 0.125, y, rs, stream)
        fake.te.rmsnorm_bwd(y, x, rs, g, x, dg, stream)
        fake.te.rmsnorm_bwd(y, x, rs, g, x, dg, stream, y)
        gemm, *norms = [call for call in fake.calls() if len(call) > 1]
        return [gemm[-2].get("6"), *(call[-3] for call in norms)]

    variables = dict(NVTE_EXT_MARGIN_SM="16", NVTE_FWD_LAYERNORM_SM_MARGIN="8", NVTE_BWD_LAYERNORM_SM_MARGIN="4")
    before = fake.te.Stream(0x78, fake.allocate)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert sms(fake.te.Stream(0x78, fake.allocate)) == [116, 124, 128, 128]
    assert sms(before) == [None, 132, 132, 132]
    for value in ("132", "-1", "8 SMs"):
        monkeypatch.setenv("NVTE_EXT_MARGIN_SM", value)
        with pytest.raises(ValueError, match=f"NVTE_EXT_MARGIN_SM={value}: it must be an integer from 0 to 131"):
            fake.te.Stream(0x78, fake.allocate)


def test_nothing_leaks(fake, make):
    """Handles and configurations after many calls, also failing ones, are those of before."""

    def once(i):
        tensor = fake.te.Tensor
        x, w = tensor(0x1000, (16, 32), BF16), tensor(0x2000, (32,), BF16)
        z = tensor(0x3000, (16, 32), E4M3, 0x4000, 0x5000, 0x6000, 0x7000)
        rs = tensor(0x8000, (16,), F32)
        q, stats = tensor(0x9000, (1, 16, 2, 16), BF16), tensor(0x9900, (1, 2, 16, 1), F32)
        if i % 3 == 0:
            fake.fail(["nvte_rmsnorm_fwd", "nvte_quantize", "nvte_fused_attn_fwd_v2"][i // 3 % 3], "fails")
        for call in (
            lambda: fake.te.rmsnorm_fwd(x, w, 1e-5, z, rs, fake.stream),
            lambda: fake.te.quantize(x, z, fake.stream),
            lambda: fake.te.gemm(x, x, tensor(0, (16, 16), BF16), True, False, fake.stream),
            lambda: fake.te.attention_fwd(q, q, q, q, stats, 1.0, 5, Mask.CAUSAL, True, fake.stream),
            lambda: fake.te.attention_bwd(q, q, q, q, q, stats, q, q, q, 1.0, 5, Mask.CAUSAL, fake.stream),
            lambda: tensor(0x1000, (1, 2, 3), E4M3, 0x4000),
        ):
            try:
                call()
            except (TransformerEngineError, ValueError):
                pass

    once(1)
    fake.calls()
    before = fake.library.fake_live_tensors(), fake.library.fake_live_configs()
    for i in range(300):
        once(i)
    fake.calls()
    gc.collect()
    assert (fake.library.fake_live_tensors(), fake.library.fake_live_configs()) == before


def test_unbound(unbound_shim, fake_library):
    module = unbound_shim()
    for create in (lambda: module.Tensor(0, (), 0), lambda: module.Stream(0, print)):
        with pytest.raises(ImportError, match="load.* has not been called"):
            create()
    module.bind(*[fake_library._handle] * 3)
    module.Tensor(0, (), 0)
    with pytest.raises(ImportError, match="already bound"):
        module.bind(*[fake_library._handle] * 3)


def test_missing_entry_points(unbound_shim, fake_library, tmp_path, gxx):
    """Binding to a library that lacks functions names them all."""
    source, library = tmp_path / "empty.cpp", tmp_path / "libempty.so"
    source.write_text('extern "C" void nvte_dequantize() {}')
    subprocess.run([gxx, "-shared", "-fPIC", source, "-o", library], check=True)
    module, handle = unbound_shim(), ctypes.CDLL(str(library))._handle
    with pytest.raises(ImportError, match="nvte_create_tensor, .*nvte_fused_attn_bwd_v2") as error:
        module.bind(handle, *[fake_library._handle] * 2)
    assert "nvte_dequantize" not in str(error.value) and "cuda" not in str(error.value)
    with pytest.raises(ImportError):
        module.Tensor(0x1000, (1,), BF16)
