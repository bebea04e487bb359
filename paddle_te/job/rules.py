"""The one table of what a run may not be asked for.

The launcher, the training scripts, recipes of PaddleFormers, `auto` and the planner's search call `check`, or `fault`
where an answer is enough. Values of single flags are not here: a flag's Kind says what they may be.

A rule's texts are templates of `doors.Door.explain`, so that each user reads the names that he writes. Its examples are
words of `words.example`: `breaks` is a run that this rule refuses, `near` a similar one that no rule refuses, and
tests/unit/job tries both.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from paddle_te.configs.spec import experts_width
from paddle_te.host import PADDLEFORMERS, PADDLENLP
from paddle_te.hosts.paddlenlp.capabilities import has_pipeline
from paddle_te.job.doors import SCRIPT, Door
from paddle_te.job.record import DPO, FINETUNE, KTO, PRETRAIN, Job
from paddle_te.options import scripts
from paddle_te.options.option import Option, word
from paddle_te.options.scripts import (
    DISPATCHERS,
    FINETUNE_DATA,
    FINETUNE_MODEL,
    LAYERS,
    OPTIMIZER_DEFAULTS,
    PRETRAINING,
    TRAINING,
    UPDATED_HERE,
)


class JobError(ValueError):
    """A rule is broken; the message says in the user's words what is wrong and what to do, in one line."""


@dataclass(frozen=True)
class Rule:
    """when: what of a Job is against it, falsy where nothing is; a text stands for {found} in the others.

    says: what is wrong, and why. remedy: what to do. host: whose runs it is for; all, where it is empty.
    """

    when: Callable[[Job], object]
    says: str
    remedy: str = ""
    breaks: str = ""
    near: str = ""
    host: str = ""

    @property
    def flag(self) -> str:
        """The first flag that it names; "" where that depends on the run."""
        named = re.match(r"\{(\w+)", self.says)
        return named[1] if named and named[1] != "found" else ""

    def against(self, job: Job) -> object:
        """Return the values of a Job that break the rule."""
        return self.host in ("", job.host) and self.when(job)

    def told(self, job: Job, door: Door, found: object) -> str:
        """The error's line."""
        template = "; ".join(filter(None, (self.says, self.remedy)))
        return door.explain(template.replace("{found}", str(found)), job)


def check(job: Job, door: Door = SCRIPT, rules: Iterable[Rule] | None = None) -> None:
    """Raise JobError for the first rule that the run breaks, in the words of a door. rules: some of them."""
    for rule in RULES if rules is None else rules:
        if found := rule.against(job):
            raise JobError(rule.told(job, door, found))


def fault(job: Job) -> Rule | None:
    """The first rule that the run breaks, None for a run that breaks none."""
    return next((rule for rule in RULES if rule.against(job)), None)


HALF = "--bf16 true --fp16_opt_level O2"
TE, PD = f"{HALF} --transformer_engine_backend transformer_engine", "--transformer_engine_backend paddle"
FP8 = f"{TE} --use_fp8 true"
LORA = f"finetune --do_train true {TE} --lora true"
ONE = "leave one of them out"


def _needs(flag: str, example: str, *backends: str, why: str = "", others: str = "") -> Rule:
    """A flag that other backends do not have. example: a value. others: flags that it needs as well."""
    default = next(each.default for each in (*LAYERS, *TRAINING) if each.name == flag)
    needed = " or ".join(f"{{transformer_engine_backend:{each}}}" for each in backends)
    return Rule(
        lambda job: getattr(job, flag) not in (None, default) and job.transformer_engine_backend not in backends,
        f"{{{flag}}} needs {needed}" + (f": {why}" if why else ""),
        breaks=f"--{flag} {example}",
        near=f"{TE} --{flag} {example} {others}",
    )


def _needs_evaluation(flag: str, example: str) -> Rule:
    return Rule(
        lambda job: getattr(job, flag) and not job.evaluates,
        f"{{{flag}}} needs {{do_eval:true}}: nothing is evaluated without it",
        "",
        f"--{flag} {example}",
        f"--{flag} {example} --do_eval true",
    )


def _has_no_warm_up(flag: str, example: float) -> Rule:
    return Rule(
        lambda job: job.lr_scheduler_type == "constant" and getattr(job, flag),
        f"{{{flag}}} with {{lr_scheduler_type}}, which has no warm-up",
        "take constant_with_warmup",
        f"finetune --do_train true --lr_scheduler_type constant --{flag} {example}",
        f"finetune --do_train true --lr_scheduler_type constant_with_warmup --{flag} {example}",
        host=PADDLENLP,
    )


def _means_nothing(option: Option, other: str, wanted: object, job: Job) -> bool:
    return getattr(job, option.name) != option.default and getattr(job, other) != wanted


def _goes_with(option: Option) -> Iterator[Rule]:
    """An option that means nothing without another one (`Option.needs`)."""
    for other, wanted in option.needs.items():
        yield Rule(
            partial(_means_nothing, option, other, wanted),
            f"{{{option.name}}} needs {{{other}:{word(wanted)}}}",
            "alone it means nothing",
        )


# ------------------------------------------------------------------------------------------------ layers

