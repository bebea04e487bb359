"""What benchmarks/ has of whole trainings, as Points that the planner can be compared with.

Points are the runs of throughput.py that train with this project, all weights or LoRA, from its results, and figures
that were written down by hand where there is no result.

Some were measured with older code. CHANGES says what that did otherwise, with the formula of its bytes or its time, so
that a Point is compared with what the planner would have to say of that code.

    python -m tools.benchmark.measured

writes the planner's own list of what ran (paddle_te/planner/measured.json).
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from itertools import takewhile
from pathlib import Path

from paddle_te.options.scripts import OPTIMIZER_DEFAULTS
from paddle_te.planner import GPUS, Layout, Lora, Measured, Model, Plan, memory_of_step, time_of_step
from paddle_te.planner.measured import FILE
from paddle_te.planner.memory import trained_elements
from tools.benchmark import finetuning
from tools.benchmark.throughput import FINETUNING_RUNS, OUR_RUNS

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COUNTED = OUR_RUNS | FINETUNING_RUNS  # the runs that there are Points of
# Of the code that was measured before today's, the oldest first.
OLDER_COMMITS = (
    *("6a48209", "9ac8abb", "3a594ec", "f422506", "453a57d", "03e0906", "eee5ec4", "1d9ccb4", "b64f7e2", "639c6e8"),
    *("46ce83b", "3759275", "1dc0f90", "fc2fcfa", "29de05e", "b746c6e", "86290a0", "ae2fff9", "d120f6c"),
)


def _nothing(model, layout):
    return 0.0


@dataclass(frozen=True)
class Change:
    """What code did until a change of it. last: the last of OLDER_COMMITS that did it. concerns: of which Layouts.

    memory: fields of `Measured`. traffic: {Model, Layout: bytes that it read and wrote in a step besides}. held:
    likewise those that it kept for backward besides. gpu: of the Gpu what was different.
    """

    what: str
    last: str
    concerns: Callable[[Layout], bool]
    memory: dict
    traffic: Callable[[Model, Layout], float] = _nothing
    held: Callable[[Model, Layout], float] = _nothing
    gpu: dict | None = None


def _local(model, layout):
    return model.parameters / (layout.tp * layout.pp)


def _gradients_twice(model, layout):
    """A rank's own gradients, read and written."""
    return 2 * (4 if layout.main_grads else 2) * _local(model, layout) / layout.sharding


def _layers_that_wait(model, layout):
    """Those that have more than their inputs at a time."""
    return 1 if layout.recompute == "full" else model.layers


