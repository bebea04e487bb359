"""Times the grouped GEMMs of a layer of experts beside dense GEMMs of the same FLOP."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tools.benchmark.expert_peers import ExpertDims
from tools.benchmark.kernels import Bench, Stopwatch, Target
from tools.benchmark.layer import free_memory
from tools.benchmark.peers import start_on_paddles

PRECISIONS = ("bf16", "fp8")
ROWS = ("even", "uneven")


class Shape(NamedTuple):
    """y[rows, out] = x[rows, in_] · weight[out, in_]ᵀ of each expert."""

    rows: int
    in_: int
    out: int


class Pair(NamedTuple):
    """Calls of one GEMM."""

    grouped: Callable[[], Any]
    dense: Callable[[], Any]


def counts_of(dims: ExpertDims, rows: str, seed: int) -> np.ndarray:
    """Return the experts' rows, int64, multiples of 16: all alike, or drawn from a Dirichlet distribution (2)."""
    shares = np.full(dims.experts, 1 / dims.experts)
    if rows == "uneven":
        shares = np.random.default_rng(seed).dirichlet(np.full(dims.experts, 2.0))
    counts = (shares * dims.rows // 16 * 16).astype(np.int64)
    counts[counts.argmax()] += dims.rows - counts.sum()
    return counts


class Operands:
    """The matrices of one linear layer of all experts, in bf16 or cast to fp8 (with transposed copies of the whole: a
    grouped GEMM reads as many bytes of as many numbers)."""

    def __init__(self, bench: Any, dims: ExpertDims, shape: Shape, precision: str, counts: np.ndarray) -> None:
        import paddle

        from paddle_te.ops.te.grouped_gemms import factors

        self.bench, self.dims, self.shape, self.precision = bench, dims, shape, precision
        rows, in_, out = shape
        self.kept: list[Any] = []
        self.x, self.dy = self._matrix(rows, in_, bench.e4m3), self._matrix(rows, out, bench.e5m2)
        self.weight, self.one_weight = (self._matrix(n * out, in_, bench.e4m3) for n in (dims.experts, 1))
        self.y, self.dx, self.dw, self.one_dw = (
            self._result(*sizes) for sizes in ((rows, out), (rows, in_), (dims.experts * out, in_), (out, in_))
        )
        begins = np.concatenate([[0], counts.cumsum()])
        self.counts = paddle.to_tensor(counts)
        self.begins = {columns: paddle.to_tensor(begins * columns) for columns in {in_, out}}
        self.scale_inv, self.factors = paddle.full([dims.experts], 0.1, "float32"), factors()

    def _matrix(self, rows: int, columns: int, float8: int) -> Any:
        x = self.bench.random(rows, columns)
        if self.precision == "bf16":
            self.kept.append(x)
            return self.bench.native(x)
        target = Target(self.bench, (rows, columns), float8)
        self.bench.te.quantize(self.bench.native(x), target.native, self.bench.stream)
        self.kept.append(target)
        return target.native

    def _result(self, rows: int, columns: int) -> Any:
        import paddle

        self.kept.append(paddle.empty([rows, columns], "bfloat16"))
        return self.bench.native(self.kept[-1])

    def _grouped(self, a: Any, b: Any, d: Any, transa: bool, transb: bool, columns: tuple[int, int, int]) -> Any:
        te, stream = self.bench.te, self.bench.stream
        offsets = [self.begins[count].data_ptr() for count in columns]
        scales = [0 if self.precision == "bf16" else self.scale_inv.data_ptr()] * 2
        counts, experts, split = self.counts.data_ptr(), self.dims.experts, not transa
        return lambda: te.grouped_gemm(
            a, b, d, transa, transb, experts, counts, *offsets, self.factors, stream, False, split, *scales
        )

    def _dense(self, a: Any, b: Any, d: Any, transa: bool, transb: bool) -> Any:
        te, stream = self.bench.te, self.bench.stream
        return lambda: te.gemm(a, b, d, transa, transb, stream, False, not transa)

    def pairs(self) -> Iterator[tuple[str, Pair]]:
        """Yield each GEMM's name and calls."""
        _, in_, out = self.shape
        grouped, dense = self._grouped, self._dense
        yield (
            "fprop",
            Pair(
                grouped(self.weight, self.x, self.y, True, False, (in_, in_, out)),
                dense(self.one_weight, self.x, self.y, True, False),
            ),
        )
        yield (
            "dgrad",
            Pair(
                grouped(self.weight, self.dy, self.dx, False, False, (in_, out, in_)),
                dense(self.one_weight, self.dy, self.dx, False, False),
            ),
        )
        yield (
            "wgrad",
            Pair(
                grouped(self.x, self.dy, self.dw, False, True, (in_, out, in_)),
                dense(self.x, self.dy, self.one_dw, False, True),
            ),
        )


def shapes_of(dims: ExpertDims) -> dict[str, Shape]:
    """Return the Shapes of both linear layers."""
    return {"fc1": Shape(dims.rows, dims.hidden, 2 * dims.ffn), "fc2": Shape(dims.rows, dims.ffn, dims.hidden)}


def measure(arguments: argparse.Namespace, dims: ExpertDims) -> dict[str, dict[str, Any]]:
    """Return {"fc1 fprop, bf16, even": row} of all GEMMs; row: its microseconds, grouped and dense, and its FLOP."""
    from paddle_te.ops.te.grouped_gemms import check_experts

    _, raw_stream, _ = start_on_paddles(arguments.device)
    check_experts()
    bench, found = Bench(), {}
    watch = Stopwatch(bench, raw_stream, arguments)
    for layer, shape in shapes_of(dims).items():
        for precision in PRECISIONS:
            for rows in ROWS:
                operands = Operands(bench, dims, shape, precision, counts_of(dims, rows, arguments.seed))
                for gemm, pair in operands.pairs():
                    row = {"flops": 2 * shape.rows * shape.in_ * shape.out}
                    row |= {"grouped_us": watch.microseconds(pair.grouped), "dense_us": watch.microseconds(pair.dense)}
                    found[f"{layer} {gemm}, {precision}, {rows}"] = row
                    print(" | ".join(table_cells(f"{layer} {gemm}, {precision}, {rows}", row)), flush=True)
                del operands, pair
                free_memory()
    return found


def table_cells(name: str, row: dict[str, Any]) -> list[str]:
    """Return the cells of one GEMM."""
    speeds = [row["flops"] / row[f"{kind}_us"] / 1e6 for kind in ("grouped", "dense")]
    times = [f"{row[f'{kind}_us'] / 1e3:.3f}" for kind in ("grouped", "dense")]
    return [name, *times, *(f"{speed:.0f}" for speed in speeds), f"{speeds[0] / speeds[1]:.2f}"]


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of `measure`'s results."""
    if not found:
        return []
    header = ["GEMM", "ms", "dense", "TFLOP/s", "dense", "of dense"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return lines + ["| " + " | ".join(table_cells(name, row)) + " |" for name, row in found.items()] + [""]
