"""Time each way to compute Muon's Newton–Schulz for a model's matrices, and one large GEMM for comparison.

    python tools/benchmark/muon.py [--sizes gate-and-up q-and-o ...] [--quick]   # --device cpu: nvgpu's host runtime

Ways: a GEMM for each product of each matrix; one grouped GEMM; symmetric products by 2 or 4 block rows; and each with
the first 3 steps without products with the matrices. "chosen" is what a run takes. Writes
benchmarks/muon/<date>_<gpu>x<n>_<what>.json and a table of the same name.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from tools.benchmark import report, timing  # noqa: E402
from tools.benchmark.layer import free_memory  # noqa: E402
from tools.benchmark.peers import start_on_paddles  # noqa: E402

DEFINITIONS = [
    "A call makes 5 steps of all matrices of a size, with norm and division. ms: by events on Paddle's stream, median "
    "of a round's calls, then of the rounds, the ways in turn. Host: until a call returns that finds the GPU idle.",
    "TFLOP/s: of 5 (4 m² n + 2 m³) operations a matrix, m ≤ n, whichever way is taken. Of a GEMM: the share of the "
    "speed of one bf16 GEMM of PEAK × PEAK × PEAK, timed in the same process. Difference: relative "
    "distance of the result from that of a GEMM for each product.",
]
STEPS, PEAK = 5, 8192


class Size(NamedTuple):
    """Matrices of one shape that are made orthogonal together."""

    count: int
    rows: int
    columns: int


SIZES = {
    "gate-and-up": Size(2, 14336, 4096),  # of a layer of Llama-3-8B
    "down": Size(1, 4096, 14336),
    "q-and-o": Size(2, 4096, 4096),
    "k-and-v": Size(2, 1024, 4096),
    "experts": Size(128, 768, 2048),  # of Qwen3-30B-A3B
    "tiny": Size(2, 256, 384),  # to try this program out
}


class Choice(NamedTuple):
    """What a way is: see `paddle_te.native.newton_schulz`."""

    blocks: int = 1
    grouped: bool = False
    first_steps: int = 1


WAYS = {
    "singly": Choice(),
    "singly, 3 first steps": Choice(first_steps=3),
    "grouped": Choice(grouped=True),
    "grouped, 3 first steps": Choice(grouped=True, first_steps=3),
    "2 block rows": Choice(2),
    "2 block rows, 3 first steps": Choice(2, first_steps=3),
    "4 block rows": Choice(4),
    "4 block rows, 3 first steps": Choice(4, first_steps=3),
}
CHOSEN = "chosen"


class Way:
    """A peer for `timing`: Newton–Schulz of a size's matrices. name: of WAYS, or CHOSEN."""

    def __init__(self, name: str, matrices: list[Any], stream: Any) -> None:
        self.name, self.matrices, self.stream = name, matrices, stream

    def run(self) -> Any:
        """Return the result."""
        from paddle_te.native import newton_schulz as kernels
        from paddle_te.ops.te.newton_schulz import newton_schulz

        if self.name == CHOSEN:
            return newton_schulz(self.matrices, STEPS, 1.0)
        choice = WAYS[self.name]
        with (
            mock.patch.object(kernels, "blocks_of", lambda *_: choice.blocks),
            mock.patch.object(kernels, "is_grouped", lambda *_: choice.grouped),
            mock.patch.object(kernels, "first_steps", lambda *_: choice.first_steps),
        ):
            return newton_schulz(self.matrices, STEPS, 1.0)

    def step(self) -> None:
        """Compute, and let go of the result."""
        self.run()

    def release(self) -> None:
        """Keep nothing between rounds; see `timing.interleave`."""


class Dense:
    """A peer that makes one large GEMM."""

    def __init__(self, side: int, stream: Any) -> None:
        import paddle

        from paddle_te.ops.te import runtime

        self.stream, self.rt = stream, runtime.current()
        self.tensors = [paddle.randn([side, side]).astype("bfloat16") for _ in range(3)]
        code = runtime.DTYPES[paddle.bfloat16]
        self.natives = [self.rt.view(tensor, (side, side), code) for tensor in self.tensors]

    def step(self) -> None:
        """Multiply."""
        self.rt.te.gemm(*self.natives, True, False, self.rt.stream)


