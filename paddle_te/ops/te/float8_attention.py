"""Causal attention in fp8, as TE's DotProductAttention computes it with fp8_dpa and delayed scaling."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import paddle

from paddle_te.native import Mask, scaling, statistics
from paddle_te.native.casts import Form
from paddle_te.native.library import cudnn_version
from paddle_te.ops.te import runtime
from paddle_te.ops.te.quantized import FP8
from paddle_te.ops.te.runtime import FLOAT32, Memory, Runtime

CAUSAL = int(Mask.CAUSAL)
SLOT = 32  # bytes of an amax, a scale and a scale_inv, which begins at 16
SLOTS = 256  # bytes for three slots, with which memory for something else ends


class Quantizer(Protocol):
    """A `fp8` Quantizer, or what stands for one while an op is recorded."""

    @property
    def kind(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def scale_ptr(self) -> int: ...
    @property
    def amax_ptr(self) -> int: ...
    @property
    def scale_inv_ptr(self) -> int: ...
    @property
    def statistics_ptr(self) -> int: ...


class QuantizersOfOne(Protocol):
    """The quantizers of a tensor and of its gradient."""

    @property
    def input(self) -> Quantizer: ...
    @property
    def grad_output(self) -> Quantizer: ...


class Sizes(Protocol):
    """The part of `core_attention.AttentionSizes` that this file reads."""

    q: tuple[int, ...]
    kv: tuple[int, ...]
    stats: tuple[int, ...]
    out: list[int]
    tokens: int
    width: int
    dtype: Any
    starts: dict[int, tuple[int, int]]
    stats_bytes: int

    def q_view(self, rt: Runtime, tensor: Memory) -> Any: ...


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
    """q, k and v, or their gradients, in fp8 under one scale, at an address: native, and `whole`, all three."""

    __slots__ = ("q", "k", "v", "whole", "factors")

    def __init__(self, rt: Runtime, heads: Sizes, layout: int, address: int, factors: _Factors) -> None:
        self.factors = factors
        to_k, to_v = heads.starts[layout]
        self.q = _float8(rt, address, heads.q, factors)
        self.k = _float8(rt, address + to_k, heads.kv, factors)
        self.v = _float8(rt, address + to_v, heads.kv, factors)
        self.whole = _float8(rt, address, (heads.tokens, heads.width), factors)

    def pairs(self, rt: Runtime, heads: Sizes, views: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
        """Return [(fp8, 16-bit)] to be cast: views are of q, k and v, each in memory of its own, or of the whole."""
        return zip((self.q, self.k, self.v) if len(views) == 3 else (self.whole,), views, strict=True)


class Float8Attention:
    """One attention's forward and backward.

    cuDNN's kernels round the softmax to fp8 before it multiplies v, and its gradient before it multiplies q and k.
    They write no scale_inv: for the softmax, the output and their gradients it comes from the update of the scales.
    They overwrite amax, for dq, dk and dv together, although it must be the greatest of all micro-batches. So the
    kernels write to slots, and the slots are added to the quantizers' amax.

    quantizers: for q, k and v together, for the softmax, and for the output, each also for the gradient.

    In the first step (quantizers of kind "current") there are no scales yet. Scales of q, k and v and of the output's
    gradient come from these tensors. Scales of the numbers that a kernel rounds come from the kernel's amaxes, so it
    runs until they are known.
    """

    def __init__(
        self,
        rt: Runtime,
        heads: Sizes,
        layout: int,
        scale: float,
        quantizers: Sequence[QuantizersOfOne],
        stats: Any = None,
    ) -> None:
        """Allocate what forward keeps. stats: native, for the softmax's statistics; None: its own, for its backward."""
        self.heads, self.layout, self.scale, self.quantizers = heads, layout, scale, quantizers
        qkv, softmax, out = (of_one.input for of_one in quantizers)
        of_stats = heads.stats_bytes if stats is None else 0
        self.memory, qkv_at, out_at, self.slots = self._allocate(rt, of_stats)
        self.results = _results(self.slots, softmax, out)
        self.qkv = Float8QKV(rt, heads, layout, qkv_at, _Factors.of(qkv, self.slots[0], qkv.amax_ptr))
        self.softmax = _float8(rt, 0, (0,), self.results[0])
        self.out = _float8(rt, out_at, heads.q, self.results[1])
        self.stats = stats or rt.tensor(self.slots[0] + SLOTS, heads.stats, FLOAT32)

    def _allocate(self, rt: Runtime, more: int = 0) -> tuple[Any, int, int, tuple[int, int, int]]:
        """Return (memory, addresses in it of q, k and v in fp8, the output, and three slots); `more`: bytes behind."""
        heads = self.heads
        qkv, out = heads.tokens * heads.width, math.prod(heads.q)
        memory = rt.empty([qkv + out + SLOTS + more], paddle.uint8)
        address = memory.data_ptr()
        slots = address + qkv + out
        return memory, address, address + qkv, (slots, slots + SLOT, slots + 2 * SLOT)

    def forward(self, rt: Runtime, views: Sequence[Any] | None, train: bool) -> Any:
        """Return out [b, s, h·d]; views: `Float8QKV.pairs`', None where q, k and v are in fp8 already."""
        te, heads, qkv = rt.te, self.heads, self.qkv
        of_qkv, softmax, of_out = (quantizers.input for quantizers in self.quantizers)
        if views is not None:
            _quantize(rt, [*qkv.pairs(rt, heads, views)], of_qkv, self.slots)
        tensors = qkv.q, qkv.k, qkv.v, self.out, self.stats
        options = self.scale, self.layout, CAUSAL, train, rt.stream, 0.0, None, None, None
        run = partial(te.attention_fwd, *tensors, *options, self.softmax)
        _run_with_amaxes(rt, run, self.results, (softmax, of_out), self.slots[0])
        out = rt.empty(heads.out, heads.dtype)
        te.dequantize(self.out, heads.q_view(rt, out), rt.stream)
        return out

    def backward(self, rt: Runtime, dout: Any, views: Sequence[Any]) -> None:
        """Fill the gradients. views: theirs, in the form of forward's."""
        te, heads, qkv = rt.te, self.heads, self.qkv
        of_qkv, of_softmax, of_out = (quantizers.grad_output for quantizers in self.quantizers)
        _memory, dqkv_at, dout_at, slots = self._allocate(rt)
        dout8 = _float8(rt, dout_at, heads.q, _Factors.of(of_out, slots[0], of_out.amax_ptr))
        _quantize(rt, [(dout8, heads.q_view(rt, dout))], of_out, slots)
        results = _results(slots, of_softmax, of_qkv)
        dsoftmax, dqkv = _float8(rt, 0, (0,), results[0]), Float8QKV(rt, heads, self.layout, dqkv_at, results[1])
        tensors = qkv.q, qkv.k, qkv.v, self.out, dout8, self.stats, dqkv.q, dqkv.k, dqkv.v
        options = self.scale, self.layout, CAUSAL, rt.stream, 0.0, deterministic(), None, None, None, None
        run = partial(te.attention_bwd, *tensors, *options, self.softmax, dsoftmax)
        _run_with_amaxes(rt, run, results, (of_softmax, of_qkv), slots[0])
        for source, target in dqkv.pairs(rt, heads, views):
            te.dequantize(source, target, rt.stream)


