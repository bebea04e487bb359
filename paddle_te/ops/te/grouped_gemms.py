"""Grouped GEMMs of Transformer Engine: where they are, and the three of a layer's experts.

Only the device knows how many rows each expert has. Memory has room for the greatest possible number, and the GEMMs
read the numbers on the device. So the host never waits, and one recorded program serves all batches.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, TypeAlias, cast

import paddle
from paddle import Tensor

from paddle_te import native
from paddle_te.fp8 import BlockScaling, GemmQuantizers, TensorScaling
from paddle_te.native import BackendUnavailable, choice, experts
from paddle_te.native.errors import Problem
from paddle_te.native.experts import Rows
from paddle_te.native.library import cublas_version
from paddle_te.ops.te import float8_experts, runtime
from paddle_te.ops.te.packing import SIZES
from paddle_te.ops.te.recording import Placeholder, RecordedQuantizers, Recorder
from paddle_te.ops.te.runtime import DTYPES, Matrix, Runtime
from paddle_te.ops.te.scaled_activation import ACTIVATIONS

# from here on Hopper has grouped GEMMs, in fp8, and in fp8 with block scaling
CUBLAS, CUBLAS_FP8, CUBLAS_BLOCK = (13, 4), (13, 5), (13, 6)
HOPPER = 9  # elsewhere they take factors for each expert
# From here on these corrupt data on newer GPUs. 13.10 computed even experts on an H200 as 13.6 does
# (benchmarks/layer/2026-11-28_h200x1_newer-libraries.md); uneven ones and other recipes than delayed were not tried.
FAULTY = (13, 7)
PIP = 'pip install "nvidia-cublas>=13.6.2,<13.7"'
REMEDY = (
    f"{PIP}; or keep it beside the other one: {PIP} --no-deps --target FOLDER, and start with "
    f"{choice.VARIABLE}=FOLDER/nvidia/cu13/lib"
)


def check_experts(activation: str = "swiglu") -> None:
    """Refuse what has no kernels, and libraries without grouped GEMMs."""
    native.load()
    version = cublas_version()
    problems: list[Problem] = []
    if not _has_grouped_gemms(version):
        problems.append(Problem(f"grouped GEMMs need cuBLAS 13.4 to 13.6, not {_present(version)}", REMEDY))
    capability = runtime.current().stream.capability
    if capability[0] != HOPPER:
        what = "grouped GEMMs are called as Hopper has them, not GPUs of compute capability {}.{}".format(*capability)
        problems.append(Problem(what, "use backend paddle"))
    if activation not in ACTIVATIONS:
        what = f"backend transformer_engine has no experts with activation {activation}"
        problems.append(Problem(what, "use backend paddle"))
    if problems:
        raise BackendUnavailable(problems)


def _has_grouped_gemms(version: tuple[int, ...]) -> bool:
    return CUBLAS <= version < FAULTY


def has_grouped_gemms(rt: Runtime) -> bool:
    """Say whether library and GPU have grouped GEMMs, as `check_experts` wants them."""
    return _has_grouped_gemms(cublas_version()) and rt.stream.capability[0] == HOPPER


def check_supported(activation: str) -> None:
    """Refuse an activation. Layers have asked `check_experts` before, which takes longer."""
    if activation not in ACTIVATIONS:
        check_experts(activation)


def check_fp8(quantizers: GemmQuantizers | None) -> None:
    """Raise where there are no grouped GEMMs with such quantizers."""
    if quantizers is None:
        return
    in_blocks = quantizers.input.kind == "block"
    needed = CUBLAS_BLOCK if in_blocks else CUBLAS_FP8
    if cublas_version() < needed:
        kind = "fp8 with block scaling" if in_blocks else "fp8"
        what = "grouped GEMMs in {} need cuBLAS {}.{}".format(kind, *needed)
        raise BackendUnavailable([Problem(f"{what}, not {_present(cublas_version())}", REMEDY)])


def _present(version: tuple[int, ...]) -> str:
    """Return the version of the loaded cuBLAS, and its places."""
    places = native.report().get("cublasLt", {"paths": []})["paths"]
    return "{}.{}".format(*version) + (f" ({', '.join(places)})" if places else "")


@cache
def _factors(place: str, alpha: float, beta: float) -> Tensor:
    return paddle.to_tensor([alpha, 0, 0, 0, beta, 0, 0, 0], "float32")


def factors(alpha: float = 1.0, beta: float = 0.0) -> int:
    """Return where a grouped GEMM finds alpha and, 16 bytes behind it, beta on the present device."""
    return _factors(str(paddle.framework._current_expected_place()), alpha, beta).data_ptr()


# what a grouped GEMM reads
Grouped: TypeAlias = Matrix | float8_experts.Operand | float8_experts.BlockOperand | float8_experts.StoredOperand


class Group(NamedTuple):
    """The rows of all experts.

    experts: number of experts. rows: number of rows that memory has room for. counts: address of each expert's number
    of rows. begins: {columns: address of the places where experts' rows begin in a matrix with so many columns}.
    """

    experts: int
    rows: int
    counts: int
    begins: dict[int, int]

    def _gemm(
        self,
        rt: Recorder,
        a: Grouped,
        b: Grouped,
        d: Matrix,
        transa: bool,
        transb: bool,
        accumulate: bool,
        backward: bool,
    ) -> None:
        offsets = [self.begins.get(matrix.shape[1], 0) for matrix in (a, b, d)]  # not read for weights
        exact = backward or isinstance(a, float8_experts.BlockOperand)
        of_sum = factors(beta=float(accumulate))
        given = transa, transb, self.experts, self.counts, *offsets, of_sum, rt.stream, accumulate, exact
        rt.te.grouped_gemm(a.native, b.native, d.native, *given, *map(float8_experts.scale_inv, (a, b)))

    def forward(self, rt: Recorder, x: Grouped, weight: Grouped, y: Matrix, accumulate: bool = False) -> None:
        """Compute y (+)= x · weightᵀ; weight [E · out, in]."""
        self._gemm(rt, weight, x, y, True, False, accumulate, False)

    def dgrad(self, rt: Recorder, dy: Grouped, weight: Grouped, dx: Matrix, accumulate: bool = False) -> None:
        """Compute dx (+)= dy · weight."""
        self._gemm(rt, weight, dy, dx, False, False, accumulate, True)

    def wgrad(self, rt: Recorder, x: Grouped, dy: Grouped, weight: Placeholder) -> Placeholder | None:
        """Return weight's gradient, or None where it is put into or added to its main_grad."""
        if weight.stop_gradient:
            return None
        main_grad, (_, out, in_) = weight.main_grad, weight.shape
        fused = main_grad is not None
        dw = rt.empty(weight.shape, weight.dtype) if main_grad is None else main_grad
        accumulate = fused and bool(weight.accumulate)
        self._gemm(rt, x, dy, rt.matrix(dw, DTYPES[dw.dtype]), False, True, accumulate, True)
        if not accumulate:  # GEMMs over no rows write nothing
            size = out * in_ * SIZES[dw.dtype]
            experts.zero_empty(rt.te, rt.stream, dw.data_ptr(), self.counts, self.experts, size)
        return None if fused else dw

    def of_rows(self, matrix: Matrix) -> Rows:
        """Return the experts.Rows of a Matrix that has these."""
        rows, columns = matrix.shape
        given = matrix.memory.data_ptr(), 0, self.begins[columns], rows
        return experts.Rows(*given, self.experts, self.rows, columns, self.counts)


def multiple_of(quantizers: RecordedQuantizers | None, otherwise: int) -> int:
    """Return what divides dimensions of GEMMs in fp8; without fp8 `otherwise`."""
    if quantizers is None:
        return otherwise
    return cast(TensorScaling | BlockScaling, quantizers.input.scaling).multiple


def dtype_of_weight(quantizers: RecordedQuantizers | None, x: Placeholder) -> Any:
    """Return the dtype of a weight beside x: of bytes where it exists in fp8 only."""
    return paddle.uint8 if quantizers is not None and quantizers.weight.kind == "stored" else x.dtype


def grouped_weight(
    rt: Recorder, weight: Placeholder, quantizers: RecordedQuantizers | None, code: int, train: bool
) -> Grouped:
    """Return a weight [E, out, in] as GEMMs read it."""
    if quantizers is None:
        return rt.matrix(weight, code)
    return float8_experts.quantized_weight(rt, weight, quantizers, code, train)
