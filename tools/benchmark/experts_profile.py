"""Lists the kernels of a layer of experts, forward + backward, with their times, for one peer of experts.py.

    python tools/benchmark/experts_profile.py PEER [--size mixtral] [--steps 5] [--trace DIR]

Kernels come from CUPTI, through Paddle's profiler (on nvgpu: pip install nvidia-cuda-cupti) or PyTorch's. A process may
have one of the two, hence one peer.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from paddle_te.table import in_columns  # noqa: E402
from tools.benchmark import device_trace, timing  # noqa: E402
from tools.benchmark.expert_peers import PEERS, SIZES, ExpertProblem  # noqa: E402
from tools.benchmark.experts import choose_libraries  # noqa: E402

WARMUP = 5


class Kernel(NamedTuple):
    """A kernel or copy: its milliseconds and calls in a step."""

    name: str
    ms: float
    calls: float


def of_paddle(peer: Any, steps: int, folder: Path) -> list[Kernel]:
    """Profile steps of a peer of Paddle's; the trace is left in `folder`."""
    paddle = peer.paddle
    ready = paddle.profiler.export_chrome_tracing(str(folder), "experts")
    profiler = paddle.profiler.Profiler(on_trace_ready=ready)
    profiler.start()
    for step in range(steps + 1):  # device_trace leaves the first one out
        with paddle.profiler.RecordEvent(f"step {step}"):
            peer.step()
            paddle.device.synchronize()
    profiler.stop()
    profile = device_trace.read(max(folder.glob("experts*.json"), key=lambda path: path.stat().st_mtime))
    spent: Counter[str] = Counter()
    for work in profile.works:
        spent[work.name] += work.end - work.start
    calls = Counter(work.name for work in profile.works)
    return [Kernel(name, us / steps / 1e3, calls[name] / steps) for name, us in spent.most_common()]


def of_torch(peer: Any, steps: int, folder: Path) -> list[Kernel]:
    """Profile steps of a peer of PyTorch's; the trace is left in `folder`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            peer.step()
        peer.torch.cuda.synchronize()
    found.export_chrome_trace(str(folder / "experts.json"))
    kernels = [
        event for event in found.key_averages() if event.self_device_time_total and not event.self_cpu_time_total
    ]
    made = [Kernel(event.key, event.self_device_time_total / steps / 1e3, event.count / steps) for event in kernels]
    return sorted(made, key=lambda kernel: -kernel.ms)


def text(kernels: Sequence[Kernel], step_ms: float) -> str:
    """Return the table of the kernels."""
    total = sum(kernel.ms for kernel in kernels)
    rows = [["ms", "share", "calls", "kernel"]]
    rows += [[f"{k.ms:.4f}", f"{k.ms / total:.1%}", f"{k.calls:g}", k.name[:150]] for k in kernels]
    found = "\n".join(in_columns(rows, rule=True))
    return f"{found}\n{total:.3f} ms in kernels; a step takes {step_ms:.3f} ms without the profiler"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS, metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--size", choices=SIZES, default="mixtral", help="default %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="default %(default)s")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="keep the trace there")
    arguments = parser.parse_args(argv)
    choose_libraries("cuda")
    peer = PEERS[arguments.peer](ExpertProblem(SIZES[arguments.size], seed=0))
    step_ms = timing.summarize([timing.time_steps(timing.CudaClock(), peer, arguments.steps, WARMUP)])["median"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.trace or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        kernels = (of_torch if hasattr(peer, "torch") else of_paddle)(peer, arguments.steps, folder)
    print(f"{arguments.peer}, {arguments.size}\n{text(kernels, step_ms)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