CHANGES = (
    Change(
        "clipping read and wrote all gradients (until fc996bf)",
        "6a48209",
        lambda layout: layout.gpus == 1,
        {},
        _gradients_twice,
    ),
    Change(
        "clipping over several GPUs read and wrote a rank's gradients (until 453a57d)",
        "f422506",
        lambda layout: layout.gpus > 1,
        {},
        _gradients_twice,
    ),
    Change(
        "the loss made a float32 copy of the logits, its softmax and its gradient (until fab126b)",
        "9ac8abb",
        lambda layout: not layout.loss_in_chunks,
        dict(logit_bytes=10),  # 2 of the logits, 4 each of softmax and gradient, when there is most
        # copy, softmax, gradient and its cast read and write 28 bytes; today 12
        lambda model, layout: 16 * model.vocabulary * layout.tokens * layout.micro_batches / layout.tp,
    ),
    Change(
        "main gradients in stage 1 were cleared and added to (until bc0f3ff)",
        "3a594ec",
        lambda layout: layout.overlap and layout.stage == 1,
        {},
        lambda model, layout: 8 * _local(model, layout),
    ),
    Change(
        "no collective of tensor parallelism ran beside a GEMM (until efb4b4b)",
        "453a57d",
        lambda layout: layout.tp > 1,
        {},
        gpu=dict(tp_overlap=0.0),
    ),
    Change(
        "Paddle divided gradients by the number of ranks (until the collectives averaged them, d3b425f)",
        "86290a0",
        lambda layout: layout.data > 1,
        {},
        lambda model, layout: (8 if layout.sharding > 1 else 4) * _local(model, layout) / layout.sharding,
    ),
    Change(
        "one process held bf16 gradients until the next step's (until 56a702d)",
        "fc2fcfa",
        lambda layout: layout.gpus == 1 and not layout.main_grads and layout.optimizer_in_backward == "off",
        dict(released=False),
        # and filled them with zeros
        lambda model, layout: 2 * trained_elements(model, layout, model.parameters),
    ),
    Change(
        "SwiGLU, its gradient and RMSNorm were cast to fp8 by the library (until 495d8fc and 2677240)",
        "fc2fcfa",
        lambda layout: layout.precision == "fp8" and not layout.lora,
        {},
        # 4 bytes a token and number of fc1's output, 2 of a hidden state; half of that in forward, maybe twice
        lambda model, layout: (
            (4 * model.fc1 + 2 * model.hidden)
            * (1.5 if layout.recompute == "full" else 1)
            * model.layers
            * layout.tokens
            * layout.micro_batches
            / layout.tp
            / layout.pp
            * model.gated
        ),
    ),
    Change(
        "LoRA's layers kept silu(gate) as well (until ff9bfb3)",
        "46ce83b",
        lambda layout: layout.lora is not None,
        {},
        held=lambda model, layout: 2 * model.ffn * layout.tokens * _layers_that_wait(model, layout),
    ),
    Change(
        "frozen weights' GEMMs in fp8 kept the transposes of their inputs, and LoRA's products were operations of "
        "their own (until a555fe3)",
        "fc2fcfa",
        lambda layout: layout.lora is not None and layout.precision == "fp8",
        {},
        # a byte of each input and output, and 4 where a product is written and read again to be added
        lambda model, layout: (
            (1 + 4)
            * sum(gemm.inputs + sum(gemm.outputs) for gemm in model.gemms)
            * (4 / 3 if layout.recompute == "full" else 1)
            * layout.tokens
            * model.layers
        ),
        held=lambda model, layout: (3 * model.hidden + model.ffn) * layout.tokens * _layers_that_wait(model, layout),
    ),
    Change(
        "the host waited for the device again when it logged the loss, and looked up what AdamW needs behind the first "
        "wait (until 5f8c9d7)",
        "ae2fff9",
        lambda layout: True,
        {},
        gpu=dict(gap=4, launch=1.2),
    ),
    Change(
        "the norm before the head was a dozen of Paddle's operations (until 019dd58)",
        "ae2fff9",
        lambda layout: True,
        dict(norm_bytes=8),  # a float32 copy of its input, and of its output
        # 2.2 ms of 8,192 tokens of 4,096 numbers
        lambda model, layout: 220 * model.hidden * layout.tokens * layout.micro_batches / layout.tp,
    ),
    Change(
        "with LoRA Paddle added the residuals' gradients to the norms', and casts of their own made fp8 of SwiGLU and "
        "its gradient (until norm and MLP with LoRA became one operation each)",
        "d120f6c",
        lambda layout: layout.lora is not None,
        {},
        lambda model, layout: (
            (
                2 * 3 * 2 * model.hidden
                + (layout.precision == "fp8") * 2 * (model.fc1 + model.ffn * (2 if layout.recompute == "full" else 1))
            )
            * layout.tokens
            * layout.micro_batches
            * model.layers
            / layout.tp
        ),
    ),
)


@dataclass(frozen=True)
class Point:
    """A training that was measured. ms: of a step, None where too few were timed or some were disturbed. memory: peak,
    in bytes, None where nobody wrote it down. gpu: its name among GPUS."""

    name: str
    commit: str
    gpu: str
    model: Model
    layout: Layout
    ms: float | None
    memory: float | None

    @property
    def older(self):
        """The Changes that its code did not have."""
        if self.commit not in OLDER_COMMITS:
            return []
        order = OLDER_COMMITS.index
        return [each for each in CHANGES if order(self.commit) <= order(each.last) and each.concerns(self.layout)]


