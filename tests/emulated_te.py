"""The native module (paddle_te/native/shim.cpp) in NumPy on host memory: what TE's kernels compute, without a GPU.

Slow and plain: for the logic of paddle_te.ops.te (what is saved, added, freed, gathered), not for speed. It keeps what
Hopper demands: an fp8 GEMM reads its operands along k, so a transposed one must have its columnwise copy.
`install` puts it in the place of the native module.
"""

import collections
import ctypes
import functools
import math
import types

import ml_dtypes
import numpy as np
import paddle

from paddle_te.native import DType, Mask, QKVLayout, ScalingMode
from paddle_te.ops.activations import FC1_WIDTHS

NUMPY = {
    int(DType.BYTE): np.uint8,
    int(DType.INT32): np.int32,
    int(DType.INT64): np.int64,
    int(DType.FLOAT32): np.float32,
    int(DType.FLOAT16): np.float16,
    int(DType.BFLOAT16): ml_dtypes.bfloat16,
    int(DType.FLOAT8_E4M3): ml_dtypes.float8_e4m3fn,
    int(DType.FLOAT8_E5M2): ml_dtypes.float8_e5m2,
}
GREATEST = {int(DType.FLOAT8_E4M3): 448.0, int(DType.FLOAT8_E5M2): 57344.0}
FLOAT8 = {"e4m3": int(DType.FLOAT8_E4M3), "e5m2": int(DType.FLOAT8_E5M2)}
ELEMENTS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float": np.float32}


def at(pointer, shape, dtype):
    """The array that lies at an address."""
    assert pointer, "null pointer"
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(pointer), dtype).reshape(shape)


def strided(pointer, shape, token_stride, dtype):
    """[tokens, heads, d] at an address with that many elements from token to token."""
    tokens, heads, d = shape
    flat = at(pointer, ((tokens - 1) * token_stride + heads * d,), dtype)
    size = flat.itemsize
    bits = flat.view(f"u{size}")  # as_strided does not know 8-bit floats
    return np.lib.stride_tricks.as_strided(bits, shape, (token_stride * size, d * size, size)).view(dtype)


def moved(address, bases):
    """Where slot << 48 | offset is now; other numbers stay."""
    slot = max(address, 0) >> 48
    return bases[slot] + (address & (1 << 48) - 1) if slot else address