_OURS, _TE = ("transformer_engine", "paddle"), ("transformer_engine",)
_CHECKED = (*LAYERS, *TRAINING, *FINETUNE_MODEL, *FINETUNE_DATA, *scripts.DPO)
LAYER_RULES = (
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
        f"finetune --do_train true {TE} --mlp_chunk_tokens 64",
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
    Rule(
        lambda job: job.fp8_dpa and job.cp > 1,
        "{fp8_dpa} with {context_parallel_degree}: ring attention is in 16 bits",
        "{sep_parallel_degree:name} has fp8",
        f"x2 {FP8} --fp8_dpa true --context_parallel_degree 2",
        f"x2 {FP8} --fp8_dpa true --sep_parallel_degree 2",
    ),
    Rule(
        lambda job: job.use_fp8 and not job.fp8_reduce_amax and job.sequence_parallel,
        "{fp8_reduce_amax} with {sequence_parallel}: ranks gather each other's rows in fp8, and need the same scales",
        ONE,
        f"x2 {FP8} --fp8_reduce_amax false --tensor_parallel_degree 2 --sequence_parallel true",
        f"x2 {FP8} --fp8_reduce_amax false --tensor_parallel_degree 2",
    ),
    Rule(
        lambda job: job.use_fp8 and not job.fp8_reduce_amax and job.world > 1 and job.resume_from_checkpoint,
        "{fp8_reduce_amax} with {resume_from_checkpoint}: a checkpoint has the scales of one rank, and each of the "
        "{devices} ranks had its own",
        "start from its weights, or leave {fp8_reduce_amax:name} out",
        f"x2 {FP8} --fp8_reduce_amax false --resume_from_checkpoint auto",
        f"x2 {FP8} --resume_from_checkpoint auto",
    ),
    Rule(
        lambda job: job.fp8_fallback and not job.fp8_statistics,
        "{fp8_fallback} needs {fp8_statistics:name}, whose numbers it judges",
        "set {fp8_statistics:name}, such as to 50",
        f"{FP8} --fp8_fallback bf16:underflows=0.3",
        f"{FP8} --fp8_fallback bf16:underflows=0.3 --fp8_statistics 50",
    ),
    Rule(
        lambda job: job.quantize_base and _leaves_fp8(job),
        "{found} with {quantize_base}: such weights exist in fp8 only",
        ONE,
        f"{LORA} --quantize_base fp8 --use_fp8 true --fp8_skip_layers first:1",
        f"{LORA} --use_fp8 true --fp8_skip_layers first:1",
    ),
    Rule(
        lambda job: job.model and len(job.skipped_layers(job.layers)) == job.layers,
        "{fp8_skip_layers}: {model_name_or_path:value} has {layers} decoder layers, of which none would compute in fp8",
        "leave {use_fp8:name} out, or skip fewer",
        f"{FP8} --model_name_or_path tiny-llama-demo --fp8_skip_layers first:100",
        f"{FP8} --model_name_or_path tiny-llama-demo --fp8_skip_layers first:1",
    ),
    Rule(
        lambda job: job.use_fp8 and _size_out_of_steps(job),
        "{use_fp8} with {fp8_recipe:value} scaling needs multiples of {fp8_multiple}; {found}",
        "take another size, degree or fp8_recipe",
        f"{FP8} --fp8_recipe block --max_seq_length 1040 --per_device_train_batch_size 1",
        f"{FP8} --fp8_recipe current --max_seq_length 1040 --per_device_train_batch_size 1",
    ),
)


def _leaves_fp8(job: Job) -> str:
    """The first flag with which layers compute in 16 bits, as a template."""
    return next((f"{{{name}}}" for name in ("fp8_skip_layers", "fp8_fallback") if getattr(job, name)), "")


def _installed(job: Job, package: str) -> bool:
    return job.elsewhere or importlib.util.find_spec(package) is not None


def _lacks_its_own_fused_loss(job: Job) -> str:
    """PaddleNLP finds out in the first step, or, in a pipeline, forgets the flag."""
    if job.tp > 1 or job.pp > 1 or not _installed(job, "paddlenlp_kernel"):
        return "it needs its package paddlenlp_kernel, and no tensor or pipeline parallelism"
    if job.label_smoothing_factor:
        return "it knows no smoothing, {label_smoothing_factor}"
    return (
        "it has no logits to count {metric_for_best_model} by"
        if "accuracy" in (job.metric_for_best_model or "")
        else ""
    )


def _has_its_own_ring(job: Job) -> bool:
    return job.place == "gpu" and job.use_flash_attention and _installed(job, "paddlenlp_ops")


def _of_experts(job: Job) -> str:
    """The first option that is for experts."""
    if again := {"moe", "moe_act"}.intersection(job.recompute_modules or ()):
        return f"{{recompute_modules:name}} {min(again)}"
    values = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_router_bias_update_rate")
    given = [name for name in values if getattr(job, name) is not None]
    given += ["moe_router_force_load_balancing"] * job.moe_router_force_load_balancing
    return "".join(f"{{{name}}}" for name in given[:1])


def _of_mlps(job: Job) -> str:
    """The first option that layers with experts lack, where all or some layers of a model have experts."""
    assert job.model is not None
    modules = {*(job.recompute_modules or ())}
    without = ("mlp", "mlp_act") if job.model.dense is None else ()
    if found := modules.intersection(("layernorm", *without)):
        return f"{{recompute_modules:name}} {min(found)}"
    options = ("mlp_chunk_tokens", "activation_func_fp8_input_store")
    return "".join(f"{{{name}}}" for name in [name for name in options if getattr(job, name)][:1])


def _size_out_of_steps(job: Job) -> str:
    """The first size of a GEMM, in words, that an fp8 recipe does not take."""
    sizes = _sizes_of_model(job) if job.model else {}
    if job.script == PRETRAIN or job.sequence_parallel:
        sizes |= _tokens(job, "per_device_train_batch_size")
    if job.do_eval and job.script == PRETRAIN:
        sizes |= _tokens(job, "per_device_eval_batch_size")
    return next((f"{name} is {size}" for name, size in sizes.items() if size % job.fp8_multiple), "")


