"""Layouts of jobs: the part of a Job that memory and time depend on, and the command that starts it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from paddle_te.job import FINETUNE, PRETRAIN, Job
from paddle_te.job.record import FLAGS
from paddle_te.job.words import options, printed
from paddle_te.options.launcher import FLAGS as LAUNCHERS
from paddle_te.options.launcher import OVERLAPS, SPLIT
from paddle_te.options.layers import DISPATCHERS, again, stored_in_fp8
from paddle_te.options.lora import COUNTED as COUNTED_OF_ADAPTER
from paddle_te.options.lora import Adapter
from paddle_te.options.option import GIVEN
from paddle_te.options.training import WHOLE_LAYERS

# Words of a layout, as tables and results have them: the flag
_SHORT = {
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "vp": "virtual_pp_degree",
    "sep": "sep_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
    "batch": "per_device_train_batch_size",
    "micro_batches": "gradient_accumulation_steps",
    "loss_in_chunks": "use_fused_linear_cross_entropy",
    "fp8_head": "fp8_lm_head",
    "fp8_attention": "fp8_dpa",
    "main_grads": "amp_master_grad",
}
_PLANNED = {name: option.planned for name, option in options().items() if option.planned}
# The flags that the planner counts and the launcher has no argument for, beside an adapter's
COUNTED = tuple(name for name in _PLANNED if name not in Adapter().flags)
_KEPT = ("script", *(name for name, how in _PLANNED.items() if how == GIVEN))
_ONE: dict[str, object] = {"per_device_train_batch_size": 1, **again()}


def layout(
    gpus: int,
    sequence: int,
    *,
    sharding: int = 1,
    stage: int = 1,
    precision: str = "fp8",
    recompute: str = "none",
    overlap: bool = False,
    fp8_input_store: bool = False,
    lora: Mapping[str, Any] | bool | None = False,
    **flags: Any,
) -> Job:
    """Return the Job that the launcher starts with te on so many devices of nvgpu.

    sequence: tokens. sharding: ranks that share states, in this stage. overlap: OVERLAP=1. recompute: the launcher's.
    lora: whether an adapter is trained, or its {"rank", "targets", "fp8_base"}. flags: others, by name or in words of
    _SHORT.
    """
    known: dict[str, Any] = _ONE | (WHOLE_LAYERS | {"recompute_granularity": recompute} if recompute != "none" else {})
    known |= stored_in_fp8(True) if fp8_input_store else {}
    if isinstance(lora, Mapping):
        known |= Adapter(**lora).flags
    known |= by_flag(flags)
    divided = known.get("expert_parallel_degree", 1) > 1
    made = Job(
        script=FINETUNE if lora else PRETRAIN,
        do_train=True,
        device="nvgpu",
        world=gpus,
        transformer_engine_backend="transformer_engine",
        bf16=True,
        fp16_opt_level="O2",
        use_fp8=precision == "fp8",
        max_seq_length=sequence,
        max_length=sequence,
        max_seq_len=sequence,
        sharding=f"stage{stage}" if sharding > 1 else "",
        sharding_parallel_degree=sharding,
        sharding_parallel_config=OVERLAPS.get(f"stage{stage}", OVERLAPS["stage2"]) if overlap else SPLIT * divided,
        lora=bool(lora),
    )
    return over_tensor_ranks(made.but(**known), int(known.get("tensor_parallel_degree", 1)))


def over_tensor_ranks(job: Job, tp: int) -> Job:
    """Return the Job with tensor and so sequence parallelism, for which fine-tuning pads all batches."""
    several = tp > 1
    return job.but(tensor_parallel_degree=tp, sequence_parallel=several, pad_to_max_length=job.lora and several)


def by_flag(words: Mapping[str, object]) -> dict[str, Any]:
    """Return {flag: value} of words that may be _SHORT's; JSON's lists become tuples."""
    return {_SHORT.get(name, name): tuple(value) if isinstance(value, list) else value for name, value in words.items()}


def kept(job: Job) -> dict[str, Any]:
    """Return the flags of a Job that other layouts of the same training have, too."""
    return {name: getattr(job, name) for name in _KEPT}


def row_of(job: Job) -> dict[str, object]:
    """Return what `layout` makes the Job from, without defaults, as JSON has it."""
    said = {
        "sharding": (job.sharding_ranks, 1),
        "stage": (job.stage, 1),
        "precision": (job.precision, "fp8"),
        "recompute": (job.recomputed, "none"),
        "overlap": (job.overlaps, False),
        "fp8_input_store": (job.stores_input_in_fp8, False),
    }
    plain = layout(job.world, job.sequence)
    said |= {name: (getattr(job, flag), getattr(plain, flag)) for name, flag in _SHORT.items()}
    named = {*_SHORT.values(), *LAUNCHERS.values(), *Adapter().flags, "max_length", "max_seq_len"}
    named |= {"script", "world", "use_fp8", "sequence_parallel", "pad_to_max_length", "recompute", "max_grad_norm"}
    named |= {"recompute_granularity", "sharding_parallel_config", *stored_in_fp8(True)}
    others = {name: value for name, value in differing(job, plain).items() if name not in named}
    row: dict[str, object] = {"gpus": job.world, "sequence": job.sequence}
    row |= {name: value for name, (value, default) in said.items() if value != default} | others
    return row | ({"lora": job.adapter.counted} if job.lora else {})


def differing(job: Job, other: Job) -> dict[str, object]:
    """Return the fields in which a Job differs from another one."""
    mine, theirs = vars(job), vars(other)
    return {name: mine[name] for name in FLAGS if mine[name] != theirs[name]}


def launcher_arguments(job: Job) -> dict[str, object]:
    """Return the launcher's arguments and variables that make this layout, but for EXTRA_ARGS."""
    arguments: dict[str, object] = {
        name: getattr(job, flag) for name, flag in LAUNCHERS.items() if name not in ("SEP", "CP", "EP")
    }
    arguments |= {
        "FSDP": job.sharding_ranks,
        "SP": job.tp > 1,
        "max_seqlen": job.sequence,
        "sharding_stage": f"stage{job.stage}",
        "backend": "te",
        "precision": job.precision,
        "recompute": job.recomputed,
    }
    if job.script == FINETUNE:  # which has no pipelines
        del arguments["PP"], arguments["VP"]
    if job.tunes:
        arguments["method"] = "lora" if job.lora else "full"
    arguments |= {name: degree for name, degree in (("SEP", job.sep), ("CP", job.cp), ("EP", job.ep)) if degree > 1}
    return arguments | ({"OVERLAP": True} if job.overlaps else {})


