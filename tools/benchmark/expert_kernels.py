"""Times this project's kernels for experts: placing rows, gathering them, casting them and weights, summing them up."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from paddle_te.native import casts
from tools.benchmark.expert_peers import ExpertDims
from tools.benchmark.kernels import Bench, Stopwatch, Target
from tools.benchmark.layer import free_memory
from tools.benchmark.peers import start_on_paddles

MULTIPLE = 16  # what divides an expert's rows


class Timed(NamedTuple):
    """A kernel's call, and the bytes that it reads and writes at least."""

    call: Callable[[], Any]
    bytes: int


class Kernels:
    """The calls for one layer; the experts of each token are drawn at random."""

    def __init__(self, bench: Any, dims: ExpertDims, seed: int) -> None:
        import paddle

        from paddle_te.native import experts

        self.bench, self.dims, self.experts = bench, dims, experts
        chosen = np.random.default_rng(seed).random((dims.tokens, dims.experts)).argsort(-1)[:, : dims.topk]
        routing_map = np.zeros((dims.tokens, dims.experts), bool)
        np.put_along_axis(routing_map, chosen, True, -1)
        rows = experts.most_rows(dims.tokens, dims.experts, dims.topk, MULTIPLE)
        self.sizes = experts.Sizes(dims.tokens, dims.experts, rows, MULTIPLE)
        self.map, self.probs = paddle.to_tensor(routing_map), paddle.rand([dims.tokens, dims.experts], "float32")
        shapes = {
            "int64": ([dims.experts], [3, dims.experts + 1]),
            "int32": ([dims.tokens, dims.experts], [rows]),
            "float32": ([rows],),
        }
        self.kept = [paddle.zeros(shape, dtype) for dtype, each in shapes.items() for shape in each]
        self.places = experts.Places(*(tensor.data_ptr() for tensor in self.kept))
        self.columns = dims.hidden, 2 * dims.ffn, dims.ffn
        self.x, self.rows = bench.random(dims.tokens, dims.hidden), bench.random(rows, dims.hidden)
        self.out = paddle.empty_like(self.x)
        self.place()

    def place(self) -> None:
        """Place the rows."""
        given = self.map.data_ptr(), self.probs.data_ptr(), self.places, self.sizes, self.columns
        self.experts.place(self.bench.te, self.bench.stream, *given)

    def of_tokens(self) -> Any:
        """Return the experts.Rows of the tokens."""
        dims, places = self.dims, self.places
        given = self.x.data_ptr(), places.token_of, places.offsets, dims.tokens
        return self.experts.Rows(*given, dims.experts, self.sizes.rows, dims.hidden, places.counts)

    def cast(self, rows: Any, target: Target, scales: Any) -> Timed:
        """Return the cast of Rows to fp8 with transposed copies."""
        bench = self.bench
        of_experts = self.experts.ExpertsTarget(target.cast, scales.data_ptr())
        given = rows, of_experts, casts.Form(bench.dtype, bench.e4m3)
        read = rows.tokens if rows.token_of else rows.rows
        moved = 2 * read * rows.columns + 2 * rows.rows * rows.columns
        return Timed(lambda: self.experts.cast_transpose(bench.te, bench.stream, *given), moved)

    def activations(self) -> dict[str, Timed]:
        """Return SwiGLU of fc1's output and its gradient, each cast in the same pass, and behind the library's own."""
        import paddle

        bench, experts, rows, ffn = self.bench, self.experts, self.sizes.rows, self.dims.ffn
        te, stream, e4m3 = bench.te, bench.stream, bench.e4m3
        z, dact, act, dz = (bench.random(rows, n) for n in (2 * ffn, ffn, ffn, 2 * ffn))
        scales, sums = paddle.empty([self.dims.experts], "float32"), paddle.empty([rows], "float32")
        shares = paddle.empty([rows, experts.shares_of_row(ffn, bench.dtype)], "float32")
        targets = [Target(bench, (rows, n), e4m3) for n in (ffn, 2 * ffn)]
        self.kept += [z, dact, act, dz, scales, sums, shares, *targets]
        places = self.places.prob_of, sums.data_ptr()
        prob_of, dprob_of = (te.Tensor(at, (rows,), int(bench.float32)) for at in places)
        of_z, form = self.of_rows(z, 2)._replace(columns=ffn), casts.Form(bench.dtype, e4m3)
        written = [experts.ExpertsTarget(target.cast, scales.data_ptr(), shares.data_ptr()) for target in targets]
        forward, backward = ((of_z, self.places.prob_of, target, form) for target in written)
        cast_act, cast_dz = (
            self.cast(self.of_rows(*x), y, scales) for x, y in zip(((act, 2), (dz, 1)), targets, strict=True)
        )

        def gradient() -> None:
            experts.dswiglu_cast_transpose(te, stream, dact.data_ptr(), *backward)
            experts.row_sums(te, stream, shares.data_ptr(), sums.data_ptr(), *shares.shape)

        def library() -> None:
            te.scaled_swiglu(bench.native(z), prob_of, bench.native(act), stream)
            cast_act.call()

        def librarys_gradient() -> None:
            te.scaled_dswiglu(bench.native(dact), bench.native(z), prob_of, bench.native(dz), dprob_of, stream)
            cast_dz.call()

        return {
            "SwiGLU, cast in passing": Timed(
                lambda: experts.swiglu_cast_transpose(te, stream, *forward), 6 * rows * ffn
            ),
            "SwiGLU, the library's, then a cast": Timed(library, 6 * rows * ffn),
            "its gradient, cast in passing": Timed(gradient, 10 * rows * ffn),
            "its gradient, the library's, then a cast": Timed(librarys_gradient, 10 * rows * ffn),
        }

    def of_rows(self, x: Any, width: int) -> Any:
        """Return the experts.Rows of x [rows, columns]; width: the place of the columns in `columns`."""
        begins, columns = self.places.offsets + 8 * (self.dims.experts + 1) * width, x.shape[1]
        given = x.data_ptr(), 0, begins, self.sizes.rows, self.dims.experts, self.sizes.rows, columns
        return self.experts.Rows(*given, self.places.counts)

    def all(self) -> dict[str, Timed]:
        """Return each kernel's Timed."""
        import paddle

        bench, dims, experts, places = self.bench, self.dims, self.experts, self.places
        tokens, hidden, rows = dims.tokens, dims.hidden, self.sizes.rows
        scales, address = paddle.empty([dims.experts], "float32"), self.rows.data_ptr()
        out = address, self.map.data_ptr(), places, self.x.data_ptr(), self.out.data_ptr(), self.sizes, hidden
        weight = bench.random(dims.experts * 2 * dims.ffn, hidden)
        of_weight = experts.Rows.of_weight(weight.data_ptr(), dims.experts, dims.experts * 2 * dims.ffn, hidden)
        targets = [Target(bench, shape, bench.e4m3) for shape in ([rows, hidden], weight.shape)]
        self.kept += [scales, weight, *targets]
        gathered = 2 * (tokens + rows) * hidden
        return {
            "place": Timed(self.place, tokens * dims.experts * (2 + 4) + rows * 8),
            "gather": Timed(
                lambda: experts.gather(bench.te, bench.stream, self.of_tokens(), address, bench.dtype), gathered
            ),
            "gather and cast": self.cast(self.of_tokens(), targets[0], scales),
            "cast of fc1's weight": self.cast(of_weight, targets[1], scales),
            "combine": Timed(
                lambda: experts.combine(bench.te, bench.stream, *out, bench.dtype), gathered + 2 * tokens * hidden
            ),
        } | self.activations()


