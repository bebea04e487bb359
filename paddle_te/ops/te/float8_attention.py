"""Causal attention in fp8, as TE's DotProductAttention computes it with fp8_dpa and delayed scaling."""

import math
import os

import paddle

from paddle_te.native import Mask, scaling
from paddle_te.native.library import cudnn_version
from paddle_te.ops.te import runtime
from paddle_te.ops.te.quantized import FP8
from paddle_te.ops.te.runtime import FLOAT32

CAUSAL = int(Mask.CAUSAL)
AMAXES = 256  # bytes for two of them, with which memory for something else ends


def _float8(rt, address, shape, quantizer, amax=None):
    """A native tensor in fp8 under the quantizer's factors, or another amax; address 0: the factors alone."""
    factors = quantizer.scale_ptr, amax or quantizer.amax_ptr, quantizer.scale_inv_ptr
    return rt.tensor(address, shape, FP8[quantizer.dtype], 0, *factors)


class _QKV:
    """q, k and v, or their gradients, in fp8 under one scale, at an address: native, and `whole`, all three."""

    __slots__ = ("q", "k", "v", "whole")

    def __init__(self, rt, heads, layout, address, quantizer, amax=None):
        to_k, to_v = heads.starts[layout]
        self.q = _float8(rt, address, heads.q, quantizer, amax)
        self.k = _float8(rt, address + to_k, heads.kv, quantizer, amax)
        self.v = _float8(rt, address + to_v, heads.kv, quantizer, amax)
        self.whole = _float8(rt, address, (heads.tokens, heads.width), quantizer)

    def pairs(self, rt, heads, views):
        """[(fp8, 16-bit)] to be cast: views are of q, k and v, each in memory of its own, or the whole's alone."""
        return zip((self.q, self.k, self.v) if len(views) == 3 else (self.whole,), views, strict=True)


class Float8Attention:
    """One attention's forward and backward.

    Inside cuDNN's kernels the softmax is rounded to fp8 before it meets v, and its gradient before it meets q and k.
    quantizers: of (q, k, v together; the softmax; the output), with those of their gradients. The kernels write no
    scale_inv: those of the softmax, the output and their gradients come from the update of the scales. And they
    overwrite amax (dq, dk and dv together with their greatest), which must be the greatest of all micro-batches'.
    """

    def __init__(self, rt, heads, layout, scale, quantizers, stats=None):
        """heads: `attention._Heads`. stats: native, for the softmax's statistics; None: its own, for its backward."""
        self.heads, self.layout, self.scale, self.quantizers = heads, layout, scale, quantizers
        qkv, softmax, out = quantizers
        of_stats = heads.stats_bytes if stats is None else 0
        self.memory, qkv_at, out_at, self.amaxes = self._allocate(rt, of_stats)
        self.qkv = _QKV(rt, heads, layout, qkv_at, qkv.input)
        self.softmax = _float8(rt, 0, (0,), softmax.input, self.amaxes)
        self.out = _float8(rt, out_at, heads.q, out.input, self.amaxes + 4)
        self.stats = stats or rt.tensor(self.amaxes + AMAXES, heads.stats, FLOAT32)

    def _allocate(self, rt, more=0):
        """(memory, addresses in it of q, k and v in fp8, of the output, and of two amaxes with `more` bytes behind)."""
        heads = self.heads
        qkv, out = heads.tokens * heads.width, math.prod(heads.q)
        memory = rt.empty([qkv + out + AMAXES + more], paddle.uint8)
        address = memory.data_ptr()
        return memory, address, address + qkv, address + qkv + out

    def forward(self, rt, views, train):
        """out [b, s, h·d]; views: `_QKV.pairs`'."""
        te, heads, qkv = rt.te, self.heads, self.qkv
        for target, source in qkv.pairs(rt, heads, views):
            te.quantize(source, target, rt.stream)
        tensors = qkv.q, qkv.k, qkv.v, self.out, self.stats
        options = self.scale, self.layout, CAUSAL, train, rt.stream, 0.0, None, None, None
        te.attention_fwd(*tensors, *options, self.softmax)
        _, softmax, of_out = (quantizers.input for quantizers in self.quantizers)
        _raise_amaxes(rt, self.amaxes, softmax, of_out)
        out = rt.empty(heads.out, heads.dtype)
        te.dequantize(self.out, heads.q_view(rt, out), rt.stream)
        return out

    def backward(self, rt, dout, views):
        """Fills the gradients' views, which are as forward's."""
        te, heads, qkv = rt.te, self.heads, self.qkv
        of_qkv, of_softmax, of_out = (quantizers.grad_output for quantizers in self.quantizers)
        _memory, dqkv_at, dout_at, amaxes = self._allocate(rt)
        dout8 = _float8(rt, dout_at, heads.q, of_out)
        te.quantize(heads.q_view(rt, dout), dout8, rt.stream)
        dqkv = _QKV(rt, heads, self.layout, dqkv_at, of_qkv, amaxes + 4)
        tensors = qkv.q, qkv.k, qkv.v, self.out, dout8, self.stats, dqkv.q, dqkv.k, dqkv.v
        options = self.scale, self.layout, CAUSAL, rt.stream, 0.0, deterministic(), None, None, None, None
        te.attention_bwd(*tensors, *options, self.softmax, _float8(rt, 0, (0,), of_softmax, amaxes))
        _raise_amaxes(rt, amaxes, of_softmax, of_qkv)
        for source, target in dqkv.pairs(rt, heads, views):
            te.dequantize(source, target, rt.stream)


def _raise_amaxes(rt, amaxes, first, second):
    """Adds the two amaxes at that address to those of two quantizers."""
    scaling.raise_amaxes(rt.te, rt.stream, amaxes, first.amax_ptr, amaxes + 4, second.amax_ptr)


def deterministic():
    """TE's own switch: NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 asks cuDNN for a backward without atomics."""
    return os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"


def check_fp8_attention(head_dim, sequence=16, backward=True):
    """Raises ValueError where cuDNN has no fp8 attention for this GPU, head size and length; backward: in fp8 as well.

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


def has_fp8_backward(quantizers):
    """Whether attention with these quantizers, None for 16 bits, is in fp8 in backward too."""
    return quantizers is not None and quantizers[0].forward_pass.recipe.fp8_dpa_bwd
