"""Read the content of JSON files as dataclasses.

Each name must be known and said once, each value have its field's type and keep within its bounds.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import types
import typing
from collections import Counter
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from paddle_te.files import NotRegular, open_file

WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "an object, {…}",
    list: "a list, […]",
    types.NoneType: "null",
}


DIGITS = 40  # that a whole number may have


class NotAsDeclared(ValueError):
    """Report a value that its dataclass does not allow.

    name: the value's, from the file's top down. shown: the value, shortened; None where the name itself is at fault.
    wanted: what the value must be, or what is wrong with the name.
    """

    def __init__(self, name: str, shown: str | None, wanted: str) -> None:
        self.name, self.shown, self.wanted = name, shown, wanted
        super().__init__(f"{name or 'it'} is {wanted if shown is None else f'{shown}: it must be {wanted}'}")


class NotJson(ValueError):
    """A file that cannot be read as JSON; the message says why, and does not name the file."""


@dataclass(frozen=True)
class Bounds:
    """What a value may be beyond its type: least to most, above and below, or one of a few (`among`)."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    among: tuple[object, ...] = ()

    def allow(self, value: Any) -> bool:
        """Return whether a value of the right type keeps to them."""
        if self.among:
            return any(type(value) is type(each) and value == each for each in self.among)
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    @property
    def words(self) -> str:
        """Say them as they continue "a number": "from 1 to 8", "of at least 0", "above 0 and below 1"."""
        if None not in (self.least, self.most):
            return f"from {self.least:,} to {self.most:,}"
        limits = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        given = [(f"{word} {value:,}") for word, value in limits.items() if value is not None]
        return "of " * given[0].startswith("at ") + " and ".join(given)


def bounded(bounds: Bounds, default: object = MISSING) -> Any:
    """Return a dataclass's field for values within Bounds."""
    return field(default=default, metadata={"bounds": bounds})


def at_least(least: float, default: object = MISSING) -> Any:
    """Return a dataclass's field for numbers of at least `least`."""
    return bounded(Bounds(least), default)


def load(path: Path, most: int | None = None) -> object:
    """Return the content of a JSON file in UTF-8, in which no object names a key twice and all numbers are finite.

    most: bytes that the file may have. Raises NotJson, and OSError for a file that cannot be opened.
    """
    try:
        with open_file(path) as file:
            if most is not None and os.fstat(file.fileno()).st_size > most:
                raise NotJson(f"has more than {most:,} bytes, the most that it may have")
            return parse(file.read())
    except NotRegular:
        kind = "a folder" if path.is_dir() else "no ordinary file"
        raise NotJson(f"is {kind}, where a JSON file is expected") from None


def parse(data: bytes) -> object:
    """Return the content of a JSON file's bytes, as `load` does."""
    if not data.strip():
        raise NotJson("is empty")
    try:
        text = data.decode("utf-8")
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite, parse_int=_whole
        )
    except NotJson:
        raise
    except UnicodeDecodeError as error:
        raise NotJson(f"is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from error
    except RecursionError as error:
        raise NotJson("is nested too deeply") from error
    except ValueError as error:
        start = "it begins with a byte order mark" if data.startswith(b"\xef\xbb\xbf") else error
        raise NotJson(f"is not JSON: {start}") from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise NotJson(f"names {short(twice)} twice: leave one of them out")
    return found


def _constant(name: str) -> float:
    raise NotJson(f"holds {name}, which is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise NotJson(f"holds {short(text)}, a number that is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > DIGITS:
        raise NotJson(f"holds {short(text)}, a number that is too large")
    return int(text)


def read(kind: Any, value: Any, name: str = "") -> Any:
    """Return `value`, as json.loads returned it, as an object of the type `kind`.

    kind: a dataclass, int, float, str, bool, list, dict, None, Any, dict[str, …], list[…], or several of them with |.
    name: what to call the value in messages. Raises NotAsDeclared.
    """
    if is_dataclass(kind):
        return _read_record(kind, value, name)
    if kind is Any:
        return value
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
        raise NotAsDeclared(name, short(value), wanted(kind))
    return value


def _read_record(kind: Any, value: Any, name: str) -> Any:
    value, known = read(dict, value, name), {entry.name: entry for entry in fields(kind)}
    for key in value:
        if key not in known:
            raise NotAsDeclared(_join(name, key), None, "not known")
    hints, found = typing.get_type_hints(kind), {}
    for key, entry in known.items():
        if key in value:
            found[key] = _read_field(hints[key], value[key], _join(name, key), entry.metadata.get("bounds"))
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise NotAsDeclared(_join(name, key), None, "missing")
    return kind(**found)


def _read_field(kind: Any, value: Any, name: str, bounds: Bounds | None) -> Any:
    if bounds is None:
        return read(kind, value, name)
    try:
        found = read(kind, value, name)
    except NotAsDeclared as error:
        # an error inside of the value names what it is about itself
        raise error if error.name != name else NotAsDeclared(name, error.shown, wanted(kind, bounds)) from None
    each = found if isinstance(found, list) else [found]
    if not all(one is None or bounds.allow(one) for one in each):
        raise NotAsDeclared(name, short(value), wanted(kind, bounds))
    return found


def wanted(kind: Any, bounds: Bounds | None = None) -> str:
    """Say what a field takes, as it continues "it must be": "a whole number from 1 to 8 or null"."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    return " or ".join(_words(each, bounds) for each in kinds)


def _words(kind: Any, bounds: Bounds | None) -> str:
    if typing.get_origin(kind) is list:
        return f"a list, each entry {_words(typing.get_args(kind)[0], bounds)}"
    words = WORDS.get(typing.get_origin(kind) or kind, WORDS[dict])
    if bounds is None or kind is types.NoneType:
        return words
    return " or ".join(map(_in_json, bounds.among)) if bounds.among else f"{words} {bounds.words}"


def _in_json(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _read_one_of(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    for kind in kinds:
        try:
            return read(kind, value, name)
        except NotAsDeclared as error:
            inside = error
            if inside.name != name:  # it is of this kind, and something in it is wrong
                raise
    words = " or ".join(map(wanted, kinds))
    raise NotAsDeclared(name, short(value), words)


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 40
_REPR.maxlevel = 3


def short(value: object) -> str:
    """Return a value as messages show it, whatever it holds: in at most 40 characters."""
    text = _REPR.repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
