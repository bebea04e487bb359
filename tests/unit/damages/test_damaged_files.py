"""Damaged files through every reader: each ends in one line or in the values of whole files, within its bounds.

HYPOTHESIS_PROFILE=deep draws many more damages, other ones each time. DAMAGES_LOG=FILE gets a line of JSON for each.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_te import manifest
from paddle_te.manifest import COMPLETE_MARK, MANIFEST
from tests.damaged_readers import OTHER, REFUSED, Answer
from tests.damages import Damage, damages, kinds_for
from tests.unit.damages import world
from tests.unit.damages.drawing import drawn
from tests.unit.damages.world import READERS, Reader
from tests.unit.runs.completed import complete

SEALS = (MANIFEST, COMPLETE_MARK)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return world.make(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where the copies lie that are damaged: one path for all of them."""
    return tmp_path_factory.mktemp("damaged") / "world"


def state(folder: Path) -> dict[Path, tuple[int, ...]]:
    """What tells whether something below a folder has changed: copies keep the times of their originals."""
    found = {path: path.lstat() for path in (folder, *folder.rglob("*"))}
    return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size, stat.st_mode) for path, stat in found.items()}


COPIED: dict[Path, dict[Path, tuple[int, ...]]] = {}  # the parts of a world, as they were when they were copied


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fresh(whole: Path, place: Path) -> Path:
    """Makes `place` a copy of `whole`: of its parts, those that have changed are copied again."""
    place.mkdir(exist_ok=True)
    for part in place.iterdir():
        if part not in COPIED or state(part) != COPIED[part]:
            remove(part)
    for original in whole.iterdir():
        if not (part := place / original.name).exists():
            shutil.copytree(original, part) if original.is_dir() else shutil.copy2(original, part)
            COPIED[part] = state(part)
    return place


@pytest.fixture(scope="module")
def right(whole, place):
    """right(reader): its Answer to whole files, asked once."""
    known = {}

    def answer(reader: Reader) -> Answer:
        if reader.name not in known:
            known[reader.name] = reader.ask(fresh(whole, place))
            assert not known[reader.name].error
        return known[reader.name]

    return answer


def note(reader: Reader, name: str, damage: Damage, outcome: str, answer: Answer) -> None:
    """Adds a line to the log of damages, if there is one."""
    if path := os.environ.get("DAMAGES_LOG"):
        entry = dict(reader=reader.name, file=name, what=damage.what, outcome=outcome, error=answer.error)
        with open(path, "a") as log:
            log.write(json.dumps(entry | dict(seconds=round(answer.seconds, 2))) + "\n")


def of_checkpoint(name: str) -> bool:
    return Path(name).parent.name.startswith("checkpoint-")


def is_compared(reader: Reader, name: str) -> bool:
    """Whether another content of a file is found, whatever it is: a manifest has its checksum or, for a run that is
    resumed, the fingerprint of its data and the model's values; an order of samples has a note; a .idx has one right
    content for its .bin."""
    return of_checkpoint(name) or "index-cache" in name or name.endswith(".idx") or reader.name.startswith("resume")


def seal(folder: Path) -> None:
    """Makes a checkpoint's manifest anew, as somebody does who changes a file on purpose: then its reader must tell."""
    with contextlib.suppress(OSError):  # what cannot be read cannot be in a manifest
        complete(folder, manifest.read(folder).run)


def older(place: Path, name: str) -> Path:
    """A file of the same kind that belongs to another step or model."""
    return place / (
        name.replace("checkpoint-2", "checkpoint-1") if "checkpoint-2" in name else f"none/{Path(name).name}"
    )


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() and path.stat().st_size else None


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_damaged_file_gives_one_line_or_the_right_values(whole, place, right, reader):
    names = sorted(path.relative_to(whole).as_posix() for path in reader.found(whole))
    expected = right(reader)

    @drawn
    @given(st.data())
    def check(data):
        name = data.draw(st.sampled_from(names), "file")
        damage = data.draw(damages(*kinds_for(name)), "damage")
        sealed = of_checkpoint(name) and Path(name).name not in SEALS and data.draw(st.booleans(), "sealed")
        path = fresh(whole, place) / name
        damage.apply(path, older(place, name))
        if sealed:
            seal(path.parent)
        unchanged = content(path) == content(whole / name)
        answer = reader.ask(place)
        outcome = answer.compared_with(expected)
        note(reader, name, damage, outcome, answer)
        assert "\n" not in answer.error or reader.name == "verify"
        if unchanged or is_compared(reader, name) and not sealed:
            assert outcome != OTHER
        if reader.name == "verify" and not unchanged and not sealed:
            assert outcome == REFUSED

    check()


def exchange(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def half(folder: Path, other: Path) -> None:
    """Puts every second file of another checkpoint in its place."""
    for path in sorted(folder.iterdir())[::2]:
        if (other / path.name).is_file():
            shutil.copy(other / path.name, path)


# What hands do to whole folders: each takes the newest checkpoint, the one before, and one of another format.
MIXTURES = {
    "renamed": lambda newest, before, other: newest.rename(newest.with_name("checkpoint-9")),
    "exchanged": lambda newest, before, other: exchange(newest, before),
    "half of an older one": lambda newest, before, other: half(newest, before),
    "half of a newer one": lambda newest, before, other: half(before, newest),
    "another format's beside": lambda newest, before, other: shutil.copytree(other, newest, dirs_exist_ok=True),
    "another rank's beside": lambda newest, before, other: [
        shutil.copy(newest / name, newest / name.replace(".", ".tp01.", 1)) for name in ("model_state.pdparams",)
    ],
    "within itself": lambda newest, before, other: shutil.copytree(before, newest / newest.name),
    "a link to the older one": lambda newest, before, other: (shutil.rmtree(newest), newest.symlink_to(before)),
    "a link to itself": lambda newest, before, other: (shutil.rmtree(newest), newest.symlink_to(newest)),
    "a file": lambda newest, before, other: (shutil.rmtree(newest), newest.write_bytes(b"")),
}
OF_FOLDERS = [reader for reader in READERS.values() if any(world.CHECKPOINT in pattern for pattern in reader.files)]


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("reader", OF_FOLDERS, ids=lambda reader: reader.name)
def test_mixed_folders_give_one_line_or_the_right_values(whole, place, right, reader, mixture):
    expected = right(reader)
    fresh(whole, place)
    newest = place / world.CHECKPOINT
    MIXTURES[mixture](newest, newest.with_name("checkpoint-1"), place / world.UNIFIED)
    answer = reader.ask(place)
    note(reader, world.CHECKPOINT, Damage(mixture, 0, 0), answer.compared_with(expected), answer)
    assert answer.compared_with(expected) != OTHER
