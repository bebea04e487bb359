"""Times this project's kernels that cast to fp8 in turn with Transformer Engine's functions. Compares the bits of both.

    python tools/benchmark/kernels.py [--sizes 8b 7b 1b] [--functions norm ...] [--quick]

Writes benchmarks/kernels/<date>_<gpu>x<n>_<what>.json and a table of the same name. --tilings times our kernels with
other tilings as well, which are chosen in paddle_te/native.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from tools.benchmark import report, timing  # noqa: E402
from tools.benchmark.layer import free_memory  # noqa: E402
from tools.benchmark.peers import start_on_paddles  # noqa: E402

DEFINITIONS = [
    "Each function again and again on data that lies in the GPU's memory, by events on Paddle's stream; median of a "
    "round's calls, then of the rounds. Before a round the GPU is given other work, so that it never waits for the "
    "host.",
    "TB/s: of the bytes that inputs and results take, counted once, and twice for inputs that current scaling reads "
    "twice; the library's functions move more. Of a copy: of the speed at which a copy of as many bytes runs.",
    "Bits: whether data, transposed copy, amax and scale_inv equal the library's, and the copy of the residual x.",
]
BUSY = 1 << 31  # bytes that are set before a round


class Size(NamedTuple):
    """tokens of a micro-batch, and a layer's sizes."""

    tokens: int
    hidden: int
    ffn: int


SIZES = {
    "8b": Size(8192, 4096, 14336),  # Llama-3-8B
    "7b": Size(4096, 4096, 11008),  # Llama-2-7B
    "1b": Size(8192, 2048, 8192),  # Llama-3.2-1B
    "tiny": Size(48, 512, 80),  # to try this program out
}


class Target:
    """An fp8 matrix with its transposed copy: `native` for TE's functions, `cast` for our kernels. copy: a tensor that
    is written beside it, or None."""

    copy = None

    def __init__(self, bench, shape, float8):
        import paddle

        from paddle_te.native.casts import CastTarget

        rows, cols = shape
        self.data, self.transposed = paddle.full([rows, cols], 0x55, "uint8"), paddle.full([cols, rows], 0x55, "uint8")
        self.factors = paddle.to_tensor([0.37, 0, 0, 0, 0], "float32")  # scale, amax, two unused, scale_inv
        self.scale, self.amax, _, _, self.scale_inv = (self.factors.data_ptr() + 4 * i for i in range(5))
        addresses = self.data.data_ptr(), self.transposed.data_ptr(), self.scale, self.amax, self.scale_inv
        self.cast = CastTarget(*addresses)
        data, *others = addresses
        self.native = bench.rt.te.Tensor(data, tuple(shape), int(float8), *others)

    def numbers(self):
        copy = [] if self.copy is None else [self.copy.view("int16")]
        return [tensor.numpy() for tensor in (self.data, self.transposed, self.factors, *copy)]


class Case(NamedTuple):
    """One function at one size: calls that fill the targets `want` and `got`.

    inputs, outputs: bytes that are read and written, each once.
    """

    inputs: int
    outputs: int
    library: Callable
    ours: Callable
    want: Target
    got: Target

    def bytes(self, scaling):
        return (2 if scaling == "current" else 1) * self.inputs + self.outputs


class Bench:
    """What the cases are made of: tensors on the device, te and its stream."""

    def __init__(self):
        from paddle_te.native import DType
        from paddle_te.ops.te import runtime

        self.rt = runtime.current()
        self.te, self.stream, self.dtype = self.rt.te, self.rt.stream, int(DType.BFLOAT16)
        self.float32 = DType.FLOAT32
        self.e4m3, self.e5m2 = int(DType.FLOAT8_E4M3), int(DType.FLOAT8_E5M2)

    def random(self, *shape):
        import paddle

        return paddle.randn(list(shape)).astype("bfloat16")

    def native(self, tensor, shape=None):
        return self.te.Tensor(tensor.data_ptr(), tuple(shape or tensor.shape), self.dtype)

    def by_library(self, scaling, target, compute, stored, in_one=None):
        """The library's way to `target`: in_one where a function casts what it computes, else `compute`, which fills
        the Matrix `stored`, and a cast of that."""
        te, stream = self.te, self.stream

        def run():
            if scaling == "delayed" and in_one:
                return in_one()
            compute()
            if scaling == "current":
                te.compute_amax(stored, target.native, stream)
                te.compute_scale_from_amax(target.native, stream)
            te.quantize(stored, target.native, stream)

        return run

    def by_ours(self, scaling, target, cast):
        """Ours: cast(CastTarget), twice with current scaling, as `CurrentMatrix.fill_by` calls it."""
        te, stream = self.te, self.stream

        def run():
            if scaling == "current":
                te.memset_async(target.amax, 0, 4, stream)
                cast(target.cast.only_amax(target.amax))
                te.compute_scale_from_amax(target.native, stream)
            cast(target.cast)

        return run

    def case(self, scaling, shape, float8, inputs, compute, stored, cast, in_one=None):
        """in_one, cast: functions of a Target and of a CastTarget."""
        want, got = (Target(self, shape, float8) for _ in range(2))
        library = self.by_library(scaling, want, compute, stored, in_one and (lambda: in_one(want)))
        ours = self.by_ours(scaling, got, cast)
        return Case(inputs, 2 * shape[0] * shape[1], library, ours, want, got)