def expected(point):
    """The Plan of what the planner says of a Point's code."""
    memory, gpu, traffic, held = {}, GPUS[point.gpu], 0.0, 0.0
    for change in point.older:
        memory |= change.memory
        gpu = replace(gpu, **change.gpu or {})
        traffic += change.traffic(point.model, point.layout)
        held += change.held(point.model, point.layout)
    times = time_of_step(point.model, point.layout, gpu) | {"older code": traffic / gpu.hbm / 1e6}
    need = memory_of_step(point.model, point.layout, Measured(rank=0, **memory))
    return Plan(point.layout, replace(need, activations=need.activations + held), times)


def all_points():
    """[Point] of all that benchmarks/ has."""
    files = sorted(BENCHMARKS.rglob("*.json"))
    results = [result for result in map(json.loads, map(Path.read_text, files)) if _is_throughput(result)]
    pages = sorted(BENCHMARKS.glob("*_without-files.md"))
    return points_of(results) + [point for page in pages for point in points_without_files(page)]


def _is_throughput(result):
    return isinstance(result, dict) and result.get("benchmark") == "throughput"


def points_of(results):
    """[Point] of the runs that are ok in results of throughput.py and train with this project.

    Its tries for the largest batch have two timed steps on a cool GPU, so that their memory alone counts.
    """
    points = []
    for result in results:
        commit, gpu = result["commit"][:7], gpu_of(result["hardware"]["name"])
        points += [_by_hand(row, commit, gpu) for row in result.get("rows", ()) if result.get("by_hand")]
        for rows, timed in ((result.get("runs", {}), True), (result.get("tries", {}), False)):
            for name, row in rows.items():
                if row["status"] == "ok" and _counts(row["run"]):
                    ms = row["step_ms"]["median"] if timed and _is_steady(row) and not _copied(row, commit) else None
                    points.append(Point(name, commit, gpu, *of_run(row["run"]), ms, row["peak_bytes"]))
    return points


def _counts(run):
    """Of a row's run: whether it is ours, and has rows of known lengths, unlike padded samples."""
    return run.get("framework", "paddle_te") == "paddle_te" and run.get("packed", True)


def _is_steady(row):
    """Whether its steps took equally long, and the GPU did not wait for the host in a tenth of a step and more.

    Fine-tuning's first steps build cuDNN's plans for each number of documents, which take longer than the step. One of
    only two timed steps may still have been slow to begin.
    """
    times, timeline = row["step_ms"], row.get("timeline") or {}
    if timeline.get("status") == "ok" and timeline["ms"]["gaps"] > 0.1 * timeline["total_ms"]:
        return False
    if "method" in row["run"]:
        return times["max"] < 1.2 * times["min"]
    return len(times["all"]) > 2 or times["max"] < 1.1 * times["min"]


def _copied(row, commit):
    """Whether LoRA's layers made their products part by part, and copied them number by number (until 533d10a), which
    no formula says."""
    until = OLDER_COMMITS[: OLDER_COMMITS.index("1dc0f90") + 1]
    return row["run"].get("method") == "lora" and commit in until


def gpu_of(name):
    """The name among GPUS of a GPU, whose driver calls it so."""
    return next(key for key, gpu in GPUS.items() if gpu.title in name)


def _by_hand(row, commit, gpu):
    """A row of the results that were noted by hand, of which its definitions say what ran: long sequences."""
    model, layout = of_run(OUR_RUNS["8b-l16-64k-x1"].described)
    layout = replace(layout, sequence=row["sequence"])
    ms = row["sequence"] / row["tokens_per_second"] * 1e3
    name = f"by hand, {row['layers']} layers, {row['sequence']} tokens"
    return Point(name, commit, gpu, replace(model, layers=row["layers"]), layout, ms, row["peak_gb"] * 1e9)


def points_without_files(page):
    """[Point] of a page that has what was written down of lost results: its tables of throughput.py's runs."""
    text, points, columns = page.read_text(), [], []
    gpu = page.name.split("_")[1].partition("x")[0]
    commit = re.search(r"code of commit (\w{7})", text)[1]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "run":
            columns = cells
        row = dict(zip(reversed(columns), reversed(cells), strict=False))  # "planned" twice: the first one is lost
        name = cells[0].split(",")[0].split(" ")[0]
        if name in COUNTED and len(cells) == len(columns):
            memory = float(row["peak GB"]) * 1e9 if row["peak GB"] else None
            points.append(
                Point(name, commit, gpu, *of_run(COUNTED[name].described), float(row["ms"].replace(",", "")), memory)
            )
    return points


