"""Rules for experts that sharding ranks divide."""

from __future__ import annotations

from collections.abc import Callable

from paddle_te.job.record import Job
from paddle_te.job.rules.rule import ONE, TE, TUNED, Rule, counts_tied_twice
from paddle_te.options.layers import DISPATCHERS

_SPLIT = f"{TE} --amp_master_grad true --sharding stage1 --sharding_parallel_config split_param"
_MIXTURE = f"{TE} --model_name_or_path qwen3-30b-a3b"
_DIVIDED = f"{_SPLIT} --model_name_or_path qwen3-30b-a3b --sharding_parallel_degree 2 --expert_parallel_degree 2"


def _number_of_experts(job: Job) -> int:
    """Return a layer's number of experts; 0 without experts, and for a model that is not known."""
    return job.model.experts.experts if job.model and job.model.experts else 0


def _divided(when: Callable[[Job], object], says: str, remedy: str, breaks: str, near: str = f"x2 {_DIVIDED}") -> Rule:
    """Return a Rule for flags that do not go with experts that sharding ranks divide."""
    return Rule(lambda job: job.ep > 1 and when(job), f"{{expert_parallel_degree}} {says}", remedy, breaks, near)


RULES = (
    _divided(
        lambda job: job.model and not _number_of_experts(job),
        "divides experts, and {model_name_or_path:value} has none",
        "it must be 1",
        f"x2 {_SPLIT} --sharding_parallel_degree 2 --expert_parallel_degree 2",
    ),
    _divided(
        lambda job: job.tp > 1,
        "with {tensor_parallel_degree}: tensor parallel devices divide the experts by themselves",
        "leave {expert_parallel_degree:name} out",
        f"x4 {_DIVIDED} --tensor_parallel_degree 2",
        f"x4 {_MIXTURE} --tensor_parallel_degree 2",
    ),
    _divided(
        lambda job: job.sharding_ranks % job.ep,
        "must divide the {sharding_ranks} devices that share the optimizer's state",
        "more of them share it with a greater {sharding_parallel_degree:name}",
        f"x3 {_DIVIDED} --sharding_parallel_degree 3",
    ),
    _divided(
        lambda job: _number_of_experts(job) % job.ep and _number_of_experts(job),
        "must divide the {found} experts of {model_name_or_path:value}",
        "",
        f"x3 {_DIVIDED} --sharding_parallel_degree 3 --expert_parallel_degree 3",
    ),
    _divided(
        lambda job: job.stage != 1,
        "with {sharding}, which would add up gradients of different experts",
        "use {sharding:stage1}",
        f"x2 {_DIVIDED} --sharding stage2",
    ),
    _divided(
        lambda job: "split_param" not in job.sharding_parallel_config,
        "needs {sharding_parallel_config:split_param}: without it gradients of different experts would be added up",
        "",
        f"x2 {_DIVIDED} --sharding_parallel_config enable_stage1_broadcast_overlap",
    ),
    _divided(
        counts_tied_twice,
        "with {pipeline_parallel_degree}: it needs split_param, with which Paddle would count the tied embeddings of "
        "{model_name_or_path:value} twice when it clips",
        ONE,
        f"x4 {_DIVIDED} --pipeline_parallel_degree 2 --gradient_accumulation_steps 2 --model_name_or_path "
        "glam-126m-64e",
        f"x4 {_DIVIDED} --pipeline_parallel_degree 2 --gradient_accumulation_steps 2",
    ),
    _divided(
        lambda job: "fus" in job.sharding_parallel_config,
        "with {sharding_parallel_config}: only experts' gradients are kept apart, not states that are fused",
        "leave that out",
        f"x2 {_DIVIDED} --sharding_parallel_config split_param,enable_fuse_optimizer_states",
    ),
    _divided(
        lambda job: not job.amp_master_grad or job.model_dtype == "float32",
        "needs {amp_master_grad:true} and 16-bit weights, as split_param does in PaddleNLP",
        "",
        f"x2 {_DIVIDED} --amp_master_grad false",
    ),
    _divided(
        lambda job: job.sharing > 1 and f"{{{job.shared_by}}}",
        "with {found}: experts' gradients would not be added up over the devices that share sequences",
        "leave one of them out",
        f"x4 {_DIVIDED} --sep_parallel_degree 2",
    ),
    _divided(
        lambda job: job.replicas > 1,
        "leaves {replicas} data parallel devices, over which PaddleNLP does not average experts",
        "share the states over all of them",
        f"x4 {_DIVIDED}",
        f"x4 {_DIVIDED} --sharding_parallel_degree 4",
    ),
    _divided(
        lambda job: job.unified_checkpoint,
        "with {unified_checkpoint}: PaddleNLP would save one device's experts only",
        "save rank by rank with {unified_checkpoint:false}; converters and other layouts read that as well",
        f"x2 {_DIVIDED} --unified_checkpoint true",
    ),
    _divided(
        lambda job: not job.one_length and job.moe_token_dispatcher_type == DISPATCHERS[0],
        "with {moe_token_dispatcher_type} needs as many tokens on each device",
        "use {moe_token_dispatcher_type:alltoall}, {pad_to_max_length:true} or {zero_padding:true}",
        f"x2 {TUNED} {_DIVIDED}",
        f"x2 {TUNED} {_DIVIDED} --moe_token_dispatcher_type alltoall",
    ),
)