def _cast(bench, shape, float8, scaling):
    from paddle_te.native import casts

    x = bench.random(*shape)
    stored = bench.native(x)
    addresses = bench.te, bench.stream, x.data_ptr()

    def cast(target):
        if target.data:
            casts.cast_transpose(*addresses, target, *shape, bench.dtype, float8)
        else:  # the library's amax
            bench.te.compute_amax(stored, case.got.native, bench.stream)

    case = bench.case(scaling, shape, float8, x.size * 2, lambda kept=x: None, stored, cast)
    return case


def norm(bench, size, scaling, copies=False):
    """copies: a copy of x is written, too, by the library's way with a memcpy."""
    import paddle

    from paddle_te.native import rmsnorm

    te, stream, shape = bench.te, bench.stream, (size.tokens, size.hidden)
    x, gamma, normed = bench.random(*shape), bench.random(size.hidden), paddle.empty(list(shape), "bfloat16")
    # each way has statistics of its own, which lie in one tensor
    rsigma = paddle.empty([2, size.tokens], "float32")
    addresses, epsilon = (x.data_ptr(), gamma.data_ptr(), rsigma.data_ptr() + 4 * size.tokens), 1e-5
    ours = rmsnorm.RMSNorm(*addresses, *shape, bench.dtype, epsilon, zero_centered=False)
    statistics = te.Tensor(rsigma.data_ptr(), (size.tokens,), int(bench.float32))
    inputs, stored = (bench.native(x), bench.native(gamma)), bench.native(normed)

    def compute(kept=normed):
        te.rmsnorm_fwd(*inputs, epsilon, stored, statistics, stream)

    def in_one(target):
        te.rmsnorm_fwd(*inputs, epsilon, target.native, statistics, stream)

    def cast(target, kept=(x, gamma, rsigma)):
        if scaling == "delayed" or not target.data:
            amax = 0 if target.data else target.amax
            copy = case.got.copy.data_ptr() if copies else 0
            rmsnorm.statistics(te, stream, ours, amax, copy)
        if target.data:
            rmsnorm.cast_transpose(te, stream, ours, target, bench.e4m3, scaling == "current")

    case = bench.case(scaling, shape, bench.e4m3, x.size * 2, compute, stored, cast, in_one)
    if not copies:
        return case
    case.want.copy, case.got.copy = (paddle.full(list(shape), 7, "bfloat16") for _ in range(2))
    native = bench.native(case.want.copy)

    def library():
        case.library()
        te.memcpy_async(native, inputs[0], stream)

    return case._replace(outputs=case.outputs + x.size * 2, library=library)


def norm_and_copy(bench, size, scaling):
    return norm(bench, size, scaling, copies=True)


def cast_of_activations(bench, size, scaling):
    return _cast(bench, (size.tokens, size.hidden), bench.e5m2, scaling)


def cast_of_weights(bench, size, scaling):
    return _cast(bench, (2 * size.ffn, size.hidden), bench.e4m3, scaling)


