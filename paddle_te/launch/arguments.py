"""The jobs' arguments, read from the command line and the environment."""

from __future__ import annotations

import argparse
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from paddle_te.host import HOSTS
from paddle_te.launch import JobModule, run_files
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.names import arguments_of, misspelt, name_of, remedy, script_of
from paddle_te.options.launcher import AUTO, FALLBACKS
from paddle_te.options.removed import check_removed

ROOT = Path(__file__).resolve().parents[2]  # the repository, or the folder of installed packages
SCRIPTS = ROOT / "paddle_te/scripts"
# What a layout consists of, in the order of the arguments
LAYOUT = ("batch_size_per_device", "FSDP", "TP", "PP", "VP", "GA", "SP", "sharding_stage", "recompute")


def by_name(job: JobModule, words: list[str]) -> list[str]:
    """Return all arguments as --name=value. Positional ones come in the job's order; empty ones are left out.

    Raises:
        LaunchError: more than the job has, one that it has not, or a name without a value.
    """
    options, positional, rest = [], [], iter(words)
    names = [option.name for option in job.ARGUMENTS]
    known = {f"--{option.name}" for option in arguments_of(job)} | {"--training_script"}
    for word in rest:
        name, equals, _ = word.partition("=")
        if word in ("-h", "--help"):
            options.append(word)
        elif not word.startswith("--"):
            positional.append(word)
        elif name not in known:
            what_to_do = remedy(job, name[2:]) or f"EXTRA_ARGS takes {script_of(job)}'s flags"
            raise LaunchError(f"unknown argument {word}: {what_to_do} (--help lists the arguments)")
        elif equals:
            options.append(word)
        elif run_files.lacks_value(name, value := next(rest, None)):
            raise LaunchError(f"{name}: its value is missing; write {name}=VALUE or {name} VALUE")
        else:
            options.append(f"{name}={value}")
    if len(positional) > len(names):
        raise LaunchError(
            f"too many arguments: {len(positional)} given, at most {len(names)} (the last is {names[-1]})"
        )
    return options + [f"--{name}={value}" for name, value in zip(names, positional, strict=False) if value]


def _from(environ: Mapping[str, str], name: str) -> str:
    value = next(filter(None, map(environ.get, (name, *FALLBACKS.get(name, ())))), "")
    # tcsh and others keep the machine's name there
    return "" if name == "HOST" and value not in HOSTS and value == socket.gethostname() else value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(re.sub(r"^argument --(\w+): ", r"\1: ", message))


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names a default where there is one and the help does not say it itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.default in (None, "") or "(default" in (action.help or "")
        return action.help if said else super()._get_help_string(action)


def make_parser(job: JobModule, environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser of a job's arguments and variables, by name, of which the environment may hold defaults."""
    parser = _Parser(
        prog=f"paddle-te {name_of(job)}",
        description=f"{str(job.__doc__).splitlines()[0]} Arguments in capitals from HOST on may also stand in the "
        "environment. A run file may come first, a recipe of the package or a file of your own, in these names or "
        "PaddleNLP's: FILE.json [--name value ...]; with --print-config it is completed, printed, and not run. "
        "`paddle-te recipes` lists the recipes.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    for option in arguments_of(job):
        value = None if option in job.ARGUMENTS else _from(environ, option.name)
        # argparse reads defaults that are text, so an environment variable is checked like an argument
        parser.add_argument(
            f"--{option.name}",
            default=value or option.default_text(),
            type=option.kind.argument,
            help=option.told,
            metavar="VALUE",
            choices=option.kind.values or None,  # for completion: its reader refuses others before
        )
    parser.add_argument(
        "--training_script", default=str(SCRIPTS / script_of(job)), type=str, help="what each process runs"
    )
    parser.set_defaults(**job.FIXED)
    return parser


def parse(job: JobModule, words: list[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """Return a job's arguments and variables, typed.

    words: --name=value or --name value, or values in the order of `job.ARGUMENTS`; or a run file, and names and values.

    Raises:
        LaunchError: one of them is not what it may be, or the environment has a name that is almost one of theirs.
    """
    try:
        check_removed([*words, *environ])
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if wrong := misspelt(job, environ):
        raise LaunchError(wrong)
    if run_files.is_run_file(words):
        words = run_files.as_arguments(job, words, environ)
    words = by_name(job, words)
    args = make_parser(job, environ).parse_args(words)
    given = {word[2:].partition("=")[0] for word in words} | {*job.FIXED}
    _leave_to_planner(args, given | {option.name for option in job.VARIABLES if _from(environ, option.name)})
    return args


def _leave_to_planner(args: argparse.Namespace, given: set[str]) -> None:
    """Make the arguments of the layout auto that are not `given`, where one of them is auto.

    Their defaults belong to another layout.

    Raises LaunchError where TOKENS_PER_STEP is given and no argument is auto.
    """
    if not left_to_planner(args):
        if args.TOKENS_PER_STEP:
            raise LaunchError("TOKENS_PER_STEP goes with auto, as in TP=auto; else batch_size_per_device and GA say it")
        return
    for name in {*LAYOUT} - given:
        setattr(args, name, AUTO)


def left_to_planner(args: argparse.Namespace) -> list[str]:
    """Return the names of what of the layout is auto."""
    return [name for name in LAYOUT if getattr(args, name, None) == AUTO]
