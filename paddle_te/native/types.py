"""Enumerations of Transformer Engine 2.20's C headers, as far as they are used (checked by tests/unit/native)."""

from enum import IntEnum


class DType(IntEnum):
    """`NVTEDType` (transformer_engine.h)."""

    BYTE = 0
    INT32 = 2
    INT64 = 3
    FLOAT32 = 4
    FLOAT16 = 5
    BFLOAT16 = 6
    FLOAT8_E4M3 = 7
    FLOAT8_E5M2 = 8


class ScalingMode(IntEnum):
    """`NVTEScalingMode` (transformer_engine.h): how many numbers of a tensor share a scale."""

    DELAYED_TENSOR_SCALING = 0  # all; unquantized tensors too
    BLOCK_SCALING_1D = 2  # 1 x 128 along the dimension that a GEMM sums over
    BLOCK_SCALING_2D = 3  # 128 x 128


class QKVLayout(IntEnum):
    """`NVTE_QKV_Layout` (fused_attn.h). b batch, s sequence, t tokens of all sequences, h heads, d head size."""

    BS3HD = 5  # one buffer [b, s, 3, h, d]
    BSHD_BSHD_BSHD = 9  # three buffers [b, s, h, d]
    T3HD = 10  # one buffer [t, 3, h, d]; cu_seqlens say where sequences begin
    THD_THD_THD = 14  # three buffers [t, h, d]


class Mask(IntEnum):
    """`NVTE_Mask_Type` (fused_attn.h)."""

    NONE = 0
    PADDING = 1
    CAUSAL = 2
    PADDING_CAUSAL = 3