def _results(slots: Sequence[int], first: Quantizer, second: Quantizer) -> tuple[_Factors, _Factors]:
    """Return the _Factors of a kernel's inner tensor and of its result. The kernel overwrites the slots' amaxes."""
    _, of_first, of_second = slots
    return _Factors.of(first, of_first, of_first), _Factors.of(second, of_second, of_second)


def _quantize(rt: Runtime, pairs: Sequence[tuple[Any, Any]], quantizer: Quantizer, slots: Sequence[int]) -> None:
    """Cast [(fp8, 16-bit)], one pair or three, under one scale; in the first step it is computed in slots[0]."""
    if quantizer.kind == "current":
        of_each = [_Factors.of(quantizer, slot, slot) for slot in slots]
        for (_, source), factors in zip(pairs, of_each, strict=False):
            rt.te.compute_amax(source, _float8(rt, 0, (0,), factors), rt.stream)
        if len(pairs) > 1:
            scaling.raise_amaxes(rt.te, rt.stream, slots[1], slots[0], slots[2], slots[0])
        of_each[0].set_scale(rt, slots[0])
    for target, source in pairs:
        rt.te.quantize(source, target, rt.stream)
    if quantizer.statistics_ptr:
        _count(rt, [source for _, source in pairs], _Factors.of(quantizer, slots[0], slots[0]), quantizer)


def _count(rt: Runtime, sources: Iterable[Any], factors: _Factors, quantizer: Quantizer) -> None:
    """Add 16-bit tensors that were cast under one scale to a step's statistics."""
    for source in sources:
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


def deterministic() -> bool:
    """Read TE's own switch: NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 asks cuDNN for a backward without atomics."""
    return os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"


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
