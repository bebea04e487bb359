"""Damages to files and folders: what disks, copies and hands do to them.

A `Damage` is what hypothesis draws: its name and two numbers that say where, and with what. `apply` does it to one
file of a folder.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

PAGE = 512  # of what is small; a disk's pages are 4096 bytes
ODD = (None, True, False, -1, 0, 1, 1.5, "text", "", [], {}, [1], {"x": 1}, 2**31, 2**70, float("nan"), float("inf"))
ODD += (-(10**6), "\ud800", "../x", [[]] * 3, {"": None}, 1e308)
ODD_INTEGERS = (0, 1, -1, 2, 10, 10**6, -(10**6), 2**31 - 1, 2**62, 2**63 - 1, -(2**63))


@dataclass(frozen=True)
class Damage:
    """what: a name of ANY, JSON, SAFETENSORS or NUMBERS. where, value: any numbers from 0, taken modulo what fits."""

    what: str
    where: int
    value: int

    def apply(self, path: Path, other: Path) -> None:
        """Damages a file. other: an older file of the same kind, of another step or model."""
        ALL[self.what](path, self, other)

    def choice(self, values: Any) -> Any:
        """One of the values, by `value`."""
        return values[self.value % len(values)]


def damages(*kinds: dict[str, Any]) -> st.SearchStrategy[Damage]:
    """Damages of these tables, beside those of ANY."""
    names = sorted({**ANY, **{name: 0 for kind in kinds for name in kind}})
    numbers = st.integers(0, 2**40)
    return st.builds(Damage, st.sampled_from(names), numbers, numbers)


def kinds_for(name: str) -> list[dict[str, Any]]:
    """The tables of damages that fit a file, by its name."""
    tables = []
    if name.endswith((".json", ".jsonl")):
        tables.append(JSON)
    if name.endswith(".safetensors"):
        tables.append(SAFETENSORS)
    if name.endswith((".idx", ".npy")):
        tables.append(NUMBERS)
    return tables


def _replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def _bytes(change: Callable[[bytearray, int, Damage], bytes | None]) -> Callable[..., None]:
    """A damage to a file's content. change: takes it, and a place in it; changes it, or returns another."""

    def apply(path: Path, damage: Damage, other: Path) -> None:
        content = bytearray(path.read_bytes())
        changed = change(content, damage.where % max(len(content), 1), damage)
        _replace(path, bytes(content if changed is None else changed))

    return apply


def _flip(content, place, damage):
    if content:
        content[place] ^= 1 << damage.value % 8


def _truncate(content, place, damage):
    return content[:place]


def _extend(content, place, damage):
    return content + damage.choice((b"\0", b"\n", b"}", b"\0" * PAGE, bytes(content[:PAGE]), bytes(content)))


def _zero(content, place, damage):
    start = place // PAGE * PAGE
    content[start : start + PAGE] = bytes(len(content[start : start + PAGE]))


def _repeat(content, place, damage):
    start = place // PAGE * PAGE
    return content[: start + PAGE] + content[start:]


def _as_text(encode: Callable[[str], bytes]) -> Callable[..., None]:
    return _bytes(lambda content, place, damage: encode(content.decode("utf-8", "surrogateescape")))


def _to_utf16(text: str) -> bytes:
    return text.encode("utf-16", "surrogatepass")


def _in_place_of(make: Callable[[Path, Path], Any]) -> Callable[..., None]:
    """A damage that puts something else where the file was. make: takes its path, and the older file."""

    def apply(path: Path, damage: Damage, other: Path) -> None:
        path.unlink()
        make(path, other)

    return apply


def _sibling(path: Path, damage: Damage, other: Path) -> None:
    """Another file of the folder, under this one's name."""
    files = sorted(each for each in path.parent.iterdir() if each.is_file() and each != path)
    _replace(path, damage.choice(files).read_bytes() if files else b"")


# What may happen to any file. A file that cannot be read, though it is there, is /proc/self/mem: EIO, whoever asks.
ANY: dict[str, Callable[..., None]] = {
    "flip a bit": _bytes(_flip),
    "truncate": _bytes(_truncate),
    "extend": _bytes(_extend),
    "zero a page": _bytes(_zero),
    "repeat a page": _bytes(_repeat),
    "empty": _bytes(lambda content, place, damage: b""),
    "gzip": _bytes(lambda content, place, damage: gzip.compress(bytes(content), mtime=0)),
    "CRLF": _bytes(lambda content, place, damage: bytes(content).replace(b"\n", b"\r\n")),
    "BOM": _bytes(lambda content, place, damage: b"\xef\xbb\xbf" + content),
    "UTF-16": _as_text(lambda text: text.encode("utf-16", "surrogatepass")),
    "delete": _in_place_of(lambda path, other: None),
    "a folder": _in_place_of(lambda path, other: path.mkdir()),
    "a link to itself": _in_place_of(lambda path, other: path.symlink_to(path)),
    "a link to nothing": _in_place_of(lambda path, other: path.symlink_to(path.parent / "nothing")),
    "a FIFO": _in_place_of(lambda path, other: os.mkfifo(path)),
    "a device": _in_place_of(lambda path, other: path.symlink_to("/dev/null")),
    "an endless device": _in_place_of(lambda path, other: path.symlink_to("/dev/zero")),
    "an unreadable file": _in_place_of(lambda path, other: path.symlink_to("/proc/self/mem")),
    "another file of the folder": _sibling,
    "the same file of another checkpoint": _in_place_of(
        lambda path, other: shutil.copy(other, path) if other.is_file() else path.write_bytes(b"{}")
    ),
}


