"""Rules for the optimizer: Muon, how states are kept, and when weights are updated."""

from __future__ import annotations

from collections.abc import Callable

from paddle_te.host import PADDLEFORMERS, PADDLENLP
from paddle_te.job.record import Job
from paddle_te.job.rules.rule import HALF, LORA, ONE, PD, TE, TUNED, Rule
from paddle_te.options.training import OPTIMIZER_DEFAULTS, UPDATED_HERE

_COMPACT = f"{TE} --optim_moments bfloat16 --master_weights bf16_remainder"
_MUON = f"{TE} --optim muon"
_UNCLIPPED = "--optimizer_in_backward unclipped --max_grad_norm 0"


def _states(job: Job) -> str:
    """Return the flags that say how AdamW's states are kept, beyond their defaults; "" for none."""
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
    """Return a flag whose states a unified checkpoint would join from ranks' parts, and why it cannot; "" for none."""
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
    """Return a degree with which backward leaves gradients of a part of the step's tokens."""
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


def _muon(when: Callable[[Job], object], says: str, remedy: str, breaks: str, near: str = _MUON) -> Rule:
    """Return a Rule for flags that do not go with Muon."""
    return Rule(lambda job: job.optim == "muon" and when(job), f"{{optim}} {says}", remedy, breaks, near)


_MUON_RULES = (
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
        f"{TUNED} {_MUON}",
    ),
)


RULES = (
    *_MUON_RULES,
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
    """Return whether nothing clips a run's gradients.

    Paddle 3.3.1's HybridParallelClipGrad has bf16 for its own GPU device and three others.

    `fuse_clipping` does without it, sharding stage 3 has a clipping of its own.
    """
    custom = job.place not in ("cpu", "gpu", "xpu")
    bf16 = job.model_dtype == "bfloat16" and not job.amp_master_grad
    clipped_otherwise = job.optim in UPDATED_HERE or job.stage == 3
    parallel = job.world > 1 and (job.ranks_of_a_sequence > 1 or job.sharding)
    return custom and bf16 and job.max_grad_norm > 0 and bool(parallel) and not clipped_otherwise
