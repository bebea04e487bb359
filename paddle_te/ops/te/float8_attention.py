"""Causal attention in fp8, as TE's DotProductAttention computes it with fp8_dpa and delayed scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import paddle

from paddle_te.native import Mask, scaling, statistics
from paddle_te.native.casts import Form
from paddle_te.native.centring import Means
from paddle_te.native.library import cudnn_version
from paddle_te.native.rope import WHOLE
from paddle_te.ops.te import runtime
from paddle_te.ops.te.core_attention import (
    AttentionSizes,
    Sequences,
    Softmax,
    Views,
    attend_backward,
    deterministic,
)
from paddle_te.ops.te.quantized import FP8
from paddle_te.ops.te.recording import Quantizer, QuantizersOfOne
from paddle_te.ops.te.runtime import FLOAT32, Memory, Runtime

CAUSAL = int(Mask.CAUSAL)
SLOT = 32  # bytes of an amax, a scale and a scale_inv, which begins at 16
SLOTS = 256  # bytes for three slots, with which memory for something else ends


class _Factors(NamedTuple):
    """The format of a tensor in fp8 and the addresses of its factors, as a Quantizer has them."""

    dtype: str
    scale_ptr: int
    amax_ptr: int
    scale_inv_ptr: int

    @classmethod
    def of(cls, quantizer: Quantizer, slot: int, amax: int) -> _Factors:
        """Return a quantizer's _Factors. amax: its address. Without a scale, scale and scale_inv lie in the slot."""
        if quantizer.kind == "delayed":
            return cls(quantizer.dtype, quantizer.scale_ptr, amax, quantizer.scale_inv_ptr)
        return cls(quantizer.dtype, slot + 4, amax, slot + 16)

    def set_scale(self, rt: Runtime, amax: int) -> None:
        """Compute scale and scale_inv from the amax at an address."""
        rt.te.compute_scale_from_amax(_float8(rt, 0, (0,), self._replace(amax_ptr=amax)), rt.stream)
        scaling.reciprocals(rt.te, rt.stream, self.scale_ptr, self.scale_inv_ptr, 1)


def _float8(rt: Runtime, address: int, shape: tuple[int, ...], factors: _Factors) -> Any:
    """Return a native tensor in fp8; address 0: only its factors."""
    pointers = factors.scale_ptr, factors.amax_ptr, factors.scale_inv_ptr
    return rt.tensor(address, shape, FP8[factors.dtype], 0, *pointers)


class Float8QKV:
    """q, k and v, or their gradients, in fp8 under one scale, at an address: native, and `whole`, all three.

    memory: what they lie in. strides: bytes from a token to the next, of q, and of k and v.
    """

    __slots__ = ("memory", "q", "k", "v", "whole", "strides", "factors")

    def __init__(
        self, rt: Runtime, heads: AttentionSizes, layout: int, memory: Memory, address: int, factors: _Factors
    ) -> None:
        self.memory, self.factors = memory, factors
        (*_, h, d), (*_, h_kv, _), (to_k, to_v) = heads.q, heads.kv, heads.starts[layout]
        self.strides = (h * d, h_kv * d) if layout == heads.separate else (heads.width, heads.width)
        self.q = _float8(rt, address, heads.q, factors)
        self.k = _float8(rt, address + to_k, heads.kv, factors)
        self.v = _float8(rt, address + to_v, heads.kv, factors)
        self.whole = _float8(rt, address, (heads.tokens, heads.width), factors)


