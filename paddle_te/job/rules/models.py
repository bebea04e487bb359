"""Rules for what a model lets a run ask for."""

from __future__ import annotations

import math

from paddle_te.host import PADDLENLP
from paddle_te.hosts.paddlenlp.capabilities import has_pipeline
from paddle_te.job.record import Job
from paddle_te.job.rules.rule import FP8, PD, Rule, counts_tied_twice

RULES = (
    Rule(
        lambda job: job.pp > 1 and job.model and not has_pipeline(job.model.family.model_type),
        "{pipeline_parallel_degree}: PaddleNLP has no pipeline for {family}",
        "it must be 1",
        "x2 --pipeline_parallel_degree 2 --gradient_accumulation_steps 2 --model_name_or_path mistral-7b-v0.1",
        "x2 --pipeline_parallel_degree 2 --gradient_accumulation_steps 2 --model_name_or_path meta-llama/Llama-2-7b",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.model and _does_not_divide_the_model(job),
        "{tensor_parallel_degree} must divide {found}",
        "",
        "x4 --tensor_parallel_degree 4",
        "x4 --tensor_parallel_degree 2",
    ),
    Rule(
        lambda job: job.model and _does_not_divide_the_heads(job),
        "{sep_parallel_degree} must divide {found}: the devices that share a sequence share the heads in attention",
        "",
        "x4 --tensor_parallel_degree 2 --sep_parallel_degree 2",
        "x4 --tensor_parallel_degree 2 --sep_parallel_degree 2 --model_name_or_path meta-llama/Llama-2-7b",
    ),
    Rule(
        lambda job: job.model and job.sharing > 1 and job.model.learned_positions and f"{{{job.shared_by}}}",
        "{found}: {family}'s embedding of positions would count each device's tokens from 0",
        "it must be 1",
        f"x2 {PD} --sep_parallel_degree 2 --model_name_or_path gpt-126m",
        f"x2 {PD} --tensor_parallel_degree 2 --model_name_or_path gpt-126m",
    ),
    Rule(
        lambda job: (
            job.model and job.model.learned_positions and job.sequence > job.positions and f"{{{job.length_flag}}}"
        ),
        "{found}: {model_name_or_path:value} learns {positions} positions",
        "give shorter sequences",
        f"x2 {PD} --max_seq_length 2049 --model_name_or_path gpt-126m",
        f"x2 {PD} --max_seq_length 2048 --model_name_or_path gpt-126m",
    ),
    Rule(
        lambda job: job.cp > 1 and job.model and any(layer.attention.window for layer in job.model.layers),
        "{context_parallel_degree}: ring attention has no sliding window, {model_name_or_path:value} has",
        "use {sep_parallel_degree:name}",
        f"x2 {PD} --context_parallel_degree 2 --model_name_or_path mistral-7b-v0.1",
        f"x2 {PD} --sep_parallel_degree 2 --model_name_or_path mistral-7b-v0.1",
    ),
    Rule(
        lambda job: job.model and job.sharing > 1 and job.model.layer.attention.sinks and f"{{{job.shared_by}}}",
        "{found}: devices that share a sequence have no attention with sinks, {model_name_or_path:value} has",
        "it must be 1",
        f"x2 {PD} --sep_parallel_degree 2 --model_name_or_path gpt-oss-20b",
        f"x2 {PD} --tensor_parallel_degree 2 --model_name_or_path gpt-oss-20b",
    ),
    Rule(
        lambda job: _has_latent_attention(job) and job.sharing > 1 and f"{{{job.shared_by}}}",
        "{found}: {family}'s latent attention sees whole sequences only",
        "it must be 1; {tensor_parallel_degree:name} divides the heads",
        f"x2 {PD} --sep_parallel_degree 2 --model_name_or_path DeepSeek-V2-Lite",
        f"x2 {PD} --tensor_parallel_degree 2 --model_name_or_path DeepSeek-V2-Lite",
    ),
    Rule(
        lambda job: _has_latent_attention(job) and job.fp8_dpa,
        "{fp8_dpa}: {family}'s latent attention computes its scores in 16 bits",
        "leave {fp8_dpa:name} out",
        f"{FP8} --fp8_dpa true --model_name_or_path DeepSeek-V2-Lite",
        f"{FP8} --model_name_or_path DeepSeek-V2-Lite",
    ),
    Rule(
        lambda job: job.model and len(job.model.layers) % (job.pp * job.vp),
        "{pipeline_parallel_degree} x {virtual_pp_degree} must divide the {layers} layers of "
        "{model_name_or_path:value}",
        "",
        "x3 --pipeline_parallel_degree 3 --gradient_accumulation_steps 3",
        "x4 --pipeline_parallel_degree 4 --gradient_accumulation_steps 4",
    ),
    Rule(
        lambda job: job.ep == 1 and counts_tied_twice(job),
        "{sharding_parallel_config} with {pipeline_parallel_degree}: Paddle would count the tied embeddings of "
        "{model_name_or_path:value} twice when it clips",
        "leave split_param out",
        "x2 --pipeline_parallel_degree 2 --gradient_accumulation_steps 2 --model_name_or_path llama-3.2-1b "
        "--sharding_parallel_config split_param",
        "x2 --pipeline_parallel_degree 2 --gradient_accumulation_steps 2 --sharding_parallel_config split_param",
    ),
)


def _has_latent_attention(job: Job) -> bool:
    return job.model is not None and job.model.layer.attention.latent is not None


def _does_not_divide_the_model(job: Job) -> str:
    """Return the size that tensor parallelism would have to divide, and the degrees that do; "" where it does."""
    assert job.model is not None
    attention, dense, experts = job.model.layer.attention, job.model.dense, job.model.experts
    split = {"num_attention_heads": attention.heads, "num_key_value_heads": attention.groups}
    if dense is not None:
        split["intermediate_size"] = dense.ffn
    if experts is not None:
        split["num_experts"] = experts.experts
    if experts is not None and experts.shared_ffn:
        split["shared_expert_intermediate_size"] = experts.shared_ffn
    for name, size in split.items():
        if size % job.tp:
            common = math.gcd(*split.values())
            possible = ", ".join(str(degree) for degree in range(1, 65) if common % degree == 0)
            return f"{name}={size} of {{model_name_or_path:value}}; it may be {possible}"
    return ""


def _does_not_divide_the_heads(job: Job) -> str:
    """Return the heads of a device that SEP would have to divide; "" where it does."""
    assert job.model is not None
    heads = {
        "num_attention_heads": job.model.layer.attention.heads,
        "num_key_value_heads": job.model.layer.attention.groups,
    }
    for name, size in heads.items():
        if size // job.tp % job.sep:
            return f"{name} of a device, of {{model_name_or_path:value}} {size} / {{tensor_parallel_degree}}"
    return ""
