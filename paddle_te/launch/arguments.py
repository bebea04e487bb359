"""The jobs' arguments, read from the command line and the environment."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from paddle_te.launch import run_files
from paddle_te.launch.machines import LaunchError
from paddle_te.options import Kind
from paddle_te.options.launcher import FALLBACKS, VARIABLES

ROOT = Path(__file__).resolve().parents[2]  # the repository, or the folder of installed packages
SCRIPTS = ROOT / "paddle_te/scripts"


def by_name(job, words: list[str]) -> list[str]:
    """Positional arguments, of which empty ones have their defaults, as --name=value, beside those that are.

    Raises:
        LaunchError: more than the job has, or one that it has not.
    """
    options = [word for word in words if word.startswith("--") or word == "-h"]
    positional = [word for word in words if word not in options]
    names = [option.name for option in job.ARGUMENTS]
    known = {f"--{option.name}" for option in (*job.ARGUMENTS, *VARIABLES, *job.VARIABLES)} | {"--training_script"}
    for word in options:
        name, equals, _ = word.partition("=")
        if word not in ("-h", "--help") and (name not in known or not equals):
            remedy = "write it as --NAME=VALUE" if name in known else f"EXTRA_ARGS takes {_script(job)}'s flags"
            raise LaunchError(f"unknown argument {word}: {remedy}; --help lists them all")
    if len(positional) > len(names):
        raise LaunchError(
            f"too many arguments: {len(positional)} given, at most {len(names)} (the last is {names[-1]})"
        )
    return options + [f"--{name}={value}" for name, value in zip(names, positional, strict=False) if value]


def _name(job) -> str:
    return job.__name__.rpartition(".")[2]


def _script(job) -> str:
    return f"run_{_name(job)}.py"


def _from(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(FALLBACKS.get(name, "")) or ""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise LaunchError(re.sub(r"^argument --(\w+): ", r"\1: ", message))


def _reader(kind: Kind):
    """argparse's type for a kind of values."""

    def read(text):
        try:
            return kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def parse(job, words: list[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """A job's arguments and variables, typed.

    words: --name=value, or values in the order of `job.ARGUMENTS`; or a run file, and --name value.

    Raises:
        LaunchError: one of them is not what it may be.
    """
    parser = _Parser(
        prog=f"paddle-te {_name(job)}",
        description=f"{job.__doc__.splitlines()[0]} Arguments in capitals from DEVICE on may also stand in the "
        "environment. A run file may come first, a recipe of the package or a file of your own, in these names or "
        "PaddleNLP's: FILE.json [--name value ...]; with --print-config it is completed, printed, and not run. "
        f"Recipes: {', '.join(run_files.recipes())}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for option in (*job.ARGUMENTS, *VARIABLES, *job.VARIABLES):
        value = None if option in job.ARGUMENTS else _from(environ, option.name)
        # argparse reads defaults that are text, so an environment variable is checked like an argument
        parser.add_argument(
            f"--{option.name}",
            default=value or option.default_text(),
            type=_reader(option.kind),
            help=option.help,
            metavar="VALUE",
        )
    parser.add_argument(
        "--training_script", default=str(SCRIPTS / _script(job)), type=str, help="what each process runs"
    )
    parser.set_defaults(**job.FIXED)
    if run_files.is_run_file(words):
        words = run_files.as_arguments(job, words, environ)
    return parser.parse_args(by_name(job, words))
