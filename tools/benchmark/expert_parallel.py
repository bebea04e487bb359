"""Times a step of Qwen3-30B's layers on ranks that divide the experts, and the communication that nothing hides.

    python tools/benchmark/expert_parallel.py [--dispatchers allgather alltoall] [--precisions bf16 fp8]
        [--layers 16 14 12] [--batch 1] [--ranks 2]

Starts a process for each GPU and dispatcher. --layers: as many as the GPUs have room for, of those numbers. Forward and
backward with float32 main gradients and forced balance, without embedding, head and optimizer. Writes
benchmarks/expert_parallel/<date>_<gpu>x<n>_<what>.json and a table of the same name.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout, installed or not

from paddle_te.options.layers import DISPATCHERS  # noqa: E402
from tools.benchmark import floors, report  # noqa: E402

DEFINITIONS = [
    "ms: wall time of a step, from a barrier until the device of the first rank has done; median. Tokens/s of one GPU. "
    "Exposed: the share of a step that goes away where each collective of the dispatch gives its own rank's rows "
    "instead, as many, without sending; the host's wait for the numbers of rows goes away, too.",
    "Of floor: GEMMs, attention and passes over memory at the best rates seen (tools/benchmark/floors.py), with the "
    "weights of a rank's experts.",
]
SIZES = {
    "qwen3-30b": floors.LayerSizes(2048, 768, 32, 4, 128, 128, 8),
    "tiny": floors.LayerSizes(64, 32, 2, 2, 32, 4, 2),
}
PRECISIONS = {"bf16": None, "fp8": "DelayedScaling", "fp8_current": "Float8CurrentScaling"}
TIMEOUT = 150  # seconds of one dispatcher


@dataclass(frozen=True)
class Case:
    """What one start of the ranks measures."""

    size: str
    layers: int
    batch: int
    sequence: int
    dispatcher: str
    precisions: tuple[str, ...]
    iterations: int
    warmup: int
    emulated: bool = False

    @property
    def tokens(self) -> int:
        """Return the tokens of one rank's step."""
        return self.batch * self.sequence


def make_layers(case: Case, ranks: int) -> list[Any]:
    """Return the decoder layers of this rank, with main gradients."""
    import paddle

    from paddle_te.layers import TransformerLayer
    from paddle_te.layers.moe import MoELayer

    sizes = SIZES[case.size]
    mixture = MoELayer.in_layer(
        num_moe_experts=sizes.experts,
        moe_router_topk=sizes.topk,
        moe_router_force_load_balancing=True,
        moe_token_dispatcher_type=case.dispatcher,
    )
    layers = [
        TransformerLayer(
            sizes.hidden,
            sizes.ffn,
            sizes.heads,
            sizes.kv_heads,
            kv_channels=sizes.head_dim,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            max_sequence_length=case.sequence,
            qk_norm_type="RMSNorm",
            qk_norm_before_rope=True,
            feed_forward=mixture,
            set_parallel_mode=ranks > 1,
            fuse_wgrad_accumulation=True,
            params_dtype="bfloat16",
        )
        for _ in range(case.layers)
    ]
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        parameter.main_grad = paddle.zeros(parameter.shape, "float32")
    return layers