def _sizes_of_model(job: Job) -> dict[str, int]:
    assert job.model is not None
    attention, over = job.model.layer.attention, " over {tensor_parallel_degree}"
    sizes = {
        "hidden_size of {model_name_or_path:value}": job.model.hidden,
        f"query size{over}": attention.q_size // job.tp,
        f"key size{over}": attention.kv_size // job.tp,
    }
    if (latent := attention.latent) is not None:
        sizes |= {"kv_lora_rank": latent.kv_rank, "q_lora_rank": latent.q_rank or 0}
        keys_and_values = attention.heads * (attention.head_dim - latent.turned + latent.value_dim)
        sizes |= {f"size of keys and values{over}": keys_and_values // job.tp}
    dense, experts = job.model.dense, job.model.experts
    if dense is not None:
        sizes[f"intermediate_size{over}"] = dense.ffn // job.tp
    if experts is not None:  # which ranks have whole
        sizes[experts_width(job.model.family)] = experts.ffn
        sizes[f"shared_expert_intermediate_size{over}"] = (experts.shared_ffn or 0) // job.tp
    return sizes


def _tokens(job: Job, batch: str) -> dict[str, int]:
    """Tokens of a rank's micro-batch, and under sequence parallelism those between its attention and MLP."""
    shared = f" over {{{job.shared_by}}}" if job.sharing > 1 else ""
    name, tokens = f"{{{batch}}} x {{{job.length_flag}}}{shared}", getattr(job, batch) * job.sequence // job.sharing
    in_all = {f"{name} over {{tensor_parallel_degree}}": tokens // job.tp} if job.sequence_parallel else {}
    return {name: tokens} | in_all


# ------------------------------------------------------------------------------------------------ layouts


def _does_not_divide(job: Job) -> str:
    """The degrees whose product does not divide the number of devices, in words; "" where it does."""
    degrees = job.ranks_of_a_sequence * job.sharding_ranks
    if job.world % degrees == 0:
        return ""
    split = ["tensor_parallel_degree", "pipeline_parallel_degree", *_sharing(job)]
    split += [f"sharding_parallel_degree:{job.sharding_ranks}"]
    return f"{' x '.join(f'{{{name}}}' for name in split)} = {degrees}"


def _sharing(job: Job) -> list[str]:
    """Return those degrees of SEP and CP that are above 1."""
    return [name for name in ("sep_parallel_degree", "context_parallel_degree") if getattr(job, name) > 1]


def _shards(job: Job, *stages: int) -> bool:
    return job.sharding_ranks > 1 and job.stage in stages


_SHARDED_PIPELINE = "x4 --sharding_parallel_degree 2 --pipeline_parallel_degree 2 --gradient_accumulation_steps 2"
def _counts_tied_twice(job: Job) -> bool:
    """Return whether Paddle would clip by a norm that counts embeddings on two stages twice."""
    return bool(job.pp > 1 and job.model and job.model.tied and "split_param" in job.sharding_parallel_config)


LAYOUT_RULES = (
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
        lambda job: _shards(job, 2, 3) and job.pp > 1,
        "{sharding} does not go with {pipeline_parallel_degree} in {library}",
        "use stage1",
        f"{_SHARDED_PIPELINE} --sharding stage2",
        f"{_SHARDED_PIPELINE} --sharding stage1",
    ),
    Rule(
        lambda job: _shards(job, 2, 3) and job.sharing > 1 and f"{{{job.shared_by}}}",
        "{sharding} does not go with {found}: Paddle would not sum the gradients of the devices that share sequences",
        "use stage1",
        f"x4 {PD} --sharding stage3 --sharding_parallel_degree 2 --context_parallel_degree 2",
        f"x4 {PD} --sharding stage1 --sharding_parallel_degree 2 --context_parallel_degree 2",
    ),
    Rule(
        lambda job: _shards(job, 3) and job.tp > 1,
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
        lambda job: job.ep == 1 and _counts_tied_twice(job),
        "{sharding_parallel_config} with {pipeline_parallel_degree}: Paddle would count the tied embeddings of "
        "{model_name_or_path:value} twice when it clips",
        "leave split_param out",
        "x2 --pipeline_parallel_degree 2 --gradient_accumulation_steps 2 --model_name_or_path llama-3.2-1b "
        "--sharding_parallel_config split_param",
        "x2 --pipeline_parallel_degree 2 --gradient_accumulation_steps 2 --sharding_parallel_config split_param",
    ),
)


def _without_gloo(job: Job) -> str:
    for name in ("tensor_parallel_degree", "pipeline_parallel_degree", *_sharing(job)):
        if getattr(job, name) > 1:
            return f"{{{name}}}"
    return "{sharding}" if _shards(job, 2, 3) else ""


def _has_latent_attention(job: Job) -> bool:
    return job.model is not None and job.model.layer.attention.latent is not None


def _does_not_divide_the_model(job: Job) -> str:
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
    assert job.model is not None
    heads = {
        "num_attention_heads": job.model.layer.attention.heads,
        "num_key_value_heads": job.model.layer.attention.groups,
    }
    for name, size in heads.items():
        if size // job.tp % job.sep:
            return f"{name} of a device, of {{model_name_or_path:value}} {size} / {{tensor_parallel_degree}}"
    return ""


# ------------------------------------------------------------------------------------------------ optimizer

_COMPACT = f"{TE} --optim_moments bfloat16 --master_weights bf16_remainder"
_MUON = f"{TE} --optim muon"
_UNCLIPPED = "--optimizer_in_backward unclipped --max_grad_norm 0"


def _states(job: Job) -> str:
    """The flags that say how AdamW's states are kept, beyond their defaults; "" for none."""
    flags = [name for name in ("optim_moments", "master_weights") if getattr(job, name) != OPTIMIZER_DEFAULTS[name]]
    flags += ["offload_optimizer"] * bool(job.offload_optimizer)
    return " ".join(f"{{{name}}}" for name in flags)


def _states_not_ours(job: Job) -> str:
    """Return the words of --sharding or --sharding_parallel_config that keep AdamW's states in another way."""
    said = f"{job.sharding} {job.sharding_parallel_config}"
    words = ("offload", "enable_stage1_tensor_fusion", "enable_fuse_optimizer_states")
    return next(
        (f"with {name} of {{sharding:name}} or {{sharding_parallel_config:name}}" for name in words if name in said), ""
    )


def _joined_states(job: Job) -> str:
    """A flag whose states a unified checkpoint would join from ranks' parts, why not, and what would; "" for none."""
    parts = {
        "{tensor_parallel_degree}": job.tp > 1,
        "split_param of {sharding_parallel_config:name}": "split_param" in job.sharding_parallel_config,
    }
    layout = next((name for name, there in parts.items() if there), None)
    if not job.unified_checkpoint or layout is None:
        return ""
    whole = f"with {{unified_checkpoint}} and {layout}: such a checkpoint has whole weights, and"
    if job.optim_moments == "int8":
        return f"{{optim_moments}} {whole} ranks keep blocks of their parts"
    return (
        f"{{offload_optimizer}} {whole} PaddleNLP joins them on the device, where they are not"
        if job.offload_optimizer
        else ""
    )


def _incomplete_gradients(job: Job) -> str:
    """A degree with which backward leaves gradients of a part of the step's tokens."""
    kinds = (f"{kind}_parallel_degree" for kind in ("pipeline", "sharding", "sep", "context"))
    return next((f"{{{name}}}" for name in kinds if getattr(job, name) > 1), "")


def _in_backward(when: Callable[[Job], object], says: str, remedy: str, breaks: str, near: str = _UNCLIPPED) -> Rule:
    """Return a Rule for flags that need all gradients at once, or gradients from more than one backward."""
    return Rule(
        lambda job: job.optimizer_in_backward != "off" and when(job),
        f"{{optimizer_in_backward}} {says}",
        remedy,
        breaks,
        near,
    )


_SPLIT = f"{TE} --amp_master_grad true --sharding stage1 --sharding_parallel_config split_param"
_MIXTURE = f"{TE} --model_name_or_path qwen3-30b-a3b"
_DIVIDED = f"{_SPLIT} --model_name_or_path qwen3-30b-a3b --sharding_parallel_degree 2 --expert_parallel_degree 2"


def _number_of_experts(job: Job) -> int:
    """Return a layer's number of experts; 0 without experts, and for a model that is not known."""
    return job.model.experts.experts if job.model and job.model.experts else 0


def _divided(when: Callable[[Job], object], says: str, remedy: str, breaks: str, near: str = f"x2 {_DIVIDED}") -> Rule:
    """Return a Rule for flags that do not go with experts that sharding ranks divide."""
    return Rule(lambda job: job.ep > 1 and when(job), f"{{expert_parallel_degree}} {says}", remedy, breaks, near)


def _muon(when: Callable[[Job], object], says: str, remedy: str, breaks: str, near: str = _MUON) -> Rule:
    """Return a Rule for flags that do not go with Muon."""
    return Rule(lambda job: job.optim == "muon" and when(job), f"{{optim}} {says}", remedy, breaks, near)


MUON_RULES = (
    Rule(
        lambda job: job.optim == "muon",
        "{optim} is not there in PaddleFormers",
        "use {optim:adamw}, or train with PaddleNLP",
        f"paddleformers {_MUON}",
        f"paddleformers {TE}",
        host=PADDLEFORMERS,
    ),
    _muon(
        lambda job: job.stage == 3,
        "with {sharding}: a device has slices of all weights, and makes whole matrices orthogonal",
        "use stage1 or stage2",
        f"x2 {_MUON} --sharding stage3 --sharding_parallel_degree 2",
        f"x2 {_MUON} --sharding stage2 --sharding_parallel_degree 2",
    ),
    _muon(
        lambda job: job.optim_moments == "int8",
        "with {optim_moments}: its momentum is kept in float32 or bfloat16",
        "",
        f"{_MUON} --optim_moments int8",
        f"{_MUON} --optim_moments bfloat16",
    ),
    _muon(
        lambda job: next((f"{{{name}}}" for name in ("offload_optimizer", "offload_optim") if getattr(job, name)), ""),
        "with {found}: only AdamW's states lie in host memory",
        ONE,
        f"{_MUON} --offload_optimizer 0.5",
    ),
    _muon(
        _states_not_ours,
        "{found}: it would not have its matrices there",
        "leave that out",
        f"x2 {_MUON} --sharding stage1 --sharding_parallel_config enable_stage1_tensor_fusion",
        f"x2 {_MUON} --sharding stage1 --sharding_parallel_config split_param --amp_master_grad true",
    ),
    _muon(
        lambda job: job.lora,
        "with {lora}: it makes updates of whole matrices orthogonal, and an adapter is a product of two",
        ONE,
        f"{LORA} --optim muon",
        f"finetune --do_train true {_MUON}",
    ),
)

EXPERT_RULES = (
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
        lambda job: job.stage != 1 or "split_param" not in job.sharding_parallel_config,
        "needs sharding by {sharding:stage1} and {sharding_parallel_config:split_param}: other kinds would add up "
        "gradients of different experts",
        "",
        f"x2 {_DIVIDED} --sharding_parallel_config enable_stage1_broadcast_overlap",
    ),
    _divided(
        _counts_tied_twice,
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
        f"x2 finetune --do_train true {_DIVIDED}",
        f"x2 finetune --do_train true {_DIVIDED} --moe_token_dispatcher_type alltoall",
    ),
)

