"""What an option is, which values it may have, and the dataclass fields and model configuration made from it."""

# ruff: noqa: UP006, UP035, UP045 (PaddleNLP's argument parser reads typing.Optional and typing.List only)

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, make_dataclass, replace
from typing import List, Optional


@dataclass(frozen=True)
class Kind:
    """A kind of values.

    type: of the values, for a dataclass field. words: complete "it must be …". accepts: says whether a value is one.
    read: makes one of a launcher's text, or raises ValueError. values: all of them, where they are few words.
    """

    type: object
    words: str
    accepts: Callable[[object], bool] = lambda value: True
    read: Callable[[str], object] = str
    values: tuple[str, ...] = ()

    def parse(self, text: str) -> object:
        """The value that a text stands for. Raises ValueError: what the text must be, in one line."""
        try:
            value = self.read(text)
            accepted = self.accepts(value)
        except ValueError:
            accepted = False
        if not accepted:
            raise ValueError(f"{text!r} must be {self.words}")
        return value

    def argument(self, text: str) -> object:
        """`parse` as argparse wants a type, whose error it shows."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def _read_whole(text):
    if not re.fullmatch("-?[0-9]+", text):
        raise ValueError(text)
    return int(text)


def whole(least, most=None):
    """Whole numbers from `least` on, to `most` where that is given."""
    words = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    return Kind(int, words, lambda n: type(n) is int and least <= n and (most is None or n <= most), _read_whole)


def number(words, accepts=lambda x: True):
    """Finite numbers for which accepts(x) is true."""
    return Kind(float, words, lambda x: math.isfinite(x) and accepts(x), float)


SEED = whole(0, 2**32 - 1)  # NumPy takes no other
NUMBER = number("a number")
POSITIVE = number("a number above 0", lambda x: x > 0)
NOT_NEGATIVE = number("a number of at least 0", lambda x: x >= 0)
FRACTION = number("a number from 0 to 1", lambda x: 0 <= x <= 1)
BELOW_ONE = number("a number of at least 0 and below 1", lambda x: 0 <= x < 1)


def choice(*values, others=""):
    """One of some words. others: why some that a user may know are not among them."""
    words = f"one of {', '.join(values)}" + (f" ({others})" if others else "")
    return Kind(str, words, lambda value: value in values, values=values)


def some_of(*values):
    """One or more of some words, with blanks between them."""
    words = f"one or more of {', '.join(values)}"
    return Kind(List[str], words, lambda given: 0 < len(given) and {*given} <= {*values}, str.split, values)


TEXT = Kind(str, "a text")
TEXTS = Kind(List[str], "texts")
FLAG = Kind(bool, "true or false")  # of a script, where PaddleNLP's parser reads it


@dataclass(frozen=True)
class Option:
    """All that is said about one option: a flag of a script, or an argument or variable of the launcher.

    name: of the flag without its dashes, of the launcher's argument, or of the variable (in capitals).
    default: None where nothing is chosen; REQUIRED where something must be.
    help: for --help. doc: for the tables in llm/llama/README_TE.md, in Markdown; if left out, help. zh: the same in
        Chinese, for README_TE_zh.md; if left out, doc. shown, shown_zh: what the tables say is the default, where the
        value does not say it.
    flag: of the launcher's: the script's flag that it becomes.
    config: whether it decides on the model's layers and goes into the model's configuration (config.json).
    needs: {name of another flag: value} without which this one means nothing and may only have its default.
    """

    name: str
    kind: Kind
    default: object = None
    help: str = ""
    doc: str = ""
    zh: str = ""
    shown: str = ""
    shown_zh: str = ""
    flag: str = ""
    config: bool = False
    needs: dict = field(default_factory=dict)

    def but(self, **changes: object) -> Option:
        """The same option as another program has it."""
        return replace(self, **changes)

    def default_text(self) -> str | None:
        """The default as a user would write it."""
        return None if self.default is None else str(self.default)

    def annotation(self):
        """The type of its dataclass field."""
        return Optional[self.kind.type] if self.default is None else self.kind.type

    def field(self):
        """Its dataclass field, as PaddleNLP's argument parser reads it, to which metadata are arguments of argparse."""
        alone = {"nargs": "?", "const": True} if self.kind is FLAG and self.default is None else {}
        return field(default=self.default, metadata={"help": self.help, **alone})


REQUIRED = MISSING


def with_options(*options):
    """Class decorator, below @dataclass: a field for each option. `check_values` then checks an instance of it."""

    def add(cls):
        cls.OPTIONS = {**getattr(cls, "OPTIONS", {}), **{option.name: option for option in options}}
        for option in options:
            cls.__annotations__[option.name] = option.annotation()
            setattr(cls, option.name, option.field())
        return cls

    return add


def check_values(arguments, bounds=None, options=None):
    """Raises ValueError, in one line that names the flag, for a value that one of a script's options may not have.

    arguments: an instance of a dataclass `with_options`, or what a parser read for one. bounds: {name: Kind} for flags
    that are not ours. options: {name: Option}, by default those of the dataclass.
    """
    options = arguments.OPTIONS if options is None else options
    kinds = {**(bounds or {}), **{name: option.kind for name, option in options.items()}}
    for name, kind in kinds.items():
        value = getattr(arguments, name, None)
        if value is not None and not kind.accepts(value):
            raise ValueError(f"--{name} {value}: it must be {kind.words}")
    for name, option in options.items():
        value = getattr(arguments, name)
        for other, wanted in option.needs.items():
            if value != option.default and getattr(arguments, other) != wanted:
                raise ValueError(f"--{name} {_word(value)} needs --{other} {_word(wanted)}; alone it means nothing")


def configure(config, *arguments):
    """Puts what decides on the model's layers (`Option.config`) into its configuration.

    arguments: instances of dataclasses `with_options`.
    """
    for record in arguments:
        for name in (option.name for option in record.OPTIONS.values() if option.config):
            setattr(config, name, getattr(record, name))


def _word(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def config_options(name, options):
    """A record of what a model's configuration says about options; read it with `of(config)`.

    A configuration that says nothing about one, such as Hugging Face's, means its default.
    """

    def of(cls, config):
        return cls(**{name: getattr(config, name, default) for name, default in defaults.items()})

    defaults = {option.name: option.default for option in options}
    fields = [(option.name, option.annotation(), field(default=option.default)) for option in options]
    return make_dataclass(name, fields, frozen=True, namespace={"of": classmethod(of)})
