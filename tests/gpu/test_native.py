"""Each entry point of the native binding against PyTorch, which allocates memory here and computes the references."""

import gc
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the references need PyTorch")

from paddle_te import native  # noqa: E402
from paddle_te.native import (  # noqa: E402
    DType,
    Mask,
    QKVLayout,
    ScalingMode,
    TransformerEngineError,
    addition,
    casts,
    column_sums,
    library,
    low_rank,
    rmsnorm,
    rope,
    swiglu,
)
from paddle_te.ops.te import program, runtime  # noqa: E402
from tests import block_scaling  # noqa: E402

DTYPES = {
    torch.bfloat16: DType.BFLOAT16,
    torch.float16: DType.FLOAT16,
    torch.float32: DType.FLOAT32,
    torch.uint8: DType.BYTE,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
}
E4M3, E5M2 = DType.FLOAT8_E4M3, DType.FLOAT8_E5M2
TORCH_FP8 = {E4M3: (torch.float8_e4m3fn, 448.0), E5M2: (torch.float8_e5m2, 57344.0)}
BF16_ERROR = 6e-3  # relative L2 error of a result rounded to bf16, with room for bf16 inputs of a sum


@pytest.fixture(scope="module")
def te():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    problems = native.diagnose()
    if any("not installed" in problem.what for problem in problems):
        pytest.skip(f"{problems[0].what}")
    return native.load()


@pytest.fixture
def stream(te):
    return make_stream(te)


@pytest.fixture(autouse=True)
def _seed(seed):
    torch.manual_seed(seed)


def make_stream(te):
    def allocate(size):
        return torch.full([size], 0xAB, dtype=torch.uint8, device="cuda")  # kernels may not rely on zeros

    return te.Stream(torch.cuda.current_stream().cuda_stream, allocate)


