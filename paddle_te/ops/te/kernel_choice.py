"""Choose where our kernels replace TE's functions, with the same bits. Tests and benchmarks replace these functions.

TE's slower functions compute the rest: geglu and its cast (Gemma), RMSNorm of a width that `rmsnorm.takes` does not
list (Gemma 3, Phi-4-mini), and norms behind a layer's halves, which are passes of their own. TE has no function for
norms of q and k with the rotation (`native.qk_norm`). They take heads of up to 512 numbers, with 1 + weight or without,
and refuse others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from paddle_te.native import experts, newton_schulz, rmsnorm
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


BLOCK_ROWS = 2048  # at least, of a symmetric product: a GEMM of as many rows and columns is a tile for almost each SM
GROUPED_MOST = 2048  # with more rows and columns a GEMM of one matrix fills a GPU


def newton_schulz_blocks(rows: int, columns: int) -> int:
    """Return how many block rows a symmetric product of a matrix is divided into, of which those below are mirrored.

    1: it is computed whole.
    """
    small, tile = min(rows, columns), newton_schulz.TILE
    if max(rows, columns) % tile:
        return 1
    return next((n for n in range(small // BLOCK_ROWS, 1, -1) if small % (n * tile) == 0), 1)


def groups_newton_schulz(count: int, rows: int, columns: int) -> bool:
    """Say whether the products of so many matrices are one grouped GEMM, which reads lines of 16 bytes."""
    return count > 1 and not (rows % 8 or columns % 8) and min(rows, columns) <= GROUPED_MOST