class Float8Attention:
    """One attention's forward and backward.

    cuDNN's kernels round the softmax to fp8 before it multiplies v, and its gradient before it multiplies q and k.
    They write no scale_inv: for the softmax, the output and their gradients it comes from the update of the scales.
    They overwrite amax, for dq, dk and dv together, although it must be the greatest of all micro-batches. So the
    kernels write to slots, and the slots are added to the quantizers' amax.

    quantizers: for q, k and v together, for the softmax, and for the output, each also for the gradient.
    backward_in_fp8: else backward is in 16 bits. It reads q, k, v and the output as they were rounded to fp8, because
    the softmax's statistics are theirs.
    qkv: whoever makes the object fills it, by `quantize` or by a kernel of their own.

    In the first step (quantizers of kind "current") there are no scales yet. Scales of q, k and v and of the output's
    gradient come from these tensors. Scales of the numbers that a kernel rounds come from the kernel's amaxes, so it
    runs until they are known.
    """

    def __init__(
        self,
        rt: Runtime,
        heads: AttentionSizes,
        layout: int,
        scale: float,
        quantizers: Sequence[QuantizersOfOne],
        backward_in_fp8: bool,
    ) -> None:
        """Allocate what forward keeps."""
        self.heads, self.layout, self.scale, self.quantizers = heads, layout, scale, quantizers
        self.backward_in_fp8 = backward_in_fp8
        qkv, softmax, out = (of_one.input for of_one in quantizers)
        memory, qkv_at, out_at, self.slots = self._allocate(rt, heads.stats_bytes)
        self.results = _results(self.slots, softmax, out)
        self.qkv = Float8QKV(rt, heads, layout, memory, qkv_at, _Factors.of(qkv, self.slots[0], qkv.amax_ptr))
        self.softmax = _float8(rt, 0, (0,), self.results[0])
        self.out = _float8(rt, out_at, heads.q, self.results[1])
        self.stats = rt.tensor(self.slots[0] + SLOTS, heads.stats, FLOAT32)

    def _allocate(self, rt: Runtime, more: int = 0) -> tuple[Any, int, int, tuple[int, int, int]]:
        """Return (memory, addresses in it of q, k and v in fp8, the output, and three slots); `more`: bytes behind."""
        heads = self.heads
        qkv, out = heads.tokens * heads.width, math.prod(heads.q)
        memory = rt.empty([qkv + out + SLOTS + more], paddle.uint8)
        address = memory.data_ptr()
        slots = address + qkv + out
        return memory, address, address + qkv, (slots, slots + SLOT, slots + 2 * SLOT)

    def quantize(self, rt: Runtime, qkv: Memory) -> None:
        """Fill q, k and v from a buffer in 16 bits, centred, with the same layout."""
        source = self.heads.whole_view(rt, qkv.data_ptr())
        _quantize(rt, self.qkv.whole, source, self.quantizers[0].input, self.slots[0])

    def forward(self, rt: Runtime, means: Means, train: bool) -> Any:
        """Return out [b, s, h·d]. means: those that were subtracted; the values' is added to what they attend to."""
        heads, qkv = self.heads, self.qkv
        _, softmax, of_out = (quantizers.input for quantizers in self.quantizers)
        tensors = qkv.q, qkv.k, qkv.v, self.out, self.stats
        options = self.scale, self.layout, CAUSAL, train, rt.stream, 0.0, None, None, None
        run = partial(rt.te.attention_fwd, *tensors, *options, self.softmax)
        _run_with_amaxes(rt, run, self.results, (softmax, of_out), self.slots[0])
        out = rt.empty(heads.out, heads.dtype)
        given = self.out.data_ptr, self.results[1].scale_inv_ptr, out.data_ptr()
        means.dequantize(rt.te, rt.stream, *given, heads.geometry(WHOLE))
        return out

    def backward(self, rt: Runtime, dout: Memory, grads: Views, whole: Any = None) -> None:
        """Fill native dq, dk and dv. whole: the same as one tensor, where they share a buffer."""
        if not self.backward_in_fp8:
            return self._backward_in_16_bits(rt, dout, grads)
        dqkv = self._backward_in_fp8(rt, dout)
        pairs = zip((dqkv.q, dqkv.k, dqkv.v), grads, strict=True) if whole is None else [(dqkv.whole, whole)]
        for source, target in pairs:
            rt.te.dequantize(source, target, rt.stream)

    def _backward_in_fp8(self, rt: Runtime, dout: Memory) -> Float8QKV:
        te, heads, qkv = rt.te, self.heads, self.qkv
        of_qkv, of_softmax, of_out = (quantizers.grad_output for quantizers in self.quantizers)
        memory, dqkv_at, dout_at, slots = self._allocate(rt)
        dout8 = _float8(rt, dout_at, heads.q, _Factors.of(of_out, slots[0], of_out.amax_ptr))
        _quantize(rt, dout8, heads.q_view(rt, dout), of_out, slots[0])
        results = _results(slots, of_softmax, of_qkv)
        dsoftmax = _float8(rt, 0, (0,), results[0])
        dqkv = Float8QKV(rt, heads, self.layout, memory, dqkv_at, results[1])
        tensors = qkv.q, qkv.k, qkv.v, self.out, dout8, self.stats, dqkv.q, dqkv.k, dqkv.v
        options = self.scale, self.layout, CAUSAL, rt.stream, 0.0, deterministic(), None, None, None, None
        run = partial(te.attention_bwd, *tensors, *options, self.softmax, dsoftmax)
        _run_with_amaxes(rt, run, results, (of_softmax, of_qkv), slots[0])
        return dqkv

    def _backward_in_16_bits(self, rt: Runtime, dout: Memory, grads: Views) -> None:
        heads, buffer = self.heads, self.heads.new_buffer(rt)
        out = rt.empty(heads.out, heads.dtype)
        rt.te.dequantize(self.qkv.whole, heads.whole_view(rt, buffer.data_ptr()), rt.stream)
        rt.te.dequantize(self.out, heads.q_view(rt, out), rt.stream)
        views = heads.views(rt, buffer.data_ptr(), self.layout)
        softmax = Softmax(self.scale, Sequences(causal=True))
        attend_backward(rt, heads, views, out, self.stats, dout, grads, softmax, self.layout)


