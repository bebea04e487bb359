"""Rules for PaddleFormers as the host."""

from __future__ import annotations

from paddle_te.host import PADDLEFORMERS
from paddle_te.job.record import Job
from paddle_te.job.rules.rule import FP8, HALF, PD, TE, Rule, shards
from paddle_te.options.layers import LAYERS


def _not_there(flag: str, value: str, why: str, others: str = "") -> Rule:
    """Return a Rule for an option that our layers lack there. value: an example. others: flags that it needs."""
    default = next(each.default for each in LAYERS if each.name == flag)
    return Rule(
        lambda job: job.ours and getattr(job, flag) not in (default, None, False),
        f"{{{flag}}}: {why}",
        f"leave {{{flag}:name}} out",
        f"paddleformers {FP8} --{flag} {value} {others}",
        f"{FP8} --{flag} {value} {others}",
        host=PADDLEFORMERS,
    )


def _positions_elsewhere(job: Job) -> bool:
    """Return whether rotation needs more than the base, which is all that PaddleFormers' own layers read."""
    rotation = job.model and job.model.layer.attention.rotation
    return job.positions_elsewhere or bool(rotation and rotation.scaling)


_MAIN = f"{HALF} --amp_master_grad true"
_SHARED_OUT = "--sharding_parallel_degree 2 --sharding"
_PIPED = f"paddleformers x2 {HALF} --pipeline_parallel_degree 2 --gradient_accumulation_steps 2 --amp_master_grad true"
_WITH_MAIN = "set {bf16:true}, {fp16_opt_level:O2} and {amp_master_grad:true}"
_SCALED = "--model_name_or_path meta-llama/Meta-Llama-3.1-8B"
# What PaddleFormers 1.2.0 has for a Llama, with its own layers and with ours
LAYOUT_RULES = (
    Rule(
        lambda job: job.world > 1 and job.place == "cpu" and job.loads_flex,
        "several processes on {device:cpu}: PaddleFormers' checkpoints pass between them on accelerators only",
        "use {device:nvgpu}, whose host runtime needs no GPU (nvgpu)",
        "paddleformers x2 --device cpu",
        "paddleformers x2 --device nvgpu",
        host=PADDLEFORMERS,
    ),
    Rule(
        lambda job: shards(job, 2, 3) and job.replicas > 1,
        "{sharding} does not go with data parallelism beside it in PaddleFormers",
        "leave {sharding_parallel_degree:name} out, or use stage1",
        f"paddleformers x4 {_MAIN} --sharding stage2 --sharding_parallel_degree 2",
        f"paddleformers x4 {_MAIN} --sharding stage2 --sharding_parallel_degree 4",
        host=PADDLEFORMERS,
    ),
    Rule(
        lambda job: job.sharding_ranks > 1 and not job.amp_master_grad,
        "{sharding}: PaddleFormers shards the optimizer with float32 main gradients only",
        f"{_WITH_MAIN}, or leave sharding out",
        f"paddleformers x2 {_SHARED_OUT} stage1",
        f"paddleformers x2 {_MAIN} {_SHARED_OUT} stage1",
        host=PADDLEFORMERS,
    ),
    Rule(
        lambda job: job.tp * job.pp > 1 and not job.amp_master_grad and job.max_grad_norm > 0,
        "{max_grad_norm}: PaddleFormers clips gradients under tensor parallelism and in pipelines with float32 main "
        "gradients only",
        f"{_WITH_MAIN}, or {{max_grad_norm:0}}",
        "paddleformers x2 --tensor_parallel_degree 2 --max_grad_norm 1",
        "paddleformers x2 --tensor_parallel_degree 2 --max_grad_norm 0",
        host=PADDLEFORMERS,
    ),
    Rule(
        lambda job: job.pp > 1 and job.lora_path,
        "{lora_path:name} with {pipeline_parallel_degree}: PaddleFormers loads no LoRA adapter in pipelines",
        "train from it in another layout",
        f"{_PIPED} --lora true --lora_path adapter",
        f"{_PIPED} --lora true",
        host=PADDLEFORMERS,
    ),
    Rule(
        lambda job: job.pp > 1 and not job.ours and _positions_elsewhere(job),
        "{pipeline_parallel_degree}: PaddleFormers' own pipelines read neither the rope scaling nor the theta in "
        "rope_parameters",
        "use {transformer_engine_backend:paddle} or {transformer_engine_backend:transformer_engine}",
        f"{_PIPED} {_SCALED}",
        f"{_PIPED} {_SCALED} {PD}",
        host=PADDLEFORMERS,
    ),
    Rule(
        lambda job: job.resume_from_checkpoint and job.loads_flex and not job.ours and shards(job, 2),
        "{resume_from_checkpoint:name} with {sharding}: PaddleFormers' own layers cannot load its checkpoints in "
        "sharding stage 2",
        "use {transformer_engine_backend:paddle} or {transformer_engine_backend:transformer_engine}",
        f"paddleformers x2 {_MAIN} {_SHARED_OUT} stage2 --resume_from_checkpoint auto",
        f"paddleformers x2 {_MAIN} {_SHARED_OUT} stage2 --resume_from_checkpoint auto {PD}",
        host=PADDLEFORMERS,
    ),
)
LAYER_RULES = (
    _not_there("fp8_lm_head", "true", "in PaddleFormers the head is the host's own"),
    _not_there("offload_activations", "2", "PaddleFormers has nothing like it; recompute saves memory, too"),
    Rule(
        lambda job: job.ours and job.fp8_statistics,
        "{fp8_statistics}: they are counted in PaddleNLP's Trainer",
        "leave {fp8_statistics:name} out, or train with PaddleNLP",
        f"paddleformers {FP8} --fp8_statistics 50",
        f"{FP8} --fp8_statistics 50",
        host=PADDLEFORMERS,
    ),
    Rule(
        lambda job: job.sharing > 1 and f"{{{job.shared_by}}}",
        "{found}: PaddleFormers' Llama has no attention for sequences that ranks share",
        "leave it at 1, or train with PaddleNLP",
        f"paddleformers x2 {TE} --sep_parallel_degree 2",
        f"x2 {TE} --sep_parallel_degree 2",
        host=PADDLEFORMERS,
    ),
)
