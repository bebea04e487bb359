"""The picture in docs/background/architecture.md is the package: its rooms, their order, and what imports no Paddle."""

import ast
import re

import pytest

from tests.unit.test_imports import HOSTS, MAY_IMPORT, PACKAGE, files, rooms

PAGE = PACKAGE.parent / "docs/background/architecture.md"
BELOW = " for all of them:"  # from here on the picture has no order
WITHOUT = " for all of them, without Paddle:"
SWAPPED = {"hosts": "models/", "models": "hosts/"}


def lines():
    """The picture's lines."""
    return re.search(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL)[1].splitlines()


def named(line):
    """The files and folders of the package that a line is about: "fp8/", "device.py"."""
    return re.findall(r"(?<!\S)\w+(?:/|\.py)(?!\S)", line)


def room(name):
    return name.removesuffix("/").removesuffix(".py")


def at_import(path):
    """The packages that a file imports when it is imported itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def check(picture):
    """Raises AssertionError where the lines of a picture are not the package's."""
    names = [name for line in picture for name in named(line)]
    gone = [name for name in names if not getattr(PACKAGE / name, "is_dir" if name.endswith("/") else "is_file")()]
    assert not gone, "in the picture, but not in paddle_te"
    assert {*map(room, names)} == rooms() - {"__init__", "__main__"} and len(names) == len({*names})
    places = {room(name): number for number, line in enumerate(picture[: picture.index(BELOW)]) for name in named(line)}
    upwards = [
        (this, other) for this in places for other in MAY_IMPORT[this] if places.get(other, len(picture)) < places[this]
    ]
    assert not upwards, "each imports one that stands above it"


def test_the_picture_is_the_package():
    check(lines())


def test_a_stale_picture_would_be_seen():
    picture = "\n".join(lines())
    stale = [picture.replace(*words) for words in (("optimizer/", "optimizer.py"), ("table.py", "tables.py"))]
    stale += [picture.replace(" fp8/", ""), re.sub(r"\b(hosts|models)/", lambda m: SWAPPED[m[1]], picture)]
    for changed in stale:
        assert changed != picture
        with pytest.raises(AssertionError):
            check(changed.splitlines())


def test_rooms_without_paddle():
    first = lines().index(WITHOUT)
    marked = [line for number, line in enumerate(lines()) if "No Paddle" in line or number > first]
    without = {room(name) for line in marked for name in named(line)}
    for this in without:
        assert MAY_IMPORT[this] <= without, this
        for path in files(this):
            assert not {"paddle", *HOSTS} & {*at_import(path)}, path
