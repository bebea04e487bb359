"""Read the trainings in benchmarks/ as Points, with which the planner is compared.

Points are the trainings of planned.py, the runs of throughput.py that train with this project (all weights, LoRA, or
LoRA on preferences), the steps of mixtures of experts of step.py, and figures that were written down by hand where
the result is lost. This command writes the planner's list of what ran (paddle_te/planner/measured.json):

    python -m tools.benchmark.measured
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paddle_te.job import Job
from paddle_te.job.record import PREFERENCES
from paddle_te.job.words import read
from paddle_te.options.layers import FuseWgrad
from paddle_te.planner.gpus import GPUS
from paddle_te.planner.layout import COUNTED as FLAGS
from paddle_te.planner.layout import layout as layout_of
from paddle_te.planner.layout import row_of
from paddle_te.planner.measured import FILE, model_of_row
from paddle_te.planner.memory import memory_of_step
from paddle_te.planner.model import Model
from paddle_te.planner.plan import Plan
from paddle_te.planner.speed import ADDED_BYTES, time_of_step
from tools.benchmark import finetuning, preferences, step
from tools.benchmark.problem import Dims, Variant
from tools.benchmark.throughput import FINETUNING_RUNS, OUR_RUNS

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COUNTED = OUR_RUNS | FINETUNING_RUNS  # the runs that become Points
# Further flags of a run that a layout has
_OTHERS = ("lora_rank", "lora_targets")
COMPACT = {"optim_moments": "bfloat16", "master_weights": "bf16_remainder"}
# Older code computed with other kernels. The planner counts today's bytes, so it is not compared with older results.
# They stay in benchmarks/ where nothing newer answers their question.
SINCE = "2026-11-24T15:00:00+00:00"
# Since commit 8be0674a te's GEMMs add up gradients in bf16, too. Results are dated when they ran: older code that ran
# later had main gradients.
GEMMS_ADD_SINCE = "2026-11-28T21:10:35+00:00"
# Since commit 2bd171a9 tensor parallelism's collectives of the forward run beside GEMMs. The planner counts that, so it
# is not compared with the times of older code.
TP_BESIDE_GEMMS_SINCE = "2026-11-29T04:06:00+00:00"
# A result may also have a peer that was made for one question, such as te as it was before a change.
_OURS = {name for name in step.PEERS if name.startswith("paddle_te")}


@dataclass(frozen=True)
class Point:
    """A training that was measured.

    ms: of a step; None if too few steps were timed or some were disturbed. memory: the peak in bytes; None if it was
    not recorded. gpu: a name of GPUS. commit: of the code that ran. date: when it ran, in ISO 8601.
    """

    name: str
    model: Model
    layout: Job
    ms: float | None
    memory: float | None
    gpu: str
    commit: str
    date: str

    @property
    def fuses_wgrad(self) -> FuseWgrad:
        """Where te's GEMMs added up weight gradients in the code that ran; today `Job.fuses_wgrad` says it."""
        today = self.layout.fuses_wgrad
        return False if today == "grad" and self.date < GEMMS_ADD_SINCE else today


def expected(point: Point) -> Plan:
    """Return the planner's Plan for a Point, with the additions of the code that ran."""
    need = memory_of_step(point.model, point.layout, rank=0)
    times = time_of_step(point.model, point.layout, GPUS[point.gpu])
    times["accumulation"] *= ADDED_BYTES[point.fuses_wgrad] / ADDED_BYTES[point.layout.fuses_wgrad]
    return Plan(point.layout, need, times)


def all_points():
    """Return the Points of all results in benchmarks/ that code since SINCE gave."""
    results = map(json.loads, map(Path.read_text, sorted(BENCHMARKS.rglob("*.json"))))
    known = [result for result in results if isinstance(result, dict) and result.get("benchmark") in KINDS]
    points = [point for result in known if result["date"] >= SINCE for point in points_of(result)]
    points += points_without_files(BENCHMARKS / "2026-11-25_h100_without-files.md")
    return [point if _takes_that_long_today(point) else replace(point, ms=None) for point in points]


def _takes_that_long_today(point: Point) -> bool:
    return point.layout.tp == 1 or point.date >= TP_BESIDE_GEMMS_SINCE


def points_of(result: dict[str, Any]) -> list[Point]:
    """Return the Points of a result of throughput.py, planned.py or step.py."""
    gpu = gpu_of(result["hardware"]["name"])
    return KINDS[result["benchmark"]](result, partial(Point, gpu=gpu, commit=result["commit"][:7], date=result["date"]))


def _of_throughput(result: dict[str, Any], point: Callable[..., Point]) -> list[Point]:
    """Return the Points of successful runs that train with this project.

    point: makes a Point of what differs between those of a result. Tries for the largest batch have two timed steps on
    a cool GPU, so only their memory counts.
    """
    points = []
    for rows, timed in ((result.get("runs", {}), True), (result.get("tries", {}), False)):
        for name, row in rows.items():
            if row["status"] == "ok" and _counts(row["run"]):
                ms = row["step_ms"]["median"] if timed and _is_steady(row) else None
                points.append(point(name, *of_run(row["run"]), ms, row["peak_bytes"]))
    return points


def _of_planned(result: dict[str, Any], point: Callable[..., Point]) -> list[Point]:
    rows = {name: row for name, row in result["rows"].items() if row["status"] == "ok"}
    return [
        point(name, model_of_row(row["model"]), layout_of(**row["layout"]), row["step_ms"]["median"], row["peak_bytes"])
        for name, row in rows.items()
    ]