def _swiglu(bench, size, scaling, float8, name, inputs):
    """inputs: of the function, bfloat16."""
    import paddle

    from paddle_te.native import swiglu
    from paddle_te.native.casts import Form

    te, stream = bench.te, bench.stream
    shape = size.tokens, size.ffn * (2 if len(inputs) > 1 else 1)
    memory = paddle.empty(list(shape), "bfloat16") if scaling == "current" else inputs[0]
    natives, addresses = [bench.native(x) for x in inputs], [x.data_ptr() for x in inputs]
    stored = te.Tensor(memory.data_ptr(), shape, bench.dtype)
    to_fp8 = getattr(te, f"{name}_cast_transpose" if len(inputs) > 1 else name)

    def compute(kept=memory):
        getattr(te, name)(*natives, stored, stream)

    def in_one(target):
        to_fp8(*natives, target.native, stream)

    def cast(target, kept=inputs):
        options = (size.tokens, size.ffn), Form(bench.dtype, float8, scaling == "current")
        getattr(swiglu, f"{name}_cast_transpose")(te, stream, *addresses, target, *options)

    read = sum(x.size for x in inputs) * 2
    return bench.case(scaling, shape, float8, read, compute, stored, cast, in_one)


def swiglu(bench, size, scaling):
    return _swiglu(bench, size, scaling, bench.e4m3, "swiglu", [bench.random(size.tokens, 2 * size.ffn)])


def swiglu_gradient(bench, size, scaling):
    inputs = [bench.random(size.tokens, size.ffn * factor) for factor in (1, 2)]
    return _swiglu(bench, size, scaling, bench.e5m2, "dswiglu", inputs)


FUNCTIONS = {
    "norm": ("RMSNorm", norm),
    "norm_copy": ("RMSNorm and a copy of x", norm_and_copy),
    "cast": ("cast of [tokens, hidden]", cast_of_activations),
    "weight": ("cast of [2 ffn, hidden]", cast_of_weights),
    "swiglu": ("SwiGLU", swiglu),
    "dswiglu": ("gradient of SwiGLU", swiglu_gradient),
}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["8b", "7b", "1b"], metavar="NAME")
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS), metavar="NAME")
    parser.add_argument("--tilings", action="store_true", help="times our kernels with other tilings too")
    timing.add_options(parser, "kernels", rounds=3, iterations=30, warmup=3, quick=(1, 3, 1))
    return timing.parse_options(parser, argv)


def _empty_bytes(size):
    import paddle

    return paddle.empty([size], "uint8")