class Step:
    """Forward and backward of this rank's tokens."""

    def __init__(self, case: Case) -> None:
        import paddle
        import paddle.distributed as dist

        from paddle_te.layers import RotaryPositionEmbedding

        self.case, self.ranks = case, dist.get_world_size()
        self.layers = make_layers(case, self.ranks)
        self.angles = RotaryPositionEmbedding(SIZES[case.size].head_dim)(case.sequence)
        shape = [case.batch, case.sequence, SIZES[case.size].hidden]
        self.x = paddle.randn(shape, "float32").astype("bfloat16").detach()
        self.x.stop_gradient = False
        self.group = dist.new_group(list(range(self.ranks))) if self.ranks > 1 else None

    def run(self, precision: str) -> None:
        """Compute one step."""
        from paddle_te import fp8

        recipe = PRECISIONS[precision] and getattr(fp8, PRECISIONS[precision])()
        with fp8.fp8_autocast(recipe is not None, recipe, self.group):
            y = self.x
            for layer in self.layers:
                y = layer(y, None, self.angles)
        y.backward(self.x.detach())
        self.x.clear_gradient()

    def milliseconds(self, precision: str) -> list[float]:
        """Return the time of each step, after those of the warm-up."""
        import paddle
        import paddle.distributed as dist

        times = []
        for number in range(self.case.warmup + self.case.iterations):
            paddle.device.synchronize()
            if self.group is not None:
                dist.barrier(self.group)
            start = time.perf_counter()
            self.run(precision)
            paddle.device.synchronize()
            if number >= self.case.warmup:
                times.append(1e3 * (time.perf_counter() - start))
        return times


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Let the collectives of the ranks give this rank's part as often as it takes, without sending."""
    import paddle

    from paddle_te.distributed import TensorParallel

    def all_to_all(ranks: Any, x: Any, sent: Any = None, received: Any = None) -> Any:
        wanted = x.shape[0] if received is None else sum(received)
        return x.clone() if wanted == x.shape[0] else paddle.concat([x] * -(-wanted // x.shape[0]))[:wanted]

    replaced = {
        "all_gather": lambda ranks, x: paddle.concat([x] * ranks.size),
        "reduce_scatter": lambda ranks, x: x[: x.shape[0] // ranks.size].clone(),
        "all_to_all": all_to_all,
    }
    kept = {name: getattr(TensorParallel, name) for name in replaced}
    for name, function in replaced.items():
        setattr(TensorParallel, name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(TensorParallel, name, function)


def start(case: Case) -> None:
    """Let Paddle compute on this rank's GPU, and divide the experts over all ranks."""
    import paddle
    import paddle.distributed as dist
    from paddle.distributed import fleet

    from paddle_te import upstream
    from paddle_te.distributed.expert_parallel import make_groups

    paddle.set_device("nvgpu")
    upstream.apply()
    if case.emulated:
        from tests import emulated_te

        emulated_te.install()
    paddle.set_default_dtype("bfloat16")
    if (ranks := dist.get_world_size()) > 1:
        strategy = fleet.DistributedStrategy()
        degrees = dict(dp_degree=1, mp_degree=1, pp_degree=1, sharding_degree=ranks)
        strategy.hybrid_configs = degrees | dict(order=["dp", "pp", "sharding", "sep", "mp"])
        fleet.init(is_collective=True, strategy=strategy)
        make_groups(ranks)


def measure(case: Case) -> dict[str, Any]:
    """Return this rank's rows, by precision."""
    from paddle_te import device

    start(case)
    step, rows = Step(case), {}
    for precision in case.precisions:
        device.reset_peak_memory()
        row: dict[str, Any] = {"ms": step.milliseconds(precision), "peak_bytes": device.peak_memory()}
        if step.ranks > 1:
            with nothing_sent():
                row["ms_without_sending"] = step.milliseconds(precision)
        rows[precision] = row
        print(precision, statistics.median(row["ms"]), "ms", flush=True)
    return rows


def run_ranks(case: Case, ranks: int, folder: Path) -> dict[str, Any]:
    """Start the ranks; return the first one's rows, with "status", or "failed" and a reason."""
    out = folder / f"{case.dispatcher}-{case.layers}.json"
    logs = folder / f"logs-{case.dispatcher}-{case.layers}"
    words = [sys.executable, "-m", "paddle.distributed.launch", "--devices", ",".join(map(str, range(ranks)))]
    words += ["--log_dir", str(logs), __file__, "--of_a_rank", json.dumps(asdict(case)), "--output", str(out)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")])),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "FLAGS_tcp_store_using_libuv": "0",
    }
    try:
        subprocess.run(words, env=environment, timeout=TIMEOUT, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return {"status": "failed", "reason": f"not done after {TIMEOUT} s"}
    if out.exists():
        return {"status": "ok", "layers": case.layers, "precisions": json.loads(out.read_text())}
    said = "".join(log.read_text(errors="replace") for log in sorted(logs.glob("workerlog.*")))
    print(said[-4000:], file=sys.stderr)
    found = report.OUT_OF_MEMORY.search(said)
    lines = [line for line in said.splitlines() if "Error" in line]
    return {"status": "failed", "reason": found[0] if found else lines[-1] if lines else "the ranks said nothing"}


def most_layers(cases: Sequence[Case], ranks: int, folder: Path) -> dict[str, Any]:
    """Return the row of the first case that has room."""
    row: dict[str, Any] = {}
    for case in cases:
        row = run_ranks(case, ranks, folder)
        print(f"{case.dispatcher}, {case.layers} layers: {row['status']} {row.get('reason', '')}", flush=True)
        if row["status"] == "ok" or not report.OUT_OF_MEMORY.search(row["reason"]):
            break
    return row


def with_floors(row: dict[str, Any], case: Case, ranks: int, gpu: str) -> dict[str, Any]:
    """Add speeds, the share of the floor and of exposed communication to a row."""
    sizes, bandwidth = SIZES[case.size], floors.bandwidth_of(gpu)
    mine = floors.LayerSizes(**asdict(sizes) | dict(experts=sizes.experts // ranks))
    for precision, found in row.get("precisions", {}).items():
        ms = statistics.median(found["ms"])
        found |= {"median_ms": ms, "tokens_per_second_per_gpu": case.tokens / ms * 1e3}
        if "ms_without_sending" in found:
            found["exposed"] = 1 - statistics.median(found["ms_without_sending"]) / ms
        if bandwidth:
            kind = precision.split("_")[0]
            of_a_layer = floors.layer_seconds(mine, case.batch, case.sequence, kind, bandwidth)
            found["of_floor"] = 1e3 * of_a_layer * row["layers"] / ms
    return row


def markdown(result: dict[str, Any]) -> str:
    """Return the readable table of a result."""
    lines = report.heading("Layers with experts on ranks that divide them", result)
    header = ["", "layers", "precision", "ms", "tokens/s a GPU", "of floor", "exposed", "peak GB"]
    lines += ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name, row in result["rows"].items():
        if row["status"] != "ok":
            lines.append(f"| {name} | **failed**: {row['reason']} |" + " |" * (len(header) - 2))
        for precision, found in row.get("precisions", {}).items():
            shares = [f"{found[share]:.1%}" if share in found else "" for share in ("of_floor", "exposed")]
            cells = [name, str(row["layers"]), precision, f"{found['median_ms']:.2f}"]
            cells += [f"{found['tokens_per_second_per_gpu']:.0f}", *shares, f"{found['peak_bytes'] / 1e9:.1f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_destination(parser, "expert_parallel")
    parser.add_argument("--size", choices=SIZES, default="qwen3-30b", help="default %(default)s; tiny: tries it out")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs; default %(default)s")
    parser.add_argument("--dispatchers", nargs="+", choices=DISPATCHERS, default=list(DISPATCHERS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp8"])
    parser.add_argument("--layers", nargs="+", type=int, default=[16, 14, 12, 10], help="tried in this order")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank; default %(default)s")
    parser.add_argument("--sequence", type=int, default=4096, help="default %(default)s")
    parser.add_argument("--iterations", type=int, default=6, help="timed steps; default %(default)s")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps before them; default %(default)s")
    parser.add_argument("--emulated", action="store_true", help="on nvgpu's host runtime: tries this program out")
    parser.add_argument("--of_a_rank", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = parse_arguments(argv)
    if arguments.of_a_rank:
        return _be_a_rank(Case(**arguments.of_a_rank), arguments.output)
    names = "size", "batch", "sequence", "iterations", "warmup", "emulated"
    shared = {name: getattr(arguments, name) for name in names} | {"precisions": tuple(arguments.precisions)}
    result = report.header("expert_parallel", argv, DEFINITIONS) | {"libraries": {}, "rows": {}}
    result["hardware"]["gpus"] = arguments.ranks
    path = report.destination(result, arguments, f"{arguments.size}-ep{arguments.ranks}")
    with tempfile.TemporaryDirectory() as folder:
        for dispatcher in arguments.dispatchers:
            cases = [Case(layers=layers, dispatcher=dispatcher, **shared) for layers in arguments.layers]
            row = most_layers(cases, arguments.ranks, Path(folder))
            result["rows"][dispatcher] = with_floors(row, cases[0], arguments.ranks, result["hardware"]["name"])
            report.write(result, path, markdown(result))
    print(markdown(result))
    return 0 if any(row["status"] == "ok" for row in result["rows"].values()) else 1


def _be_a_rank(case: Case, out: Path) -> int:
    import paddle.distributed as dist

    rows = measure(case)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
