"""The GPUs that a job is for, and whether its layout fits them: the planner's memory against theirs."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from paddle_te import commands
from paddle_te.job import Job
from paddle_te.launch.devices import gpu_names
from paddle_te.launch.errors import LaunchError
from paddle_te.planner.gpus import GPUS, Gpu, called
from paddle_te.planner.layout import adapter_flags, extra_arguments, launcher_arguments
from paddle_te.planner.memory import Memory, lacking, memory_of_step
from paddle_te.planner.model import Model
from paddle_te.planner.plan import Plan
from paddle_te.planner.remedies import bill, remedies

DOUBT = 1.02  # by which the planner's memory may differ from what a step takes (docs/guides/plan.md)
SUGGESTIONS = 2


def card_of(args: argparse.Namespace) -> Gpu | None:
    """Return the planner's numbers of the GPUs here; None for GPUs that the planner does not know.

    Where there are none, those that GPU names for a dry run.

    Raises:
        LaunchError: GPU names other ones than are here.
    """
    asked, names = GPUS.get(args.GPU), {*gpu_names()}
    here = GPUS.get(called(names) or "")
    if names and asked and asked != here and not args.DRY_RUN:
        raise LaunchError(f"GPU: {args.GPU} is not what is here, {' and '.join(sorted(names))}; leave it out")
    return asked or here


def check_memory(args: argparse.Namespace, config: dict[str, Any], layout: Job | None) -> None:
    """Refuse a layout that the GPUs have too little memory for, and say where it is close.

    The refusal names layouts that they have enough for.

    layout: None for what the planner does not know.

    Raises:
        LaunchError: the layout does not fit, and CHECK_MEMORY is not 0.
    """
    card = card_of(args)
    if card is None or layout is None or not args.CHECK_MEMORY:
        return
    model = Model.of(config)
    memory = memory_of_step(model, layout)
    if lacking(memory, model, layout, card) <= 0:
        return
    short = layout.but(max_seq_length=16, max_length=16, per_device_train_batch_size=1)
    least = memory if layout.one_length else memory_of_step(model, short)
    counted = _counted(memory, card)
    if least.total <= DOUBT * card.memory * 1e9:
        why = "that is close" if layout.one_length else "rows as long as they may be do not fit, shorter ones may"
        print(f"note: {counted}; {why}", file=sys.stderr)
        return
    raise LaunchError(
        f"memory: {counted}. {_what_fits(args, model, layout, card)}; CHECK_MEMORY=0 starts it all the same"
    )


def _counted(memory: Memory, card: Gpu) -> str:
    needs = f"by the planner a step needs {memory.total / 1e9:.1f} GB on each {card.title}"
    return f"{needs}, which has {card.memory:g}{bill(memory, least=1)}"


def _what_fits(args: argparse.Namespace, model: Model, layout: Job, card: Gpu) -> str:
    """The fastest layouts that fit, as what to change in the arguments."""

    def wanted(each: Job) -> bool:  # fine-tuning has no pipelines
        return (each.sep, each.cp) == (args.SEP, args.CP) and (each.pp == 1 or "method" not in args)

    change, plans = remedies(model, layout, card, SUGGESTIONS, wanted)
    if plans:
        less = "Over a base in fp8" if layout.lora else "With a compact state of the optimizer"
        with_what = less if change else "With as many tokens a step"
        return f"{with_what} these fit, the fastest first: {'; or '.join(_changes(args, plan) for plan in plans)}"
    kind = args.GPU or card.title.lower()
    asked = "--gpu", kind, "--seq", args.max_seqlen, "--precision", layout.precision, *adapter_flags(layout)
    command = commands.line("plan", args.model_name, "--gpus", commands.NUMBER, *asked)
    return f"No layout of {layout.world} x {card.title} fits with as many tokens a step; {command} says what more do"


def _changes(args: argparse.Namespace, plan: Plan) -> str:
    """A plan's layout as the arguments that differ from the job's, with its memory."""
    given = vars(args) | ({"OVERLAP": False} if getattr(args, "OVERLAP", None) == "auto" else {})
    values = {"OVERLAP": False, "EP": 1} | launcher_arguments(plan.layout)
    words = [f"{name}={str(value).lower()}" for name, value in values.items() if given.get(name, value) != value]
    if extra := extra_arguments(plan.layout):
        words.append(f"EXTRA_ARGS='{extra}'")
    return f"{' '.join(words)} ({plan.memory.total / 1e9:.0f} GB)"