class Stopwatch:
    """Times calls on Paddle's stream."""

    def __init__(self, bench, raw_stream, arguments):
        self.bench, self.raw_stream, self.arguments = bench, raw_stream, arguments
        self.clock = timing.make_clock(arguments)
        self.busy = None if arguments.device == "cpu" else _empty_bytes(BUSY)

    def microseconds(self, call):
        """Median of the rounds' medians."""
        arguments, clock, medians = self.arguments, self.clock, []
        for _ in range(arguments.rounds):
            for _ in range(arguments.warmup):
                call()
            clock.synchronize()
            if self.busy is not None:
                for _ in range(3):
                    self.bench.te.memset_async(self.busy.data_ptr(), 0, BUSY, self.bench.stream)
            events = [clock.record(self.raw_stream)]
            for _ in range(arguments.iterations):
                call()
                events.append(clock.record(self.raw_stream))
            clock.synchronize()
            pairs = zip(events, events[1:], strict=False)
            medians.append(statistics.median(clock.elapsed_ms(*pair) for pair in pairs) * 1e3)
        return statistics.median(medians)

    def copy(self, size):
        """Microseconds of a copy that reads and writes so many bytes together."""
        import paddle

        half = size // 4 * 2
        source, target = (paddle.full([half], 1, "uint8") for _ in range(2))
        natives = [self.bench.te.Tensor(x.data_ptr(), (half // 2,), self.bench.dtype) for x in (target, source)]
        return self.microseconds(lambda: self.bench.te.memcpy_async(*natives, self.bench.stream))


def equal_bits(case):
    case.library()
    case.ours()
    pairs = zip(case.want.numbers(), case.got.numbers(), strict=True)
    return all([(want.view("uint8") == got.view("uint8")).all() for want, got in pairs])


def measure(arguments):
    """{name: row} of all sizes, functions and scalings."""
    _, raw_stream, _ = start_on_paddles(arguments.device)
    bench, rows = Bench(), {}
    watch = Stopwatch(bench, raw_stream, arguments)
    for size in arguments.sizes:
        for function in arguments.functions:
            for scaling in ("delayed", "current"):
                title, make = FUNCTIONS[function]
                case = make(bench, SIZES[size], scaling)
                row = {"size": size, "function": title, "scaling": scaling, "bytes": case.bytes(scaling)}
                row["bits"] = bool(equal_bits(case))
                row |= {"library_us": watch.microseconds(case.library), "ours_us": watch.microseconds(case.ours)}
                row["copy_us"] = watch.copy(case.bytes(scaling))
                if arguments.tilings:
                    row["tilings"] = times_of_tilings(watch, case, function)
                rows[f"{size}, {title}, {scaling}"] = row
                print(table_row(row), flush=True)
                del case
                free_memory()
    return rows


def times_of_tilings(watch, case, function):
    """{a Tiling as text: microseconds}."""
    from paddle_te.native import casts, rmsnorm
    from paddle_te.native import swiglu as of_swiglu

    chosen, found = casts.Tiling, {}
    holders = {
        "norm": (rmsnorm, "CAST_TILING", [chosen(*tiling) for tiling in TILINGS]),
        "norm_copy": (rmsnorm, "CAST_TILING", [chosen(*tiling) for tiling in TILINGS]),
        "cast": (casts, "CAST_TILING", [chosen(*tiling) for tiling in TILINGS]),
        "swiglu": (of_swiglu.TILINGS, "SwiGLU", [chosen(*tiling) for tiling in TILINGS]),
        "dswiglu": (of_swiglu.TILINGS, "DSwiGLU", [chosen(*tiling) for tiling in TILINGS]),
    }
    holder, name, tilings = holders["cast" if function == "weight" else function]
    get = holder.get if isinstance(holder, dict) else lambda name: getattr(holder, name)
    put = holder.__setitem__ if isinstance(holder, dict) else lambda name, value: setattr(holder, name, value)
    before = get(name)
    try:
        for tiling in tilings:
            put(name, tiling)
            text = f"rows {tiling.tile_rows}, band {tiling.band}, blocks {tiling.blocks_per_sm}, tiles {tiling.tiles}"
            found[text] = watch.microseconds(case.ours)
    finally:
        put(name, before)
    return found


# blocks of an SM, tiles, rows of tiles in a band
# Tiling's rows, band, blocks of an SM, tiles
TILINGS = [
    (128, 8, 3), (128, 8, 4), (128, 8, 6), (128, 8, 8), (128, 4, 6), (128, 16, 6), (64, 8, 8), (64, 8, 12),
    (128, 8, 4, 2), (256, 8, 3),
]  # fmt: skip


def table_row(row):
    def speed(us):
        return f"{row['bytes'] / us / 1e6:.2f}"

    cells = [row["size"], row["function"], row["scaling"]]
    for who in ("library_us", "ours_us"):
        cells += [f"{row[who]:.1f}", speed(row[who])]
    cells += [f"{row['copy_us'] / row['ours_us']:.0%}", "equal" if row["bits"] else "**different**"]
    return "| " + " | ".join(cells) + " |"


def markdown(result):
    """The readable table of a result."""
    lines = report.heading("Casts to fp8 by our kernels and by the library's functions", result)
    named = ", ".join(f"{name}: {size._asdict()}" for name, size in SIZES.items() if name in result["sizes"])
    lines += [named.replace("'", "").replace("{", "").replace("}", ""), ""]
    header = ["size", "function", "scaling", "the library, µs", "TB/s", "ours, µs", "TB/s", "of a copy", "bits"]
    lines += ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += [table_row(row) for row in result["rows"].values()]
    for name, row in result["rows"].items():
        for tiling, us in row.get("tilings", {}).items():
            lines += ["", f"## {name}, by tiling", ""] if tiling == next(iter(row["tilings"])) else []
            lines.append(f"- {tiling}: {us:.1f} µs")
    return "\n".join(lines) + "\n"


def main(argv=None):
    arguments = parse_arguments(argv)
    result = report.header("kernels", argv, DEFINITIONS)
    result["sizes"], result["rows"] = arguments.sizes, measure(arguments)
    result["libraries"] = report.loaded_libraries()
    path = report.destination(result, arguments, "casts")
    report.write(result, path, markdown(result))
    print(f"{path} and {path.with_suffix('.md')}")


if __name__ == "__main__":
    main()
