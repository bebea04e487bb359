"""Reads what JSON files hold as dataclasses: each name known, each value of its field's type and within its bounds."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import MISSING, field, fields, is_dataclass

WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "an object, {…}",
    list: "a list, […]",
    types.NoneType: "null",
}


class NotAsDeclared(ValueError):
    """A value that its dataclass does not allow; the message names it, from the file's top down, and says what it must
    be."""


def at_least(least: float, default: object = MISSING) -> typing.Any:
    """A dataclass's field for numbers of at least `least`."""
    return field(default=default, metadata={"least": least})


def read(kind: typing.Any, value: object, name: str = "") -> typing.Any:
    """`value`, as json.loads returned it, as an object of the type `kind`.

    kind: a dataclass, int, float, str, bool, list, dict, None, dict[str, …], list[…], or several of them with |.
    name: what to call the value in messages. Raises NotAsDeclared.
    """
    if is_dataclass(kind):
        return _read_record(kind, value, name)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _read_one_of(arguments, value, name)
    if origin is dict:
        return {key: read(arguments[1], inner, _join(name, key)) for key, inner in read(dict, value, name).items()}
    if origin is list:
        return [read(arguments[0], inner, f"{name}[{i}]") for i, inner in enumerate(read(list, value, name))]
    if kind is float and type(value) is int:
        return value
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise NotAsDeclared(f"{name or 'it'} is {_short(value)}: it must be {WORDS[kind]}")
    return value


def _read_record(kind, value, name):
    value, known = read(dict, value, name), {entry.name: entry for entry in fields(kind)}
    for key in value:
        if key not in known:
            raise NotAsDeclared(f"{_join(name, key)} is not known")
    hints, found = typing.get_type_hints(kind), {}
    for key, entry in known.items():
        if key in value:
            found[key] = read(hints[key], value[key], _join(name, key))
            _check_least(entry, found[key], _join(name, key))
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise NotAsDeclared(f"{_join(name, key)} is missing")
    return kind(**found)


def _check_least(entry, value, name):
    least = entry.metadata.get("least")
    if least is not None and value is not None and value < least:
        raise NotAsDeclared(f"{name} is {_short(value)}: it must be at least {least}")


def _read_one_of(kinds, value, name):
    for kind in kinds:
        try:
            return read(kind, value, name)
        except NotAsDeclared:
            continue
    words = " or ".join(WORDS.get(typing.get_origin(kind) or kind, "an object, {…}") for kind in kinds)
    raise NotAsDeclared(f"{name or 'it'} is {_short(value)}: it must be {words}")


def _join(name, key):
    return f"{name}.{key}" if name else str(key)


def _short(value):
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