def of_run(run):
    """(Model, Layout) of what a row says that it has run."""
    size, dims, flags = run["size"], run["size"]["dims"], run["flags"]
    model = Model.of(
        {
            "model_type": size.get("family", "llama"),  # older rows do not say it, nor the next but one
            "hidden_size": dims["hidden"],
            "intermediate_size": dims["ffn"],
            "num_hidden_layers": size["layers"],
            "num_attention_heads": dims["heads"],
            "num_key_value_heads": dims["kv_heads"],
            "vocab_size": size["vocabulary"],
            "max_position_embeddings": dims["sequence"],
            "tie_word_embeddings": size.get("tied", False),
        }
    )
    layout = Layout(
        run["gpus"],
        dims["sequence"],
        tp=run["tp"],
        pp=run.get("pp", 1),
        sep=run.get("sep", 1),
        cp=run.get("cp", 1),
        sharding=run["sharding"],
        stage=int(run["stage"][-1]),
        batch=run["batch"],
        micro_batches=size.get("micro_batches", 1),
        precision=run["precision"],
        recompute=run["recompute"],
        recompute_modules=_values(flags, "--recompute_modules"),
        fp8_input_store="--activation_func_fp8_input_store true" in flags,
        mlp_chunk_tokens=int(_value(flags, "--mlp_chunk_tokens", 0)),
        overlap=re.search(r"enable_\w*overlap", flags) is not None,  # of sharding
        loss_in_chunks="--use_fused_linear_cross_entropy true" in flags,
        fp8_head="--fp8_lm_head true" in flags,
        fp8_attention="--fp8_dpa true" in flags,
        # what the launcher takes for several GPUs, unless the flags say otherwise (launch/flags.py)
        main_grads=_value(flags, "--amp_master_grad", "true" if run["gpus"] > 1 else "false") == "true",
        fused_wgrad="--fuse_wgrad_accumulation false" not in flags,
        release_grads="--release_grads true" in flags,
        **{name: _value(flags, f"--{name}", default) for name, default in OPTIMIZER_DEFAULTS.items()},
        offload_activations=int(_value(flags, "--offload_activations", 0)),
        offload_optimizer=float(_value(flags, "--offload_optimizer", 0)),
        lora=_lora(run) if run.get("method") == "lora" else None,
    )
    return model, _of_documents(layout) if run.get("packed") else layout


def _lora(run):
    return Lora(int(_value(run["flags"], "--lora_rank", 0)), fp8_base=bool(run.get("fp8_base")))


def _of_documents(layout):
    """A layout of packed rows, as one of sequences that have as many tokens and as much attention as the documents."""
    lengths = finetuning.lengths_of_samples(layout.sequence) - 1.0
    length = (lengths**2).sum() / lengths.sum()
    return replace(layout, sequence=length, batch=layout.batch * layout.sequence / length)


def _value(flags, name, default):
    return next(iter(_values(flags, name)), default)


def _values(flags, name):
    """What stands behind a flag, up to the next one."""
    words = flags.split()
    behind = words[words.index(name) + 1 :] if name in words else ()
    return tuple(takewhile(lambda word: not word.startswith("--"), behind))


def as_rows(points):
    """What planner/measured.json says of the Points that have a time: of equal layouts the last."""
    rows = [
        {
            "gpu": point.gpu,
            "model": _not_default(point.model),
            "layout": _not_default(point.layout),
            "tokens_per_second": round(point.layout.tokens_per_step / point.ms * 1e3 / point.layout.gpus, 1),
        }
        for point in points
        if point.ms
    ]
    return list({json.dumps({**row, "tokens_per_second": None}): row for row in rows}.values())


def _not_default(record):
    """{field: value} of a dataclass, as JSON has it, without defaults."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    kept = {each.name for each in fields(record) if values[each.name] != each.default}
    return {name: value for name, value in json.loads(json.dumps(asdict(record))).items() if name in kept}


def as_text(points):
    """The file: a row a line."""
    return "[\n" + ",\n".join(json.dumps(row) for row in as_rows(points)) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(as_text(all_points()), encoding="utf-8")
    print(f"{FILE}: written")
