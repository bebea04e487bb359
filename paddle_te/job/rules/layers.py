"""Rules for backends and their layers: what they compute again, keep, move to host memory and fuse."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from paddle_te.host import PADDLENLP
from paddle_te.job.record import Job
from paddle_te.job.rules.rule import FP8, LORA, ONE, PD, TE, TUNED, Rule, installed
from paddle_te.options.layers import LAYERS
from paddle_te.options.option import Option, word
from paddle_te.options.training import TRAINING
from paddle_te.options.tuning import DPO, FINETUNE_DATA, FINETUNE_MODEL


def _needs(flag: str, example: str, *backends: str, why: str = "", others: str = "") -> Rule:
    """Return a Rule for a flag that other backends lack. example: a value. others: flags that it needs as well."""
    default = next(each.default for each in (*LAYERS, *TRAINING) if each.name == flag)
    needed = " or ".join(f"{{transformer_engine_backend:{each}}}" for each in backends)
    return Rule(
        lambda job: getattr(job, flag) not in (None, default) and job.transformer_engine_backend not in backends,
        f"{{{flag}}} needs {needed}" + (f": {why}" if why else ""),
        breaks=f"--{flag} {example}",
        near=f"{TE} --{flag} {example} {others}",
    )


def _means_nothing(option: Option, other: str, wanted: object, job: Job) -> bool:
    return getattr(job, option.name) != option.default and getattr(job, other) != wanted


def _goes_with(option: Option) -> Iterator[Rule]:
    """Yield Rules for an option that means nothing without another one (`Option.needs`)."""
    for other, wanted in option.needs.items():
        yield Rule(
            partial(_means_nothing, option, other, wanted),
            f"{{{option.name}}} needs {{{other}:{word(wanted)}}}",
            "alone it means nothing",
        )


_OURS, _TE = ("transformer_engine", "paddle"), ("transformer_engine",)
_CHECKED = (*LAYERS, *TRAINING, *FINETUNE_MODEL, *FINETUNE_DATA, *DPO)
RULES = (
    *(rule for option in _CHECKED for rule in _goes_with(option)),
    Rule(
        lambda job: job.te and job.place == "cpu",
        "{transformer_engine_backend} needs an NVIDIA GPU ({device:gpu} with paddlepaddle-gpu, or {device:nvgpu} with "
        "nvgpu)",
        "on a CPU use {transformer_engine_backend:paddle}, the same layers in plain Paddle",
        f"{TE} --device cpu",
        f"{PD} --device cpu",
    ),
    Rule(
        lambda job: job.te and not (job.bf16 or job.fp16),
        "{transformer_engine_backend} with {bf16}: its attention kernels take 16 bits",
        "use {bf16:true}, or {use_fp8:true} with it; float32 goes with {transformer_engine_backend:paddle}",
        "--transformer_engine_backend transformer_engine",
        TE,
    ),
    _needs("use_fp8", "true", *_OURS, why="pd emulates its rounding"),
    _needs("recompute_modules", "layernorm", *_OURS),
    _needs("activation_func_fp8_input_store", "true", *_OURS),
    _needs("mlp_chunk_tokens", "64", *_OURS),
    _needs("offload_activations", "2", *_TE, why="only its layers move them"),
    _needs(
        "offload_optimizer",
        "0.5",
        *_TE,
        why="its native module copies the states, and on a CPU there is no device memory to save",
    ),
    Rule(
        lambda job: job.ours and job.recompute_granularity == "full_attn",
        "{recompute_granularity}: backends pd and te have full and core_attn",
        breaks=f"{TE} --recompute --recompute_granularity full_attn",
        near=f"{TE} --recompute --recompute_granularity core_attn",
    ),
    Rule(
        lambda job: job.recompute_modules and job.recomputed == "full",
        "{recompute_modules} with {recompute_granularity}: whole layers are computed again, and their parts with them",
        "leave out {recompute_modules:name}, or {recompute:name}",
        f"{TE} --recompute_modules mlp --recompute",
        f"{TE} --recompute_modules mlp --recompute --recompute_granularity core_attn",
    ),
    Rule(
        lambda job: {"mlp", "mlp_act"} <= {*(job.recompute_modules or ())},
        "{recompute_modules}: mlp computes the activation again, too",
        "leave out mlp_act",
        f"{TE} --recompute_modules mlp_act mlp",
        f"{TE} --recompute_modules mlp_act layernorm",
    ),
    Rule(
        lambda job: job.stores_input_in_fp8 and job.input_again and f"{{{job.input_again}}}",
        "{activation_func_fp8_input_store} with {found}, with which backward computes the activation's input again and "
        "nothing of it is kept",
        ONE,
        f"{TE} --activation_func_fp8_input_store true --mlp_chunk_tokens 64",
        f"{TE} --activation_func_fp8_input_store true --recompute_modules mlp_act",
    ),
    Rule(
        lambda job: job.mlp_chunk_tokens % (job.fp8_multiple * (job.tp if job.sequence_parallel else 1)),
        "{mlp_chunk_tokens}: each rank's GEMMs have a share of it, a multiple of {fp8_multiple} tokens",
        "",
        f"{FP8} --mlp_chunk_tokens 1000",
        f"{FP8} --mlp_chunk_tokens 1024",
    ),
    Rule(
        lambda job: job.mlp_chunk_tokens and job.lora,
        "{mlp_chunk_tokens} with {lora}: layers with LoRA have no chunks",
        "leave it out, or take {recompute:true}",
        f"{LORA} --mlp_chunk_tokens 64",
        f"{TUNED} {TE} --mlp_chunk_tokens 64",
    ),
    Rule(
        lambda job: job.model and job.model.experts is None and _of_experts(job),
        "{found}: {model_name_or_path:value} has no experts",
        "leave it out",
        f"{TE} --moe_expert_capacity_factor 1.5",
        f"{TE} --moe_expert_capacity_factor 1.5 --model_name_or_path qwen3-30b-a3b",
    ),
    Rule(
        lambda job: (
            job.moe_router_bias_update_rate is not None
            and job.model
            and job.model.experts is not None
            and not job.model.experts.expert_bias
        ),
        "{moe_router_bias_update_rate}: {model_name_or_path:value} chooses experts without a bias",
        "leave it out; {moe_aux_loss_coeff:name} balances the load of its experts",
        f"{TE} --moe_router_bias_update_rate 0.001 --model_name_or_path qwen3-30b-a3b",
        f"{TE} --moe_router_bias_update_rate 0.001 --model_name_or_path Moonlight-16B-A3B",
    ),
    Rule(
        lambda job: job.model and job.model.experts and _of_mlps(job),
        "{found}: layers with experts, of {model_name_or_path:value}, have no such option",
        "leave it out; {recompute_modules:name} moe or moe_act keep less of experts",
        f"{TE} --recompute_modules layernorm --model_name_or_path qwen3-30b-a3b",
        f"{TE} --recompute_modules moe core_attn --model_name_or_path qwen3-30b-a3b",
    ),
    Rule(
        lambda job: job.offload_activations and job.recomputed == "full",
        "{offload_activations} with {recompute_granularity}: whole layers are computed again, and keep their "
        "inputs only",
        "leave out {recompute:name}, or compute parts again with {recompute_modules:name}",
        f"{TE} --offload_activations 2 --recompute",
        f"{TE} --offload_activations 2 --recompute_modules mlp",
    ),
    Rule(
        lambda job: job.offload_activations and job.pp > 1,
        "{offload_activations} with {pipeline_parallel_degree}: a stage keeps several micro-batches at a time, and "
        "there is host memory for one",
        ONE,
        f"x2 {TE} --offload_activations 2 --pipeline_parallel_degree 2 --gradient_accumulation_steps 2",
        f"x2 {TE} --offload_activations 2 --tensor_parallel_degree 2",
    ),
    Rule(
        lambda job: job.fp8_lm_head and job.use_fused_linear_cross_entropy,
        "{fp8_lm_head} with {use_fused_linear_cross_entropy}: its chunks are in the activations' precision",
        "the one is for speed, the other for memory",
        f"{FP8} --fp8_lm_head true --use_fused_linear_cross_entropy true",
        f"{FP8} --fp8_lm_head true",
    ),
    Rule(
        lambda job: job.use_fused_linear_cross_entropy and not job.ours and _lacks_its_own_fused_loss(job),
        "{use_fused_linear_cross_entropy} with {transformer_engine_backend} is PaddleNLP's own: {found}",
        "the other backends need nothing",
        "--use_fused_linear_cross_entropy true",
        f"{PD} --use_fused_linear_cross_entropy true",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.cp > 1 and not job.ours and not _has_its_own_ring(job),
        "{context_parallel_degree} with {transformer_engine_backend} is PaddleNLP's own ring attention: it needs "
        "{device:gpu}, {use_flash_attention:true} and its package paddlenlp_ops",
        "the other backends need nothing",
        "x2 --context_parallel_degree 2",
        f"x2 {PD} --context_parallel_degree 2",
        host=PADDLENLP,
    ),
)


def _lacks_its_own_fused_loss(job: Job) -> str:
    """Return why PaddleNLP has no fused loss for a run; "" where it has.

    It would find out in the first step, or, in a pipeline, forget the flag.
    """
    if job.tp > 1 or job.pp > 1 or not installed(job, "paddlenlp_kernel"):
        return "it needs its package paddlenlp_kernel, and no tensor or pipeline parallelism"
    if job.label_smoothing_factor:
        return "it knows no smoothing, {label_smoothing_factor}"
    return (
        "it has no logits to count {metric_for_best_model} by"
        if "accuracy" in (job.metric_for_best_model or "")
        else ""
    )


def _has_its_own_ring(job: Job) -> bool:
    """Return whether PaddleNLP has what its own ring attention needs."""
    return job.place == "gpu" and job.use_flash_attention and installed(job, "paddlenlp_ops")


def _of_experts(job: Job) -> str:
    """Return the first option that is for experts."""
    if again := {"moe", "moe_act"}.intersection(job.recompute_modules or ()):
        return f"{{recompute_modules:name}} {min(again)}"
    values = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_router_bias_update_rate")
    given = [name for name in values if getattr(job, name) is not None]
    given += ["moe_router_force_load_balancing"] * job.moe_router_force_load_balancing
    return "".join(f"{{{name}}}" for name in given[:1])


def _of_mlps(job: Job) -> str:
    """Return the first option that layers with experts lack, where all or some layers of a model have experts."""
    assert job.model is not None
    modules = {*(job.recompute_modules or ())}
    without = ("mlp", "mlp_act") if job.model.dense is None else ()
    if found := modules.intersection(("layernorm", *without)):
        return f"{{recompute_modules:name}} {min(found)}"
    options = ("mlp_chunk_tokens", "activation_func_fp8_input_store")
    return "".join(f"{{{name}}}" for name in [name for name in options if getattr(job, name)][:1])