class Blocks:
    """The scale_inv of a matrix [rows, cols] with block scaling, where and how cuBLAS reads it."""

    def __init__(self, pointer, shape, mode):
        (self.rows, self.cols), self.height = shape, {ScalingMode.BLOCK_SCALING_1D: 1}.get(mode, 128)
        assert self.rows % self.height == 0 and self.cols % 128 == 0
        blocks = self.cols // 128
        padded = (blocks, self.rows) if self.height == 1 else (self.rows // 128, -(-blocks // 4) * 4)
        lies = at(pointer, padded, np.float32)
        self.scale_inv = lies.T if self.height == 1 else lies[:, :blocks]

    def of(self, matrix):
        """The matrix as [rows / height, height, blocks, 128]."""
        return matrix.reshape(self.rows // self.height, self.height, self.cols // 128, 128)

    def quantize(self, values, limit, force_pow_2_scales, amax_epsilon):
        """values, float32, multiplied with their blocks' scales, whose inverses are left behind."""
        amax = np.maximum(np.abs(self.of(values)).max((1, 3)), np.float32(amax_epsilon))
        scale = np.divide(np.float32(limit), amax, out=np.ones_like(amax), where=amax > 0)
        if force_pow_2_scales:
            scale = np.exp2(np.floor(np.log2(scale)))
        self.scale_inv[...] = 1 / scale
        return (self.of(values) * scale[:, None, :, None]).reshape(values.shape)

    def dequantize(self, matrix):
        return (self.of(matrix) * self.scale_inv[:, None, :, None]).reshape(matrix.shape)


class Tensor:
    def __init__(
        self, data, shape, dtype, columnwise=0, scale=0, amax=0, scale_inv=0, columnwise_scale_inv=0, scaling_mode=0
    ):
        assert all(type(n) is int for n in shape)
        self.given = self.pointers = data, columnwise, scale, amax, scale_inv, columnwise_scale_inv
        self.data_ptr, self.shape, self.dtype, self.columnwise = data, shape, dtype, columnwise
        self.scaling_mode, self.in_blocks = scaling_mode, scaling_mode != ScalingMode.DELAYED_TENSOR_SCALING
        if self.in_blocks:
            assert not scale and not amax and (data == 0) == (scale_inv == 0)
            assert (columnwise == 0) == (columnwise_scale_inv == 0)
        self.scale, self.amax, self.scale_inv = (
            at(p, (1,), np.float32) if p and not self.in_blocks else None for p in (scale, amax, scale_inv)
        )

    def move(self, bases):
        given = self.given
        data, *others = [moved(address, bases) for address in given]
        self.__init__(data, self.shape, self.dtype, *others, self.scaling_mode)
        self.given = given

    @property
    def is_fp8(self):
        return self.dtype in GREATEST

    @property
    def array(self):
        return at(self.data_ptr, self.shape, NUMPY[self.dtype])

    @property
    def transposed(self):
        rows, cols = self.shape
        return at(self.columnwise, (cols, rows), NUMPY[self.dtype])

    def blocks(self, transposed):
        """(values, their Blocks): of the data, or of the transposed copy."""
        *_, scale_inv, transposed_scale_inv = self.pointers
        values = self.transposed if transposed else self.array
        return values, Blocks(transposed_scale_inv if transposed else scale_inv, values.shape, self.scaling_mode)

    def read(self):
        """As float32."""
        return self.array.astype(np.float32)

    def write(self, values):
        """Stores float32 values: rounded, or quantized with the scale, which leaves amax and scale_inv behind."""
        values = values.reshape(self.shape)
        if not self.is_fp8:
            self.array[...] = values.astype(NUMPY[self.dtype])
            return
        limit = GREATEST[self.dtype]
        quantized = np.clip(values * self.scale, -limit, limit).astype(NUMPY[self.dtype])
        if self.data_ptr:
            self.array[...] = quantized
        if self.columnwise:
            self.transposed[...] = quantized.T
        self.amax[...] = np.maximum(self.amax, np.abs(values).max())
        self.scale_inv[...] = 1 / self.scale

    def operand(self, transposed):
        """A GEMM's operand in float32, [k last] if not transposed, from the copy that Hopper's GEMM reads."""
        if not self.is_fp8:
            return self.read().T if transposed else self.read()
        if self.in_blocks:
            values, blocks = self.blocks(transposed)
            return blocks.dequantize(values.astype(np.float32))
        return (self.transposed if transposed else self.array).astype(np.float32) * self.scale_inv


class Sequence:
    def __init__(self, te, tensors, calls):
        self.te, self.tensors, self.calls = te, tensors, calls

    def run(self, bases):
        for tensor in self.tensors:
            tensor.move(bases)
        for name, arguments in self.calls:
            getattr(self.te, name)(*[moved(a, bases) if type(a) is int else a for a in arguments])


class Steps:
    def __init__(self, kept, temporary, steps):
        self.kept, self.temporary, self.steps = kept, temporary, steps

    def run(self, memories, allocate, temporary):
        address = lambda memory: memory if type(memory) is int else 0 if memory is None else memory.data_ptr()  # noqa: E731
        bases = [address(memory) for memory in memories]

        def put(index, memory):
            memories[index], bases[index] = memory, address(memory)

        def locate(memory, offsets):
            for index, offset in offsets:
                bases[index] = address(memory) + offset

        of_kept, kept = self.kept
        if of_kept is not None:
            put(0, allocate(*of_kept))
        locate(memories[0], kept)
        locate(temporary, self.temporary)
        for new, run, result, ends in self.steps:
            for index, arguments in new:
                put(index, allocate(*arguments))
            if isinstance(run, Sequence):
                run.run(bases)
            else:
                made = run(memories)
                if result >= 0:
                    put(result, made)
            for index in ends:
                memories[index] = None


class Stream:
    capability, sm_count, workspace_size = (9, 0), 132, 0

    def __init__(self, handle, allocate):
        self.handle = handle


class HostMemory:
    def __init__(self, bytes):
        self.bytes, self._memory = bytes, np.empty(bytes, np.uint8)

    def data_ptr(self):
        return self._memory.ctypes.data


class Event:
    def __init__(self, copies):
        self.copies, self.count = copies, copies.count

    def hold(self, stream):
        self.wait()

    def wait(self):
        self.copies.run(self.count)


class CopyStream:
    """Copies as late as they may be: when somebody waits for them."""

    def __init__(self):
        self.pending, self.count = collections.deque(), 0

    def follow(self, what):
        """What a Stream was given has been done by now. An Event of another CopyStream's copies has not."""
        if isinstance(what, Event):
            self._add(what.wait)

    def copy(self, to, from_, bytes):
        self._add(ctypes.memmove, to, from_, bytes)

    def _add(self, *call):
        self.pending.append(call)
        self.count += 1

    def mark(self):
        return Event(self)

    def run(self, count):
        while self.count - len(self.pending) < count:
            function, *arguments = self.pending.popleft()
            function(*arguments)


def _gamma(gamma, zero_centered_gamma):
    return gamma.read() + (1 if zero_centered_gamma else 0)


def layernorm_fwd(x, gamma, beta, epsilon, z, mu, rsigma, stream, zero_centered_gamma=False):
    values = x.read()
    mu.array[...] = values.mean(1)
    values = values - mu.array[:, None]
    rsigma.array[...] = 1 / np.sqrt((values**2).mean(1) + epsilon)
    z.write(values * rsigma.array[:, None] * _gamma(gamma, zero_centered_gamma) + beta.read())


def layernorm_bwd(dz, x, mu, rsigma, gamma, dx, dgamma, dbeta, stream, zero_centered_gamma=False):
    inverse, grad = rsigma.array[:, None], dz.read()
    normed = (x.read() - mu.array[:, None]) * inverse
    inner = grad * _gamma(gamma, zero_centered_gamma)
    dx.write(inverse * (inner - inner.mean(1, keepdims=True) - normed * (inner * normed).mean(1, keepdims=True)))
    dgamma.write((grad * normed).sum(0))
    dbeta.write(grad.sum(0))


def rmsnorm_fwd(x, gamma, epsilon, z, rsigma, stream, zero_centered_gamma=False):
    values = x.read()
    rsigma.array[...] = _rsigma(values, epsilon)
    z.write(values * rsigma.array[:, None] * _gamma(gamma, zero_centered_gamma))


def rmsnorm_bwd(dz, x, rsigma, gamma, dx, dgamma, stream, add=None, zero_centered_gamma=False):
    inverse, grad = rsigma.array[:, None], dz.read()
    normed = x.read() * inverse
    inner = grad * _gamma(gamma, zero_centered_gamma)
    result = inverse * (inner - normed * (inner * normed).mean(1, keepdims=True))
    dx.write(result if add is None else result + add.read())
    dgamma.write((grad * normed).sum(0))


def quantize(input, output, stream):
    output.write(input.read())


def quantize_blocks(input, output, force_pow_2_scales, amax_epsilon, stream):
    limit = GREATEST[output.dtype]
    for transposed in [False] * bool(output.data_ptr) + [True] * bool(output.columnwise):
        values, blocks = output.blocks(transposed)
        source = input.read().T if transposed else input.read()
        scaled = blocks.quantize(np.ascontiguousarray(source), limit, force_pow_2_scales, amax_epsilon)
        values[...] = np.clip(scaled, -limit, limit).astype(values.dtype)


def quantize_dbias(input, output, dbias, stream):
    assert output.data_ptr and output.columnwise, "TE's kernel writes both copies"
    dbias.write(input.read().sum(0))
    output.write(input.read())


def dequantize(input, output, stream):
    output.write(input.read() * input.scale_inv)


def transpose(input, output, stream):
    output.array[...] = input.array.T


def _silu(x):
    """(the function, its derivative), as the others here."""
    sigmoid = 1 / (1 + np.exp(-x))
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))


def _gelu(x):
    c = np.float32(np.sqrt(2 / np.pi))
    tanh = np.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * c * (1 + 3 * 0.044715 * x**2)


def _relu(x):
    return np.maximum(x, 0), (x > 0).astype(x.dtype)


# what an activation makes of its input, or a gated one of its gate
_FUNCTIONS = {"swiglu": _silu, "geglu": _gelu, "gelu": _gelu, "relu": _relu}