def random(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def poisoned(*shape, dtype=torch.bfloat16):
    """Outputs start as NaN, so that what a kernel leaves out shows."""
    return torch.full(shape, math.nan, dtype=dtype, device="cuda")


def view(te, tensor, **kwargs):
    return te.Tensor(tensor.data_ptr(), tuple(tensor.shape), DTYPES[tensor.dtype], **kwargs)


def error(got, want):
    """Relative L2 error."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm()).item()


class Float8:
    """An fp8 matrix with its transposed copy and its factors."""

    def __init__(self, te, shape, dtype=E4M3, scale=1.0):
        rows, cols = shape
        self.torch_dtype, self.max = TORCH_FP8[dtype]
        self.data = torch.full([rows, cols], 0xFF, dtype=torch.uint8, device="cuda")
        self.columnwise = torch.full([cols, rows], 0xFF, dtype=torch.uint8, device="cuda")
        self.factors = torch.zeros(8, device="cuda")  # scale, amax, -, -, scale_inv: 16-byte aligned
        self.factors[0] = scale
        pointer = self.factors.data_ptr()
        self.native = te.Tensor(
            self.data.data_ptr(), shape, dtype, self.columnwise.data_ptr(), pointer, pointer + 4, pointer + 16
        )

    @property
    def target(self):
        """What our kernels write to."""
        factors = (self.factors.data_ptr() + 4 * i for i in (0, 1, 4))
        return casts.CastTarget(self.data.data_ptr(), self.columnwise.data_ptr(), *factors)

    scale = property(lambda self: self.factors[0].item())
    amax = property(lambda self: self.factors[1].item())
    scale_inv = property(lambda self: self.factors[4].item())

    def bits(self, reference):
        """The bytes that `reference` (float32) should have."""
        return (reference.float() * self.factors[0]).clamp(-self.max, self.max).to(self.torch_dtype).view(torch.uint8)

    def dequantized(self):
        return self.data.view(self.torch_dtype).double() * self.factors[4].double()

    def check(self, reference, exact=True):
        """Row-wise data, its transpose and the factors belong to `reference`."""
        assert torch.equal(self.columnwise, self.data.T)
        assert self.amax == pytest.approx(reference.float().abs().max().item(), rel=0 if exact else 1e-2)
        assert self.scale_inv == pytest.approx(1 / self.scale, rel=1e-6)
        if exact:
            assert torch.equal(self.data, self.bits(reference))
        else:
            assert error(self.dequantized(), reference) < 0.05


def quantized(te, stream, tensor, dtype=E4M3):
    result = Float8(te, tuple(tensor.shape), dtype, TORCH_FP8[dtype][1] / 2 / tensor.abs().max().item())
    te.quantize(view(te, tensor), result.native, stream)
    return result


def test_libraries(te):
    report = native.report()
    assert report["transformer_engine"]["version"].startswith(library.SUPPORTED)
    for name in ("cudart", "cublasLt", "cudnn", "nvrtc", "cuda"):
        assert report[name]["version"], name
    assert [name for name, entry in report.items() if entry["duplicate"]] == []
    assert native.diagnose() == []


NORM_SHAPES = pytest.mark.parametrize("shape", [(77, 256), (512, 4096), (1, 1024), (130, 8192)])


@pytest.mark.parametrize("zero_centered", [False, True])
@NORM_SHAPES
def test_rmsnorm(te, stream, shape, zero_centered):
    x, gamma, dz, add = random(*shape), random(shape[1]), random(*shape), random(*shape)
    z, rsigma = poisoned(*shape), poisoned(shape[0], dtype=torch.float32)
    te.rmsnorm_fwd(view(te, x), view(te, gamma), 1e-5, view(te, z), view(te, rsigma), stream, zero_centered)

    xd, gd = x.double().requires_grad_(), gamma.double().requires_grad_()
    want_rsigma = (xd.square().mean(-1) + 1e-5).rsqrt()
    want = xd * want_rsigma[:, None] * (gd + zero_centered)
    want.backward(dz.double())
    assert error(rsigma, want_rsigma.detach()) < 1e-5 and error(z, want.detach()) < BF16_ERROR
    for residual in (None, add):
        dx, dgamma = poisoned(*shape), poisoned(shape[1])
        inputs = [view(te, t) for t in (dz, x, rsigma, gamma, dx, dgamma)]
        te.rmsnorm_bwd(*inputs, stream, None if residual is None else view(te, residual), zero_centered)
        want_dx = xd.grad if residual is None else xd.grad + residual.double()
        assert error(dx, want_dx) < BF16_ERROR and error(dgamma, gd.grad) < BF16_ERROR


@pytest.mark.parametrize("zero_centered", [False, True])
@NORM_SHAPES
def test_layernorm(te, stream, shape, zero_centered):
    x, gamma, beta, dz = random(*shape) + 3, random(shape[1]), random(shape[1]), random(*shape)
    z, mu, rsigma = poisoned(*shape), *(poisoned(shape[0], dtype=torch.float32) for _ in range(2))
    parameters = view(te, gamma), view(te, beta), 1e-5
    te.layernorm_fwd(view(te, x), *parameters, view(te, z), view(te, mu), view(te, rsigma), stream, zero_centered)

    xd, gd, bd = (t.double().requires_grad_() for t in (x, gamma, beta))
    want = torch.nn.functional.layer_norm(xd, shape[1:], gd + zero_centered, bd, 1e-5)
    want.backward(dz.double())
    want_rsigma = (x.double().var(-1, correction=0) + 1e-5).rsqrt()
    assert error(mu, x.double().mean(-1)) < 1e-5 and error(rsigma, want_rsigma) < 1e-5
    assert error(z, want.detach()) < BF16_ERROR
    gradients = poisoned(*shape), poisoned(shape[1]), poisoned(shape[1])
    te.layernorm_bwd(*[view(te, t) for t in (dz, x, mu, rsigma, gamma, *gradients)], stream, zero_centered)
    for got, tensor in zip(gradients, (xd, gd, bd), strict=True):
        assert error(got, tensor.grad) < BF16_ERROR

    if shape[0] % 16 == 0:
        z8 = Float8(te, shape, scale=50.0)
        te.layernorm_fwd(view(te, x), *parameters, z8.native, view(te, mu), view(te, rsigma), stream, zero_centered)
        z8.check(want.detach(), exact=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1, 1029, 2**20])
def test_add_to(te, stream, dtype, n):
    x, y = random(n + 1, dtype=dtype), random(n, dtype=dtype)
    want = torch.cat([x[:n] + y, x[n:]])
    addition.add_to(te, stream, x.data_ptr(), y.data_ptr(), n, DTYPES[dtype])
    assert torch.equal(x, want)


def test_rmsnorm_to_fp8_and_with_amax(te, stream):
    x, gamma = random(96, 512), random(512)
    z, rsigma, amax = poisoned(96, 512), poisoned(96, dtype=torch.float32), torch.zeros(1, device="cuda")
    inputs = view(te, x), view(te, gamma), 1e-5
    te.rmsnorm_fwd(*inputs, view(te, z, amax=amax.data_ptr()), view(te, rsigma), stream)
    assert amax.item() == z.float().abs().max().item()
    z8 = Float8(te, (96, 512), scale=50.0)
    te.rmsnorm_fwd(*inputs, z8.native, view(te, rsigma), stream)
    z8.check(z, exact=False)


@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [16, 208, 4096])
@pytest.mark.parametrize("hidden", rmsnorm.WARPS)
def test_our_rmsnorm_has_te_s_bits(te, stream, hidden, rows, dtype, zero_centered, scaling):
    """Statistics, data, transpose and factors, of rows of many magnitudes, some with a mean, one of zeros."""
    shape, epsilon = (rows, hidden), 1e-5
    x = torch.randn(shape, device="cuda") * torch.exp2(torch.randint(-6, 4, (rows, 1), device="cuda"))
    x = x + torch.where(torch.rand(rows, 1, device="cuda") < 0.3, torch.randn(rows, 1, device="cuda") * 8, 0.0)
    x.view(-1)[torch.randint(0, x.numel(), [rows], device="cuda")] = 300.0
    x[3] = 0
    x, gamma = x.to(dtype), random(hidden, dtype=dtype)
    rsigma, want_rsigma = (poisoned(rows, dtype=torch.float32) for _ in range(2))
    got, want, normed = Float8(te, shape, scale=21.0), Float8(te, shape, scale=21.0), poisoned(*shape, dtype=dtype)
    inputs, current = (view(te, x), view(te, gamma), epsilon), scaling == "current"
    output = view(te, normed) if current else want.native
    te.rmsnorm_fwd(*inputs, output, view(te, want_rsigma), stream, zero_centered)
    if current:
        te.compute_amax(output, want.native, stream)
        te.compute_scale_from_amax(want.native, stream)
        te.quantize(output, want.native, stream)
    amax, copy = got.factors.data_ptr() + 4 if current else 0, poisoned(*shape, dtype=dtype)
    places = x.data_ptr(), gamma.data_ptr(), rsigma.data_ptr()
    norm = rmsnorm.RMSNorm(*places, *shape, DTYPES[dtype], epsilon, zero_centered)
    rmsnorm.statistics(te, stream, norm, amax, copy.data_ptr())
    if current:
        te.compute_scale_from_amax(got.native, stream)
    plain = poisoned(*shape, dtype=dtype)
    of_plain = plain.data_ptr() if current else 0  # the library has stored `normed` then
    rmsnorm.cast_transpose(te, stream, norm, got.target, E4M3, current, of_plain)
    assert torch.equal(rsigma, want_rsigma) and torch.equal(copy, x) and (not current or torch.equal(plain, normed))
    check_equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("r, part_sizes", [(16, (4096, 1024, 1024)), (8, (11008,)), (6, (24, 40)), (16, (36, 64))])
def test_low_rank_factors(te, stream, dtype, r, part_sizes):
    """In runs of 16 bytes, and number by number; `unpack` takes them out again, with the factor once more."""
    inputs, factor, count, outputs = 512, 0.3, len(part_sizes), sum(part_sizes)
    sizes, starts = low_rank.Sizes.of(inputs, outputs, r, count), [sum(part_sizes[:i]) for i in range(count)]
    a, b = poisoned(inputs, sizes.width, dtype=dtype), poisoned(sizes.width, outputs, dtype=dtype)
    want_a, want_b = torch.zeros_like(a), torch.zeros_like(b)

    def launch(function, factors):
        parts = [
            low_rank.Part(x.data_ptr(), y.data_ptr(), start, y.shape[1])
            for (x, y), start in zip(factors, starts, strict=True)
        ]
        function(te, stream, parts, a.data_ptr(), b.data_ptr(), sizes, factor, DTYPES[dtype])

    def scaled(values):
        return (values.float() * torch.tensor(factor, dtype=torch.float32, device="cuda")).to(dtype)

    factors = [(random(inputs, r, dtype=dtype), random(r, size, dtype=dtype)) for size in part_sizes]
    launch(low_rank.pack, factors)
    places = [(slice(i * r, (i + 1) * r), slice(start, start + part_sizes[i])) for i, start in enumerate(starts)]
    for (x, y), (rows, columns) in zip(factors, places, strict=True):
        want_a[:, rows], want_b[rows, columns] = x, scaled(y)
    assert torch.equal(a, want_a) and torch.equal(b, want_b)
    gradients = [(poisoned(inputs, r, dtype=dtype), poisoned(r, size, dtype=dtype)) for size in part_sizes]
    launch(low_rank.unpack, gradients)
    for (dx, dy), (x, _), (rows, columns) in zip(gradients, factors, places, strict=True):
        assert torch.equal(dx, x) and torch.equal(dy, scaled(b[rows, columns]))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(16, 16), (80, 272), (512, 4096)])
def test_quantize(te, stream, dtype, shape):
    x = random(*shape, scale=3.0)
    x8 = Float8(te, shape, dtype, scale=37.5)
    te.quantize(view(te, x), x8.native, stream)
    x8.check(x)
    back = poisoned(*shape)
    row = te.Tensor(x8.data.data_ptr(), shape, dtype, scale_inv=x8.factors.data_ptr() + 16)
    te.dequantize(row, view(te, back), stream)
    assert error(back, x8.dequantized()) < BF16_ERROR


ONE_DIM, TWO_DIMS = ScalingMode.BLOCK_SCALING_1D, ScalingMode.BLOCK_SCALING_2D
BLOCKS = {ONE_DIM: (1, 128), TWO_DIMS: (128, 128)}


class Blocks:
    """A bfloat16 matrix in fp8 with block scaling, with its transposed copy."""

    def __init__(self, te, stream, source, mode, power_2_scale, dtype=E4M3):
        (rows, cols), self.mode, self.float8 = source.shape, mode, TORCH_FP8[dtype][0]
        self.data, self.columnwise = (
            torch.full(shape, 0xFF, dtype=torch.uint8, device="cuda") for shape in ((rows, cols), (cols, rows))
        )
        self.scale_inv, self.columnwise_scale_inv = (
            torch.full(self._scales(*shape), math.nan, device="cuda") for shape in ((rows, cols), (cols, rows))
        )
        addresses = [t.data_ptr() for t in (self.columnwise, self.scale_inv, self.columnwise_scale_inv)]
        columnwise, *scale_invs = addresses
        self.native = te.Tensor(self.data.data_ptr(), (rows, cols), dtype, columnwise, 0, 0, *scale_invs, mode)
        te.quantize_blocks(view(te, source), self.native, power_2_scale, 0.0, stream)

    def _scales(self, rows, cols):
        if self.mode == ONE_DIM:
            return cols // 128, rows
        return rows // 128, -(-cols // 128 // 4) * 4

    def dequantized(self, columnwise=False):
        """float64; columnwise: what the transposed copy stands for, as a matrix of the data's shape."""
        data, scales = (self.columnwise, self.columnwise_scale_inv) if columnwise else (self.data, self.scale_inv)
        rows, cols = data.shape
        each = scales.T if self.mode == ONE_DIM else scales[:, : cols // 128].repeat_interleave(128, 0)
        values = data.view(self.float8).double() * each.repeat_interleave(128, 1).double()
        return values.T if columnwise else values


@pytest.mark.parametrize("power_2_scale", [True, False])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("mode", BLOCKS)
@pytest.mark.parametrize("shape", [(128, 128), (384, 640)])
def test_quantize_blocks(te, stream, shape, mode, dtype, power_2_scale):
    """To the bit, with blocks of zeros and magnitudes that differ from row to row; the copy has blocks of its own."""
    x = random(*shape) * torch.randn(shape[0], 1, device="cuda").mul(8).exp2().bfloat16()
    x[:128, :128] = 0
    got = Blocks(te, stream, x, mode, power_2_scale, dtype)
    name = {E4M3: "e4m3", E5M2: "e5m2"}[dtype]
    for columnwise in (False, True):
        block = BLOCKS[mode][::-1] if columnwise else BLOCKS[mode]
        want = block_scaling.quantized(x.float().cpu().numpy(), block, power_2_scale, name)
        np.testing.assert_array_equal(got.dequantized(columnwise).float().cpu().numpy(), want)


@pytest.mark.parametrize("tokens, inner, outer", [(128, 384, 640), (512, 1024, 2048)])
@pytest.mark.parametrize("power_2_scale, grad_dtype", [(True, E4M3), (False, E4M3), (True, E5M2)])
def test_gemms_of_blocks(te, stream, tokens, inner, outer, power_2_scale, grad_dtype):
    """The three GEMMs of a layer, with what is added in them."""
    x, w, dy, bias = random(tokens, inner), random(outer, inner), random(tokens, outer), random(outer)
    x8, dy8 = (Blocks(te, stream, t, ONE_DIM, power_2_scale, dtype) for t, dtype in ((x, E4M3), (dy, grad_dtype)))
    w8, residual = Blocks(te, stream, w, TWO_DIMS, power_2_scale), random(tokens, outer)
    y, dx, main = residual.clone(), poisoned(tokens, inner), torch.ones(outer, inner, device="cuda")
    te.gemm(w8.native, x8.native, view(te, y), True, False, stream, True, True, view(te, bias))
    te.gemm(w8.native, dy8.native, view(te, dx), False, False, stream, False, True)
    te.gemm(x8.native, dy8.native, view(te, main), False, True, stream, True, True)
    want = x8.dequantized() @ w8.dequantized().T + bias.double() + residual.double()
    assert error(y, want) < BF16_ERROR
    assert error(dx, dy8.dequantized() @ w8.dequantized()) < BF16_ERROR
    assert error(main, 1 + dy8.dequantized(True).T @ x8.dequantized(True)) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows, cols", [(1, 8), (130, 1000), (2048, 4096)])
def test_column_sums(te, stream, dtype, rows, cols):
    x, out = random(rows, cols, dtype=dtype), poisoned(cols, dtype=dtype)
    column_sums.column_sums(te, stream, x.data_ptr(), out.data_ptr(), rows, cols, DTYPES[dtype])
    assert error(out, x.double().sum(0)) < {torch.bfloat16: BF16_ERROR, torch.float16: 1e-3}.get(dtype, 1e-5)


def test_quantize_saturates(te, stream):
    """Delayed scaling meets values beyond its history's: they become fp8's greatest, not infinite."""
    x = random(32, 32)
    x8 = Float8(te, (32, 32), E4M3, scale=1000.0)
    te.quantize(view(te, x), x8.native, stream)
    x8.check(x)
    assert x8.dequantized().isfinite().all()


def test_current_scaling(te, stream):
    x = random(64, 128, scale=0.01)
    x8 = Float8(te, (64, 128))
    x8.factors.fill_(1e30)  # compute_amax overwrites, it does not raise an older value
    te.compute_amax(view(te, x), x8.native, stream)
    te.compute_scale_from_amax(x8.native, stream)
    assert x8.amax == x.float().abs().max().item() and x8.scale == pytest.approx(448 / x8.amax, rel=1e-6)
    te.quantize(view(te, x), x8.native, stream)
    x8.check(x)


def gated_inputs(rows, cols, dtype, special):
    """(dy, z): numbers of many magnitudes, among them zeros, gates at which exp overflows, or what is not finite."""
    values = [0.0, -0.0, 88.0, -88.0, 120.0, -120.0, 3e4, -3e4]
    values = {"none": [], "finite": values, "infinite": [*values, math.inf, -math.inf, math.nan]}[special]
    inputs = []
    for shape in ((rows, cols), (rows, 2 * cols)):
        x = random(*shape, dtype=torch.float32) * torch.exp2(torch.randint(-12, 4, shape, device="cuda"))
        x = x.to(dtype)
        for value in values:
            x.view(-1)[torch.randint(0, x.numel(), [max(1, x.numel() // 300)], device="cuda")] = value
        inputs.append(x)
    return inputs


def cast_swiglu(te, stream, name, dy, z, out, target=None, rounded=False):
    """Our kernel. name: swiglu or dswiglu; out: a Float8."""
    target = target or out.target
    inputs = [z.data_ptr()] if name == "swiglu" else [dy.data_ptr(), z.data_ptr()]
    cast = getattr(swiglu, f"{name}_cast_transpose")
    form = casts.Form(DTYPES[z.dtype], DType(out.native.dtype), rounded)
    cast(te, stream, *inputs, target, tuple(dy.shape), form)


def check_equal(got, want):
    """Both Float8 to the bit."""
    assert torch.equal(got.data, want.data) and torch.equal(got.columnwise, want.columnwise)
    assert torch.equal(got.factors.view(torch.int32), want.factors.view(torch.int32))


def of_many_magnitudes(shape, dtype, special):
    x = torch.randn(shape, device="cuda") * torch.exp2(torch.randint(-12, 8, shape, device="cuda"))
    values = {"none": [], "finite": [0.0, -0.0, 3e4, -3e4], "infinite": [0.0, math.inf, -math.inf, math.nan]}[special]
    for value in values:
        x.view(-1)[torch.randint(0, x.numel(), [max(1, x.numel() // 300)], device="cuda")] = value
    return x.to(dtype)


@pytest.mark.parametrize("copies", ["both", "data", "transposed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("float8", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [0.37, 1e30])
@pytest.mark.parametrize("special", ["none", "finite", "infinite"])
@pytest.mark.parametrize("shape", [(256, 512), (16, 16), (208, 336), (1040, 1424), (4096, 80)])
def test_our_cast_has_te_s_bits(te, stream, shape, special, scale, float8, dtype, copies):
    x = of_many_magnitudes(shape, dtype, special)
    got, want = (Float8(te, shape, float8, scale) for _ in range(2))
    for out in got, want:
        out.factors[1] = 0.25  # an earlier micro-batch's amax
    target = got.target if copies == "both" else got.target._replace(**{{"data": "transposed"}.get(copies, "data"): 0})
    casts.cast_transpose(te, stream, x.data_ptr(), target, *shape, DTYPES[dtype], float8)
    te.quantize(view(te, x), want.native, stream)
    if copies != "both":
        unwritten = got.columnwise if copies == "data" else got.data
        assert (unwritten == 0xFF).all()
        unwritten.copy_(want.columnwise if copies == "data" else want.data)
    check_equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shapes", [[(3072, 2048), (2048, 2048)], [(16, 16), (208, 4112)]], ids=str)
def test_our_cast_of_two_matrices_has_te_s_bits(te, stream, shapes, dtype):
    inputs = [of_many_magnitudes(shape, dtype, "finite") for shape in shapes]
    got, want = (
        [Float8(te, shape, scale=scale) for shape, scale in zip(shapes, (0.37, 21.0), strict=True)] for _ in range(2)
    )
    both = [(x.data_ptr(), out.target, *x.shape) for x, out in zip(inputs, got, strict=True)]
    casts.cast_transpose_both(te, stream, *both, DTYPES[dtype], E4M3)
    for x, ours, theirs in zip(inputs, got, want, strict=True):
        te.quantize(view(te, x), theirs.native, stream)
        check_equal(ours, theirs)


SWIGLU = pytest.mark.parametrize("name, float8", [("swiglu", E4M3), ("dswiglu", E5M2), ("dswiglu", E4M3)])
GATED_SHAPES = pytest.mark.parametrize("rows, cols", [(256, 512), (16, 16), (208, 336), (1040, 1424)])
SPECIAL = pytest.mark.parametrize("special", ["none", "finite", "infinite"])


@pytest.mark.parametrize("scale", [0.37, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@SPECIAL
@SWIGLU
@GATED_SHAPES
def test_our_swiglu_has_te_s_bits(te, stream, rows, cols, name, float8, special, dtype, scale):
    """As delayed scaling casts: data, transpose, amax, which keeps what is greater, and scale_inv."""
    dy, z = gated_inputs(rows, cols, dtype, special)
    got, want = (Float8(te, (rows, cols if name == "swiglu" else 2 * cols), float8, scale) for _ in range(2))
    if name == "swiglu":
        te.swiglu(view(te, z), want.native, stream)
    else:
        te.dswiglu_cast_transpose(view(te, dy), view(te, z), want.native, stream)
    cast_swiglu(te, stream, name, dy, z, got)
    check_equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@SPECIAL
@SWIGLU
@GATED_SHAPES
def test_our_swiglu_has_te_s_bits_in_current_scaling(te, stream, rows, cols, name, float8, special, dtype):
    """What TE stores in 16 bits before it measures and casts it, ours computes twice."""
    dy, z = gated_inputs(rows, cols, dtype, special)
    shape = rows, cols if name == "swiglu" else 2 * cols
    got, want, stored = Float8(te, shape, float8), Float8(te, shape, float8), poisoned(*shape, dtype=dtype)
    getattr(te, name)(*(view(te, x) for x in ([z] if name == "swiglu" else [dy, z])), view(te, stored), stream)
    te.compute_amax(view(te, stored), want.native, stream)
    te.compute_scale_from_amax(want.native, stream)
    te.quantize(view(te, stored), want.native, stream)
    amax = casts.CastTarget.only_amax(got.factors.data_ptr() + 4)
    cast_swiglu(te, stream, name, dy, z, got, amax, rounded=True)
    te.compute_scale_from_amax(got.native, stream)
    cast_swiglu(te, stream, name, dy, z, got, rounded=True)
    check_equal(got, want)


def test_transpose(te, stream):
    x = torch.randint(0, 255, (80, 272), dtype=torch.uint8, device="cuda")
    y = torch.zeros(272, 80, dtype=torch.uint8, device="cuda")
    # the bytes of fp8: TE has no transpose of plain bytes
    source, target = (te.Tensor(t.data_ptr(), tuple(t.shape), DType.FLOAT8_E4M3) for t in (x, y))
    te.transpose(source, target, stream)
    assert torch.equal(y, x.T)


@pytest.mark.parametrize("tokens, inner, outer", [(77, 256, 384), (512, 1024, 2048)])
def test_gemm_bf16(te, stream, tokens, inner, outer):
    x, w, dy, residual = random(tokens, inner), random(outer, inner), random(tokens, outer), random(tokens, outer)
    y, dx, dw = poisoned(tokens, outer), poisoned(tokens, inner), poisoned(outer, inner)
    vx, vw, vdy = (view(te, t) for t in (x, w, dy))
    te.gemm(vw, vx, view(te, y), True, False, stream)
    te.gemm(vw, vdy, view(te, dx), False, False, stream)
    te.gemm(vx, vdy, view(te, dw), False, True, stream)
    xd, wd, dyd = x.double(), w.double(), dy.double()
    assert error(y, xd @ wd.T) < BF16_ERROR
    assert error(dx, dyd @ wd) < BF16_ERROR
    assert error(dw, dyd.T @ xd) < BF16_ERROR
    total = residual.clone()
    te.gemm(vw, vx, view(te, total), True, False, stream, True)
    assert error(total, residual.double() + xd @ wd.T) < BF16_ERROR
    main = random(outer, inner, dtype=torch.float32)
    before = main.double()
    te.gemm(vx, vdy, view(te, main), False, True, stream, True)
    assert error(main, before + dyd.T @ xd) < 1e-5


@pytest.mark.parametrize("tokens, inner, outer", [(80, 256, 384), (512, 1024, 2048)])
@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2])
def test_gemm_fp8(te, stream, tokens, inner, outer, grad_dtype):
    """The three GEMMs of a layer on fp8 operands: exact products, so only the result's rounding is left."""
    x, w = quantized(te, stream, random(tokens, inner)), quantized(te, stream, random(outer, inner))
    dy = quantized(te, stream, random(tokens, outer), grad_dtype)
    y, dx, dw = poisoned(tokens, outer), poisoned(tokens, inner), poisoned(outer, inner)
    te.gemm(w.native, x.native, view(te, y), True, False, stream)
    te.gemm(w.native, dy.native, view(te, dx), False, False, stream, False, True)
    te.gemm(x.native, dy.native, view(te, dw), False, True, stream, False, True)
    xd, wd, dyd = x.dequantized(), w.dequantized(), dy.dequantized()
    assert error(y, xd @ wd.T) < 2 * BF16_ERROR  # fast accumulation
    assert error(dx, dyd @ wd) < BF16_ERROR
    assert error(dw, dyd.T @ xd) < BF16_ERROR
    main = torch.ones(outer, inner, device="cuda")
    te.gemm(x.native, dy.native, view(te, main), False, True, stream, True, True)
    assert error(main, 1 + dyd.T @ xd) < 1e-3


def gated(function):
    def activate(x):
        gate, up = x.chunk(2, -1)
        return function(gate) * up

    return activate


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


GATED = {"swiglu": gated(torch.nn.functional.silu), "geglu": gated(gelu)}
PLAIN = {"gelu": gelu, "relu": torch.relu}


@pytest.mark.parametrize("tokens, inner", [(77, 256), (256, 1408)])
@pytest.mark.parametrize("name", GATED | PLAIN)
def test_activations(te, stream, name, tokens, inner):
    width = inner * (2 if name in GATED else 1)
    x, dy = random(tokens, width), random(tokens, inner)
    y, dx = poisoned(tokens, inner), poisoned(tokens, width)
    getattr(te, name)(view(te, x), view(te, y), stream)
    getattr(te, f"d{name}")(view(te, dy), view(te, x), view(te, dx), stream)
    xd = x.double().requires_grad_()
    want = (GATED | PLAIN)[name](xd)
    want.backward(dy.double())
    assert error(y, want.detach()) < BF16_ERROR and error(dx, xd.grad) < BF16_ERROR
    if tokens % 16:
        return
    y8, dx8 = Float8(te, (tokens, inner), scale=20.0), Float8(te, (tokens, width), E5M2, scale=900.0)
    getattr(te, name)(view(te, x), y8.native, stream)
    y8.check(want.detach(), exact=False)
    to_fp8 = getattr(te, f"d{name}_cast_transpose" if name in GATED else f"d{name}")
    to_fp8(view(te, dy), view(te, x), dx8.native, stream)
    assert torch.equal(dx8.columnwise, dx8.data.T) and error(dx8.dequantized(), xd.grad) < 0.08
    if name in PLAIN:
        again, dbias = Float8(te, (tokens, width), E5M2, scale=900.0), poisoned(width)
        getattr(te, f"quantize_dbias_d{name}")(view(te, dy), view(te, x), again.native, view(te, dbias), stream)
        assert torch.equal(again.data, dx8.data) and torch.equal(again.columnwise, dx8.columnwise)
        assert error(dbias, xd.grad.sum(0)) < BF16_ERROR


@pytest.mark.parametrize("tokens, inner, outer", [(80, 256, 384), (512, 1024, 2048)])
@pytest.mark.parametrize("fp8", [False, True])
def test_gemm_adds_bias_and_residual(te, stream, tokens, inner, outer, fp8):
    """Both at once: the bias as the epilogue, the residual in D."""
    x, w, bias, residual = random(tokens, inner), random(outer, inner), random(outer), random(tokens, outer)
    vx, vw, xd, wd = view(te, x), view(te, w), x.double(), w.double()
    if fp8:
        x8, w8 = quantized(te, stream, x), quantized(te, stream, w)
        vx, vw, xd, wd = x8.native, w8.native, x8.dequantized(), w8.dequantized()
    y = residual.clone()
    te.gemm(vw, vx, view(te, y), True, False, stream, True, False, view(te, bias))
    assert error(y, residual.double() + xd @ wd.T + bias.double()) < 2 * BF16_ERROR


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_amax_and_scale_update(te, stream, algo, margin):
    history = torch.rand(16, 7, device="cuda") * 10
    history[:, 3] = 0  # a tensor that was not there
    scale = torch.rand(7, device="cuda") + 1
    old_history, old_scale = history.clone(), scale.clone()
    te.amax_and_scale_update(view(te, history), view(te, scale), algo, int(E4M3), margin, stream)
    amax = old_history.max(0).values if algo == "max" else old_history[0]
    want = torch.where(amax > 0, 448 / amax / 2**margin, old_scale)
    torch.testing.assert_close(scale, want, rtol=1e-6, atol=0)
    rolled = old_history.roll(-1, 0)
    rolled[0] = 0
    assert torch.equal(history, rolled)


def angles(s, d, base=10000.0):
    half = torch.outer(torch.arange(s).float(), base ** (-torch.arange(0, d, 2) / d)).float()
    return torch.cat([half, half], -1).cuda()


def turned(x, freqs, sign, turn):
    """x: [b, s, h, d], in float64, of which the first numbers are turned in pairs."""
    width, interleaved = freqs.shape[-1], turn.interleaved
    turns = torch.polar(torch.full_like(freqs, turn.factor).double(), sign * freqs.double())[:, None, : width // 2]
    pairs = x[..., :width].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    both = torch.complex(first, second) * turns
    both = torch.stack([both.real, both.imag], -1 if interleaved else -2).flatten(-2)
    return torch.cat([both, x[..., width:].double()], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("d, width", [(128, 96), (128, 64), (64, 64), (256, 256)])
def test_rotation_of_a_part(te, stream, dtype, d, width, interleaved):
    tolerance = {torch.bfloat16: BF16_ERROR, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]
    b, s, heads, kv_heads = 2, 77, 8, 2
    freqs, turn = angles(s, width), rope.Turn(width, interleaved, 1.25)
    qkv = random(b, s, heads + 2 * kv_heads, d, dtype=dtype)
    q_and_k, v = qkv.split([heads + kv_heads, kv_heads], 2)
    for backward, sign in ((False, 1), (True, -1)):
        packed, geometry = qkv.clone(), rope.Geometry(b * s, s, heads, kv_heads, d, DTYPES[dtype], turn)
        addresses = packed.data_ptr(), packed.data_ptr(), freqs.data_ptr()
        rope.rotate(te, stream, *addresses, geometry, backward)
        assert error(packed, torch.cat([turned(q_and_k, freqs, sign, turn), v.double()], 2)) < tolerance


def rotated(x, freqs, sign=1):
    """x: [b, s, h, d], in float64."""
    x, cos, sin = x.double(), freqs.double().cos()[:, None], sign * freqs.double().sin()[:, None]
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("b, s, heads, kv_heads, d", [(2, 77, 8, 8, 64), (1, 512, 32, 8, 128), (3, 33, 6, 2, 96)])
def test_rope(te, stream, dtype, b, s, heads, kv_heads, d):
    tolerance = {torch.bfloat16: BF16_ERROR, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]
    geometry = rope.Geometry(b * s, s, heads, kv_heads, d, DTYPES[dtype])
    freqs = angles(s, d)
    qkv = random(b, s, heads + 2 * kv_heads, d, dtype=dtype)
    parts = [t.contiguous() for t in qkv.split([heads, kv_heads, kv_heads], 2)]
    want = [rotated(parts[0], freqs), rotated(parts[1], freqs), parts[2].double()]
    back = [rotated(parts[0], freqs, -1), rotated(parts[1], freqs, -1), parts[2].double()]

    outputs = [poisoned(*t.shape, dtype=dtype) for t in parts]
    rope.rotate(te, stream, qkv.data_ptr(), tuple(t.data_ptr() for t in outputs), freqs.data_ptr(), geometry)
    for got, expected in zip(outputs, want, strict=True):
        assert error(got, expected) < tolerance
    assert torch.equal(outputs[2], parts[2])

    merged = poisoned(*qkv.shape, dtype=dtype)
    rope.rotate(te, stream, tuple(t.data_ptr() for t in parts), merged.data_ptr(), freqs.data_ptr(), geometry, True)
    assert error(merged, torch.cat(back, 2)) < tolerance

    for backward, expected in ((False, want), (True, back)):
        packed = qkv.clone()
        rope.rotate(te, stream, packed.data_ptr(), packed.data_ptr(), freqs.data_ptr(), geometry, backward)
        assert error(packed, torch.cat(expected, 2)) < tolerance

        single = poisoned(*parts[0].shape, dtype=dtype)  # TE's own kernel agrees
        te.rope(view(te, parts[0]), view(te, freqs.view(s, 1, 1, d)), view(te, single), backward, stream)
        assert error(single, expected[0]) < tolerance


def attention_reference(q, k, v, dout, scale, causal, bias=None):
    """out, dq, dk, dv in float64. All [b, s, h, d]; bias: [b or 1, 1, s, s of k]."""
    q, k, v = (t.double().detach().requires_grad_() for t in (q, k, v))
    repeat = q.shape[2] // k.shape[2]
    kk, vv = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, kk) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], device="cuda").triu(1).bool(), -math.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), vv)
    out.backward(dout.double())
    return out.detach(), q.grad, k.grad, v.grad


def run_attention(te, stream, q, k, v, dout, scale, layout, mask, grads=None, **kwargs):
    b, s, h, d = q.shape
    out, stats = poisoned(b, s, h, d, dtype=q.dtype), poisoned(b, h, s, 1, dtype=torch.float32)
    tensors = [view(te, t) for t in (q, k, v, out)]
    options = {name: value for name, value in kwargs.items() if name != "deterministic"}
    te.attention_fwd(*tensors, view(te, stats), scale, layout, mask, True, stream, **options)
    grads = grads or [poisoned(*t.shape, dtype=t.dtype) for t in (q, k, v)]
    views = [view(te, t) for t in (dout, stats, *grads)]
    te.attention_bwd(*tensors, *views, scale, layout, mask, stream, **kwargs)
    return out, *grads


@pytest.mark.parametrize("mask", [Mask.CAUSAL, Mask.NONE])
@pytest.mark.parametrize(
    "b, s, heads, kv_heads, d", [(2, 128, 4, 4, 64), (1, 257, 8, 2, 128), (3, 65, 6, 1, 64), (1, 1024, 2, 2, 128)]
)
def test_attention(te, stream, b, s, heads, kv_heads, d, mask):
    q, dout = random(b, s, heads, d), random(b, s, heads, d)
    k, v = random(b, s, kv_heads, d), random(b, s, kv_heads, d)
    got = run_attention(te, stream, q, k, v, dout, d**-0.5, QKVLayout.BSHD_BSHD_BSHD, mask)
    want = attention_reference(q, k, v, dout, d**-0.5, mask == Mask.CAUSAL)
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert error(x, y) < 1.5e-2, name
    inference = poisoned(b, s, heads, d)
    stats = poisoned(b, heads, s, 1, dtype=torch.float32)
    layout = QKVLayout.BSHD_BSHD_BSHD
    tensors = [view(te, t) for t in (q, k, v, inference, stats)]
    te.attention_fwd(*tensors, d**-0.5, layout, mask, False, stream)
    assert error(inference, want[0]) < 1.5e-2


@pytest.mark.parametrize("b, s, heads, d", [(2, 128, 4, 64), (1, 257, 8, 128)])
def test_attention_packed(te, stream, b, s, heads, d):
    """q, k, v and their gradients in one buffer [b, s, 3, h, d]: the fused projection's own order, no copies."""
    packed, dout, dpacked = random(b, s, 3, heads, d), random(b, s, heads, d), poisoned(b, s, 3, heads, d)
    q, k, v = packed.unbind(2)  # `view` takes address and shape; the layout says how they are strided
    got = run_attention(te, stream, q, k, v, dout, d**-0.5, QKVLayout.BS3HD, Mask.CAUSAL, grads=list(dpacked.unbind(2)))
    want = attention_reference(q, k, v, dout, d**-0.5, True)
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert error(x, y) < 1.5e-2, name


def test_attention_deterministic(te, stream):
    q, k, v, dout = (random(2, 512, 8, 64) for _ in range(4))
    arguments = q, k, v, dout, 0.125, QKVLayout.BSHD_BSHD_BSHD, Mask.CAUSAL
    first = run_attention(te, stream, *arguments, deterministic=True)
    for _ in range(3):
        for a, b in zip(first, run_attention(te, stream, *arguments, deterministic=True), strict=True):
            assert torch.equal(a, b)


def test_attention_padding(te, stream):
    """Tokens beyond a sequence's length get no weight."""
    b, s, h, d = 2, 128, 4, 64
    q, k, v, dout = (random(b, s, h, d) for _ in range(4))
    lengths = [128, 70]
    cu_seqlens = torch.tensor([0, 128, 198], dtype=torch.int32, device="cuda")
    dout[1, 70:] = 0
    got = run_attention(
        te, stream, q, k, v, dout, 0.125, QKVLayout.BSHD_BSHD_BSHD, Mask.PADDING_CAUSAL, cu_seqlens=view(te, cu_seqlens)
    )
    for i, n in enumerate(lengths):
        want = attention_reference(*(t[i : i + 1, :n] for t in (q, k, v, dout)), 0.125, True)
        for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert error(x[i : i + 1, :n], y) < 1.5e-2, (name, i)


@pytest.mark.parametrize("heads, kv_heads, d", [(4, 4, 64), (8, 2, 128), (6, 1, 64)])
def test_attention_over_documents(te, stream, heads, kv_heads, d):
    """Documents one after another, of any lengths, with empty ones at the end; each as if it were alone."""
    lengths = [1, 200, 37, 64, 0, 130, 0, 0]
    tokens, ends = sum(lengths), np.cumsum([0, *lengths]).tolist()
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device="cuda")
    dout = random(tokens, heads, d)
    if heads == kv_heads:
        layout, packed, dpacked = QKVLayout.T3HD, random(tokens, 3, heads, d), poisoned(tokens, 3, heads, d)
        (q, k, v), grads = packed.unbind(1), dpacked.unbind(1)
    else:
        layout = QKVLayout.THD_THD_THD
        q, (k, v) = random(tokens, heads, d), (random(tokens, kv_heads, d) for _ in range(2))
        grads = [poisoned(*t.shape) for t in (q, k, v)]
    out, stats = poisoned(tokens, heads, d), poisoned(tokens, heads, 1, dtype=torch.float32)
    tensors = [view(te, t) for t in (q, k, v, out)]
    options = d**-0.5, layout, Mask.PADDING_CAUSAL
    te.attention_fwd(*tensors, view(te, stats), *options, True, stream, cu_seqlens=view(te, cu_seqlens))
    views = [view(te, t) for t in (dout, stats, *grads)]
    te.attention_bwd(*tensors, *views, *options, stream, cu_seqlens=view(te, cu_seqlens))
    for start, end in zip(ends, ends[1:], strict=False):
        if start == end:
            continue
        want = attention_reference(*(t[None, start:end] for t in (q, k, v, dout)), d**-0.5, True)
        for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *grads), want, strict=True):
            x, y = x[start:end], y[0]
            if end - start == 1 and name in ("dq", "dk"):  # one token's softmax is 1 whatever the scores
                assert x.abs().max() < 1e-2, name
            else:
                assert error(x, y) < 1.5e-2, (name, start)


@pytest.mark.parametrize("b, bias_b, s, keys, heads, kv_heads, d", [
    (2, 2, 128, 128, 4, 4, 64),  # masks of packed documents
    (2, 1, 96, 128, 4, 2, 16),
    (3, 3, 37, 64, 4, 4, 32),  # a batch of prompts, keys rounded up
    (3, 3, 1, 64, 4, 2, 64),  # one token behind a cache
    (2, 2, 5, 128, 8, 2, 128),
])  # fmt: skip
def test_attention_bias(te, stream, b, bias_b, s, keys, heads, kv_heads, d):
    """A bias of 0 and -30000 hides tokens, here at random, with any number of keys; rows see one token at least."""
    q, dout = random(b, s, heads, d), random(b, s, heads, d)
    k, v = random(b, keys, kv_heads, d), random(b, keys, kv_heads, d)
    bias = torch.where(torch.rand(bias_b, 1, s, keys, device="cuda") < 0.5, 0.0, -3e4)
    bias[..., 0] = 0.0
    bias = bias.to(torch.bfloat16)
    layout = QKVLayout.BSHD_BSHD_BSHD
    out, stats = poisoned(b, s, heads, d), poisoned(b, heads, s, 1, dtype=torch.float32)
    tensors = [view(te, t) for t in (q, k, v, out)]
    te.attention_fwd(*tensors, view(te, stats), d**-0.5, layout, Mask.NONE, True, stream, bias=view(te, bias))
    want = attention_reference(q, k, v, dout, d**-0.5, False, bias)
    assert error(out, want[0]) < 1.5e-2
    inference, inference_stats = poisoned(b, s, heads, d), poisoned(b, heads, s, 1, dtype=torch.float32)
    views = [view(te, t) for t in (q, k, v, inference, inference_stats)]
    te.attention_fwd(*views, d**-0.5, layout, Mask.NONE, False, stream, bias=view(te, bias))
    assert error(inference, want[0]) < 1.5e-2
    if s > 1:  # nothing is trained behind a cache
        grads, dbias = [poisoned(*t.shape) for t in (q, k, v)], poisoned(*bias.shape)
        views = [view(te, t) for t in (dout, stats, *grads)]
        options = dict(bias=view(te, bias), dbias=view(te, dbias))
        te.attention_bwd(*tensors, *views, d**-0.5, layout, Mask.NONE, stream, **options)
        for name, x, y in zip(("dq", "dk", "dv"), grads, want[1:], strict=True):
            assert error(x, y) < 1.5e-2, name


def test_attention_dropout(te, stream):
    q, k, v, dout = (random(1, 256, 4, 64) for _ in range(4))
    arguments = q, k, v, dout, 0.125, QKVLayout.BSHD_BSHD_BSHD, Mask.CAUSAL

    def run(state):
        rng = torch.tensor(state, dtype=torch.int64, device="cuda")
        return run_attention(te, stream, *arguments, dropout=0.25, rng_state=view(te, rng))

    plain = run_attention(te, stream, *arguments)
    first, again, other = run([5, 0]), run([5, 0]), run([6, 0])
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0]) and 0.05 < error(first[0], plain[0]) < 1


def test_memory(te, stream):
    a, b = torch.arange(100, device="cuda"), torch.zeros(100, dtype=torch.int64, device="cuda")
    te.memcpy_async(view(te, b[:50]), view(te, a[:50]), stream)
    te.memset_async(a.data_ptr(), 0xFF, 10 * 8, stream)
    assert b.tolist() == [*range(50), *[0] * 50] and a.tolist()[:11] == [-1] * 10 + [10]


def test_side_stream(te):
    """Work goes to the stream given, in order with what is there, and not to another."""
    side = torch.cuda.Stream()
    x, y = random(2048, 2048), poisoned(2048, 2048)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        stream = make_stream(te)
        te.gemm(view(te, x), view(te, x), view(te, y), True, False, stream)  # allocates the workspace
        side.synchronize()
        torch.cuda._sleep(50_000_000)
        y.fill_(math.nan)
        te.gemm(view(te, x), view(te, x), view(te, y), True, False, stream)
    assert not side.query()
    side.synchronize()
    assert error(y, x.double() @ x.double().T) < BF16_ERROR


def test_errors(te, stream):
    """TE's refusals come as exceptions with its message and the tensors; what follows works."""
    x, w = random(32, 24), random(32, 24)
    x8 = Float8(te, (32, 24), scale=10.0)
    with pytest.raises(TransformerEngineError, match=r"(?s)nvte_\w+ failed: .*\n  A: fp8_e4m3 \[32, 24\]"):
        te.gemm(x8.native, x8.native, view(te, poisoned(32, 32)), True, False, stream)
    with pytest.raises(TransformerEngineError, match=r"(?s)nvte_swiglu failed: .*output: bfloat16 \[32, 13\]"):
        te.swiglu(view(te, x), view(te, poisoned(32, 13)), stream)
    q, stats = random(1, 64, 3, 64), poisoned(1, 3, 64, 1, dtype=torch.float32)
    k = random(1, 64, 2, 64)  # 3 heads on 2
    with pytest.raises(
        TransformerEngineError, match=r"(?s)nvte_fused_attn_fwd_v2 failed: .*q: bfloat16 \[1, 64, 3, 64\]"
    ):
        te.attention_fwd(
            *(view(te, t) for t in (q, k, k, poisoned(1, 64, 3, 64), stats)), 1.0, 9, Mask.CAUSAL, True, stream
        )
    y = poisoned(32, 32)
    te.gemm(view(te, w), view(te, x), view(te, y), True, False, stream)
    assert error(y, x.double() @ w.double().T) < BF16_ERROR


def test_nothing_leaks(te):
    """Thousands of calls, through new tensors each time, hold no more memory or handles than a few."""
    x, gamma, dy = random(64, 256), random(256), random(64, 256)
    z, rsigma = poisoned(64, 256), poisoned(64, dtype=torch.float32)
    q = random(1, 64, 4, 64)
    weight8 = Float8(te, (256, 256), scale=30.0)
    stream = make_stream(te)

    def step():
        te.rmsnorm_fwd(view(te, x), view(te, gamma), 1e-5, view(te, z), view(te, rsigma), stream)
        te.quantize(view(te, random(256, 256)), weight8.native, stream)
        te.gemm(view(te, x), view(te, dy), view(te, poisoned(256, 256)), False, True, stream)
        run_attention(te, stream, q, q, q, q, 0.125, QKVLayout.BSHD_BSHD_BSHD, Mask.CAUSAL)
        with pytest.raises(TransformerEngineError):
            te.swiglu(view(te, x), view(te, z), stream)

    def used():
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    for _ in range(20):
        step()

    def grown():
        before = used()
        for _ in range(3000):
            step()
        return used() - before

    # Of the whole GPU, on which others may start now and then; what leaks grows each time.
    assert any(grown() <= 8 << 20 for _ in range(3))
    runtime.kept_tensors(te.Tensor).cache_clear()  # what te's layers of other tests made, and keep
    program.clear()
    gc.collect()
    # TE's pool has 20,000 handles: had one call in a step leaked one, these would not all be there.
    held = [view(te, x) for _ in range(19_000)]
    assert len(held) == 19_000


def test_rope_speed(te, stream):
    """At 7B, batch 1, 4096 tokens: prints microseconds; the floor is reading and writing everything once."""
    b, s, h, d = 1, 4096, 32, 128
    qkv, freqs = random(b, s, 3 * h, d), angles(s, d)
    parts = [t.contiguous() for t in qkv.chunk(3, 2)]
    geometry = rope.Geometry(b * s, s, h, h, d, DType.BFLOAT16)
    pointers = tuple(t.data_ptr() for t in parts)
    single, te_freqs = view(te, parts[0]), view(te, freqs.view(s, 1, 1, d))
    out = view(te, poisoned(b, s, h, d))
    packed, freqs_pointer = qkv.data_ptr(), freqs.data_ptr()
    candidates = {
        "in place": lambda: rope.rotate(te, stream, packed, packed, freqs_pointer, geometry),
        "split": lambda: rope.rotate(te, stream, packed, pointers, freqs_pointer, geometry),
        "merge": lambda: rope.rotate(te, stream, pointers, packed, freqs_pointer, geometry, True),
        "TE, q only": lambda: te.rope(single, te_freqs, out, False, stream),
        "copy of q, k, v": lambda: qkv.clone(),
    }
    times = {}
    for name, run in candidates.items():
        run()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
        for event in events[:-1]:
            event.record()
            run()
        events[-1].record()
        torch.cuda.synchronize()
        gaps = sorted(a.elapsed_time(b) * 1e3 for a, b in zip(events, events[1:], strict=False))
        times[name] = gaps[len(gaps) // 2]
    print({name: round(value, 1) for name, value in times.items()})
    assert times["in place"] < times["split"] < 2 * times["copy of q, k, v"]
