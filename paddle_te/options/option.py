"""What an option is, which values it may have, and the dataclass fields and model configuration made from it."""

# ruff: noqa: UP006, UP035, UP045 (PaddleNLP's argument parser reads typing.Optional and typing.List only)

from __future__ import annotations

import argparse
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, replace
from functools import partial
from typing import Any, List, Optional, TypeVar, dataclass_transform

from paddle_te.records import record


def shown(value: object) -> str:
    """Return a value as an error message has it: in one line that a terminal and a log can hold."""
    text = str(value) if str(value).isprintable() else ascii(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


Limits = tuple[tuple[Callable[[Any], bool], str], ...]


@dataclass(frozen=True)
class Kind:
    """A kind of values.

    type: of the values, for a dataclass field. words: complete "it must be …". accepts: says whether a value is one.
    read: makes one of a launcher's text, or raises ValueError. values: all of them, where they are few words. limits:
    what only a slip is beyond, [(accepts, words)]; tables do not tell them. unit: of a number.
    """

    type: object
    words: str
    accepts: Callable[[Any], bool] = lambda value: True
    read: Callable[[str], Any] = str
    values: tuple[str, ...] = ()
    limits: Limits = ()
    unit: str = ""

    def fault(self, value: Any) -> str | None:
        """Return what a value must be and is not; None for one of these."""
        rules = ((self.accepts, self.words), *self.limits)
        return next((words for accepts, words in rules if not accepts(value)), None)

    def parse(self, text: str) -> Any:
        """Return the value that a text stands for. Raise ValueError: what the text must be, in one line."""
        try:
            value = self.read(text)
            fault = self.fault(value)
        except ValueError:
            fault = self.words
        if fault:
            raise ValueError(f"{text!r} must be {fault}")
        return value

    def argument(self, text: str) -> Any:
        """Do what `parse` does, as argparse wants a type, whose error it shows."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def _read_whole(text: str) -> int:
    if not re.fullmatch("-?[0-9]+", text):
        raise ValueError(text)
    return int(text)


def whole(least: int, most: int | None = None, limit: int | None = None, unit: str = "") -> Kind:
    """Return the kind of whole numbers from `least` on, to `most` where that is given.

    limit: more than anybody means, so that a slip is told before it takes all memory.
    """
    words = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    limits = () if limit is None else ((lambda n: n <= limit, f"a whole number of at most {limit:,}"),)
    accepts = lambda n: type(n) is int and least <= n and (most is None or n <= most)  # noqa: E731
    return Kind(int, words, accepts, _read_whole, limits=limits, unit=unit)


def number(words: str, accepts: Callable[[float], bool] = lambda x: True) -> Kind:
    """Return the kind of finite numbers for which accepts(x) is true, and which float32 holds."""
    return Kind(float, words, lambda x: math.isfinite(x) and accepts(x), float, limits=_FLOAT32)


_FLOAT32 = ((lambda x: x == 0 or 1.2e-38 < abs(x) < 3.4e38, "a number that float32 holds"),)
SEED = whole(0, 2**32 - 1)  # NumPy takes no other
STEP_TOKENS = whole(1, limit=2**40, unit="tokens")  # of all ranks, in a step
SEQUENCES = whole(1, limit=2**16, unit="sequences")  # of a micro-batch
MICRO_BATCHES = replace(SEQUENCES, unit="micro-batches")  # of a step
TOKENS = whole(1, limit=2**24, unit="tokens")  # of a sequence
STEPS = whole(1, limit=10**9, unit="steps")
STEPS_OR_NONE = whole(0, limit=10**9, unit="steps")
RANKS = whole(1, limit=2**16, unit="ranks")  # that share something, or nodes
WORKERS = whole(1, limit=1024, unit="processes")
SAMPLES = whole(1, limit=2**31 - 1, unit="samples")
NUMBER = number("a number")
POSITIVE = number("a number above 0", lambda x: x > 0)
NOT_NEGATIVE = number("a number of at least 0", lambda x: x >= 0)
SECONDS = replace(NOT_NEGATIVE, limits=((lambda x: x <= 10**8, "at most 100,000,000 seconds"),), unit="seconds")
FRACTION = number("a number from 0 to 1", lambda x: 0 <= x <= 1)
BELOW_ONE = number("a number of at least 0 and below 1", lambda x: 0 <= x < 1)


def choice(*values: str, others: str = "") -> Kind:
    """Return the kind of one of some words. others: why some that a user may know are not among them."""
    words = f"one of {', '.join(values)}" + (f" ({others})" if others else "")
    return Kind(str, words, lambda value: value in values, values=values)


def some_of(*values: str) -> Kind:
    """Return the kind of one or more of some words, with blanks between them."""
    words = f"one or more of {', '.join(values)}"
    return Kind(List[str], words, lambda given: 0 < len(given) and {*given} <= {*values}, str.split, values)


def _is_utf8(text: str) -> bool:
    """Return whether files and terminals can hold it: other bytes of a command line become lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _has_short_names(path: str) -> bool:
    return len(path.encode()) < 4096 and all(len(name.encode()) < 256 for name in path.split("/"))


def _all_are(fits: Callable[[str], bool], texts: Iterable[str]) -> bool:
    return all(map(fits, texts))


_TEXT: Limits = ((_is_utf8, "in UTF-8"), (lambda text: "\0" not in text, "without the character NUL"))
_PATH: Limits = (
    *_TEXT,
    (lambda path: not any(unicodedata.category(each) == "Cc" for each in path), "without control characters"),
    (_has_short_names, "shorter: names have at most 255 bytes, paths 4095"),
)
TEXT = Kind(str, "a text", limits=_TEXT)
TEXTS = Kind(List[str], "texts", limits=tuple((partial(_all_are, fits), words) for fits, words in _TEXT))
PATH = Kind(str, "a text", limits=((lambda path: bool(path.strip()), "a path, and is empty"), *_PATH))
PATH_OR_EMPTY = Kind(str, "a text", limits=_PATH)
FLAG = Kind(bool, "true or false")  # of a script, where PaddleNLP's parser reads it


# "; [which one](…)", " ([how](…))" and the like at the end of what a doc says, or of a part of it
_LEADS_ON = re.compile(r"(?:[,;.]| \() ?\[[^]]*\]\([^)]*\)\)?(?=$|[.;,])")


@dataclass(frozen=True)
class Option:
    """All that is said about one option: a flag of a script, or an argument or variable of the launcher.

    name: of the flag without its dashes, of the launcher's argument, or of the variable (in capitals).
    default: None where nothing is chosen; REQUIRED where something must be.
    help: for --help; if left out, doc without Markdown. doc: for docs/reference/options.md, in Markdown; if left out,
        help. zh: the same in Chinese, for docs/zh/reference/options.md; if left out, doc. shown, shown_zh: what the
        tables say is the default, where the value does not say it.
    flag: of the launcher's: the script's flag that it is another name for. passed: the flag gets the value as it is.
    config: whether it decides on the model's layers and goes into the model's configuration (config.json).
    needs: {name of another flag: value} without which this one means nothing and may only have its default.
    planned: whether memory and time of a step depend on it: GIVEN where all layouts of a training have the user's
        value, SEARCHED where each has its own.
    line: what says it in a recipe of PaddleFormers: another name; SAME: a line of this name; HOSTED: such a line that
        hosts/paddleformers reads; SILENT: no line has to; "": PaddleFormers has nothing like it.
    source: whose flag it is: PADDLENLP's, which PaddleNLP's own dataclasses have, or ours.
    """

    name: str
    kind: Kind
    default: Any = None
    help: str = ""
    doc: str = ""
    zh: str = ""
    shown: str = ""
    shown_zh: str = ""
    flag: str = ""
    passed: bool = False
    config: bool = False
    needs: dict[str, object] = field(default_factory=dict)
    planned: str = ""
    line: str = ""
    source: str = ""

    def but(self, **changes: Any) -> Option:
        """Return the same option as another program has it."""
        return replace(self, **changes)

    @property
    def told(self) -> str:
        """What --help says: `help`, or `doc` without Markdown and without links that only lead on."""
        return self.help or re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", _LEADS_ON.sub("", self.doc)).replace("`", "")

    def default_text(self) -> str | None:
        """Return the default as a user would write it."""
        return None if self.default is None else str(self.default)

    def annotation(self) -> object:
        """Return the type of its dataclass field."""
        return Optional[self.kind.type] if self.default is None else self.kind.type

    def field(self) -> Any:
        """Return its dataclass field for PaddleNLP's argument parser, to which metadata are arguments of argparse."""
        return field(default=self.default, metadata={"help": self.told})


REQUIRED = MISSING
GIVEN, SEARCHED = "given", "searched"  # Option.planned
SAME, HOSTED, SILENT = "same", "hosted", "silent"  # Option.line
PADDLENLP = "PaddleNLP"
_Section = TypeVar("_Section")


def option(kind: Kind, *, default: Any = None, help: str = "", **about: Any) -> Any:  # noqa: A002 (Option's word)
    """Return a field of a `section`, from which its Option is made. about: the Option's other fields."""
    return field(default=default, metadata={"option": {"kind": kind, "default": default, "help": help, **about}})


def theirs(kind: Kind, *, default: Any = None, **about: Any) -> Any:
    """Return the `option` that PaddleNLP's dataclasses define, with its default there. kind: what it does not check."""
    return option(kind, default=default, source=PADDLENLP, **about)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, theirs))
def section(cls: type[_Section]) -> type[_Section]:
    """Class decorator: fields for a frozen dataclass to inherit, all of them options, in __options__ by name."""
    options = [Option(n, **each.metadata["option"]) for n, each in vars(cls).items() if isinstance(each, Field)]
    return record(with_options(*options)(cls))


def options_of(*sections: Any) -> tuple[Option, ...]:
    """Return the options of some sections, in their order."""
    return tuple(each for one in sections for each in one.__options__.values())


def with_options(*options: Option) -> Callable[[type[_Section]], type[_Section]]:
    """Return a class decorator, below @dataclass: a field for each option, which `check_values` checks."""

    def add(cls: type[_Section]) -> type[_Section]:
        inherited = [getattr(each, "__options__", {}) for each in (*cls.__bases__, cls)]
        known = {name: option for each in inherited for name, option in each.items()}
        known |= {option.name: option for option in options}
        setattr(cls, "__options__", known)  # noqa: B010 (a name that mypy does not know of the class)
        for option in options:
            cls.__annotations__[option.name] = option.annotation()
            setattr(cls, option.name, option.field())
        return cls

    return add


def check_values(
    arguments: Any, bounds: Mapping[str, Kind] | None = None, options: Mapping[str, Option] | None = None
) -> None:
    """Raise ValueError, in one line that names the flag, for a value that one of a script's options may not have.

    arguments: an instance of a dataclass `with_options`, or what a parser read for one. bounds: {name: Kind} for flags
    that are not ours. options: {name: Option}, by default those of the dataclass.
    """
    options = arguments.__options__ if options is None else options
    kinds = {**(bounds or {}), **{name: option.kind for name, option in options.items()}}
    for name, kind in kinds.items():
        value = getattr(arguments, name, None)
        if value is not None and (fault := kind.fault(value)):
            raise ValueError(f"--{name} {shown(value)}: it must be {fault}")
    for name, option in options.items():
        value = getattr(arguments, name)
        for other, wanted in option.needs.items():
            # A script without the other flag does always what it asks for, as run_dpo.py packs.
            if value != option.default and getattr(arguments, other, wanted) != wanted:
                raise ValueError(f"--{name} {word(value)} needs --{other} {word(wanted)}; alone it means nothing")


def configure(config: object, *arguments: Any) -> None:
    """Put what decides on the model's layers (`Option.config`) into its configuration.

    arguments: instances of dataclasses `with_options`.
    """
    for each in arguments:
        for name in (option.name for option in each.__options__.values() if option.config):
            setattr(config, name, getattr(each, name))


def word(value: object) -> str:
    """Return a value as a command line has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