def _activations():
    """{name: kernel}: the activations, their gradients, and these with what is fused into them."""

    def gated(function):
        def forward(input, output, stream):
            gate, up = np.split(input.read(), 2, 1)
            output.write(function(gate)[0] * up)

        def backward(grad, input, output, stream):
            gate, up = np.split(input.read(), 2, 1)
            (value, derivative), dy = function(gate), grad.read()
            output.write(np.concatenate([dy * up * derivative, dy * value], 1))

        def without_transpose(grad, input, output, stream):
            assert not output.columnwise, "TE's kernel writes one copy"
            backward(grad, input, output, stream)

        return forward, without_transpose, ("d{}_cast_transpose", backward)

    def plain(function):
        def forward(input, output, stream):
            output.write(function(input.read())[0])

        def backward(grad, input, output, stream):
            output.write(grad.read() * function(input.read())[1])

        def with_dbias(grad, input, output, dbias, stream):
            assert output.data_ptr and output.columnwise, "TE's kernel writes both copies"
            dbias.write((grad.read() * function(input.read())[1]).sum(0))
            backward(grad, input, output, stream)

        return forward, backward, ("quantize_dbias_d{}", with_dbias)

    kernels = {}
    for name, function in _FUNCTIONS.items():
        forward, backward, (fused_name, fused) = (gated if FC1_WIDTHS[name] == 2 else plain)(function)
        kernels |= {name: forward, f"d{name}": backward, fused_name.format(name): fused}
    for name, kernel in kernels.items():
        kernel.__name__ = name
    return kernels.values()


def gemm(
    A, B, D, transa, transb, stream, accumulate=False, split_accumulator=False, bias=None, dbias=None,
    alpha=1.0, beta=1.0,
):  # fmt: skip
    assert A.in_blocks == B.in_blocks, "cuBLAS multiplies no blocks with anything else"
    if A.in_blocks:
        assert split_accumulator and {A.scaling_mode, B.scaling_mode} != {ScalingMode.BLOCK_SCALING_2D}
        assert not any(n % 128 for n in (*A.shape, *B.shape))
    result = np.float32(alpha) * (B.operand(transb) @ A.operand(not transa).T)
    if bias is not None:
        assert bias.dtype == D.dtype and dbias is None
        result = result + bias.read()
    if dbias is not None:
        assert dbias.dtype == D.dtype and not B.is_fp8, "cuBLAS has no such epilogue"
        dbias.write(B.operand(transb).sum(1))
    D.write(result + np.float32(beta) * D.read() if accumulate else result)


def amax_and_scale_update(amax_history, scale, algo, fp8_dtype, margin, stream):
    history = amax_history.array
    amax = history[0].copy() if algo == "most_recent" else np.nanmax(history, 0)
    usable = np.isfinite(amax) & (amax > 0)
    scale.array[usable] = GREATEST[fp8_dtype] * 2.0**-margin / amax[usable]
    history[...] = np.roll(history, -1, 0)
    history[0] = 0


def compute_amax(input, output, stream):
    output.amax[...] = np.abs(input.read()).max()


def compute_scale_from_amax(output, stream):
    output.scale[...] = GREATEST[output.dtype] / output.amax if 0 < output.amax < np.inf else 1


PACKED, THD = (QKVLayout.BS3HD, QKVLayout.T3HD), (QKVLayout.T3HD, QKVLayout.THD_THD_THD)


def _bshd(shape, layout):
    """[b, s, h, d] of a tensor's shape; with THD all tokens are one sequence, in which a mask keeps documents apart."""
    assert len(shape) == (3 if layout in THD else 4)
    return (1, *shape) if layout in THD else shape


def _attention_array(t, layout):
    """[b, s, h, d] of q, k or v, or their gradients, where `layout` says that they lie: others may lie in between."""
    b, s, heads, d = _bshd(t.shape, layout)
    stride = heads * d * (3 if layout in PACKED else 1)
    return strided(t.data_ptr, (b * s, heads, d), stride, NUMPY[t.dtype]).reshape(b, s, heads, d)


def _stats_array(stats, layout):
    """[b, h, s, 1] of the statistics, which are [tokens, h, 1] with THD."""
    return np.moveaxis(stats.array, 0, 1)[None] if layout in THD else stats.array


def _per_head(q, k, v):
    """float32 [b, h, s, d], k and v repeated to q's heads."""
    q, k, v = (np.moveaxis(x.astype(np.float32), 1, 2) for x in (q, k, v))
    return q, *(np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))


def _probabilities(q, k, scale, mask, bias, cu_seqlens, window):
    causal = mask in (Mask.CAUSAL, Mask.PADDING_CAUSAL)
    assert (mask in (Mask.PADDING, Mask.PADDING_CAUSAL)) == (cu_seqlens is not None)
    assert (mask == Mask.NONE or bias is None) and (causal or window < 0)
    scores = q @ np.swapaxes(k, 2, 3) * np.float32(scale)
    if bias is not None:
        scores = scores + bias.read()
    if causal:
        seen = np.tri(*scores.shape[2:], dtype=bool)
        scores = np.where(np.triu(seen, -window) if window >= 0 else seen, scores, -np.inf)
    if cu_seqlens is not None:
        ends, tokens = cu_seqlens.array, scores.shape[2]
        assert ends[0] == 0 and ends[-1] == tokens and (np.diff(ends) >= 0).all()
        document = np.searchsorted(ends, np.arange(tokens), "right")
        scores = np.where(document[:, None] == document, scores, -np.inf)
    greatest = scores.max(-1, keepdims=True)
    exponents = np.exp(scores - greatest)
    total = exponents.sum(-1, keepdims=True)
    return exponents / total, greatest + np.log(total)


def _dropout(shape, dropout, rng_state):
    """What the softmax is multiplied with: 0 where it is dropped, 1 / (1 - dropout) elsewhere."""
    if not dropout:
        return np.float32(1)
    assert rng_state.array.dtype == np.int64 and rng_state.shape == (2,)
    generator = np.random.default_rng(rng_state.array.view(np.uint64))
    return (generator.random(shape, np.float32) >= dropout) / np.float32(1 - dropout)


def _dequantized(arrays, tensors):
    return [array * t.scale_inv if t.is_fp8 else array for array, t in zip(arrays, tensors, strict=True)]


def _rounded(values, factors):
    """What remains of what never leaves the kernel, under its factors: a Tensor without data, or None."""
    if factors is None:
        return values
    assert factors.data_ptr == 0
    limit = GREATEST[factors.dtype]
    factors.amax[...] = np.abs(values).max()  # cuDNN overwrites
    rounded = np.clip(values * factors.scale, -limit, limit).astype(NUMPY[factors.dtype])
    return rounded.astype(np.float32) * factors.scale_inv


