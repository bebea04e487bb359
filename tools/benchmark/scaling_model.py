"""Predicts step time and tokens/s per GPU of Llama-3 8B and 70B on 8 to 512 H200s, and checks itself where measured.

    python tools/benchmark/scaling_model.py [--layer FILE] [--step FILE] [--throughput FILE ...] [--output FILE.md]

A step is summed from first principles and few measured inputs: a layer's speed (a result of layer.py), the time of
head, embedding and optimizer (of step.py; where that has not measured a size, the assumptions'), and links of assumed
bandwidth. The files that are taken where none is given are named below: LAYER, STEP, THROUGHPUT. Prints Markdown: the
assumptions, predictions compared with what throughput.py measured, and predictions for more GPUs.

Sources. Pipeline: Narayanan et al. 2021 (arXiv:2104.04473), 2.2: a bubble of (p-1)/(v·m). Tensor and sequence
parallelism, memory of activations: Korthikanti et al. 2022 (arXiv:2205.05198), 4. Sharding: Rajbhandari et al. 2020
(arXiv:1910.02054), 7. Ring collectives: Patarasuk and Yuan 2009: of S bytes over n ranks each sends S·(n-1)/n in
all-gather and reduce-scatter, twice that in all-reduce, in n-1 hops.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout, installed or not

from tools.benchmark import step  # noqa: E402
from tools.benchmark.problem import SIZES as LAYER_SIZES  # noqa: E402
from tools.benchmark.problem import Dims  # noqa: E402

LLAMA_8B = replace(step.SIZES["8b-s8192"], layers=32)
LLAMA_70B = step.Size(replace(LAYER_SIZES["70b-b1"], sequence=8192), LLAMA_8B.vocabulary, 80)
BENCHMARKS = ROOT / "benchmarks"
LAYER = BENCHMARKS / "layer/2026-11-22_h200x1_all-sizes.json"
STEP = BENCHMARKS / "step/2026-11-22_h200x1_8b-float32-weights.json"
THROUGHPUT = [
    BENCHMARKS / "throughput/2026-11-22_h200x4_layouts.json",
    BENCHMARKS / "throughput/2026-11-22_h200x1_timeline.json",
]
GPUS = (8, 16, 32, 64, 128, 256, 512)
# Flags of runs that do what no input was measured for
NOT_MODELLED = ("fp8_lm_head", "fp8_dpa", "use_fused_linear_cross_entropy")


def assumed(value, what):
    """A field of Assumptions, with the words that the printed table says about it."""
    return field(default=value, metadata={"what": what})


@dataclass(frozen=True)
class Assumptions:
    """What is not measured here. Units: GB/s in one direction, µs, TFLOP/s, bytes."""

    gpus_per_node: int = assumed(8, "joined by NVLink; nodes by InfiniBand")
    nvlink: float = assumed(300, "reached in collectives, of 450 (measured between four GPUs: 290 to 300)")
    network: float = assumed(45, "InfiniBand, per GPU, reached of 50 (400 Gbit/s, a card for each GPU)")
    nvlink_hop: float = assumed(1, "latency of a step of a ring within a node")
    network_hop: float = assumed(5, "and between nodes")
    overlap: float = assumed(0.9, "share of sharding's communication that can run at the same time as computation")
    slowdown: float = assumed(
        0.25, "of what runs at the same time: it takes SMs and memory bandwidth (measured: 0.2 to 0.35)"
    )
    tp_overlap: float = assumed(
        0.5, "of the collectives that run during backward's GEMMs: gained, as these get slower (measured at tp4)"
    )
    bucket: float = assumed(256e6, "bytes of bf16 weights that are gathered, or whose gradients are reduced, at once")
    hbm: float = assumed(3400, "reached by element-wise kernels, of 4800")
    head_tflops: float = assumed(600, "lm_head's GEMMs, bf16; where step.py has not measured the head")
    head_bytes: float = assumed(24, "moved a token and entry of the vocabulary by the loss; likewise")
    optimizer_bytes: float = assumed(
        34, "moved a parameter by clipping and AdamW with float32 master weights; likewise"
    )
    memory: float = assumed(130, "GB of 141 that tensors may take")
    activations: float = assumed(
        34, "bytes kept a token, layer and hidden unit (Korthikanti: 34, without attention's s² terms)"
    )


@dataclass(frozen=True)
class Layout:
    """How the ranks share the work; sharding over what tp and pp leave. microbatches of `batch` sequences a step."""

    gpus: int
    tp: int = 1
    pp: int = 1
    vp: int = 1
    microbatches: int = 1
    batch: int = 1
    stage: int = 1  # of sharding; 0: data parallel with bf16 gradients
    overlap: bool = True
    recompute: str = "none"

    @property
    def data(self):
        """Ranks with other data."""
        return self.gpus // (self.tp * self.pp)

    def __str__(self):
        names = {"tp": self.tp, "pp": self.pp, "vp": self.vp, "sharding " if self.stage else "dp ": self.data}
        return " × ".join(f"{name}{degree}" for name, degree in names.items() if degree > 1) or "one GPU"


@dataclass(frozen=True)
class Inputs:
    """Measured on one GPU. flops_per_ms of a layer, forward and backward; ms a token of head, loss and embedding; ms a
    parameter of clipping and optimizer. gathered_bytes: of an activation that GEMMs read, 1 in fp8."""

    flops_per_ms: float
    head_ms: float
    optimizer_ms: float
    gathered_bytes: int = 2


def parameters(size):
    """Elements of all weights: layers, embedding, lm_head, final norm."""
    return size.layers * size.dims.parameters + 2 * size.vocabulary * size.dims.hidden + size.dims.hidden


def ring_ms(size_bytes, ranks, stride, messages, assume):
    """An all-gather or reduce-scatter of `size_bytes` in so many messages over ranks that lie `stride` apart.

    Within a node over NVLink. Between nodes each member in a node has its own card, and the ring goes through all.
    """
    if ranks == 1:
        return 0.0
    inside = max(1, min(ranks, assume.gpus_per_node // stride))  # members in one node
    nodes = math.ceil(ranks / inside)
    bandwidth = assume.nvlink if nodes == 1 else min(assume.nvlink, inside * assume.network)
    hops = (ranks - 1) * assume.nvlink_hop if nodes == 1 else nodes * assume.network_hop
    hops += 0 if nodes == 1 else (ranks - nodes) * assume.nvlink_hop
    return size_bytes * (ranks - 1) / ranks / bandwidth / 1e6 + messages * hops / 1e3


def exposed_ms(communication, window, layout, assume):
    """What of a communication the computation of the `window` does not hide, and by how much it slows that down."""
    if not layout.overlap:
        return communication
    hidden = min(assume.overlap * communication, window)
    return communication - hidden + assume.slowdown * hidden


def predict(size, layout, inputs, assume):
    """{part: ms of a step}, all parts of which add up to it.

    size: a step.Size; its dims' batch does not count, layout's does.
    """
    dims = replace(size.dims, batch=layout.batch)
    tokens, m = layout.batch * dims.sequence, layout.microbatches
    again = {"none": 0, "core_attn": 0, "full": 1 / 3}[layout.recompute]  # attention's own part is small
    layer = dims.flops / inputs.flops_per_ms / layout.tp * (1 + again)
    tp = tensor_parallel_ms(tokens * dims.hidden, inputs.gathered_bytes, layout, assume)
    layers_here = size.layers / layout.pp
    stage = layers_here * (layer + tp) + stage_transfer_ms(tokens * dims.hidden, layout, assume)
    head = tokens * inputs.head_ms / layout.tp  # on the last stage, for which the others wait

    local = parameters(size) / (layout.tp * layout.pp)
    scatter, gather = sharding_ms(local, layout, assume)
    forward = layers_here * layer / 3
    communication = exposed_ms(scatter, 2 * forward, layout, assume) + exposed_ms(gather, forward, layout, assume)
    shards = layout.data if layout.stage else 1
    return {
        "layers": m * layers_here * layer,
        "tensor parallel": m * layers_here * tp,
        "stage transfers": m * (stage - layers_here * (layer + tp)),
        "head": m * head,
        "bubble": (layout.pp - 1) / layout.vp * (stage + head),
        "sharding": communication,
        "optimizer": local / shards * inputs.optimizer_ms + gradients_ms(local, layout, assume),
    }


def gradients_ms(local, layout, assume):
    """Of what several ranks do with a rank's `local` gradients besides sending them, which one rank does not.

    Sharding: of float32 main gradients a rank's own part is divided by the ranks; except in stage 1, where te writes
    them anew, they are cleared as well, and read as wgrad adds to them. Data parallel (Paddle's EagerReducer): bf16
    gradients are copied into a buffer and back, and divided.
    """
    if layout.data == 1:
        return 0.0
    divided = 8 / layout.data
    bytes_each = {0: 4 + 4 + 4, 1: divided}.get(layout.stage, 4 + 4 + divided)
    return bytes_each * local / assume.hbm / 1e6


def tensor_parallel_ms(elements, gathered_bytes, layout, assume):
    """Of a layer, forward and backward, with sequence parallelism: 4 all-gathers and 4 reduce-scatters of a
    [tokens, hidden] tensor (4.2.2), and 2 all-gathers again of what backward needs whole. These two and 2 of the
    reduce-scatters (bf16) run during GEMMs."""
    gather, scatter = (ring_ms(size * elements, layout.tp, 1, 1, assume) for size in (gathered_bytes, 2))
    return 4 * gather + 2 * scatter + (1 - assume.tp_overlap) * (2 * gather + 2 * scatter)


def stage_transfer_ms(elements, layout, assume):
    """Of a micro-batch on one stage: an activation and its gradient, bf16, sent v times each, over the network."""
    if layout.pp == 1:
        return 0.0
    return layout.vp * 2 * (2 * elements / layout.tp / assume.network / 1e6 + assume.network_hop / 1e3)


def sharding_ms(local, layout, assume):
    """(ms of the collectives during backward, and of those during forward) for a rank's `local` parameters."""
    messages = math.ceil(2 * local / assume.bucket)

    def ring(bytes_each):
        return ring_ms(bytes_each * local, layout.data, layout.tp, messages, assume)

    if layout.stage == 0:
        return 2 * ring(2), 0.0  # all-reduce of bf16 gradients
    return ring(4) + (ring(2) if layout.stage == 3 else 0), ring(2)


def memory_gb(size, layout, assume):
    """bf16 weights, float32 main gradients, 12 bytes of optimizer over the shards, fp8 weights; activations."""
    local = parameters(size) / (layout.tp * layout.pp)
    weights = local * (2 + 4 + 12 / (layout.data if layout.stage else 1) + 2)
    in_flight = 1 + (layout.pp - 1) / (layout.pp * layout.vp) if layout.vp > 1 else 1  # 4.2.3
    kept = assume.activations * layout.batch * size.dims.sequence * size.dims.hidden / layout.tp * size.layers
    return (weights + kept * in_flight) / 1e9


def best_layout(size, gpus, inputs, assume, sequences_per_gpu=1):
    """The fastest Layout that fits: {"layout", "parts", "memory"}; None if none does.

    All have the same tokens a step: `sequences_per_gpu` sequences for each GPU, one a micro-batch.
    """
    found = []
    for tp in (1, 2, 4, 8):
        for pp, vp in ((1, 1), (2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (8, 5)):
            if gpus % (tp * pp) or size.layers % (pp * vp) or size.dims.kv_heads % tp:
                continue
            layout = Layout(gpus, tp, pp, vp, microbatches=tp * pp * sequences_per_gpu)
            memory = memory_gb(size, layout, assume)
            if memory <= assume.memory:
                found.append(dict(layout=layout, parts=predict(size, layout, inputs, assume), memory=memory))
    return min(found, key=lambda each: sum(each["parts"].values()), default=None)


def tokens_per_second_per_gpu(size, layout, parts):
    tokens = layout.data * layout.microbatches * layout.batch * size.dims.sequence
    return tokens / sum(parts.values()) * 1e3 / layout.gpus


# ------------------------------------------------------------------------------------------------ measured inputs


def flops_per_ms(layers, dims, precision, cached):
    """Of te's layer with this hidden and ffn size in a result of layer.py; more tokens: the same speed.

    Raises ValueError where it was not measured.
    """
    peer = {"bf16": "paddle_te_bf16", "fp8": "paddle_te_fp8_delayed"}[precision]
    peer += "_cached" if cached and precision == "fp8" else ""
    for found in layers["sizes"].values():
        same = all(found["dims"][name] == getattr(dims, name) for name in ("hidden", "ffn", "kv_heads"))
        row = found["peers"].get(peer, {})
        if same and row.get("status") == "ok":
            return found["flops"] / row["step_ms"]["median"]
    raise ValueError(f"no measured {peer} layer with hidden={dims.hidden}, ffn={dims.ffn}, kv_heads={dims.kv_heads}")


def head_and_optimizer(steps, size, precision, assume):
    """(ms a token, ms a parameter) of a result of step.py;
    of the assumptions where `steps` is None or has not measured this hidden size and vocabulary.
    """
    peer = f"paddle_te_{precision}"
    for found in steps["sizes"].values() if steps else ():
        row, dims = found["peers"].get(peer, {}), Dims(**found["dims"])
        if row.get("status") != "ok" or (dims.hidden, found["vocabulary"]) != (size.dims.hidden, size.vocabulary):
            continue
        ms = {part: times["median"] for part, times in row["parts_ms"].items()}
        outside = sum(time for part, time in ms.items() if "head" in part or "embedding" in part)
        measured = step.Size(dims, found["vocabulary"], found["layers"])
        return outside / found["tokens"], (ms["clipping"] + ms["optimizer"]) / parameters(measured)
    weights = size.dims.hidden * size.vocabulary
    head = 6 * weights / assume.head_tflops / 1e9 + assume.head_bytes * size.vocabulary / assume.hbm / 1e6
    return head, assume.optimizer_bytes / assume.hbm / 1e6


def inputs_for(size, precision, cached, layers, steps, assume):
    return Inputs(
        flops_per_ms(layers, size.dims, precision, cached),
        *head_and_optimizer(steps, size, precision, assume),
        gathered_bytes=1 if precision == "fp8" else 2,
    )


def measured_points(results):
    """[(name, size, Layout, precision, ms)] of the runs that are ok in results of throughput.py, without those whose
    flags are NOT_MODELLED."""
    points = []
    for result in results:
        for name, row in result["runs"].items():
            run = row["run"]
            if row["status"] != "ok" or any(flag in run["flags"] for flag in NOT_MODELLED):
                continue
            size = step.Size(**run["size"] | {"dims": Dims(**run["size"]["dims"])})
            stage = int(run["stage"][-1]) if run["sharding"] > 1 else 0
            overlap = "overlap" in run["flags"] or stage == 0
            layout = Layout(
                run["gpus"], run["tp"], 1, 1, size.micro_batches, run["batch"], stage, overlap, run["recompute"]
            )
            points.append((name, size, layout, run["precision"], row["step_ms"]["median"]))
    return points


# ------------------------------------------------------------------------------------------------ tables


def assumptions_table(assume):
    rows = [f"| {each.name} | {getattr(assume, each.name):g} | {each.metadata['what']} |" for each in fields(assume)]
    return ["| assumption | value | |", "|---|---|---|", *rows]


def check_table(points, layers, steps, assume):
    """Predicted and measured times, and the relative error."""
    if not points:
        return ["No measured points: no result of throughput.py was given (--throughput). Nothing below is checked."]
    lines = ["| run | GPUs | layout | predicted ms | measured ms | relative error |", "|---|---|---|---|---|---|"]
    for name, size, layout, precision, ms in points:
        try:
            inputs = inputs_for(size, precision, layout.microbatches > 1, layers, steps, assume)
        except ValueError as error:
            lines.append(f"| {name} | {layout.gpus} | {layout} | {error} | {ms:.1f} | |")
            continue
        predicted = sum(predict(size, layout, inputs, assume).values())
        lines.append(f"| {name} | {layout.gpus} | {layout} | {predicted:.1f} | {ms:.1f} | {predicted / ms - 1:+.1%} |")
    return lines


def prediction_table(size, precision, layers, steps, assume):
    """The best layout on each number of GPUs."""
    rows, first = [], None
    for gpus in GPUS:
        # fp8 weights kept for several micro-batches; the speed without, for one, decides no layout
        inputs = inputs_for(size, precision, True, layers, steps, assume)
        best = best_layout(size, gpus, inputs, assume)
        if best is None:
            rows.append(f"| {gpus} | none fits in {assume.memory:g} GB | | | | | |")
            continue
        layout = best["layout"]
        if layout.microbatches == 1:
            inputs = inputs_for(size, precision, False, layers, steps, assume)
            best["parts"] = predict(size, layout, inputs, assume)
        speed, total = tokens_per_second_per_gpu(size, layout, best["parts"]), sum(best["parts"].values())
        first = first or speed
        shares = ", ".join(f"{part} {ms / total:.0%}" for part, ms in best["parts"].items() if ms / total >= 0.005)
        cells = [gpus, layout, f"{total:.0f}", f"{speed:.0f}", f"{speed / first:.3f}", f"{best['memory']:.0f}", shares]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return ["| GPUs | layout | step ms | tokens/s per GPU | of the first row | GB | parts |", "|---" * 7 + "|", *rows]


def markdown(layers, steps, results, sources, assume):
    lines = ["# Llama-3 on 8 to 512 H200s: predicted", "", f"Measured inputs: {sources}.", ""]
    lines += [*assumptions_table(assume), "", "## Predicted and measured", ""]
    lines += [*check_table(measured_points(results), layers, steps, assume), ""]
    for title, size in {"8B": LLAMA_8B, "70B": LLAMA_70B}.items():
        for precision in ("fp8", "bf16"):
            what = f"{precision}, sequences of {size.dims.sequence}, one a GPU and step"
            lines += [f"## Llama-3-{title}, {what}", ""]
            lines += [*prediction_table(size, precision, layers, steps, assume), ""]
    return "\n".join(lines)


def load(path):
    return json.loads(path.read_text())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", type=Path, default=LAYER, help="of layer.py; default %(default)s")
    parser.add_argument("--step", type=Path, default=STEP, help="of step.py; default %(default)s")
    parser.add_argument(
        "--throughput", type=Path, nargs="*", default=THROUGHPUT, help="of throughput.py; default %(default)s"
    )
    parser.add_argument("--output", type=Path, help="Markdown file (default: print alone)")
    arguments = parser.parse_args(argv)
    paths = [arguments.layer, arguments.step, *arguments.throughput]
    if missing := [str(path) for path in paths if not path.is_file()]:
        parser.error(f"there is no file {', '.join(missing)}; --layer, --step and --throughput name others")
    layer, steps, *throughput = map(load, paths)
    sources = ", ".join(f"{path.parent.name}/{path.name}" for path in paths)
    text = markdown(layer, steps, throughput, sources, Assumptions())
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