OPTIMIZER_RULES = (
    Rule(
        lambda job: job.optim not in UPDATED_HERE and _states(job),
        "{found} with {optim}",
        "it needs {optim:adamw} or {optim:muon}",
        f"{_COMPACT} --optim adamw_mini",
        _COMPACT,
    ),
    Rule(
        lambda job: job.master_weights != "float32" and job.model_dtype != "bfloat16",
        "{master_weights} needs bfloat16 weights: {bf16:true} {fp16_opt_level:O2}",
        "",
        f"{PD} --master_weights bf16_remainder",
        f"{TE} --master_weights bf16_remainder",
    ),
    Rule(
        lambda job: (found := _states_not_ours(job)) and _states(job) and f"{_states(job)} {found}",
        "{found}",
        "leave that out",
        f"x2 {_COMPACT} --sharding stage2 --sharding_parallel_config enable_fuse_optimizer_states",
        f"x2 {_COMPACT} --sharding stage2",
    ),
    Rule(
        lambda job: job.offload_optim and _states(job),
        "{found} with {offload_optim}: that is PaddleNLP's, which moves all states to the device and back, in float32",
        ONE,
        f"{_COMPACT} --offload_optim true",
        f"{TE} --offload_optim true",
    ),
    Rule(
        lambda job: job.master_weights != "float32" and job.unified_checkpoint_config,
        "{master_weights} with {unified_checkpoint_config}: a checkpoint must have weights and remainders",
        "leave it out",
        f"{_COMPACT} --unified_checkpoint true --unified_checkpoint_config skip_save_model_weight",
        f"{_COMPACT} --unified_checkpoint true",
    ),
    Rule(
        _joined_states,
        "{found}",
        "save rank by rank with {unified_checkpoint:false}",
        f"x2 {TE} --optim_moments int8 --unified_checkpoint true --tensor_parallel_degree 2",
        f"x2 {TE} --optim_moments int8 --unified_checkpoint true --sharding stage1",
    ),
    Rule(
        lambda job: job.lora and job.unified_checkpoint and job.master_weights != "float32",
        "{master_weights} with {lora} {unified_checkpoint}: PaddleNLP, which loads such checkpoints, would take the "
        "remainders for master weights",
        ONE,
        f"{LORA} --master_weights bf16_remainder --unified_checkpoint true",
        f"{LORA} --master_weights bf16_remainder",
    ),
    Rule(
        lambda job: job.lora and job.unified_checkpoint and job.optim_moments == "int8",
        "{optim_moments} with {lora} {unified_checkpoint}: PaddleNLP, which loads such checkpoints, does not know "
        "blocks of 8 bits",
        ONE,
        f"{LORA} --optim_moments int8 --unified_checkpoint true",
        f"{LORA} --optim_moments bfloat16 --unified_checkpoint true",
    ),
    _in_backward(
        lambda job: job.optimizer_in_backward == "unclipped" and job.max_grad_norm > 0,
        "with {max_grad_norm}: a step's norm is not known before its last gradient",
        "give {max_grad_norm:0}, or clip by the norm of the step before: last_norm",
        "--optimizer_in_backward unclipped",
    ),
    _in_backward(
        lambda job: job.optimizer_in_backward == "last_norm" and job.max_grad_norm == 0,
        "clips gradients: it needs {max_grad_norm:name} above 0",
        "unclipped needs none",
        "--optimizer_in_backward last_norm --max_grad_norm 0",
        "--optimizer_in_backward last_norm",
    ),
    _in_backward(
        lambda job: job.optim != "adamw", "with {optim}", "it needs {optim:adamw}", f"{_UNCLIPPED} --optim adamw_mini"
    ),
    _in_backward(
        lambda job: job.gradient_accumulation_steps > 1,
        "with {gradient_accumulation_steps}: gradients that are added up over several micro-batches must all be kept",
        "it must be 1",
        f"{_UNCLIPPED} --gradient_accumulation_steps 4",
    ),
    _in_backward(
        lambda job: job.amp_master_grad,
        "with {amp_master_grad}: a gradient is used at once, so there is nothing to add up in float32",
        ONE,
        f"{_UNCLIPPED} --amp_master_grad true",
    ),
    _in_backward(
        lambda job: job.fp16,
        "with {fp16}: a loss scale is known to be right only after the last gradient",
        ONE,
        f"{_UNCLIPPED} --fp16 true",
    ),
    _in_backward(
        lambda job: job.offload_optim,
        "with {offload_optim}: Paddle brings the states back only after backward",
        ONE,
        f"{_UNCLIPPED} --offload_optim true",
    ),
    _in_backward(
        lambda job: job.on_nan == "skip",
        "with {on_nan}: a bad step has updated weights already",
        "stop or rollback",
        f"{_UNCLIPPED} --on_nan skip",
        f"{_UNCLIPPED} --on_nan rollback",
    ),
    _in_backward(
        _incomplete_gradients,
        "with {found}: there a gradient is complete only after backward",
        "only {tensor_parallel_degree:name} may be above 1",
        f"x2 {_UNCLIPPED} --sharding stage1 --sharding_parallel_degree 2",
        f"x2 {_UNCLIPPED} --tensor_parallel_degree 2",
    ),
    _in_backward(
        lambda job: job.world // job.tp > 1 and job.world // job.tp,
        "with data parallelism or sharding over {found} ranks: their gradients must be summed first",
        "train on one GPU, or give all of them to {tensor_parallel_degree:name}",
        f"x4 {_UNCLIPPED} --tensor_parallel_degree 2",
        f"x2 {_UNCLIPPED} --tensor_parallel_degree 2",
    ),
    Rule(
        lambda job: _cannot_clip(job),
        "{bf16} on {device:value} over several processes with {optim} needs {amp_master_grad:true} (or "
        "{max_grad_norm:0}): Paddle clips no bf16 gradients of parallel models on custom devices",
        "with {optim:adamw} paddle_te does",
        f"x2 --device nvgpu {HALF} --optim adamw_mini --sharding stage1 --amp_master_grad false",
        f"x2 --device nvgpu {HALF} --sharding stage1",
        host=PADDLENLP,
    ),
)


