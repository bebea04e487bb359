"""OVERLAP: sharding's communication at the same time as computation; where that goes, and the flags for it."""

from __future__ import annotations

import argparse
import sys

from paddle_te.host import PADDLEFORMERS
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.flags import extra_flags, ranks_of_a_sequence
from paddle_te.options.launcher import AUTO, OVERLAPS
from paddle_te.options.training import UPDATED_HERE

# The same for the stages of a pipeline, where stage1 alone is possible: what is added to --pipeline_parallel_config
# reduces gradients during the last micro-batch's backward, and the next forward waits for broadcasts of weights.
# Without split_param, whose buckets Paddle makes only in the first step: a checkpoint's state could not be divided.
PIPELINE_OVERLAP = "enable_sharding_comm_overlap"
OVERLAP_IN_PIPELINES = "enable_stage1_broadcast_overlap"
LOGGING_STEPS = 2  # with overlap, where the user does not say how many: the least that it can be


def overlap_flags(args: argparse.Namespace, device: str, world: int) -> dict[str, object]:
    """Return the training script's flags for OVERLAP; none without overlap.

    Where there is sharding, OVERLAP=auto says in one line what was turned on, or why nothing was.

    args: the launcher's. device: gpu, nvgpu or cpu. world: devices of the job.
    Raises LaunchError where OVERLAP=1 cannot be.
    """
    if not args.OVERLAP:
        return {}
    obstacle = _obstacle(args, device, world)
    if args.OVERLAP == AUTO:
        obstacle = obstacle or _obstacle_by_itself(args, device)
        if args.FSDP > 1:  # else nobody asked for sharding
            _say(args, obstacle)
    elif obstacle:
        raise LaunchError(f"OVERLAP=1: {obstacle}")
    return {} if obstacle else _flags(args)


def _flags(args: argparse.Namespace) -> dict[str, object]:
    return {
        "sharding_parallel_config": OVERLAPS[args.sharding_stage] if args.PP == 1 else OVERLAP_IN_PIPELINES,
        "pipeline_parallel_config": PIPELINE_OVERLAP if args.PP > 1 else None,
        "amp_master_grad": 1,
        "logging_steps": args.LOGGING_STEPS or LOGGING_STEPS,
    }


def _say(args: argparse.Namespace, obstacle: str | None) -> None:
    if obstacle:
        print(f"OVERLAP=auto: off, because {obstacle}", file=sys.stderr)
        return
    logged = "" if args.LOGGING_STEPS else f", and the log has a line for every {LOGGING_STEPS} steps"
    print(
        f"OVERLAP=auto: on, sharding's communication in {args.sharding_stage} runs at the same time as computation"
        f"{logged}; OVERLAP=0 turns it off",
        file=sys.stderr,
    )


def _obstacle(args: argparse.Namespace, device: str, world: int) -> str | None:
    """Why there can be no overlap, and what to change; None where there can be."""
    if args.HOST == PADDLEFORMERS:
        return "it is not there in PaddleFormers yet; HOST=paddlenlp has it"
    if obstacle := _obstacle_of_layout(args, world):
        return obstacle
    if device == "cpu" or args.precision == "fp32":
        return (
            f"it needs a GPU (or nvgpu) and precision bf16 or fp8, not {device} and {args.precision}: Paddle overlaps "
            "with float32 main gradients of 16-bit weights only"
        )
    if args.LOGGING_STEPS == 1:
        return "it needs LOGGING_STEPS of 2 or more: reading each step's loss would wait for its communication"
    return None


def _obstacle_by_itself(args: argparse.Namespace, device: str) -> str | None:
    """Why auto does not turn on what OVERLAP=1 would."""
    if args.PP > 1:
        return f"with PP={args.PP} no run has shown that it is faster; OVERLAP=1 turns it on"
    said = extra_flags(args)
    for name in ("sharding", "sharding_parallel_config"):
        if name in said:
            return f"EXTRA_ARGS has --{name}, which says how to shard; leave that out"
    if said.get("logging_steps") == 1:
        return "EXTRA_ARGS has --logging_steps 1, and it needs 2 or more"
    # PaddleNLP resumes others from files that are divided as this run's
    if said.get("optim", "adamw") not in UPDATED_HERE:
        return f"a run with --optim {said['optim']} could not resume from one without overlap; OVERLAP=1 turns it on"
    if not said.get("amp_master_grad", device == "nvgpu"):
        return (
            "it would add up gradients in float32, which this run does not: 2 more bytes of memory a parameter, and "
            "other roundings; OVERLAP=1 turns it on"
        )
    return None


def _obstacle_of_layout(args: argparse.Namespace, world: int) -> str | None:
    """What of a layout that can run keeps sharding's communication from running at the same time as computation."""
    if args.FSDP == 1:
        return "it is for sharding, and FSDP=1 shards nothing: FSDP=all shards over all data-parallel devices"
    if args.sharding_stage == "stage3":
        return "it is for sharding_stage=stage1 or stage2; stage3's communication runs beside computation without it"
    if args.PP > 1 and args.EP > 1:
        return f"EP={args.EP} needs split_param, with which Paddle has no overlap for PP={args.PP}: OVERLAP=0"
    if args.PP > 1 and (name := next((name for name in ("SEP", "CP") if getattr(args, name) > 1), None)):
        return f"Paddle has it for PP={args.PP} or for {name}={getattr(args, name)}, not for both"
    if args.sharding_stage == "stage2" and (dp := world // (ranks_of_a_sequence(args) * args.FSDP)) > 1:
        return f"stage2 has no float32 main gradients in PaddleNLP where DP is {dp}: set FSDP=all, or stage1"
    return None