def attention_fwd(
    q, k, v, out, stats, scale, layout, mask, is_training, stream, dropout, rng_state, cu_seqlens, bias, s=None,
    window=-1, softmax_offset=None,
):  # fmt: skip
    assert (s is None) != q.is_fp8 and not (q.is_fp8 and (window >= 0 or dropout)) and not (window >= 0 and dropout)
    inverse = out.scale_inv.copy() if out.is_fp8 else None
    if out.is_fp8:
        out.amax[...] = 0
    q, k, v = _dequantized(_per_head(*(_attention_array(t, layout) for t in (q, k, v))), (q, k, v))
    p, statistics = _probabilities(q, k, scale, mask, bias, cu_seqlens, window)
    if softmax_offset is not None:
        assert q.shape[2] > 1, "decode only mode, i.e. s_q == 1, not supported with sink_token"  # as TE 2.20's
        total = np.logaddexp(statistics, _of_heads(softmax_offset, p))
        p, statistics = p * np.exp(statistics - total), total
    _stats_array(stats, layout)[...] = statistics
    p = p * _dropout(p.shape, dropout if is_training else 0, rng_state)
    out.write(np.moveaxis(_rounded(p, s) @ v, 1, 2))
    if out.is_fp8:
        out.scale_inv[...] = inverse  # cuDNN writes none


def _of_heads(softmax_offset, p):
    """[1, h, 1, 1]."""
    assert softmax_offset.array.dtype == np.float32 and softmax_offset.shape == p.shape[1:2]
    return softmax_offset.array.reshape(1, -1, 1, 1)


def _store(target, values, layout):
    """Sums over the heads that share a key head; target may lie between others."""
    lies = _attention_array(target, layout)
    b, s, heads, d = lies.shape
    values = np.moveaxis(values.reshape(b, heads, -1, s, d).sum(2), 1, 2)
    if target.is_fp8:
        limit = GREATEST[target.dtype]
        target.amax[...] = np.maximum(target.amax, np.abs(values).max())
        values = np.clip(values * target.scale, -limit, limit)
    lies[...] = values.astype(lies.dtype)


def attention_bwd(
    q, k, v, out, dout, stats, dq, dk, dv, scale, layout, mask, stream,
    dropout, deterministic, rng_state, cu_seqlens, bias, dbias, s=None, dp=None, window=-1, softmax_offset=None,
    dsoftmax_offset=None,
):  # fmt: skip
    assert (bias is None) == (dbias is None) and (bias is None or dbias.shape == bias.shape)
    assert (s is None) == (dp is None) != q.is_fp8 == out.is_fp8 == dout.is_fp8 == dq.is_fp8
    targets = dq, dk, dv
    q, k, v = _dequantized(_per_head(*(_attention_array(t, layout) for t in (q, k, v))), (q, k, v))
    p, statistics = _probabilities(q, k, scale, mask, bias, cu_seqlens, window)
    # fp8's rounding makes a difference where the backward of a forward in fp8 is not in fp8
    kept = _stats_array(stats, layout)
    assert (np.isnan(kept) | (kept > statistics - 0.3)).all(), "neither the statistics of these keys nor of more"
    p = p * np.exp(statistics - kept)
    out, dout = (
        np.moveaxis(x.reshape(_bshd(x.shape, layout)), 1, 2)
        for x in _dequantized([out.read(), dout.read()], (out, dout))
    )
    drop = _dropout(p.shape, dropout, rng_state)
    ds = p * (dout @ np.swapaxes(v, 2, 3) * drop - (out * dout).sum(-1, keepdims=True)) * np.float32(scale)
    ds, p = _rounded(ds, dp), _rounded(p * drop, s)
    if softmax_offset is not None:
        of_sinks = np.exp(_of_heads(softmax_offset, p) - kept) * (out * dout).sum(-1, keepdims=True)
        dsoftmax_offset.array[...] = -of_sinks.sum((0, 2, 3))
    gradients = ds @ k, np.swapaxes(ds, 2, 3) @ q, np.swapaxes(p, 2, 3) @ dout
    for target in targets:
        if target.is_fp8:
            target.amax[...] = 0
    for target, gradient in zip(targets, gradients, strict=True):
        _store(target, gradient, layout)


class Kernel(str):
    """The name of a kernel and what it is compiled with."""

    def __repr__(self):
        return self.split()[0]


MOST_ARGUMENTS = 24  # of a kernel: kMost in native/shim/calls.h


def launch(kernel, grid, block, shared, stream, *arguments):
    """The kernels of native/kernels, by name."""
    assert len(arguments) <= MOST_ARGUMENTS
    if kernel.startswith("experts_"):
        from tests import emulated_experts

        return emulated_experts.launch(kernel, grid, *arguments)
    if kernel in ("reciprocals", "raise_amaxes", "cross_entropy_loss"):
        return globals()[kernel](*arguments)
    if kernel.startswith("rmsnorm_statistics"):
        _, dtype, hidden, *_ = kernel.split()
        return rmsnorm_statistics(types.SimpleNamespace(dtype=ELEMENTS[dtype], hidden=int(hidden)), *arguments)
    if kernel.startswith("mxfp8"):
        name, dtype = kernel.split()
        return globals()[name](ELEMENTS[dtype], *arguments)
    if kernel.startswith("block_statistics"):
        _, dtype, float8, square, *_ = kernel.split()
        return block_statistics(ELEMENTS[dtype], FLOAT8[float8], square == "1", *arguments)
    if "cast_transpose" in kernel:
        name, *defines = kernel.split()
        return globals()[name](Form(*defines[:3]), *arguments)
    kernel, *options = kernel.split()
    name, _, dtype = kernel.rpartition("_")
    if name.startswith("latent"):
        return globals()[name](ELEMENTS[dtype], grid, _Turn(options == ["1"]), *arguments)
    rotating = (rope, qk_norm_forward, qk_norm_backward, qk_norm_sums, rotation_cast)
    rotating = {function.__name__: function for function in rotating}
    if name in rotating:
        return rotating[name](ELEMENTS[dtype], grid, _Turn(*[option == "1" for option in options]), *arguments)
    typed = (
        qk_norm_weights,
        cross_entropy_stats,
        cross_entropy_gradient,
        add_to,
        column_sums,
        pack,
        unpack,
        squares,
        divide_by_norms,
        mirror,
        transpose_tiles,
    )
    {function.__name__: function for function in typed}[name](ELEMENTS[dtype], grid, *arguments)


def rope(dtype, tokens, turn, *arguments):
    """kernels/rope.cu: source and target as addresses and strides of q, k, v."""
    source, target, (angles, s, heads, kv_heads, widths, factor, backward) = (
        arguments[:6],
        arguments[6:12],
        arguments[12:],
    )
    d = turn.read(widths, factor)
    places = [_heads_of(dtype, tokens, place, (heads, kv_heads, kv_heads), d) for place in (source, target)]
    for i, (x, y) in enumerate(zip(*places, strict=True)):
        values = x.astype(np.float32)
        y[...] = (turn(values, angles, s, -1 if backward else 1) if i < 2 else values).astype(dtype)