def extra_flags(job: Job) -> dict[str, object]:
    """Return the flags that stand in EXTRA_ARGS.

    The launcher's arguments do not say them, and the launcher does not set them by itself.
    """
    plain = layout(
        job.world, job.sequence, sharding=job.sharding_ranks, stage=job.stage, precision=job.precision,
        recompute=job.recomputed, overlap=job.overlaps, optimizer_in_backward=job.optimizer_in_backward,
    )  # fmt: skip
    if job.ep > 1:  # the launcher sets both
        plain = plain.but(sharding_parallel_config=job.sharding_parallel_config)
    plain = plain.but(
        **{flag: getattr(job, flag) for flag in (*LAUNCHERS.values(), "lora", "pad_to_max_length")},
        amp_master_grad=plain.keeps_main_gradients or job.overlaps or job.ep > 1,
        optimizer_in_backward="off",
        use_fused_linear_cross_entropy=job.prefers,  # which has nothing else
    )
    own = {COUNTED_OF_ADAPTER["rank"]: job.adapter.rank} if job.lora else {}
    return own | {name: value for name, value in differing(job, plain).items() if name not in own}


def extra_arguments(job: Job) -> str:
    """Return the same as one text, as a shell has it."""
    return shlex.join(
        printed({name: f"{value:g}" if isinstance(value, float) else value for name, value in extra_flags(job).items()})
    )


def adapter_flags(job: Job) -> list[str]:
    """Return the words that fine-tuning and `paddle-te plan` have for an adapter, beside --lora."""
    if not job.lora:
        return []
    flags, plain = job.adapter.flags, Adapter(rank=0).flags  # a rank always differs
    return printed({name: value for name, value in flags.items() if value != plain[name]})


def shape(job: Job) -> str:
    """Return how ranks share a model, in words for a table."""
    degrees = {"TP": job.tp, "PP": job.pp, "VP": job.vp, "SEP": job.sep, "CP": job.cp, "EP": job.ep}
    degrees |= {f"stage{job.stage} over ": job.sharding_ranks, "DP": job.replicas}
    words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1] or ["one GPU"]
    words += ["all-to-all"] * (job.ep > 1 and job.moe_token_dispatcher_type != DISPATCHERS[0])
    return " × ".join(words)


def recompute_text(job: Job) -> str:
    """Return what backward computes again, in words for a table."""
    return " + ".join(job.recomputed_modules) or job.recomputed


def memory_text(job: Job) -> str:
    """Return the same, and how many tokens the MLP takes at a time where these are not all."""
    stored = ", SwiGLU's input in fp8" * job.stores_input_in_fp8
    stored += ", transposes kept" * job.keep_fp8_transpose_cache
    return recompute_text(job) + stored + f", MLP in chunks of {job.chunk}" * job.mlp_in_chunks
