"""Times a layer of experts, forward + backward, and its peers in one process, and grouped GEMMs beside dense ones.

    python tools/benchmark/experts.py [--peers te_torch_bf16 paddle_te_bf16 ...] [--sizes mixtral ...] [--quick]

Writes benchmarks/experts/<date>_<gpu>x<n>_<what>.json and a table of the same name. Grouped GEMMs need cuBLAS 13.4 to
13.6: PADDLE_TE_CUDA_LIBRARIES chooses one, for all peers.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from tools.benchmark import expert_kernels, grouped_gemms, report, timing  # noqa: E402
from tools.benchmark.expert_peers import PEERS, SIZES, ExpertDims, ExpertProblem, PlainExperts  # noqa: E402
from tools.benchmark.layer import Contest, free_memory, run_sizes, sizes_in_words  # noqa: E402
from tools.benchmark.peers import exact_results  # noqa: E402

DEFINITIONS = [
    "A layer: norm, router, experts, residual, on 16,384 tokens, each expert with as many. Time: events around a step "
    "(gradients cleared, forward, backward) on the peer's own stream, median of a round's steps; then the median and "
    "the range of the rounds' medians. Peers take turns within each round.",
    "TFLOP/s: of the experts' and the router's GEMMs. Of TE's PyTorch: the time, relative to te_torch_ of that "
    "precision, or to the faster of it and te_torch_split_.",
    "Error: relative L2 distance from the same layer in float32 PyTorch with the same weights and input, after the "
    "warm-up steps.",
    "GEMMs: a call again and again, by events on Paddle's stream. Dense: one GEMM with as many rows, columns and sums, "
    "hence of the same FLOP; of a weight's gradient the dense one writes one expert's gradient.",
    "Kernels: likewise, each token with experts drawn at random; bytes are those of inputs and results, each once. Of "
    "a copy: of the speed at which a copy of as many bytes runs.",
]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="NAME", help=", ".join(SIZES))
    parser.add_argument("--no-gemms", dest="gemms", action="store_false", help="leaves the table of GEMMs out")
    parser.add_argument("--kernels", action="store_true", help="a table of this project's kernels, too")
    timing.add_options(parser, "experts", rounds=5, iterations=10, warmup=3, quick=(1, 3, 2))
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    return timing.parse_options(parser, argv)


def run_size(arguments: argparse.Namespace, clock: Any, dims: ExpertDims) -> dict[str, Any]:
    """Return the results of one size."""
    gemms = grouped_gemms.measure(arguments, dims) if arguments.gemms else {}
    kernels = expert_kernels.measure(arguments, dims) if arguments.kernels else {}
    problem = ExpertProblem(dims, arguments.seed)
    contest = Contest(problem, arguments, PEERS)
    reference = arguments.peers and exact_results(lambda exact: exact(problem, device=arguments.device), PlainExperts)
    free_memory()
    for name in arguments.peers:
        if contest.build(name):
            contest.check(name, reference)
    del reference
    free_memory()
    contest.time(clock, "step_ms", timing.time_steps)
    return {"dims": asdict(dims), "flops": dims.flops, "peers": contest.rows, "gemms": gemms, "kernels": kernels}


def _fastest_torch(peers: dict[str, Any], precision: str) -> dict[str, Any] | None:
    """Return the row of TE's PyTorch that a peer of this precision is compared with."""
    rows = [peers.get(f"te_torch_{how}{precision}") for how in ("", "split_")]
    ran = [row for row in rows if row is not None and row["status"] == "ok"]
    return min(ran, key=lambda row: row["step_ms"]["median"], default=None)


def size_table(name: str, size: dict[str, Any]) -> list[str]:
    """Return the lines of one size."""
    peers = size["peers"]

    def row(peer_name: str, peer: dict[str, Any]) -> list[str]:
        median = peer["step_ms"]["median"]
        own = _fastest_torch(peers, peer["precision"]) if peer_name.startswith("paddle_te") else None
        return [
            f"{median:.2f}",
            f"{peer['step_ms']['min']:.2f} to {peer['step_ms']['max']:.2f}",
            f"{size['flops'] / median / 1e9:.0f}",
            f"{median / own['step_ms']['median']:.2f}" if own else "",
            "" if peer["peak_bytes"] is None else f"{peer['peak_bytes'] / 1e9:.2f}",
            report.error_cell(peer),
        ]

    header = ["", "ms", "over rounds", "TFLOP/s", "of TE's PyTorch", "peak GB", "error y / dx / worst dW"]
    lines = [f"## {name}: {report.describe(size['dims'])}", "", *report.rows(header, peers, row)]
    return lines + grouped_gemms.table(size["gemms"]) + expert_kernels.table(size.get("kernels", {}))


def markdown(result: dict[str, Any]) -> str:
    """Return the readable table of a result."""
    lines = report.heading("A layer of experts, forward + backward", result)
    return "\n".join(lines + [line for name, size in result["sizes"].items() for line in size_table(name, size)])


def choose_libraries(device: str) -> dict[str, Any]:
    """Load CUDA's libraries as this project does, before PyTorch takes its own, and return {name: version and places}.

    {} on a CPU. Raises BackendUnavailable.
    """
    from paddle_te import native

    if device == "cpu":
        return {}
    native.load()
    return dict(native.report())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = parse_arguments(argv)
    native_libraries = choose_libraries(arguments.device)
    clock = timing.make_clock(arguments)
    result = report.header("experts", argv, DEFINITIONS) | {
        "settings": {name: getattr(arguments, name) for name in ("rounds", "iterations", "warmup", "seed")},
        "native_libraries": native_libraries,
    }
    path = report.destination(result, arguments, sizes_in_words(arguments.sizes, SIZES))
    return run_sizes(result, arguments, lambda name: run_size(arguments, clock, SIZES[name]), path, markdown)


if __name__ == "__main__":
    sys.exit(main())