def _heads_of(dtype, tokens, places, heads, d):
    """Arrays [tokens, heads, d] of q, k and v, from their addresses and strides."""
    return [
        strided(at, (tokens, n, d), stride, dtype) for at, stride, n in zip(places[:3], places[3:], heads, strict=True)
    ]


def _latent(tokens, turn, dtype, arguments):
    """(arrays at the six addresses, what turns, the numbers of a head that it does not) of kernels/latent.cu."""
    *addresses, angles, s, heads, widths, value, factor = arguments
    plain = turn.read(widths, factor)
    key = plain + turn.width
    shapes = [(heads, key), (heads, plain + value), (1, turn.width)], [(heads, key), (heads, key), (heads, value)]
    forward, backward = (addresses[:3], addresses[3:]), (addresses[3:], addresses[:3])
    rotated = lambda x, sign: turn(x.astype(np.float32), angles, s, sign)  # noqa: E731
    inputs, results = (
        [
            [at(a, (tokens, *shape), dtype) for a, shape in zip(where, each, strict=True)]
            for where, each in zip(order, shapes, strict=True)
        ]
        for order in (forward, backward)
    )
    return inputs, results, rotated, plain


def latent_forward(dtype, tokens, turn, *arguments):
    """kernels/latent.cu."""
    ((q, kv, position), (q_out, k_out, v_out)), _, rotated, plain = _latent(tokens, turn, dtype, arguments)
    q_out[..., :plain], k_out[..., :plain], v_out[...] = q[..., :plain], kv[..., :plain], kv[..., plain:]
    q_out[..., plain:], k_out[..., plain:] = rotated(q[..., plain:], 1), rotated(position, 1)


def latent_backward(dtype, tokens, turn, *arguments):
    """kernels/latent.cu."""
    _, ((dq_out, dkv, dposition), (dq, dk, dv)), rotated, plain = _latent(tokens, turn, dtype, arguments)
    dq_out[..., :plain], dkv[..., :plain], dkv[..., plain:] = dq[..., :plain], dk[..., :plain], dv
    dq_out[..., plain:] = rotated(dq[..., plain:], -1)
    dposition[...] = rotated(dk[..., plain:].astype(np.float32).sum(1, keepdims=True), -1)


