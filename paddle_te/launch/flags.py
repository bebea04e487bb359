"""What the training scripts of all jobs are told alike, and the record of what a job is asked for."""

from __future__ import annotations

import argparse
import ast
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paddle_te.configs.spec import spec_of
from paddle_te.folders import checkpoint_folder
from paddle_te.host import PADDLENLP
from paddle_te.job import LAUNCHER, Door, Job, JobError, check, words
from paddle_te.launch import JobModule
from paddle_te.launch.arguments import SCRIPTS
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.names import name_of, paddlenlps_flags, remedy, script_flags, script_of
from paddle_te.options import BACKENDS, Option
from paddle_te.options.launcher import SPLIT, VARIABLES
from paddle_te.options.removed import check_removed


def common(options: Iterable[Option], args: argparse.Namespace, device: str, world: int) -> dict[str, object]:
    """Return flags for layout, layers and precision, in PaddleNLP's names; None leaves one out.

    options: the job's own. Of these and those of all jobs some are `passed` on as they are.
    """
    half = args.precision == "bf16" or args.precision == "fp8" and device != "cpu"  # there pd emulates it in float32
    flags = {
        "device": device,
        "do_train": 1,
        **{option.flag: _number(getattr(args, option.name)) for option in (*options, *VARIABLES) if option.passed},
        "per_device_eval_batch_size": args.batch_size_per_device,
        "sharding": args.sharding_stage if args.FSDP > 1 else None,
        "transformer_engine_backend": BACKENDS[args.backend],
        "use_fp8": 1 if args.precision == "fp8" else None,
        "bf16": int(half),
        "fp16_opt_level": "O2" if half else None,
        "recompute": int(args.recompute != "none"),
        "recompute_granularity": None if args.recompute == "none" else args.recompute,
    }
    asked = _job_of(args, flags, world=world, host=args.HOST)
    if args.EP > 1:
        flags |= {"sharding_parallel_config": SPLIT}
    return flags | {"amp_master_grad": 1 if asked.keeps_main_gradients or args.EP > 1 else None}


def of_folder(args: argparse.Namespace, output: Path) -> dict[str, object]:
    """Return the flags for the run's folder, and for the checkpoint there that it goes on from."""
    resume = checkpoint_folder(output, args.resume_step) if isinstance(args.resume_step, int) else args.resume_step
    return {"output_dir": output, "resume_from_checkpoint": None if resume == "none" else resume}


def check_asked(job: JobModule, args: argparse.Namespace, device: str, world: int, config: dict[str, Any]) -> None:
    """Refuse what training would refuse of a job and its EXTRA_ARGS. config: the model's.

    Raises:
        LaunchError: a rule that the job breaks, in the launcher's words.
    """
    resume = None if args.resume_step == "none" else args.resume_step
    flags = job.told(args, device, world) | {"model_name_or_path": args.model_name, "resume_from_checkpoint": resume}
    known = dict(script=name_of(job), host=args.HOST, world=world, elsewhere=args.DRY_RUN)
    asked = _job_of(args, flags, model=spec_of(config), **known)
    try:
        check(asked, door_of(args))
    except JobError as error:
        raise LaunchError(str(error)) from error


def _job_of(args: argparse.Namespace, flags: Mapping[str, object], **known: Any) -> Job:
    extra_flags(args)  # whose error names EXTRA_ARGS
    return words.job_of([*words.printed(flags), *extra_words(args)], **known)


def check_known(job: JobModule, args: argparse.Namespace) -> None:
    """Refuse what the job's script would not take of EXTRA_ARGS, where a run file's flags stand, too.

    Raises:
        LaunchError: a value without a flag, or a flag that the script does not have. Says nothing of flags without
            PaddleNLP, or with another host or a script of the user's own.
    """
    said = extra_words(args)
    try:
        found, others = words.read(said)
        given = [*found, *words.pairs(others)]
    except ValueError as error:
        raise LaunchError(f"EXTRA_ARGS: {error}") from error
    if args.HOST != PADDLENLP or not _is_ours(job, Path(args.training_script)) or not paddlenlps_flags():
        return
    flags = script_flags(job)
    wrong = next((name for name in given if not {name, name.removeprefix("no_")} & flags), None)
    if wrong:
        what_to_do = remedy(job, wrong)
        raise LaunchError(f"--{wrong}: {script_of(job)} has no such flag" + (what_to_do and f"; {what_to_do}"))


def _is_ours(job: JobModule, script: Path) -> bool:
    """Return whether a script does what the package's does, and no more: a user's own may have flags of its own."""
    return script.is_file() and _statements(script) == _statements(SCRIPTS / script_of(job))


def _statements(script: Path) -> list[str] | None:
    """Return a script's statements behind its docstring; None where it is no Python."""
    try:
        program = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):
        return None
    return [ast.unparse(statement) for statement in program.body[ast.get_docstring(program) is not None :]]


def trains(args: argparse.Namespace) -> bool:
    """Return whether the job trains. EXTRA_ARGS may say that it only evaluates, or merges an adapter."""
    return bool(extra_flags(args).get("do_train", True))


def door_of(args: argparse.Namespace) -> Door:
    """Return the launcher's Door for a user who has given some flags in EXTRA_ARGS."""
    return LAUNCHER.with_others(extra_flags(args))


def extra_words(args: argparse.Namespace) -> list[str]:
    """Return the words of EXTRA_ARGS. Raises LaunchError for a quote without its end, and for an option that went."""
    try:
        found = shlex.split(args.EXTRA_ARGS)
    except ValueError as error:
        raise LaunchError(f"EXTRA_ARGS: {args.EXTRA_ARGS!r} is not quoted as in a shell ({error})") from error
    try:
        check_removed(found)
    except ValueError as error:
        raise LaunchError(f"EXTRA_ARGS: {error}") from error
    return found


def extra_flags(args: argparse.Namespace) -> dict[str, object]:
    """{flag: value} of EXTRA_ARGS, as far as a Job has them. Raises LaunchError for a value that one may not have."""
    given = extra_words(args)
    try:
        return words.read(given)[0]
    except ValueError as error:
        raise LaunchError(f"EXTRA_ARGS: {error}") from error


def ranks_of_a_sequence(args: argparse.Namespace) -> int:
    """Return how many devices work on the same sequences: those between which data is not divided."""
    return args.TP * args.PP * args.SEP * args.CP


def planner_knows(args: argparse.Namespace) -> bool:
    """Return whether the planner has memory and time of such jobs."""
    return args.backend == "te" and args.precision != "fp32"


def _number(value: object) -> object:
    """1 and 0 for true and false, as the scripts read them."""
    return int(value) if isinstance(value, bool) else value
