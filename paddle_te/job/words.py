"""Flags as words of a command line, read and printed."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

from paddle_te import configs
from paddle_te.configs.spec import spec_of
from paddle_te.host import HOSTS
from paddle_te.job.record import DPO, FINETUNE, FLAGS, KTO, PRETRAIN, SECTIONS, Job
from paddle_te.options.option import FLAG, Option, options_of
from paddle_te.options.pretraining import PretrainData, PretrainModel
from paddle_te.options.tuning import FinetuneData, FinetuneModel, PairPreference, PreferenceData, SinglePreference

# Sections that a script does not have
_PRETRAINS, _PREFERS = (PretrainModel, PretrainData), (PreferenceData, PairPreference, SinglePreference)
_WITHOUT = {
    PRETRAIN: (FinetuneModel, FinetuneData, *_PREFERS),
    FINETUNE: (*_PRETRAINS, *_PREFERS),
    DPO: (*_PRETRAINS, FinetuneData, SinglePreference),
    KTO: (*_PRETRAINS, FinetuneData, PairPreference),
}


@cache
def options(script: str | None = None) -> dict[str, Option]:
    """Return the options of a script, or of all, by name."""
    without = _WITHOUT[script] if script else ()
    return {option.name: option for option in options_of(*(each for each in SECTIONS if each not in without))}


def read(words: Iterable[str], names: Iterable[str] = FLAGS) -> tuple[dict[str, object], list[str]]:
    """({flag: value} of those named that stand among the words, the other words). The last of two counts.

    Raises ValueError for a value that a flag may not have.
    """
    try:
        found, others = _parser(tuple(names)).parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ValueError(str(error).removeprefix("argument ")) from error
    return {name: tuple(value) if isinstance(value, list) else value for name, value in vars(found).items()}, others


@cache
def _parser(names: tuple[str, ...]) -> argparse.ArgumentParser:
    """Return the parser of some flags of a Job."""
    # argparse asks for a formatter at each argument, and that one for the terminal's width
    form = partial(argparse.HelpFormatter, width=80)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False, formatter_class=form)
    for name in names:
        kind = options()[name].kind
        several = kind.read is str.split
        reader = (
            _boolean if kind is FLAG else (lambda text, kind=kind: kind.argument(text)[0]) if several else kind.argument
        )
        count = {"nargs": "+"} if several else {"nargs": "?", "const": True} if kind is FLAG else {}
        parser.add_argument(f"--{name}", type=reader, default=argparse.SUPPRESS, **count)
    return parser


def _boolean(text: str) -> bool:
    """Return a boolean as PaddleNLP's parser reads it."""
    for value, words in (True, ("yes", "true", "t", "y", "1")), (False, ("no", "false", "f", "n", "0")):
        if text.lower() in words:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} must be true or false")


def pairs(words: Iterable[str]) -> dict[str, str]:
    """{name: value} of words of any flags; a flag without a value is true, several values have blanks between them.

    Raises ValueError for a word that follows no flag.
    """
    found: dict[str, list[str]] = {}
    name = None
    for each in words:
        if each.startswith("--"):
            name, equals, value = each[2:].partition("=")
            found[name] = [value] if equals else []
        elif name is None:
            raise ValueError(f"{each!r} follows no flag; flags are written as --NAME VALUE")
        else:
            found[name].append(each)
    return {name: " ".join(values) or "true" for name, values in found.items()}


def printed(flags: Mapping[str, object]) -> list[str]:
    """Return the words of {flag: value}; None leaves one out, several values are words of their own."""
    words: list[str] = []
    for name, value in flags.items():
        if value is not None:
            values = value if isinstance(value, tuple | list) else [value]
            words += [f"--{name}", *(str(each).lower() if isinstance(each, bool) else str(each) for each in values)]
    return words


def job_of(words: Iterable[str], **known: Any) -> Job:
    """Return the Job of a script's command line. known: what no flag says."""
    return Job.of(read(words)[0], **known)


def example(text: str) -> Job:
    """The Job of a rule's example: flags, before them, where wanted, a script, a host, and `xN`, the processes."""
    words = text.split()
    known: dict[str, object] = {}
    while words and not words[0].startswith("--"):
        said = words.pop(0)
        name = "host" if said in HOSTS else "world" if said[0] == "x" else "script"
        known[name] = int(said[1:]) if name == "world" else said
    flags = read(words)[0]
    model = configs.read(str(flags.setdefault("model_name_or_path", "tiny-llama-demo")))
    return Job.of(flags, model=spec_of(model), **known)
