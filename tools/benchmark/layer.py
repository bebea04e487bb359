"""Times one decoder layer, of Llama, Qwen2.5, Qwen3 or GPT, forward + backward, and its peers, all in one process.

    python tools/benchmark/layer.py [--peers hf_bf16 paddle_te_fp8_delayed ...] [--sizes 7b-b1 ...] [--quick]

Without sizes it times how long the host takes to launch a small layer. With --host it does so on a machine without a
GPU, with nvgpu's host runtime: the library's functions return at once, and the time is that of our own code and
Paddle's.

Writes benchmarks/layer/<date>_<gpu>x<n>_<what>.json and a table of the same name. A peer that is not installed or fails
keeps its row, with the reason.
"""

import argparse
import gc
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from tools.benchmark import null_te, report, timing  # noqa: E402
from tools.benchmark.peers import LAUNCHED_ONLY, PEERS, exact_results  # noqa: E402
from tools.benchmark.problem import SIZES, TINY, Problem  # noqa: E402

DEFINITIONS = [
    "Time: events around a step (gradients cleared, forward, backward) on the peer's own stream, median of a round's "
    "steps; then the median and the range of the rounds' medians. Peers take turns within each round.",
    "Peak GB: greatest count of the framework's own allocator (PyTorch's, Paddle's) in a step, above its count before "
    "the layer was built: parameters, input and output gradient, fp8 copies, saved activations, workspaces, gradients.",
    "Error: relative L2 distance from the same layer in float32 PyTorch with the same weights and input, after the "
    "warm-up steps. cached: a later micro-batch of a step, with the fp8 weights kept. fused_wgrad: weight gradients "
    "added to float32 main gradients inside the GEMMs.",
]
STEPS_BEFORE_CHECK = 3  # delayed scaling finds its scales


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = [*PEERS, *LAUNCHED_ONLY]
    parser.add_argument("--peers", nargs="+", choices=peers, default=list(PEERS), metavar="NAME", help=", ".join(peers))
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=list(SIZES), metavar="NAME", help=", ".join(SIZES))
    timing.add_options(parser, "layer", rounds=5, iterations=20, warmup=3, quick=(2, 5, 2))
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs")
    parser.add_argument(
        "--host", action="store_true", help="launch a small layer of ours with a library that does nothing"
    )
    arguments = timing.parse_options(parser, argv)
    if arguments.host:
        arguments.device, arguments.sizes = "host", []
        arguments.peers = [name for name in arguments.peers if name.startswith("paddle_te")]
    return arguments


class Contest:
    """The peers at one problem, and each one's row of the result."""

    def __init__(self, problem, arguments, peers=None):
        self.problem, self.arguments, self.makers = problem, arguments, peers or PEERS
        self.rows, self.peers = {}, {}

    def build(self, name):
        """Builds a peer and warms it up. False, with the reason in its row, where that fails."""
        gc.collect()
        try:
            peer = self.makers[name](self.problem, device=self.arguments.device)
            for _ in range(STEPS_BEFORE_CHECK):
                peer.step()
            self.peers[name] = peer
            self.rows[name] = {"status": "ok", "precision": peer.precision, "note": peer.note}
        except Exception as error:
            self.fail(name, error)
        return name in self.peers

    def fail(self, name, error):
        traceback.print_exception(error)
        missing = isinstance(error, (ModuleNotFoundError, FileNotFoundError))
        status, reason = "missing" if missing else "failed", f"{type(error).__name__}: {error}"
        print(f"{name} {status}: {reason}", file=sys.stderr)
        self.rows[name] = {"status": status, "reason": reason}
        self.peers.pop(name, None)

    def check(self, name, reference):
        """Adds peak memory and errors to a peer's row."""
        peer, row = self.peers[name], self.rows[name]
        try:
            row["peak_bytes"] = peer.peak_memory()
            row["error"] = reference and relative_errors(peer.results(), reference)
            row["note"] = peer.note
            peer.release()
        except Exception as error:
            self.fail(name, error)

    def time(self, clock, key, measure):
        """Adds the interleaved times to all rows, under `key`."""
        arguments = self.arguments
        rounds = timing.interleave(
            lambda peer: measure(clock, peer, arguments.iterations, arguments.warmup),
            self.peers,
            arguments.rounds,
            self.fail,
        )
        for name, times in rounds.items():
            self.rows[name][key] = timing.summarize(times)
            print(f"{name:40} {self.rows[name][key]['median']:10.3f} {key}", flush=True)