def flops(size: Size) -> float:
    """Return the operations of a call, none saved."""
    small, large = sorted((size.rows, size.columns))
    return STEPS * size.count * (4.0 * small**2 * large + 2.0 * small**3)


def ways_of(size: Size) -> list[str]:
    """Return the ways that these matrices may go."""
    small, large = sorted((size.rows, size.columns))
    return [
        *(
            name
            for name, choice in WAYS.items()
            if (size.count > 1 or not choice.grouped) and (small < large or choice.first_steps == 1)
            if choice.blocks == 1 or small % (64 * choice.blocks) == 0
        ),
        CHOSEN,
    ]


def measure(arguments: argparse.Namespace, clock: Any, size: Size, stream: Any) -> dict[str, dict[str, Any]]:
    """Return {way: row} of a size."""
    import paddle

    matrices = [paddle.randn(list(size)).astype("bfloat16")]  # a stack, as an update of experts is
    peers = {name: Way(name, matrices, stream) for name in ways_of(size)}
    rows: dict[str, dict[str, Any]] = {}

    def failed(name: str, error: Exception) -> None:
        rows[name] = {"status": "failed", "reason": str(error)}

    reference = peers["singly"].run().astype("float32")
    for name, peer in list(peers.items()):
        try:
            difference = (peer.run().astype("float32") - reference).norm() / reference.norm()
            rows[name] = {"status": "ok", "difference": float(difference)}
        except Exception as error:  # one way's failure must not cost the others' results
            failed(name, error)
            del peers[name]
    del reference
    free_memory()

    def timed(peer: Way) -> list[float]:
        return timing.time_steps(clock, peer, arguments.iterations, arguments.warmup)

    for name, rounds in timing.interleave(timed, peers, arguments.rounds, failed).items():
        host = timing.time_enqueue(clock, peers[name], arguments.iterations, 1)
        rows[name] |= {"ms": timing.summarize(rounds), "host_us": timing.summarize([host])}
    return rows


def markdown(result: dict[str, Any]) -> str:
    """Return the readable table of a result."""
    peak = result["peak"]["flops"] / result["peak"]["ms"]["median"] / 1e9
    lines = [*report.heading("Newton–Schulz", result), f"One GEMM of {PEAK}³: {peak:.0f} TFLOP/s.", ""]
    for name, size in result["sizes"].items():
        lines += [f"## {name}: {size['count']} × {size['rows']} × {size['columns']}", ""]

        def row(_: str, way: dict[str, Any], operations: float = size["flops"]) -> list[str]:
            ms = way["ms"]["median"]
            speed, host = operations / ms / 1e9, way["host_us"]["median"] / 1e3
            return [f"{ms:.3f}", f"{host:.3f}", f"{speed:.0f}", f"{speed / peak:.0%}", f"{way['difference']:.1e}"]

        lines += report.rows(["way", "ms", "host ms", "TFLOP/s", "of a GEMM", "difference"], size["ways"], row)
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[name for name in SIZES if name != "tiny"])
    timing.add_options(parser, "muon", rounds=3, iterations=10, warmup=2, quick=(1, 2, 1))
    arguments = timing.parse_options(parser, argv)
    clock, result = timing.make_clock(arguments), report.header("muon", argv, DEFINITIONS)
    _, stream, _ = start_on_paddles("cuda")  # nvgpu's host runtime for --device cpu: the CPU has no 16-bit kernels
    side = 64 if arguments.device == "cpu" else PEAK
    rounds = [
        timing.time_steps(clock, Dense(side, stream), arguments.iterations, arguments.warmup)
        for _ in range(arguments.rounds)
    ]
    result["peak"], result["sizes"] = {"flops": 2 * side**3, "ms": timing.summarize(rounds)}, {}
    for name in arguments.sizes:
        free_memory()
        size = SIZES[name]
        ways = measure(arguments, clock, size, stream)
        result["sizes"][name] = size._asdict() | {"flops": flops(size), "ways": ways}
    report.finish(result, arguments, "ways", markdown)


if __name__ == "__main__":
    main()
