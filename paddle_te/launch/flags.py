"""What the training scripts of all jobs are told alike."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from pathlib import Path

from paddle_te.options import BACKENDS, Option
from paddle_te.options.launcher import VARIABLES
from paddle_te.planner.flags import said
from paddle_te.runs.main_gradients import launcher_keeps_them


def common(
    options: Iterable[Option], args: argparse.Namespace, device: str, world: int, output: Path
) -> dict[str, object]:
    """Flags for layout, layers, precision and resume, in PaddleNLP's names; None leaves one out.

    options: the job's own. Of these and those of all jobs the ones with a `flag` are passed on as they are.
    """
    half = args.precision != "fp32" and device != "cpu"  # on a CPU pd emulates fp8 in float32
    resume = output / f"checkpoint-{args.resume_step}" if isinstance(args.resume_step, int) else args.resume_step
    return {
        "output_dir": output,
        "device": device,
        "do_train": 1,
        **{option.flag: _number(getattr(args, option.name)) for option in (*options, *VARIABLES) if option.flag},
        "per_device_eval_batch_size": args.batch_size_per_device,
        "sharding": args.sharding_stage if args.FSDP > 1 else None,
        "transformer_engine_backend": BACKENDS[args.backend],
        "use_fp8": 1 if args.precision == "fp8" else None,
        "bf16": int(half),
        "fp16_opt_level": "O2" if half else None,
        "amp_master_grad": 1 if launcher_keeps_them(device, args.precision, world, _in_backward(args)) else None,
        "recompute": int(args.recompute != "none"),
        "recompute_granularity": None if args.recompute == "none" else args.recompute,
        "resume_from_checkpoint": None if resume == "none" else resume,
    }


def _in_backward(args: argparse.Namespace) -> str:
    """What EXTRA_ARGS says of --optimizer_in_backward."""
    given, _ = said(shlex.split(args.EXTRA_ARGS), ["optimizer_in_backward"])
    return given.get("optimizer_in_backward", "off")


def _number(value: object) -> object:
    """1 and 0 for true and false, as the scripts read them."""
    return int(value) if isinstance(value, bool) else value