def _of_step(result: dict[str, Any], point: Callable[..., Point]) -> list[Point]:
    """Return the Points of steps of mixtures of experts, which have no whole trainings. No Trainer runs in them."""
    points = []
    for name, found in result["sizes"].items():
        for peer, row in found["peers"].items():
            if not found.get("mixture") or peer not in _OURS or row["status"] != "ok":
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
            points.append(point(f"{name}-{peer}", model_of(size), layout, ms, row["peak_bytes"]))
    return points


def dims_of(said):
    """Return the Dims whose fields JSON names; older rows leave some out."""
    known = {each.name: said[each.name] for each in fields(Dims) if each.name in said}
    return Dims(**known | {"variant": Variant(**said.get("variant", {}))})


KINDS = {"throughput": _of_throughput, "planned": _of_planned, "step": _of_step}


def _counts(run):
    """Return whether a run is ours, uses te, and has rows of known lengths, which padded samples do not have."""
    ours = run.get("framework", "paddle_te") == "paddle_te" and run.get("backend", "te") == "te"
    return ours and run.get("packed", True)


def _is_steady(row):
    """Return whether a row's steps took equally long and the GPU waited for the host less than a tenth of a step.

    In fine-tuning's first steps cuDNN plans for each number of documents, which takes longer than the step. If only
    two steps are timed, the first may still have been slow.
    """
    times, timeline = row["step_ms"], row.get("timeline") or {}
    if timeline.get("status") == "ok" and timeline["ms"]["gaps"] > 0.1 * timeline["total_ms"]:
        return False
    if "method" in row["run"]:
        return times["max"] < 1.2 * times["min"]
    return len(times["all"]) > 2 or times["max"] < 1.1 * times["min"]


def gpu_of(name):
    """Return the name of GPUS for a driver's name of a GPU."""
    return next(key for key, gpu in GPUS.items() if gpu.title in name)


def points_without_files(page: Path) -> list[Point]:
    """Return the Points of a page that keeps figures of lost results in tables of throughput.py's runs."""
    text, points, columns = page.read_text(), [], []
    date, gpu, _ = page.name.split("_")
    commit = re.search(r"code of commit (\w{7})", text)[1]
    point = partial(Point, gpu=gpu.partition("x")[0], commit=commit, date=date)
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "run":
            columns = cells
        row = dict(zip(columns, cells, strict=False))
        name = cells[0].split(",")[0].split(" ")[0]
        if name in COUNTED and len(cells) == len(columns):
            memory = float(row["peak GB"]) * 1e9 if row["peak GB"] else None
            ms = float(row["ms"].replace(",", ""))
            points.append(point(name, *of_run(COUNTED[name].described), ms, memory))
    return points


def of_run(run):
    """Return the (Model, Job) of the run that a row describes."""
    said, dims = run["size"], run["size"]["dims"]
    mixture = said.get("mixture")
    size = step.Size(
        dims_of(dims),
        said["vocabulary"],
        said["layers"],
        family=said.get("family", "llama"),  # older rows lack family, tied and mixture
        tied=said.get("tied", False),
        mixture=mixture and step.Mixture(mixture["experts"], mixture["topk"], tuple(map(tuple, mixture["words"]))),
    )
    counted, _ = read(run["flags"].split())
    main_grads = {"amp_master_grad": run["gpus"] > 1}  # the launcher's default, unless the flags say otherwise
    layout = layout_of(
        run["gpus"],
        dims["sequence"],
        tp=run["tp"],
        pp=run.get("pp", 1),
        vp=run.get("vp", 1),
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
    """Return the Model of a step.Size, with the norms and biases of its family."""
    return Model.of({"model_type": size.family, "max_position_embeddings": size.dims.sequence, **size.config})


def layout_of_preferences(layout, script):
    """Return the layout of preference tuning, which has its own flag for the rows' length and its loss in chunks."""
    tuned = layout.but(script=script, zero_padding=True, pad_to_max_length=True, use_fused_linear_cross_entropy=True)
    return tuned.but(**{tuned.length_flag: layout.sequence})


def _of_documents(layout):
    """Return a layout of packed rows as one of sequences with as many tokens and as much attention work."""
    lengths = _lengths(layout) + 0.0
    length = (lengths**2).sum() / lengths.sum()
    batch = layout.batch * layout.sequence / length
    return layout.but(**{layout.length_flag: length}, per_device_train_batch_size=batch)


def _lengths(layout):
    """Return the documents' tokens. A sample is a document; a pair is two, each an answer after its question."""
    if not layout.prefers:
        return finetuning.lengths_of_samples(layout.sequence) - 1
    question, *answers = preferences.lengths_of_pairs(layout.sequence).T
    return np.concatenate([question + answer + 1 for answer in answers])


def as_rows(points):
    """Return the rows of planner/measured.json for the Points that have a time, of equal layouts the last one."""
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
    """Return {field: value} of a dataclass as in JSON, without defaults and without fields that are not compared."""
    kept = {each.name for each in fields(record) if each.compare and getattr(record, each.name) != each.default}
    return {name: value for name, value in json.loads(json.dumps(asdict(record))).items() if name in kept}


def as_text(points):
    """Return the file's text, a row a line."""
    return "[\n" + ",\n".join(json.dumps(row) for row in as_rows(points)) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(as_text(all_points()), encoding="utf-8")
    print(f"{FILE}: written")
