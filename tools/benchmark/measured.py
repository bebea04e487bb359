"""What benchmarks/ has of whole trainings, as Points that the planner is compared with.

Points are the trainings of planned.py, the runs of throughput.py that train with this project (all weights, LoRA, or
LoRA on preferences), the steps of mixtures of experts of step.py, and figures that were written down by hand where
there is no result.

    python -m tools.benchmark.measured

writes the planner's own list of what ran (paddle_te/planner/measured.json).
"""

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from paddle_te.job import Job
from paddle_te.job.record import PREFERENCES
from paddle_te.job.words import read
from paddle_te.planner.gpus import GPUS
from paddle_te.planner.layout import COUNTED as FLAGS
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.layout import row_of
from paddle_te.planner.measured import FILE, model_of_row
from paddle_te.planner.memory import memory_of_step
from paddle_te.planner.model import Model
from paddle_te.planner.plan import Plan
from paddle_te.planner.speed import time_of_step
from tools.benchmark import finetuning, preferences, step
from tools.benchmark.problem import Dims, Variant
from tools.benchmark.throughput import FINETUNING_RUNS, OUR_RUNS

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COUNTED = OUR_RUNS | FINETUNING_RUNS  # the runs that there are Points of
# Further flags of a run that a layout has
_OTHERS = ("lora_rank", "lora_targets")
COMPACT = {"optim_moments": "bfloat16", "master_weights": "bf16_remainder"}
# Code before this computed with other kernels: its results stay where nothing newer answers their question, but the
# planner, which counts today's bytes, is not compared with them.
SINCE = "2026-11-24T15:00:00+00:00"


@dataclass(frozen=True)
class Point:
    """A training that was measured. ms: of a step, None where too few were timed or some were disturbed. memory: peak,
    in bytes, None where nobody wrote it down. gpu: its name among GPUS."""

    name: str
    commit: str
    gpu: str
    model: Model
    layout: Job
    ms: float | None
    memory: float | None


def expected(point):
    """The Plan of what the planner says of a Point."""
    need = memory_of_step(point.model, point.layout, rank=0)
    return Plan(point.layout, need, time_of_step(point.model, point.layout, GPUS[point.gpu]))


def all_points():
    """[Point] of all that benchmarks/ has of code since SINCE."""
    results = map(json.loads, map(Path.read_text, sorted(BENCHMARKS.rglob("*.json"))))
    known = [result for result in results if isinstance(result, dict) and result.get("benchmark") in KINDS]
    points = [point for result in known if result["date"] >= SINCE for point in points_of(result)]
    return points + points_without_files(BENCHMARKS / "2026-11-25_h100_without-files.md")


def points_of(result):
    """[Point] of a result of throughput.py or planned.py."""
    return KINDS[result["benchmark"]](result, result["commit"][:7], gpu_of(result["hardware"]["name"]))


def _of_throughput(result, commit, gpu):
    """Runs that are ok and train with this project.

    Tries for the largest batch have two timed steps on a cool GPU, so that only their memory counts.
    """
    points = []
    for rows, timed in ((result.get("runs", {}), True), (result.get("tries", {}), False)):
        for name, row in rows.items():
            if row["status"] == "ok" and _counts(row["run"]):
                ms = row["step_ms"]["median"] if timed and _is_steady(row) else None
                points.append(Point(name, commit, gpu, *of_run(row["run"]), ms, row["peak_bytes"]))
    return points


def _of_planned(result, commit, gpu):
    rows = {name: row for name, row in result["rows"].items() if row["status"] == "ok"}
    return [
        Point(
            name,
            commit,
            gpu,
            model_of_row(row["model"]),
            layout_of(**row["layout"]),
            row["step_ms"]["median"],
            row["peak_bytes"],
        )
        for name, row in rows.items()
    ]


def _of_step(result, commit, gpu):
    """Steps of mixtures of experts, for which there are no whole trainings. The Trainer is not in them."""
    points = []
    for name, found in result["sizes"].items():
        for peer, row in found["peers"].items():
            if not found.get("mixture") or not peer.startswith("paddle_te") or row["status"] != "ok":
                continue
            size = replace(step.SIZES[name], dims=dims_of(found["dims"]), layers=found["layers"])
            scaling = row["precision"].partition("_")[2] or "delayed"
            layout = layout_of(
                1,
                size.dims.sequence,
                precision=row["precision"].partition("_")[0],
                batch=size.dims.batch,
                micro_batches=found["micro_batches"],
                fp8_recipe=scaling,
                **COMPACT if "compact" in peer else {},
            )
            ms = row["step_ms"]["median"]
            points.append(Point(f"{name}-{peer}", commit, gpu, model_of(size), layout, ms, row["peak_bytes"]))
    return points


def dims_of(said):
    """The Dims that JSON has as their fields, of which older rows do not say all."""
    known = {each.name: said[each.name] for each in fields(Dims) if each.name in said}
    return Dims(**known | {"variant": Variant(**said.get("variant", {}))})


KINDS = {"throughput": _of_throughput, "planned": _of_planned, "step": _of_step}