# ------------------------------------------------------------------------------------------------------- JSON


def places(content: Any, path: tuple = ()) -> Any:
    """The paths of all values in nested objects and lists, the outermost first."""
    yield path
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


class _Repeated(dict):
    """An object whose key stands twice in its text, with another value the second time."""

    def __init__(self, content: dict, key: str, value: Any):
        super().__init__(content)
        self._more = (key, value)

    def items(self):
        return [*super().items(), self._more]


def _texts(text: str) -> list[str]:
    """A file's JSON, or its lines of JSON."""
    try:
        json.loads(text)
    except ValueError:
        return text.splitlines()
    return [text]


def _json(change: Callable[[Any, Any, Damage], Any]) -> Callable[..., None]:
    """A damage to a value of a JSON file, or of one of a file's lines of JSON. change: takes the object or list that
    holds it, and its key, and returns what then stands where the first was."""

    def apply(path: Path, damage: Damage, other: Path) -> None:
        lines = _texts(path.read_text())
        number = damage.value % len(lines)
        content = json.loads(lines[number])
        inside = [each for each in places(content) if each]
        if not inside:
            return
        *outer, key = inside[damage.where % len(inside)]
        whole = {"": content}
        holder, name = whole, ""
        for each in outer:
            holder, name = holder[name], each
        holder[name] = change(holder[name], key, damage)
        lines[number] = json.dumps(whole[""])
        _replace(path, "\n".join(lines).encode())

    return apply


def _changed(make: Callable[[Any, Damage], Any]) -> Callable[..., Any]:
    def change(holder, key, damage):
        holder[key] = make(holder[key], damage)
        return holder

    return change


def _without(holder, key, damage):
    del holder[key]
    return holder


def _renamed(holder, key, damage):
    if isinstance(holder, list):
        return holder[::-1]
    return {f"{name}_" if name == key else name: value for name, value in holder.items()}


def _scaled(value, damage):
    if isinstance(value, bool) or not isinstance(value, int | float):
        return damage.choice(ODD)
    return damage.choice((-value, value * 10, value + 1, value - 1, value * 10**9, -value - 1, value / 3, str(value)))


def _nested(value, damage):
    for _ in range(damage.choice((1, 50, 900))):
        value = [value]
    return value


JSON: dict[str, Callable[..., None]] = {
    "another value": _json(_changed(lambda value, damage: damage.choice(ODD))),
    "another number": _json(_changed(_scaled)),
    "a missing key": _json(_without),
    "another key": _json(_renamed),
    "an unknown key": _json(
        lambda holder, key, damage: holder | {"unknown": 1} if isinstance(holder, dict) else [*holder, holder]
    ),
    "a key twice": _json(
        lambda holder, key, damage: (
            _Repeated(holder, key, damage.choice(ODD)) if isinstance(holder, dict) else holder * 2
        )
    ),
    "a nested value": _json(_changed(_nested)),
}


# ----------------------------------------------------------------------------------------- safetensors and numbers


def _header(change: Callable[[dict, list[str], Damage], None]) -> Callable[..., None]:
    """A damage to a safetensors file's header. change: takes it, the names of two tensors, and the Damage."""

    def apply(path: Path, damage: Damage, other: Path) -> None:
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        names = sorted(header.keys() - {"__metadata__"})
        two = [names[damage.where % len(names)], names[damage.value % len(names)]]
        change(header, two, damage)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        _replace(path, struct.pack("<Q", len(text)) + text + content[8 + size :])

    return apply


def _swap(key: str) -> Callable[..., None]:
    def change(header, names, damage):
        one, two = names
        header[one][key], header[two][key] = header[two][key], header[one][key]

    return _header(change)


def _odd_entry(header, names, damage):
    entry = header[names[0]]
    entry[("dtype", "shape", "data_offsets")[damage.where % 3]] = damage.choice(
        ("F32", "F64", "BOOL", [], [1], [-1, 2], [2**40], [0, 8], [8, 0], [2**63, 2**64], None, "x")
    )


def _renamed_tensor(header, names, damage):
    header[f"{names[0]}_"] = header.pop(names[0])


SAFETENSORS: dict[str, Callable[..., None]] = {
    "two tensors' offsets swapped": _swap("data_offsets"),
    "two tensors' shapes swapped": _swap("shape"),
    "another entry of a tensor": _header(_odd_entry),
    "another name of a tensor": _header(_renamed_tensor),
}


def _number(size: int) -> Callable[..., None]:
    """Another whole number of so many bytes, signed, at a place that numbers may have."""

    def change(content, place, damage):
        if len(content) >= size:
            place = place // 2 * 2 % (len(content) - size + 1)
            number = damage.choice(ODD_INTEGERS) % 2 ** (8 * size)
            content[place : place + size] = number.to_bytes(size, "little")

    return _bytes(change)


def _swapped(content, place, damage):
    """Two neighbouring numbers of 8 bytes in each other's place."""
    place = place // 8 * 8
    content[place : place + 16] = content[place + 8 : place + 16] + content[place : place + 8]


NUMBERS: dict[str, Callable[..., None]] = {
    "another number of 4 bytes": _number(4),
    "another number of 8 bytes": _number(8),
    "two numbers swapped": _bytes(_swapped),
}
ALL = {**ANY, **JSON, **SAFETENSORS, **NUMBERS}
