"""Rules for degrees of parallelism beside each other, and for devices."""

from __future__ import annotations

from paddle_te.job.record import Job
from paddle_te.job.rules.rule import HALF, PD, Rule, shards, sharing_degrees


def _does_not_divide(job: Job) -> str:
    """Return the degrees whose product does not divide the number of devices, in words; "" where it does."""
    degrees = job.ranks_of_a_sequence * job.sharding_ranks
    if job.world % degrees == 0:
        return ""
    split = ["tensor_parallel_degree", "pipeline_parallel_degree", *sharing_degrees(job)]
    split += [f"sharding_parallel_degree:{job.sharding_ranks}"]
    return f"{' x '.join(f'{{{name}}}' for name in split)} = {degrees}"


_SHARDED_PIPELINE = "x4 --sharding_parallel_degree 2 --pipeline_parallel_degree 2 --gradient_accumulation_steps 2"
RULES = (
    Rule(
        _does_not_divide,
        "{found} must divide the number of devices, {devices}",
        "DP is what remains; give {tensor_parallel_degree:1}, or degrees that do, as a device has one process",
        "x2 --tensor_parallel_degree 4",
        "x4 --tensor_parallel_degree 2",
    ),
    Rule(
        lambda job: job.vp > 1 and job.pp < 3,
        "{virtual_pp_degree} needs {pipeline_parallel_degree:name} of at least 3 (Paddle asserts more than 2 stages)",
        "",
        "x2 --virtual_pp_degree 2 --pipeline_parallel_degree 2 --gradient_accumulation_steps 4",
        "x4 --virtual_pp_degree 2 --pipeline_parallel_degree 4 --gradient_accumulation_steps 8 "
        "--model_name_or_path meta-llama/Llama-2-7b",
    ),
    Rule(
        lambda job: job.sequence_parallel and job.tp == 1,
        "{sequence_parallel} needs {tensor_parallel_degree:name} of at least 2: it splits the sequence over the "
        "tensor-parallel devices",
        "",
        "--sequence_parallel true",
        "x2 --sequence_parallel true --tensor_parallel_degree 2",
    ),
    Rule(
        lambda job: job.sep > 1 and job.cp > 1,
        "{sep_parallel_degree} does not go with {context_parallel_degree}: both split sequences",
        "use one of them",
        f"x4 {PD} --sep_parallel_degree 2 --context_parallel_degree 2",
        f"x4 {PD} --sep_parallel_degree 2 --tensor_parallel_degree 1",
    ),
    Rule(
        lambda job: job.sequence % job.sep and f"{{{job.length_flag}}}",
        "{found} must be a multiple of {sep_parallel_degree}, which splits sequences",
        "",
        f"x2 {PD} --sep_parallel_degree 2 --max_seq_length 63",
        f"x2 {PD} --sep_parallel_degree 2 --max_seq_length 64",
    ),
    Rule(
        lambda job: job.cp > 1 and job.sequence % (2 * job.cp) and f"{{{job.length_flag}}}",
        "{found} must be a multiple of 2 x {context_parallel_degree}: each device has two pieces",
        "",
        f"x2 {PD} --context_parallel_degree 2 --max_seq_length 66",
        f"x2 {PD} --context_parallel_degree 2 --max_seq_length 68",
    ),
    Rule(
        lambda job: job.sequence_parallel and job.sequence % (job.sharing * job.tp) and f"{{{job.length_flag}}}",
        "{found} must be a multiple of {tensor_parallel_degree}, times the ranks that share sequences, with "
        "{sequence_parallel}",
        "",
        "x2 --tensor_parallel_degree 2 --sequence_parallel true --max_seq_length 63",
        "x2 --tensor_parallel_degree 2 --sequence_parallel true --max_seq_length 64",
    ),
    Rule(
        lambda job: job.pp > 1 and job.gradient_accumulation_steps < job.pp,
        "{gradient_accumulation_steps} must be at least {pipeline_parallel_degree}, to fill the pipeline",
        "",
        "x4 --pipeline_parallel_degree 4 --gradient_accumulation_steps 2",
        "x4 --pipeline_parallel_degree 4 --gradient_accumulation_steps 4",
    ),
    Rule(
        lambda job: (
            job.vp > 1 and (job.gradient_accumulation_steps < 2 * job.pp or job.gradient_accumulation_steps % job.pp)
        ),
        "{gradient_accumulation_steps} must be a multiple of {pipeline_parallel_degree}, and at least twice as much, "
        "with {virtual_pp_degree:name} above 1",
        "",
        "x4 --virtual_pp_degree 2 --pipeline_parallel_degree 4 --gradient_accumulation_steps 10 "
        "--model_name_or_path meta-llama/Llama-2-7b",
        "x4 --virtual_pp_degree 2 --pipeline_parallel_degree 4 --gradient_accumulation_steps 12 "
        "--model_name_or_path meta-llama/Llama-2-7b",
    ),
    Rule(
        lambda job: shards(job, 2, 3) and job.pp > 1,
        "{sharding} does not go with {pipeline_parallel_degree} in {library}",
        "use stage1",
        f"{_SHARDED_PIPELINE} --sharding stage2",
        f"{_SHARDED_PIPELINE} --sharding stage1",
    ),
    Rule(
        lambda job: shards(job, 2, 3) and job.sharing > 1 and f"{{{job.shared_by}}}",
        "{sharding} does not go with {found}: Paddle would not sum the gradients of the devices that share sequences",
        "use stage1",
        f"x4 {PD} --sharding stage3 --sharding_parallel_degree 2 --context_parallel_degree 2",
        f"x4 {PD} --sharding stage1 --sharding_parallel_degree 2 --context_parallel_degree 2",
    ),
    Rule(
        lambda job: shards(job, 3) and job.tp > 1,
        "{sharding} does not go with {tensor_parallel_degree} in {library}",
        "use stage1 or stage2",
        "x4 --sharding stage3 --sharding_parallel_degree 2 --tensor_parallel_degree 2",
        "x4 --sharding stage2 --sharding_parallel_degree 2 --tensor_parallel_degree 2",
    ),
    Rule(
        lambda job: job.place == "cpu" and _without_gloo(job),
        "{found} does not work on {device:cpu} (Paddle's gloo has DP and stage1 only)",
        "use {device:nvgpu}, whose host runtime needs no GPU (nvgpu)",
        "x2 --device cpu --tensor_parallel_degree 2",
        "x2 --device cpu --sharding stage1",
    ),
    Rule(
        lambda job: job.place == "cpu" and job.bf16,
        "{bf16} does not train on a plain CPU in Paddle",
        "use {bf16:false}, or {device:gpu} or nvgpu",
        f"--device cpu {HALF}",
        "--device cpu",
    ),
)


def _without_gloo(job: Job) -> str:
    """Return a degree, or the sharding, that Paddle's gloo lacks; "" without one."""
    for name in ("tensor_parallel_degree", "pipeline_parallel_degree", *sharing_degrees(job)):
        if getattr(job, name) > 1:
            return f"{{{name}}}"
    return "{sharding}" if shards(job, 2, 3) else ""