def _cannot_clip(job: Job) -> bool:
    """Paddle 3.3.1's HybridParallelClipGrad has bf16 for its own GPU device and three others.

    `fuse_clipping` does without it, sharding stage 3 has a clipping of its own.
    """
    custom = job.place not in ("cpu", "gpu", "xpu")
    bf16 = job.model_dtype == "bfloat16" and not job.amp_master_grad
    clipped_otherwise = job.optim in UPDATED_HERE or job.stage == 3
    parallel = job.world > 1 and (job.ranks_of_a_sequence > 1 or job.sharding)
    return custom and bf16 and job.max_grad_norm > 0 and bool(parallel) and not clipped_otherwise


# ------------------------------------------------------------------------------------------------ the Trainer's flags

# What the evaluations of each script measure, and which of two values is the better one
_OF_REWARDS = {"loss": "less", "rewards/accuracies": "greater", "rewards/margins": "greater"}
METRICS = {
    PRETRAIN: {"loss": "less"},
    FINETUNE: {"loss": "less", "accuracy": "greater"},
    DPO: _OF_REWARDS,
    KTO: _OF_REWARDS,
}
# The schedules of each script; with fine-tuning they are PaddleNLP's, which has flags for some
_PADDLENLPS = ("linear", "cosine", "constant", "constant_with_warmup", "polynomial")
SCHEDULES = {PRETRAIN: ("linear", "cosine"), FINETUNE: _PADDLENLPS, DPO: _PADDLENLPS, KTO: _PADDLENLPS}
_OF_A_SCHEDULE = {"num_cycles": ("cosine", 0.5), "lr_end": ("polynomial", 1e-7), "power": ("polynomial", 1.0)}
# Flags of PaddleNLP's that do not do what they say: why, and what to do instead
_WITHOUT_EFFECT = {
    "minimum_eval_times": "PaddleNLP would change --eval_steps by it; give --eval_steps",
    "count_trained_tokens": "PaddleNLP's count fails in the first step; trainer_state.json has consumed_samples",
    "bf16_full_eval": "PaddleNLP reads it nowhere; evaluation has the precision of training",
    "fp16_full_eval": "PaddleNLP reads it nowhere; evaluation has the precision of training",
    "do_export": "PaddleNLP reads it nowhere; te_llama_ckpt_converter.py converts checkpoints",
}
# What --report_to may name, and the package that each one needs
REPORTS = {
    "visualdl": "visualdl",
    "wandb": "wandb",
    "tensorboard": "tensorboardX",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
}
_BEST = "--do_eval true --metric_for_best_model"
_POLYNOMIAL = "finetune --do_train true --lr_scheduler_type polynomial"


def _without_effect(flag: str, why: str) -> Rule:
    value = "3" if flag == "minimum_eval_times" else "true"
    return Rule(lambda job: getattr(job, flag), f"{{{flag}}}: {why}", "", f"--{flag} {value}", "--do_eval true")


def _metric(job: Job) -> str:
    return (job.metric_for_best_model or "").removeprefix("eval_")


def _evaluated_by(job: Job) -> str:
    if job.evaluation_strategy != "no":
        return job.evaluation_strategy
    return "steps" if job.script == PRETRAIN or job.eval_steps else "epoch"  # --do_eval true


def _unread(job: Job) -> str:
    """A flag of another schedule."""
    for name, (owner, default) in _OF_A_SCHEDULE.items():
        if getattr(job, name) != default and (job.script == PRETRAIN or job.lr_scheduler_type != owner):
            return f"{{{name}}}: only fine-tuning with {{lr_scheduler_type:{owner}}} reads it"
    return ""