def _counts(run):
    """Of a row's run: whether it is ours, on te, and has rows of known lengths, unlike padded samples."""
    ours = run.get("framework", "paddle_te") == "paddle_te" and run.get("backend", "te") == "te"
    return ours and run.get("packed", True)


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


def gpu_of(name):
    """The name among GPUS of a GPU, whose driver calls it so."""
    return next(key for key, gpu in GPUS.items() if gpu.title in name)


def points_without_files(page):
    """[Point] of a page that has what was written down of lost results: its tables of throughput.py's runs."""
    text, points, columns = page.read_text(), [], []
    gpu = page.name.split("_")[1].partition("x")[0]
    commit = re.search(r"code of commit (\w{7})", text)[1]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "run":
            columns = cells
        row = dict(zip(columns, cells, strict=False))
        name = cells[0].split(",")[0].split(" ")[0]
        if name in COUNTED and len(cells) == len(columns):
            memory = float(row["peak GB"]) * 1e9 if row["peak GB"] else None
            points.append(
                Point(name, commit, gpu, *of_run(COUNTED[name].described), float(row["ms"].replace(",", "")), memory)
            )
    return points


def of_run(run):
    """(Model, Job) of what a row says that it has run."""
    said, dims = run["size"], run["size"]["dims"]
    mixture = said.get("mixture")
    size = step.Size(
        dims_of(dims),
        said["vocabulary"],
        said["layers"],
        family=said.get("family", "llama"),  # older rows do not say it, nor the next but one
        tied=said.get("tied", False),
        mixture=mixture and step.Mixture(mixture["experts"], mixture["topk"], tuple(map(tuple, mixture["words"]))),
    )
    counted, _ = read(run["flags"].split())
    main_grads = {"amp_master_grad": run["gpus"] > 1}  # what the launcher takes, unless the flags say otherwise
    layout = layout_of(
        run["gpus"],
        dims["sequence"],
        tp=run["tp"],
        pp=run.get("pp", 1),
        sep=run.get("sep", 1),
        cp=run.get("cp", 1),
        ep=run.get("ep", 1),
        sharding=run["sharding"],
        stage=int(run["stage"][-1]),
        batch=run["batch"],
        micro_batches=said.get("micro_batches", 1),
        precision=run["precision"],
        recompute=run["recompute"],
        overlap=re.search(r"enable_\w*overlap", run["flags"]) is not None,  # of sharding
        lora=run.get("method") == "lora",
        quantize_base="fp8" if run.get("fp8_base") else None,
        **main_grads | {name: counted[name] for name in (*FLAGS, *_OTHERS) if name in counted},
    )
    if run.get("job") in PREFERENCES:
        layout = layout_of_preferences(layout, run["job"])
    return model_of(size), _of_documents(layout) if run.get("packed") else layout


def model_of(size):
    """The Model of a step.Size, whose normalization and biases are its family's."""
    return Model.of({"model_type": size.family, "max_position_embeddings": size.dims.sequence, **size.config})


def layout_of_preferences(layout, script):
    """The layout of tuning on preferences, whose rows have a length of their own and whose loss is in chunks."""
    tuned = layout.but(script=script, zero_padding=True, pad_to_max_length=True, use_fused_linear_cross_entropy=True)
    return tuned.but(**{tuned.length_flag: layout.sequence})


def _of_documents(layout):
    """A layout of packed rows, as one of sequences that have as many tokens and as much attention as the documents."""
    lengths = _lengths(layout) + 0.0
    length = (lengths**2).sum() / lengths.sum()
    batch = layout.batch * layout.sequence / length
    return layout.but(**{layout.length_flag: length}, per_device_train_batch_size=batch)


def _lengths(layout):
    """Tokens of the documents: samples, or of pairs both answers, each behind its question."""
    if not layout.prefers:
        return finetuning.lengths_of_samples(layout.sequence) - 1
    question, *answers = preferences.lengths_of_pairs(layout.sequence).T
    return np.concatenate([question + answer + 1 for answer in answers])


def as_rows(points):
    """What planner/measured.json says of the Points that have a time: of equal layouts the last."""
    rows = [
        {
            "gpu": point.gpu,
            "model": as_json(point.model),
            "layout": row_of(point.layout),
            "tokens_per_second": round(point.layout.tokens_per_step / point.ms * 1e3 / point.layout.world, 1),
        }
        for point in points
        if point.ms
    ]
    return list({json.dumps({**row, "tokens_per_second": None}): row for row in rows}.values())


def as_json(record):
    """{field: value} of a dataclass, as JSON has it, without defaults and what two records are not compared by."""
    kept = {each.name for each in fields(record) if each.compare and getattr(record, each.name) != each.default}
    return {name: value for name, value in json.loads(json.dumps(asdict(record))).items() if name in kept}


def as_text(points):
    """The file: a row a line."""
    return "[\n" + ",\n".join(json.dumps(row) for row in as_rows(points)) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(as_text(all_points()), encoding="utf-8")
    print(f"{FILE}: written")
