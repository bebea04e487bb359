"""Arguments that are `auto`: the planner chooses the layout for the GPUs that the job has."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from paddle_te import commands
from paddle_te.job import Job, words
from paddle_te.launch.arguments import LAYOUT, left_to_planner
from paddle_te.launch.cards import card_of
from paddle_te.launch.devices import gpu_names
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.flags import extra_words, planner_knows
from paddle_te.options.launcher import AUTO, METHODS
from paddle_te.options.lora import COUNTED as COUNTED_OF_ADAPTER
from paddle_te.planner.gpus import GPUS, Gpu
from paddle_te.planner.layout import (
    COUNTED,
    extra_arguments,
    launcher_arguments,
    memory_text,
    recompute_text,
    shape,
)
from paddle_te.planner.model import Model
from paddle_te.planner.plan import Plan
from paddle_te.planner.ranking import costs
from paddle_te.planner.search import LONG, search, usual_tokens

# The variable whose auto is its default, and leaves the layout to the user; the planner fills it in with a layout
OVERLAP = "OVERLAP"


def fill(args: argparse.Namespace, config: dict[str, Any], world: int) -> None:
    """Replace auto by the values of the fastest layout that fits and has what is given, and print the choice.

    config: the model's. world: devices of the job.
    Raises LaunchError where the planner does not know the job or its GPUs, and where no layout fits.
    """
    names = left_to_planner(args)
    names += [OVERLAP] * (args.OVERLAP == AUTO)
    _check_known(args)
    flags, others = _flags(args)
    in_backward = str(flags.get("optimizer_in_backward", "off"))
    gpu, tokens = _gpu(args, world), args.TOKENS_PER_STEP or usual_tokens(world, args.max_seqlen, in_backward)
    plans = _plans(args, Model.of(config), gpu, world, tokens, flags)
    layout = plans[0].layout
    values = _values(layout)
    for name in names:
        setattr(args, name, values[name])
    extra = extra_arguments(layout)
    chosen = [_said(args, name) for name in names] + [extra] * bool(extra)
    args.EXTRA_ARGS = " ".join(filter(None, (extra, others)))
    print(f"auto: {' '.join(chosen)}: {_reason(plans, gpu, tokens)}", file=sys.stderr)


def _values(layout: Job) -> dict[str, object]:
    """The launcher's arguments that make a layout."""
    return {OVERLAP: False, "PP": 1, "VP": 1} | launcher_arguments(layout)


def _said(args: argparse.Namespace, name: str) -> str:
    """An argument as it would be written."""
    return f"{name}={str(getattr(args, name)).lower()}"


def _check_known(args: argparse.Namespace) -> None:
    if not planner_knows(args):
        known = "the planner knows backend=te in bf16 and fp8"
        raise LaunchError(f"auto: {known}, not {args.backend} in {args.precision}; give numbers instead of auto")
    if args.SEP * args.CP > 1 and args.max_seqlen < LONG:
        name = "SEP" if args.SEP > 1 else "CP"
        raise LaunchError(
            f"auto: the planner considers {name} for sequences of at least {LONG} tokens, not of {args.max_seqlen}; "
            f"give numbers instead of auto, or leave {name} out"
        )
    if args.TOKENS_PER_STEP and args.TOKENS_PER_STEP % args.max_seqlen:
        raise LaunchError(f"TOKENS_PER_STEP={args.TOKENS_PER_STEP} must be a multiple of max_seqlen={args.max_seqlen}")


def _plans(
    args: argparse.Namespace, model: Model, gpu: Gpu, world: int, tokens: int, flags: dict[str, Any]
) -> list[Plan]:
    """The plans that fit and have what is given, the fastest first; at least one. flags: `_flags`'s."""
    try:
        asked = model, gpu, world, args.max_seqlen, tokens, args.precision
        found = search(*asked, wanted=lambda layout: _has_what_is_given(layout, args), **flags)
    except ValueError:
        given = [_said(args, name) for name in LAYOUT if getattr(args, name) != AUTO]
        having = f" with {' '.join(given)}" * bool(given)
        raise LaunchError(
            f"auto: no layout{having} has {tokens:,} tokens a step on {world} devices; set TOKENS_PER_STEP, or leave "
            "more arguments to the planner"
        ) from None
    if not found.plans:
        kind, least = min(found.too_large.items(), key=lambda item: item[1].memory.total)
        raise LaunchError(
            f"auto: no layout fits {world} x {gpu.title}; the smallest, {kind} with recompute "
            f"{memory_text(least.layout)}, needs {least.memory.total / 1e9:.0f} GB on each; take more GPUs, or a "
            "shorter max_seqlen"
        )
    return found.plans


def _flags(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return {flag: value} of an adapter and of flags that the planner counts, and EXTRA_ARGS' other words.

    The flags that the planner counts stand in EXTRA_ARGS.
    """
    method = METHODS[getattr(args, "method", "full")]
    known = (*COUNTED, *(COUNTED_OF_ADAPTER.values() if method else ()))
    try:
        found, others = words.read(extra_words(args), known)
    except ValueError as error:
        raise LaunchError(f"EXTRA_ARGS={args.EXTRA_ARGS!r}: {error}") from error
    return method | found, shlex.join(others)


def _gpu(args: argparse.Namespace, world: int) -> Gpu:
    """The planner's numbers of the GPUs that the job is for."""
    if (card := card_of(args)) is None:
        there = " and ".join(sorted({*gpu_names()})) or "no NVIDIA GPU"
        kind = next(iter(GPUS))
        command = commands.line("plan", args.model_name, "--gpus", world, "--gpu", kind)
        raise LaunchError(
            f"auto: the planner knows {' and '.join(gpu.title for gpu in GPUS.values())}, and here is {there}; give "
            f"numbers ({command} finds them for another machine), "
            f"or GPU={kind} for a dry run"
        )
    return card


def _has_what_is_given(layout: Job, args: argparse.Namespace) -> bool:
    """Whether it has the values of the arguments that are not auto."""
    values = _values(layout) | {"recompute": recompute_text(layout)}
    if (args.SEP, args.CP, args.EP) != (layout.sep, layout.cp, layout.ep):
        return False
    if layout.overlaps and args.LOGGING_STEPS == 1:
        return False
    if args.FSDP == "all":
        values["FSDP"] = "all" if layout.sharding_ranks == layout.data else layout.sharding_ranks
    return all(getattr(args, name) in (AUTO, values[name]) for name in (*LAYOUT, OVERLAP))


def _reason(plans: list[Plan], gpu: Gpu, tokens: int) -> str:
    best, layout = plans[0], plans[0].layout
    others = [plan for plan in plans if shape(plan.layout) != shape(layout)][:1]
    return (
        f"{shape(layout)} is the fastest that fits {layout.world} x {gpu.title} with {tokens:,} tokens a step, by the "
        f"planner {best.tokens_per_second:,.0f} tokens/s per GPU and {best.memory.total / 1e9:.0f} of its "
        f"{gpu.memory:.0f} GB"
        + "".join(f"; next is {shape(each.layout)} with {each.tokens_per_second:,.0f}" for each in others)
        + "".join(f"; {what}" for what in costs(layout))
    )