def _cannot_report(job: Job) -> str:
    for name in job.report_to or ():
        if name in ("all", "none"):
            continue
        if name not in REPORTS:
            return f"{{report_to:{name}}}: it must be one of {', '.join(REPORTS)}, all, none"
        if not _installed(job, REPORTS[name]):
            return f"{{report_to:{name}}}: the package {REPORTS[name]} is not installed; install it, or leave it out"
        if name == "wandb" and os.environ.get("WANDB_DISABLED", "").upper() in ("1", "ON", "YES", "TRUE"):
            return "{report_to:wandb}: WANDB_DISABLED is set; unset it, or leave {report_to:name} out"
    return ""


TRAINER_RULES = (
    *(_without_effect(flag, why) for flag, why in _WITHOUT_EFFECT.items()),
    Rule(
        lambda job: job.tunes and job.do_predict,
        "{do_predict}: fine-tuning has no test set",
        "run_eval.py measures a model",
        "finetune --do_predict true",
        "finetune --do_eval true",
        host=PADDLENLP,
    ),
    Rule(_cannot_report, "{found}", "", "--report_to visualdl wandbee", "--report_to none"),
    _needs_evaluation("load_best_model_at_end", "true"),
    _needs_evaluation("early_stopping_patience", "2"),
    Rule(
        lambda job: _metric(job) and _metric(job) not in METRICS[job.script] and " and ".join(METRICS[job.script]),
        "{metric_for_best_model}: evaluation gives {found}",
        "take one of them",
        f"{_BEST} accuracy",
        f"finetune {_BEST} accuracy",
    ),
    Rule(
        lambda job: _metric(job) and not job.evaluates,
        "{metric_for_best_model} needs {do_eval:true}: nothing is evaluated without it",
        "",
        "--metric_for_best_model loss",
        f"{_BEST} eval_loss",
    ),
    Rule(
        lambda job: (
            _metric(job)
            and job.greater_is_better not in (None, METRICS[job.script][_metric(job)] == "greater")
            and f"the {METRICS[job.script][_metric(job)]} {_metric(job)}"
        ),
        "{greater_is_better} with {metric_for_best_model}: {found} is the better one",
        "leave {greater_is_better:name} out",
        f"{_BEST} loss --greater_is_better true",
        f"{_BEST} loss --greater_is_better false",
    ),
    Rule(
        lambda job: job.load_best_model_at_end and job.save_strategy != _evaluated_by(job) and _evaluated_by(job),
        "{load_best_model_at_end} with {save_strategy}: evaluation is by {found}, and each checkpoint is compared by "
        "the evaluation before it",
        "give {save_strategy:name} {found}",
        "finetune --do_eval true --load_best_model_at_end true",
        "finetune --do_eval true --eval_steps 5 --load_best_model_at_end true",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.lr_scheduler_type not in SCHEDULES[job.script] and ", ".join(SCHEDULES[job.script]),
        "{lr_scheduler_type}: it must be one of {found}",
        "",
        "--lr_scheduler_type polynomial",
        "--lr_scheduler_type cosine",
        host=PADDLENLP,
    ),
    Rule(_unread, "{found}", "leave it out", "finetune --power 2", f"{_POLYNOMIAL} --power 2", PADDLENLP),
    Rule(
        lambda job: job.lr_scheduler_type == "polynomial" and job.lr_end > job.learning_rate,
        "{lr_end} is above {learning_rate}: the rate would rise",
        "",
        f"{_POLYNOMIAL} --lr_end 1",
        f"{_POLYNOMIAL} --lr_end 1e-6",
        host=PADDLENLP,
    ),
    _has_no_warm_up("warmup_steps", 3),
    _has_no_warm_up("warmup_ratio", 0.3),
    Rule(
        lambda job: job.decay_steps and job.decay_steps <= job.warmup_steps,
        "{decay_steps} with {warmup_steps}: steps of the decay count from the first step on, and it would end before "
        "it begins",
        "give more",
        "--warmup_steps 30 --decay_steps 30",
        "--warmup_steps 30 --decay_steps 31",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.script == PRETRAIN and job.learning_rate < job.min_learning_rate,
        "{learning_rate} is below {min_learning_rate}: the rate would rise where it should fall",
        "give {min_learning_rate:name} of at most a tenth",
        "--learning_rate 1e-6",
        "--learning_rate 1e-6 --min_learning_rate 0",
    ),
    Rule(
        lambda job: job.use_async_save or "async_save" in job.unified_checkpoint_config,
        "{use_async_save} {unified_checkpoint_config}: a checkpoint that is saved so could not be told from an "
        "incomplete one",
        "use {staging_dir:name} /dev/shm",
        "--use_async_save true",
        "--staging_dir /dev/shm",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.unified_checkpoint and job.stage == 3,
        "{unified_checkpoint} with {sharding}: PaddleNLP has no such checkpoints, and would save others",
        "leave {unified_checkpoint:name} out",
        "x2 --unified_checkpoint true --sharding stage3",
        "x2 --unified_checkpoint true --sharding stage2",
        host=PADDLENLP,
    ),
)


# ------------------------------------------------------------------------------------------------ fine-tuning, packing


def _of_pretraining(job: Job) -> str:
    """A flag that only pretraining has."""
    given = (each.name for each in PRETRAINING if getattr(job, each.name) != each.default)
    return job.tunes and next((f"{{{name}}}" for name in given), "") or ""


def _packs(job: Job) -> str:
    """Return the flag that keeps a sequence's documents apart; "" without one."""
    if job.prefers:
        return "packed rows"
    return (
        "{zero_padding:name}" if job.zero_padding else "{reset_attention_mask:name}" if job.reset_attention_mask else ""
    )


def _keeps_apart(job: Job) -> str:
    """The same, or the one with which positions begin anew in each document."""
    return _packs(job) or ("{reset_position_ids:name}" if job.reset_position_ids else "")


def _padding_out_of_steps(job: Job) -> str:
    """The flag for the length of a batch, by what it must be divisible, and why; "" where it is."""
    least, why = job.fp8_multiple * job.sharing, f"for GEMMs with {{fp8_recipe}} and {job.sharing} ranks a sequence"
    if not job.use_fp8:
        least, why = job.sharing * (2 if job.cp > 1 else 1), f"with {{{job.shared_by}}}, which splits sequences"
    flag = job.length_flag if job.prefers else "pad_to_multiple_of"
    wrong = job.tunes and getattr(job, flag) % least
    return f"{{{flag}}}: it must be a multiple of {least}, {why}" if wrong else ""


