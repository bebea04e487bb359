"""Where a run is asked for, and how a user of each place writes what the record's fields are called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from paddle_te.job.record import Job
from paddle_te.options.launcher import NAMES
from paddle_te.options.layers import BACKENDS
from paddle_te.options.option import word


@dataclass(frozen=True)
class Name:
    """What a door calls a flag. values: {the flag's value: the door's word}."""

    name: str
    values: Mapping[object, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Door:
    """mark: what stands before a flag's name, between: before its value.

    names: {flag: what it is called here}, where that is something else; such a name has no mark, and "=" before its
    value. where: the argument in which the flags of `others` were given, if there is one.
    """

    mark: str = "--"
    between: str = " "
    names: Mapping[str, Name] = field(default_factory=dict)
    where: str = ""
    others: frozenset[str] = frozenset()

    def name(self, flag: str) -> str:
        """Return the flag's name, as the user writes it."""
        return self.names[flag].name if flag in self.names else self.mark + flag

    def rename(self, text: str) -> str:
        """Return a text that names flags as the scripts do, `--flag`, with this door's names."""
        return re.sub(r"--(\w+)", lambda flag: self.name(flag[1]), text)

    def said(self, flag: str, value: object) -> str:
        """Return the flag with a value, as the user writes it."""
        if flag not in self.names:
            return f"{self.mark}{flag}{self.between}{word(value)}"
        called = self.names[flag]
        return f"{called.name}={called.values.get(value) or word(value)}"

    def with_others(self, flags: Iterable[str]) -> Door:
        """Return the door of a user who has given these under their own names, in `where`."""
        others = frozenset(flags)
        names = {flag: name for flag, name in self.names.items() if flag not in others}
        return replace(self, names=names, others=others)

    def explain(self, template: str, job: Job, **found: object) -> str:
        """Return a text about a job in this door's words.

        `{flag}` stands for a flag with its value, `{flag:name}` for its name, `{flag:value}` for its value, and
        `{flag:WORD}` for the flag with another value; `{property}` for what the Job has under this name.
        """
        told = _Told(self, job, found)
        text = template.format_map(told)
        return f"{self.where}: {text}" if told.named & self.others else text


SCRIPT = Door()
_HALF: dict[object, str] = {True: "bf16", False: "fp32"}
LAUNCHER = Door(
    names={flag: Name(name) for flag, name in NAMES.items()}
    | {
        "transformer_engine_backend": Name("backend", {flag: name for name, flag in BACKENDS.items()}),
        "use_fp8": Name("precision", {True: "fp8", False: "bf16"}),
        "bf16": Name("precision", _HALF),
        "recompute": Name("recompute", {False: "none", True: "full"}),
        "recompute_granularity": Name("recompute"),
        "resume_from_checkpoint": Name("resume_step"),
        "lora": Name("method", {True: "lora", False: "full"}),
    },
    where="EXTRA_ARGS",
)


class _Told(dict[str, object]):
    """What a template of `Door.explain` may name. named: the flags that it has named."""

    def __init__(self, door: Door, job: Job, found: Mapping[str, object]):
        super().__init__(found)
        self.door, self.job, self.named = door, job, set[str]()

    def __missing__(self, name: str) -> object:
        value = getattr(self.job, name)
        if name not in self.job.__dataclass_fields__:
            return value
        self.named.add(name)
        return _Flag(self.door, name, value)


@dataclass(frozen=True)
class _Flag:
    door: Door
    name: str
    value: object

    def __format__(self, spec: str) -> str:
        if spec == "name":
            return self.door.name(self.name)
        if spec == "value":
            called = self.door.names.get(self.name)
            return called and called.values.get(self.value) or word(self.value)
        return self.door.said(self.name, {"": self.value, "true": True, "false": False}.get(spec, spec))