def _results(slots: Sequence[int], first: Quantizer, second: Quantizer) -> tuple[_Factors, _Factors]:
    """Return the _Factors of a kernel's inner tensor and of its result. The kernel overwrites the slots' amaxes."""
    _, of_first, of_second = slots
    return _Factors.of(first, of_first, of_first), _Factors.of(second, of_second, of_second)


def _quantize(rt: Runtime, target: Any, source: Any, quantizer: Quantizer, slot: int) -> None:
    """Cast a native tensor in 16 bits to one in fp8, whose scale is computed in the slot in the first step."""
    factors = _Factors.of(quantizer, slot, slot)
    if quantizer.kind == "current":
        rt.te.compute_amax(source, _float8(rt, 0, (0,), factors), rt.stream)
        factors.set_scale(rt, slot)
    rt.te.quantize(source, target, rt.stream)
    if quantizer.statistics_ptr:
        form = Form(source.dtype, FP8[quantizer.dtype])
        sizes = math.prod(source.shape[:-1]), source.shape[-1]
        given = source.data_ptr, factors.scale_ptr, quantizer.statistics_ptr, *sizes, form
        statistics.of_cast(rt.te, rt.stream, *given)


def _run_with_amaxes(
    rt: Runtime,
    run: Callable[[], object],
    results: tuple[_Factors, _Factors],
    quantizers: tuple[Quantizer, Quantizer],
    amax: int,
) -> None:
    """Run a kernel and add its two results' amaxes to those of the quantizers.

    results: their _Factors, the inner tensor's first. amax: the address of an input's amax. In the first step it gives
    the scales to begin with. The first run then finds the amax of the inner tensor. The second run rounds that
    tensor rightly and finds the amax of the result.
    """
    if quantizers[0].kind == "current":
        for factors in results:
            factors.set_scale(rt, amax)
        for _ in results:
            run()
            for factors in results:
                factors.set_scale(rt, factors.amax_ptr)
    run()
    (first, second), (of_first, of_second) = results, quantizers
    scaling.raise_amaxes(rt.te, rt.stream, first.amax_ptr, of_first.amax_ptr, second.amax_ptr, of_second.amax_ptr)


def check_fp8_attention(head_dim: int, sequence: int = 16, backward: bool = True) -> None:
    """Raise ValueError where cuDNN has no fp8 attention for this GPU, head size and length; backward: in fp8 as well.

    As `nvte_get_fused_attn_backend` in TE's common/fused_attn/fused_attn.cpp, dot_product_attention/utils.py and
    cudnn-frontend's node/sdpa_fp8_bwd.h.
    """
    capability = runtime.current().stream.capability
    if not (9, 0) <= capability < (12, 0):
        where = "{}.{}".format(*capability)
        raise ValueError(f"fp8_dpa needs a GPU of compute capability 9.0 to 11, not {where}; leave fp8_dpa out")
    hopper = capability < (10, 0)
    greatest = 256 if hopper and not backward else 128
    if head_dim % 16 or head_dim > greatest or hopper and backward and head_dim != 128:
        sizes = f"multiples of 16 up to {greatest}"
        if hopper and backward:
            sizes = "128, and with fp8_dpa_bwd=False multiples of 16 up to 256"
        raise ValueError(f"fp8_dpa: heads have {head_dim} numbers; cuDNN's fp8 attention takes {sizes}")
    if backward and sequence % 16:  # seen with cuDNN 9.19: twice the error in dq, and no message
        raise ValueError(
            f"fp8_dpa: sequences of {sequence} tokens; cuDNN's fp8 backward is right for multiples of 16 only: pad "
            "them, or set fp8_dpa_bwd to False"
        )
    if backward and deterministic() and cudnn_version() < (9, 19):
        raise ValueError(
            "fp8_dpa with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0: cuDNN {}.{} has no deterministic backward in fp8, 9.19 "
            "has; update it, or set fp8_dpa_bwd to false".format(*cudnn_version())
        )