def _before_dropout(job: Job) -> str:
    """Return the flag that keeps less of norm or activation, which are single operations before lora_dropout."""
    if {*(job.recompute_modules or ())} - {"core_attn"}:
        return "{recompute_modules}"
    return "{activation_func_fp8_input_store}" if job.activation_func_fp8_input_store else ""


_TUNED = "finetune --do_train true"
FINETUNE_RULES = (
    Rule(
        _of_pretraining,
        "{found} is for pretraining: here PaddleNLP's Trainer makes the schedule",
        "leave it out",
        f"{_TUNED} --min_learning_rate 1e-6",
        _TUNED,
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.script == FINETUNE and job.pp > 1,
        "{pipeline_parallel_degree}: fine-tuning has tensor, sharding and data parallelism only",
        "it must be 1",
        f"x2 {_TUNED} --pipeline_parallel_degree 2 --gradient_accumulation_steps 2",
        f"x2 {_TUNED} --tensor_parallel_degree 2",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.tunes and not (job.do_train or job.do_eval or job.merge_lora),
        "nothing to do",
        "give {do_train:name}, {do_eval:name} or {merge_lora:name}",
        "finetune",
        _TUNED,
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.quantize_base and not job.use_fp8,
        "{quantize_base} needs {use_fp8:true}: weights that exist in fp8 only are multiplied in fp8",
        "leave {quantize_base:name} out to compute in the activations' precision",
        f"{LORA} --quantize_base fp8",
        f"{LORA} --quantize_base fp8 --use_fp8 true",
    ),
    Rule(
        lambda job: job.lora and job.freeze,
        "{freeze:name} with {lora}, which trains none of the model's weights",
        ONE,
        f"{LORA} --freeze embed",
        f"{_TUNED} --freeze embed",
    ),
    Rule(
        lambda job: job.freeze and job.unified_checkpoint,
        "{freeze:name} with {unified_checkpoint}: PaddleNLP, which loads such checkpoints, asks for the optimizer's "
        "state of all weights",
        "leave {unified_checkpoint:name} out",
        f"{TE} --freeze embed --unified_checkpoint true",
        f"{TE} --freeze embed",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.freeze and job.stage == 3,
        "{freeze:name} with {sharding}: Paddle fails to save weights without gradients there",
        "take stage1 or stage2",
        f"x2 {TE} --freeze embed --sharding stage3",
        f"x2 {TE} --freeze embed --sharding stage2",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.merge_lora and not (job.do_train or job.lora_path),
        "{merge_lora:name} without {do_train:name}: there is no adapter",
        "give it with {lora_path:name}",
        "finetune --lora true --merge_lora true",
        "finetune --lora true --merge_lora true --lora_path adapter",
    ),
    Rule(
        lambda job: job.lora and job.lora_dropout and _before_dropout(job),
        "{found} with {lora_dropout}: norm and activation are operations of their own before dropout, and keep what "
        "they give",
        ONE,
        f"{LORA} --lora_dropout 0.1 --recompute_modules layernorm",
        f"{LORA} --lora_dropout 0.1 --recompute_modules core_attn",
    ),
    Rule(
        lambda job: job.fp8_dpa and not job.prefers and _packs(job),
        "{fp8_dpa}: cuDNN has no attention in fp8 over packed documents",
        "leave out {found}, or {fp8_dpa:name}: then attention is in 16 bits, and the GEMMs stay in fp8",
        f"{FP8} --fp8_dpa true --reset_attention_mask true",
        f"{FP8} --reset_attention_mask true",
    ),
    Rule(
        lambda job: job.cp > 1 and _keeps_apart(job),
        "{found} with {context_parallel_degree}: ring attention knows no documents",
        "share sequences with {sep_parallel_degree:name}, which keeps them apart",
        f"x2 {_TUNED} {PD} --zero_padding true --context_parallel_degree 2",
        f"x2 {_TUNED} {PD} --zero_padding true --sep_parallel_degree 2",
    ),
    Rule(
        lambda job: job.sep > 1 and not job.ours and _keeps_apart(job),
        "{found} with {sep_parallel_degree}: PaddleNLP's own layers take no documents then",
        "use {transformer_engine_backend:paddle} or {transformer_engine_backend:transformer_engine}",
        "x2 --reset_attention_mask true --sep_parallel_degree 2",
        f"x2 {PD} --reset_attention_mask true --sep_parallel_degree 2",
    ),
    Rule(
        _padding_out_of_steps,
        "{found}",
        "",
        f"{_TUNED} {FP8} --model_name_or_path llama-125m --fp8_recipe block --pad_to_multiple_of 64",
        f"{_TUNED} {FP8} --model_name_or_path llama-125m --fp8_recipe block --pad_to_multiple_of 128",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: job.script == FINETUNE and job.sequence_parallel and not job.pad_to_max_length,
        "{sequence_parallel} needs {pad_to_max_length:true}: all batches must be equally long",
        "",
        f"x2 {_TUNED} --tensor_parallel_degree 2 --sequence_parallel true",
        f"x2 {_TUNED} --tensor_parallel_degree 2 --sequence_parallel true --pad_to_max_length true",
        host=PADDLENLP,
    ),
    Rule(
        lambda job: (
            job.script == FINETUNE
            and job.sharing > 1
            and not (job.ours or job.pad_to_max_length)
            and f"{{{job.shared_by}}}"
        ),
        "{found} with {transformer_engine_backend} needs {pad_to_max_length:true}: PaddleNLP's own "
        "layers take all batches for equally long",
        "",
        f"x2 {_TUNED} --sep_parallel_degree 2",
        f"x2 {_TUNED} --sep_parallel_degree 2 --pad_to_max_length true",
        host=PADDLENLP,
    ),
)

# ------------------------------------------------------------------------------------------------ preferences


def _without_reference(job: Job) -> str:
    """Return the flag by which preference tuning has no reference; "" with a reference."""
    if not job.prefers or job.has_reference:
        return ""
    return "{reference_free}" if job.reference_free else "{loss_type}"