def measure(arguments: argparse.Namespace, dims: ExpertDims) -> dict[str, dict[str, Any]]:
    """Return {kernel: {"us", "bytes", "copy_us"}}; copy_us: of a copy that moves as many bytes."""
    _, raw_stream, _ = start_on_paddles(arguments.device)
    bench, found = Bench(), {}
    watch = Stopwatch(bench, raw_stream, arguments)
    kernels = Kernels(bench, dims, arguments.seed)
    for name, timed in kernels.all().items():
        row = {"us": watch.microseconds(timed.call), "bytes": timed.bytes, "copy_us": watch.copy(timed.bytes)}
        found[name] = row
        print(" | ".join(table_cells(name, row)), flush=True)
    del kernels, timed
    free_memory()
    return found


def table_cells(name: str, row: dict[str, Any]) -> list[str]:
    """Return the cells of one kernel."""
    speed, share = row["bytes"] / row["us"] / 1e6, row["copy_us"] / row["us"]
    return [name, f"{row['us']:.1f}", f"{speed:.2f}", f"{share:.0%}"]


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of `measure`'s results."""
    if not found:
        return []
    header = ["kernel", "µs", "TB/s", "of a copy"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return lines + ["| " + " | ".join(table_cells(name, row)) + " |" for name, row in found.items()] + [""]