def relative_errors(results, reference):
    """{name: ||result - reference|| / ||reference||}, in float32; the reference is of each document alone."""
    return {
        name: ((results[name].float().reshape(exact.shape) - exact).norm() / exact.norm()).item()
        for name, exact in reference.items()
    }


def float32_results(problem, device):
    """exact_results of the layer, with each document alone."""
    return exact_results(lambda exact: exact(problem.unpacked, device=device))


def free_memory():
    """Gives what the frameworks' allocators keep back to the GPU, for the other framework."""
    gc.collect()
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()
    if paddle := sys.modules.get("paddle"):
        if hasattr(paddle.device, "empty_cache"):  # Paddle has none where it sees no device
            paddle.device.empty_cache()


def run_tiny(arguments, clock):
    """Host time a layer. Comes first: what libraries keep for the whole process is then no peer's own memory."""
    contest = Contest(Problem(TINY, arguments.seed), arguments, PEERS | LAUNCHED_ONLY)
    for name in arguments.peers:
        contest.build(name)
    contest.time(clock, "step_us", timing.time_enqueue)
    return {"dims": asdict(TINY), "peers": contest.rows}


def run_size(arguments, clock, dims):
    problem = Problem(dims, arguments.seed)
    contest = Contest(problem, arguments)
    reference = float32_results(problem, arguments.device)
    free_memory()
    for name in arguments.peers:
        if name not in LAUNCHED_ONLY and contest.build(name):
            contest.check(name, reference)
    del reference
    free_memory()
    contest.time(clock, "step_ms", timing.time_steps)
    return {"dims": asdict(dims), "flops": dims.flops, "peers": contest.rows}


def sizes_in_words(chosen, all_sizes):
    """Return the part of a result's name that says which sizes were measured."""
    return "all-sizes" if set(chosen) == set(all_sizes) else "-".join(chosen)


def run_sizes(result, arguments, run, path, table=report.markdown):
    """Adds run(name) of each size to the result and writes it to `path` after each, so a broken run leaves its part.

    Returns the exit status: 0 if any peer ran.
    """

    def save():
        result["libraries"] = report.loaded_libraries()
        report.write(result, path, table(result))

    result["sizes"] = {}
    for name in arguments.sizes:
        print(f"--- {name}", flush=True)
        result["sizes"][name] = run(name)
        free_memory()
        save()
    if not arguments.sizes:
        save()
    print(table(result))
    print(f"{path} and {path.with_suffix('.md')}")
    measured = [result.get("enqueue", {"peers": {}}), *result["sizes"].values()]
    return 0 if any(row["status"] == "ok" for part in measured for row in part["peers"].values()) else 1


def main(argv=None):
    arguments = parse_arguments(argv)
    clock = timing.make_clock(arguments)
    if arguments.host:
        null_te.install()
    result = report.header("layer", argv, DEFINITIONS) | {
        "settings": {name: getattr(arguments, name) for name in ("rounds", "iterations", "warmup", "seed")},
        "enqueue": run_tiny(arguments, clock),
    }
    if arguments.sizes:
        path = report.destination(result, arguments, sizes_in_words(arguments.sizes, SIZES))
    else:
        path = report.destination(result, arguments, "tiny-layer", "launch")
    return run_sizes(result, arguments, lambda name: run_size(arguments, clock, SIZES[name]), path)


if __name__ == "__main__":
    sys.exit(main())