_DPO, _KTO = "dpo --do_train true", "kto --do_train true"
_COMPARES = ("dpop", "sppo_hard", "nca_pair", "kto_pair")  # with the reference, answer by answer
PREFERENCE_RULES = (
    Rule(
        lambda job: job.prefers and job.fp8_dpa,
        "{fp8_dpa}: cuDNN has no attention in fp8 over packed rows",
        "leave it out: then attention is in 16 bits, and the GEMMs stay in fp8",
        f"{_DPO} {FP8} --fp8_dpa true",
        f"{_DPO} {FP8}",
    ),
    Rule(
        lambda job: job.prefers and job.fp8_lm_head,
        "{fp8_lm_head}: the head computes answers' tokens only, some 4 % of an 8B model's products, and rewards are "
        "small differences of its log-probabilities, which fp8 would round",
        "leave it out: the layers stay in fp8",
        f"{_DPO} {FP8} --fp8_lm_head true",
        f"{_DPO} {FP8}",
    ),
    Rule(
        lambda job: job.prefers and job.label_smoothing_factor,
        "{label_smoothing_factor} smooths the labels of tokens, which preference tuning has none of",
        "for pairs that may be the wrong way round take {label_smoothing:name}",
        f"{_DPO} --label_smoothing_factor 0.1",
        f"{_DPO} --label_smoothing 0.1",
    ),
    Rule(
        lambda job: job.label_smoothing and job.loss_type not in ("sigmoid", "simpo"),
        "{label_smoothing} with {loss_type}: only sigmoid and simpo have it",
        "leave it out",
        f"{_DPO} --label_smoothing 0.1 --loss_type ipo",
        f"{_DPO} --label_smoothing 0.1 --loss_type simpo",
    ),
    Rule(
        lambda job: job.loss_type == "orpo" and job.sft_loss_ratio,
        "{sft_loss_ratio} with {loss_type}, whose tokens' loss has the weight 1",
        "take {loss_type:or}, which has none of its own",
        f"{_DPO} --loss_type orpo --sft_loss_ratio 0.5",
        f"{_DPO} --loss_type or --sft_loss_ratio 0.5",
    ),
    Rule(
        lambda job: job.reference_free and job.loss_type in _COMPARES,
        "{reference_free} with {loss_type}, which compares each answer with the reference's",
        "take another loss_type",
        f"{_DPO} --reference_free true --loss_type dpop",
        f"{_DPO} --reference_free true --loss_type ipo",
    ),
    Rule(
        lambda job: job.precompute_ref_log_probs and _without_reference(job),
        "{precompute_ref_log_probs} with {found}: there is no reference",
        ONE,
        f"{_DPO} --precompute_ref_log_probs true --loss_type simpo",
        f"{_DPO} --precompute_ref_log_probs true --loss_type ipo",
    ),
    Rule(
        lambda job: job.ref_model_update_steps > 0 and not job.second_model,
        "{ref_model_update_steps} needs a reference that is a model of its own",
        "leave out what makes it another: {lora:name}, {precompute_ref_log_probs:name}, {reference_free:name}, or a "
        "loss without a reference",
        f"{_DPO} {TE} --ref_model_update_steps 5 --lora true",
        f"{_DPO} {TE} --ref_model_update_steps 5",
    ),
    Rule(
        lambda job: job.ref_model_update_steps > 0 and job.save_steps % job.ref_model_update_steps,
        "{save_steps} with {ref_model_update_steps}: between two updates a checkpoint would not hold the reference, "
        "and the run could not go on from it",
        "save at a multiple",
        f"{_DPO} --ref_model_update_steps 7",
        f"{_DPO} --ref_model_update_steps 5",
    ),
    Rule(
        lambda job: job.ref_model_update_steps > 0 and job.shards_weights,
        "{ref_model_update_steps} with {sharding}: each rank has slices of the trained weights only",
        "use stage1 or stage2",
        f"x2 {_DPO} --ref_model_update_steps 5 --sharding stage3 --sharding_parallel_degree 2",
        f"x2 {_DPO} --ref_model_update_steps 5 --sharding stage2 --sharding_parallel_degree 2",
    ),
    Rule(
        lambda job: job.prefers and job.max_prompt_len >= job.max_seq_len,
        "{max_prompt_len} must be below {max_seq_len}, in which the answers have room, too",
        "",
        f"{_KTO} --max_seq_len 1024",
        f"{_KTO} --max_seq_len 1024 --max_prompt_len 512",
    ),
)

# ------------------------------------------------------------------------------------------------ PaddleFormers


def _not_there(flag: str, value: str, why: str, others: str = "") -> Rule:
    """An option that our layers do not have in PaddleFormers. value: an example. others: flags that it needs."""
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
FORMERS_LAYOUT_RULES = (
    Rule(
        lambda job: _shards(job, 2, 3) and job.replicas > 1,
        "{sharding} does not go with data parallelism beside it in PaddleFormers",
        "leave {sharding_parallel_degree:name} out, or use stage1",
        f"paddleformers x4 {_MAIN} --sharding stage2 --sharding_parallel_degree 2",
        f"paddleformers x4 {_MAIN} --sharding stage2 --sharding_parallel_degree 4",
        host=PADDLEFORMERS,
    ),
    Rule(
        lambda job: _shards(job, 3) and job.lora,
        "{sharding}: PaddleFormers cannot save a LoRA adapter of stage 3",
        "use stage1 or stage2",
        f"paddleformers x2 finetune --do_train true {_MAIN} --lora true {_SHARED_OUT} stage3",
        f"paddleformers x2 finetune --do_train true {_MAIN} --lora true {_SHARED_OUT} stage2",
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
        lambda job: job.resume_from_checkpoint and job.loads_flex and not job.ours and _shards(job, 2),
        "{resume_from_checkpoint:name} with {sharding}: PaddleFormers' own layers cannot load its checkpoints in "
        "sharding stage 2",
        "use {transformer_engine_backend:paddle} or {transformer_engine_backend:transformer_engine}",
        f"paddleformers x2 {_MAIN} {_SHARED_OUT} stage2 --resume_from_checkpoint auto",
        f"paddleformers x2 {_MAIN} {_SHARED_OUT} stage2 --resume_from_checkpoint auto {PD}",
        host=PADDLEFORMERS,
    ),
)
FORMERS_RULES = (
    _not_there("fp8_lm_head", "true", "in PaddleFormers the head is the host's own"),
    Rule(
        lambda job: "mlflow" in (job.report_to or ()),
        "{report_to}: PaddleFormers has no callback for MLflow",
        "choose another tracker",
        "paddleformers --report_to mlflow",
        "--report_to mlflow",
        host=PADDLEFORMERS,
    ),
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
RULES = (
    *LAYER_RULES,
    *LAYOUT_RULES,
    *EXPERT_RULES,
    *MUON_RULES,
    *OPTIMIZER_RULES,
    *TRAINER_RULES,
    *FINETUNE_RULES,
    *PREFERENCE_RULES,
    *FORMERS_RULES,
    *FORMERS_LAYOUT_RULES,
)
