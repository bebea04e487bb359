"""Choose where our kernels replace TE's functions, with the same bits. Tests and benchmarks replace these functions.

TE's slower functions compute the rest: geglu and its cast (Gemma), RMSNorm of a width that `rmsnorm.takes` does not
list (Gemma 3, Phi-4-mini), and norms behind a layer's halves, which are passes of their own. TE has no function for
norms of q and k with the rotation (`native.qk_norm`). They take heads of up to 512 numbers, with 1 + weight or without,
and refuse others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from paddle_te.native import experts, rmsnorm
from paddle_te.ops.te.recording import RecordedQuantizer
from paddle_te.ops.te.runtime import Runtime

BLACKWELL = (10, 0)  # from here on TE's functions compute the sigmoid differently, and are fast enough
ONE_SCALE = ("delayed", "current")  # kinds of quantizers with one scale for each tensor


def swiglu(rt: Runtime, activation: str, quantizer: RecordedQuantizer) -> bool:
    """Say whether SwiGLU, or its gradient, is computed and cast in one pass."""
    return activation == "swiglu" and quantizer.kind in ONE_SCALE and rt.stream.capability < BLACKWELL


def swiglu_of_stored(rt: Runtime, activation: str, shape: Sequence[int]) -> bool:
    """Say whether SwiGLU, or its gradient, is computed with its input stored or read in MXFP8 in one pass.

    shape: (rows, columns) of the result.
    """
    return activation == "swiglu" and not any(n % 16 for n in shape) and rt.stream.capability < BLACKWELL


def experts_swiglu(quantizer: RecordedQuantizer, activation: str, columns: int, code: int) -> bool:
    """Say whether SwiGLU of experts, or its gradient, is computed and cast in one pass. columns: of the result's."""
    return activation == "swiglu" and quantizer.kind in ONE_SCALE and experts.shares_of_row(columns, code) > 0


def cast() -> bool:
    """Say whether our kernel casts what has one scale."""
    return True


def rotation_cast(quantizer: RecordedQuantizer) -> bool:
    """Say whether q, k and v are cast to fp8 in the pass that norms and rotates q and k. quantizer: theirs."""
    return quantizer.kind == "delayed" and quantizer.dtype == "e4m3"


def norm(rt: Runtime, hidden: int, code: int, quantizer: RecordedQuantizer) -> bool:
    """Say whether RMSNorm is computed and cast in one pass behind a pass for the rows' statistics.

    code: its dtype.
    """
    by_cudnn = os.environ.get("NVTE_NORM_FWD_USE_CUDNN") == "1"  # TE's switch, under which its bits are others
    return (
        quantizer.kind in ONE_SCALE
        and rmsnorm.takes(hidden, code)
        and rt.stream.capability < BLACKWELL
        and not by_cudnn
    )