class _Turn:
    """What kernels/rotation.cuh does. over_all: of qk_norm.cu. norms: of rotation_cast.cu."""

    def __init__(self, interleaved, over_all=False, norms=False):
        self.interleaved, self.over_all, self.norms = interleaved, over_all, norms

    def read(self, widths, factor):
        """d, of the parameters that tell how many of these numbers are turned, too, and by what they are multiplied."""
        self.width, self.factor = widths >> 32, np.uint32(factor).view(np.float32)
        return widths & 0xFFFFFFFF

    def __call__(self, values, angles, s, sign):
        if not angles:
            return values
        tokens, pairs = values.shape[0], np.arange(self.width)
        angles = np.tile(at(angles, (s, self.width), np.float32)[:, : self.width // 2], (tokens // s, 1))[:, None]
        first, second = pairs.reshape(-1, 2).T if self.interleaved else pairs.reshape(2, -1)
        cos, sin, out = self.factor * np.cos(angles), self.factor * sign * np.sin(angles), values.copy()
        out[..., first] = values[..., first] * cos - values[..., second] * sin
        out[..., second] = values[..., second] * cos + values[..., first] * sin
        return out


class _Norm:
    """What kernels/qk_norm.cu does besides: x [tokens, heads, d] are q, or k (which: 0 or 1)."""

    def __init__(self, turn, bits, sums, tokens):
        self.over_all, self.ranks, self.added = turn.over_all, bits >> 33, bits >> 32 & 1
        self.epsilon = np.uint32(bits & 0xFFFFFFFF).view(np.float32)
        self.sums = at(sums, (tokens, 4), np.float32) if self.over_all else None

    def weight(self, address, heads, d, dtype):
        shape = (heads, d) if self.over_all else (d,)
        return at(address, shape, dtype).astype(np.float32) + self.added

    def mean(self, values, column):
        """Of each head's numbers, or of what the sums say."""
        if not self.over_all:
            return values.mean(-1, keepdims=True)
        return self.sums[:, column, None, None] / np.float32(values[0].size * self.ranks)

    def r(self, x, which):
        return 1 / np.sqrt(self.mean(x**2, which) + self.epsilon)


def qk_norm_forward(dtype, tokens, turn, *arguments):
    """kernels/qk_norm.cu."""
    q_weight, k_weight, sums, angles, s, heads, widths, factor, norm = arguments[12:]
    sizes, d, norm = _three(heads), turn.read(widths, factor), _Norm(turn, norm, sums, tokens)
    *source, v = _heads_of(dtype, tokens, arguments[:6], sizes, d)
    *target, v_out = _heads_of(dtype, tokens, arguments[6:12], sizes, d)
    for i, (x, y, weight) in enumerate(zip(source, target, (q_weight, k_weight), strict=True)):
        x = x.astype(np.float32)
        y[...] = turn(x * norm.r(x, i) * norm.weight(weight, sizes[i], d, dtype), angles, s, 1).astype(dtype)
    v_out[...] = v


def _three(heads):
    """(q's, k's, v's) of a parameter."""
    return heads & 0xFFFFFFFF, heads >> 32, heads >> 32


def qk_norm_sums(dtype, tokens, turn, dq, dk, dq_stride, dk_stride, q, k, stride, q_weight, k_weight, *others):
    """kernels/qk_norm.cu, before the ranks meet."""
    sums, angles, s, heads, widths, factor, norm = others
    sizes, d, norm = _three(heads), turn.read(widths, factor), _Norm(turn, norm, sums, tokens)
    norm.sums[...] = 0
    for i, (dy, dy_stride, x, weight) in enumerate(((dq, dq_stride, q, q_weight), (dk, dk_stride, k, k_weight))):
        x = strided(x, (tokens, sizes[i], d), stride, dtype).astype(np.float32)
        norm.sums[:, i] = (x**2).sum((1, 2))
        if dy:
            dy = strided(dy, (tokens, sizes[i], d), dy_stride, dtype).astype(np.float32)
            products = turn(dy, angles, s, -1) * norm.weight(weight, sizes[i], d, dtype) * x
            norm.sums[:, 2 + i] = products.sum((1, 2))


def qk_norm_backward(dtype, grid, turn, *arguments):
    """kernels/qk_norm.cu; all of the weights' gradients are in the first block's part."""
    dq, dk, dv, *strides, q, k, stride = arguments[:9]
    places, (q_weight, k_weight, sums, partials, angles, s, tokens, heads, widths, factor, norm) = (
        arguments[9:13], arguments[13:]
    )  # fmt: skip
    blocks = grid
    sizes, d, norm = _three(heads), turn.read(widths, factor), _Norm(turn, norm, sums, tokens)
    *grads, v = _heads_of(dtype, tokens, (dq, dk, dv, *strides), sizes, d)
    *target, v_out = _heads_of(dtype, tokens, (*places[:3], *[places[3]] * 3), sizes, d)
    found = []
    for i, (dy, dx, x, weight) in enumerate(zip(grads, target, (q, k), (q_weight, k_weight), strict=True)):
        x = strided(x, (tokens, sizes[i], d), stride, dtype).astype(np.float32)
        r, back = norm.r(x, i), turn(dy.astype(np.float32), angles, s, -1)
        found.append((back * x * r).sum(0 if turn.over_all else (0, 1)).ravel())
        back *= norm.weight(weight, sizes[i], d, dtype)
        dx[...] = (r * (back - x * r * r * norm.mean(back * x, 2 + i))).astype(dtype)
    if partials:
        found = np.concatenate(found)
        parts = at(partials, (blocks, found.size), np.float32)
        parts[...] = 0
        parts[0] = found
    v_out[...] = v


def rotation_cast(dtype, tokens, turn, q, k, v, stride, *others):
    """kernels/rotation_cast.cu."""
    places, (q_weight, k_weight, angles, s, heads, widths, factor, norm, scale, amax, scale_inv) = (
        others[:6],
        others[6:],
    )
    sizes, d, norm = _three(heads), turn.read(widths, factor), _Norm(turn, norm, 0, tokens)
    source = _heads_of(dtype, tokens, (q, k, v, stride, stride, stride), sizes, d)
    target = _heads_of(NUMPY[DType.FLOAT8_E4M3], tokens, places, sizes, d)
    scale, amax, scale_inv = (at(address, (1,), np.float32) for address in (scale, amax, scale_inv))
    for i, (x, y, weight) in enumerate(zip(source, target, (q_weight, k_weight, 0), strict=True)):
        values = x.astype(np.float32)
        if weight and turn.norms:
            values = values * norm.r(values, i) * norm.weight(weight, sizes[i], d, dtype)
        values = (turn(values, angles, s, 1) if i < 2 else values).astype(dtype).astype(np.float32)
        amax[...] = max(amax[0], np.abs(values).max())
        y[...] = np.clip(values * scale[0], -448, 448).astype(y.dtype)
    scale_inv[...] = 1 / scale


def qk_norm_weights(dtype, grid, partials, dq_weight, dk_weight, blocks, *sizes):
    """kernels/qk_norm.cu."""
    total = at(partials, (blocks, sum(sizes)), np.float32).sum(0)
    for out, part in zip((dq_weight, dk_weight), np.split(total, sizes[:1]), strict=True):
        at(out, part.shape, dtype)[...] = part.astype(dtype)


def cross_entropy_stats(dtype, grid, logits, labels, stats, rows, columns, first):
    """kernels/cross_entropy.cu, before ranks meet."""
    assert grid == rows
    x, out = at(logits, (rows, columns), dtype).astype(np.float32), at(stats, (3, rows), np.float32)
    place = at(labels, (rows,), np.int64) - first
    here = (place >= 0) & (place < columns)
    out[0] = x.max(1)
    out[1] = np.exp(x - out[0][:, None]).sum(1)
    out[2] = np.where(here, x[np.arange(rows), np.where(here, place, 0)], 0)


def cross_entropy_loss(labels, stats, loss, rows, vocabulary, ignore_index):
    """kernels/cross_entropy.cu, afterwards."""
    labels, (greatest, total, picked) = at(labels, (rows,), np.int64), at(stats, (3, rows), np.float32)
    losses = np.log(total) - (picked - greatest)
    losses[(labels < 0) | (labels >= vocabulary)] = np.nan
    losses[labels == ignore_index] = 0
    at(loss, (rows,), np.float32)[:] = losses


def cross_entropy_gradient(
    dtype, grid, logits, gradient, labels, stats, dloss, rows, columns, first, vocabulary, ignore_index
):
    """kernels/cross_entropy.cu, backward."""
    assert grid == rows
    x, labels = at(logits, (rows, columns), dtype).astype(np.float32), at(labels, (rows,), np.int64)
    greatest, total, _ = at(stats, (3, rows), np.float32)
    dx = np.exp(x - greatest[:, None]) / total[:, None] - (np.arange(columns) == (labels - first)[:, None])
    dx *= np.where((labels < 0) | (labels >= vocabulary), np.nan, at(dloss, (rows,), np.float32))[:, None]
    dx[labels == ignore_index] = 0
    at(gradient, (rows, columns), dtype)[...] = dx.astype(dtype)


def reciprocals(scale, scale_inv, n):
    """kernels/scaling.cu."""
    at(scale_inv, (n, 4), np.float32)[:, 0] = 1 / at(scale, (n,), np.float32)


def raise_amaxes(first, first_amax, second, second_amax):
    """kernels/scaling.cu."""
    for value, amax in ((first, first_amax), (second, second_amax)):
        at(amax, (1,), np.float32)[0] = max(at(amax, (1,), np.float32)[0], at(value, (1,), np.float32)[0])


def add_to(dtype, grid, out, other, n):
    """kernels/addition.cu."""
    out = at(out, (n,), dtype)
    out[:] = (out.astype(np.float32) + at(other, (n,), dtype).astype(np.float32)).astype(dtype)


def column_sums(dtype, grid, x, out, rows, cols):
    """kernels/column_sums.cu."""
    at(out, (cols,), dtype)[:] = at(x, (rows, cols), dtype).astype(np.float32).sum(0).astype(dtype)


def _packed_parts(dtype, arguments):
    """kernels/low_rank.cu's: (A and B of the parts, None for one that is not there, where these lie in the two
    matrices), the matrices, the factor."""
    starts, part_sizes = arguments[6:9], arguments[9:12]
    a, b, inputs, outputs, r, width, bits = arguments[12:]
    a, b = at(a, (inputs, width), dtype), at(b, (width, outputs), dtype)
    parts = []
    for part, (start, size) in enumerate(zip(starts, part_sizes, strict=True)):
        columns = slice(part * r, (part + 1) * r)
        places = a[:, columns], b[columns, start : start + size]
        for address, shape, place in zip(arguments[part:6:3], ((inputs, r), (r, size)), places, strict=True):
            parts.append((at(address, shape, dtype) if address else None, place))
    return parts, a, b, np.uint32(bits).view(np.float32)


def pack(dtype, grid, *arguments):
    """kernels/low_rank.cu."""
    parts, a, b, factor = _packed_parts(dtype, arguments)
    a[...] = b[...] = 0
    for i, (values, place) in enumerate(parts):
        if values is not None:
            place[...] = (values.astype(np.float32) * (factor if i % 2 else 1)).astype(dtype)


def unpack(dtype, grid, *arguments):
    """kernels/low_rank.cu, backward."""
    parts, _, _, factor = _packed_parts(dtype, arguments)
    for i, (values, place) in enumerate(parts):
        if values is not None:
            values[...] = (place.astype(np.float32) * (factor if i % 2 else 1)).astype(dtype)


def squares(dtype, grid, x, sums, size, parts):
    """kernels/newton_schulz.cu, whose parts are equal but for the last ones."""
    matrices = at(x, (grid // parts, size), dtype).astype(np.float32)
    each = -(-size // parts)
    at(sums, (grid // parts, parts), np.float32)[...] = [
        [(matrix[part * each : (part + 1) * each] ** 2).sum() for part in range(parts)] for matrix in matrices
    ]


def divide_by_norms(dtype, grid, x, sums, size, parts, least):
    """kernels/newton_schulz.cu."""
    matrices = at(x, (grid // parts, size), dtype)
    norms = np.sqrt(at(sums, (grid // parts, parts), np.float32).sum(1, keepdims=True))
    least = np.uint32(least).view(np.float32)
    matrices[...] = (matrices.astype(np.float32) / np.maximum(norms, least)).astype(dtype)


def mirror(dtype, grid, upper, out, n, rows):
    """kernels/newton_schulz.cu."""
    out = at(out, (n, n), dtype)
    for first in range(0, n, rows):
        block = at(upper, (rows, n - first), dtype)
        out[first : first + rows, first:], out[first:, first : first + rows] = block, block.T
        out[first : first + rows, first : first + rows] = block[:, :rows]
        upper += block.nbytes


def transpose_tiles(dtype, grid, x, out, rows, cols):
    """kernels/newton_schulz.cu."""
    at(out, (cols, rows), dtype)[...] = at(x, (rows, cols), dtype).T


def _rsigma(values, epsilon):
    return 1 / np.sqrt((values**2).mean(1) + epsilon)


def rmsnorm_statistics(form, x, gamma, rsigma, amax, copy, rows, epsilon, zero_centered_gamma):
    """kernels/rmsnorm_statistics.cu."""
    values = at(x, (rows, form.hidden), form.dtype).astype(np.float32)
    if copy:
        at(copy, values.shape, form.dtype)[...] = at(x, values.shape, form.dtype)
    epsilon = np.uint32(epsilon).view(np.float32)
    inverse = at(rsigma, (rows,), np.float32)
    inverse[...] = _rsigma(values, epsilon)
    if amax:
        gamma = at(gamma, (form.hidden,), form.dtype).astype(np.float32) + (1 if zero_centered_gamma else 0)
        normed = (values * inverse[:, None] * gamma).astype(form.dtype).astype(np.float32)
        at(amax, (1,), np.float32)[0] = max(at(amax, (1,), np.float32)[0], np.abs(normed).max())


def rmsnorm_cast_transpose(form, x, gamma, rsigma, plain, *arguments):
    """kernels/rmsnorm_cast.cu."""
    *target, rows, cols, zero_centered_gamma = arguments
    gamma = at(gamma, (cols,), form.dtype).astype(np.float32) + (1 if zero_centered_gamma else 0)
    values = at(x, (rows, cols), form.dtype).astype(np.float32)
    values = values * at(rsigma, (rows,), np.float32)[:, None] * gamma
    _write_plain(form, plain, values)
    form.write(values, *target)


def cast_transpose(form, x, *arguments):
    """kernels/cast.cu."""
    *target, rows, cols = arguments
    form.write(at(x, (rows, cols), form.dtype).astype(np.float32), *target)


def cast_transpose_both(form, *arguments):
    """kernels/cast.cu, of two matrices."""
    half = len(arguments) // 2
    for of_one in arguments[:half], arguments[half:]:
        cast_transpose(form, *of_one)


class Form:
    """What kernels/cast_tile.cuh is compiled with, as text."""

    def __init__(self, dtype, float8, rounded):
        self.dtype, self.rounded = ELEMENTS[dtype], int(rounded)
        self.float8 = FLOAT8[float8]

    def write(self, values, data, transposed, scale, amax, scale_inv, statistics=0):
        if self.rounded:
            values = values.astype(self.dtype).astype(np.float32)
        if statistics:
            of_scale = at(scale, (1,), np.float32) if scale else np.ones(1, np.float32)
            count(statistics, values, of_scale, GREATEST[self.float8], NUMPY[self.float8])
            if not amax:
                return
        if data or transposed:
            Tensor(data, values.shape, self.float8, transposed, scale, amax, scale_inv).write(values)
        else:
            at(amax, (1,), np.float32)[0] = max(at(amax, (1,), np.float32)[0], np.abs(values).max())


def count(record, values, scale, limit, dtype):
    """kernels/statistics.cuh: of values, float32, under scales that broadcast to them."""
    fields = at(record, (7,), np.int64)
    seen = values != 0
    scaled = np.broadcast_to(np.abs(values) * scale, values.shape)[seen].astype(np.float64)
    rounded = np.clip(scaled, 0, limit).astype(np.float32).astype(dtype).astype(np.float64)
    errors = np.where(scaled > 0, np.abs(scaled - rounded) / np.where(scaled > 0, scaled, 1), 1)
    fields[:4] += [seen.sum(), (rounded == 0).sum(), (scaled > limit * 1.000001).sum(), int(errors.sum() * 2**24)]
    scale = np.broadcast_to(scale, values.shape)[seen]
    for i, value in enumerate((np.abs(values).max(), scale.max(initial=0), (1 / scale).max(initial=0)), 4):
        fields[i] = max(fields[i], int(np.float32(value).view(np.int32)))


def block_statistics(dtype, float8, square, x, begins, record, rows, cols, experts, power_2, epsilon, greatest):
    """kernels/block_statistics.cu."""
    values = at(x, (rows, cols), dtype).astype(np.float32)
    if begins:
        values = values[: at(begins, (experts + 1,), np.int64)[-1] // cols]
    height, limit = 128 if square else 1, GREATEST[float8]
    blocks = values.reshape(len(values) // height, height, cols // 128, 128)
    amax = np.maximum(np.abs(blocks).max((1, 3), keepdims=True), np.uint32(epsilon).view(np.float32))
    scale = np.divide(np.float32(limit), amax, out=np.ones_like(amax), where=amax > 0)
    if power_2:
        scale = np.exp2(np.floor(np.log2(scale)))
    if values.size:
        count(record, blocks, scale, limit, NUMPY[float8])


class MXFP8:
    """kernels/mxfp8.cuh: numbers at an address, their bytes before the exponents."""

    def __init__(self, pointer, n):
        self.bytes = at(pointer, (n // 32, 32), ml_dtypes.float8_e4m3fn)
        self.exponents = at(pointer + n, (n // 32, 1), np.uint8)

    def store(self, values):
        """values: float32, as many in any shape, finite."""
        blocks = values.reshape(self.bytes.shape)
        amax = np.abs(blocks).max(1, keepdims=True)
        with np.errstate(divide="ignore"):
            exponents = np.ceil(np.log2(amax.astype(np.float64) / 448))
        self.exponents[...] = np.clip(exponents + 127, 0, 254)
        self.bytes[...] = np.ldexp(blocks, 127 - self.exponents.astype(int)).astype(self.bytes.dtype)

    def restored(self):
        return np.ldexp(self.bytes.astype(np.float32), self.exponents.astype(int) - 127)


def mxfp8_store(dtype, x, stored, n):
    """kernels/mxfp8.cu."""
    MXFP8(stored, n).store(at(x, (n,), dtype).astype(np.float32))


def mxfp8_restore(dtype, stored, x, n):
    """kernels/mxfp8.cu."""
    at(x, (n,), dtype)[...] = MXFP8(stored, n).restored().reshape(-1).astype(dtype)


def _gate_and_up(form, z, stored, rows, cols):
    """Of swiglu.cu's kernels, in float32; what is to be stored is."""
    shape = rows, 2 * cols
    of_stored = stored and MXFP8(stored, 2 * rows * cols)
    values = at(z, shape, form.dtype).astype(np.float32) if z else of_stored.restored().reshape(shape)
    if z and stored:
        of_stored.store(values)
    return np.split(values, 2, 1)


def _write_plain(form, plain, values):
    if plain:
        at(plain, values.shape, form.dtype)[...] = values.astype(form.dtype)


def swiglu_cast_transpose(form, dy, z, stored, again, plain, *arguments):
    """kernels/swiglu.cu."""
    *target, rows, cols = arguments
    gate, up = _gate_and_up(form, z, stored, rows, cols)
    y = _silu(gate)[0] * up
    _write_plain(form, plain, y)
    if any(target):
        form.write(y, *target)


def dswiglu_cast_transpose(form, dy, z, stored, again, plain, *arguments):
    """kernels/swiglu.cu, backward."""
    *target, rows, cols = arguments
    gate, up = _gate_and_up(form, z, stored, rows, cols)
    value, derivative = _silu(gate)
    dy = at(dy, (rows, cols), form.dtype).astype(np.float32)
    dz = np.concatenate([dy * up * derivative, dy * value], 1)
    _write_plain(form, plain, dz)
    _write_plain(form, again, value * up)
    if any(target):
        form.write(dz, *target)


def memcpy_async(destination, source, stream):
    destination.array.reshape(-1)[:] = source.array.reshape(-1)


def memset_async(destination, value, bytes, stream):
    ctypes.memset(destination, value, bytes)


KERNELS = (
    layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, quantize, quantize_blocks, quantize_dbias, dequantize,
    transpose, *_activations(), gemm, amax_and_scale_update, compute_amax, compute_scale_from_amax,
    attention_fwd, attention_bwd, launch, memcpy_async, memset_async,
)  # fmt: skip


def _in_order(kernel):
    """The kernel after all that is on its way to host memory, as nvgpu's host runtime has collectives on threads."""

    @functools.wraps(kernel)
    def run(*arguments, **keywords):
        paddle.device.synchronize()
        return kernel(*arguments, **keywords)

    return run


def _precision(arguments):
    dtypes = [argument.dtype for argument in arguments if isinstance(argument, Tensor)]
    return "fp8" if any(dtype in GREATEST for dtype in dtypes) else DType(dtypes[0]).name.lower() if dtypes else ""


def _counted(kernel, counts):
    @functools.wraps(kernel)
    def run(*arguments, **keywords):
        kernel(*arguments, **keywords)
        counts[kernel.__name__, _precision(arguments)] += 1

    return run


def install(setattr=setattr):
    """te's layers compute with this module, on the CPU or on nvgpu's host runtime.

    setattr: monkeypatch.setattr in tests that share their process with others.
    """
    from paddle_te import device, native
    from paddle_te.native import (
        addition,
        casts,
        column_sums,
        cross_entropy,
        experts,
        latent,
        low_rank,
        mxfp8,
        newton_schulz,
        qk_norm,
        rmsnorm,
        rope,
        rotation_cast,
        scaling,
        statistics,
    )
    from paddle_te.ops.te import attention_support, grouped_gemms, quantized, runtime
    from tests import emulated_experts

    counts = collections.Counter()
    te = types.SimpleNamespace(Tensor=Tensor, Stream=Stream, counts=lambda: dict(counts))
    te.HostMemory, te.CopyStream = HostMemory, CopyStream
    te.Sequence, te.Steps = functools.partial(Sequence, te), Steps
    for kernel in (*KERNELS, *emulated_experts.KERNELS):
        in_order = kernel if paddle.get_device() == "cpu" else _in_order(kernel)
        te.__dict__[kernel.__name__] = _counted(in_order, counts)
    setattr(native, "load", lambda fp8=False: te)
    setattr(device, "raw_stream", lambda: 0)
    for module in (
        addition,
        casts,
        column_sums,
        cross_entropy,
        experts,
        latent,
        low_rank,
        mxfp8,
        newton_schulz,
        qk_norm,
        rmsnorm,
        rope,
        rotation_cast,
        scaling,
        statistics,
    ):
        setattr(module, "kernel", lambda name, *_, **defines: Kernel(" ".join([name, *map(str, defines.values())])))
    setattr(runtime, "_runtimes", {})
    setattr(quantized, "cublas_version", lambda: (12, 9))
    setattr(grouped_gemms, "cublas_version", lambda: (13, 6))
    setattr(attention_support, "cudnn_version", lambda: (9, 26))
