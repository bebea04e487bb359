"""Files that programs write at their end."""

import errno
import importlib
import os
import socket
import tempfile

import pytest

from paddle_te import outputs


@pytest.fixture
def place(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("new")
    socket.socket(socket.AF_UNIX).bind(str(tmp_path / "socket"))
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


@pytest.mark.parametrize("path", ["file", "new", "a/new/folder/new", "link", "folder/new", "/dev/null", "é\udcff"])
def test_a_file_that_can_be_written_is_tried_without_a_trace(place, path):
    before = contents(place)
    outputs.check_file("--output", place / path)
    assert contents(place) == before


@pytest.mark.parametrize("path, reason", [
    ("folder", "it is a folder"),
    ("file/new", "file is no folder"),
    ("file/a/new", "file is no folder"),
    ("n" * 300, "File name too long"),
    ("a" * 300 + "/new", "File name too long"),
    ("loop", "loop"),
    ("a\0b", "null"),
    ("/proc/new", "No such file"),
])  # fmt: skip
def test_a_file_that_cannot_be_written_is_told(place, path, reason):
    before = contents(place)
    with pytest.raises(ValueError, match=f"^--output: .*{reason}") as error:
        outputs.check_file("--output", place / path)
    assert "\n" not in str(error.value) and contents(place) == before


@pytest.mark.parametrize("path", ["", "."])
def test_a_file_needs_a_name(path):
    with pytest.raises(ValueError, match=f"--output: '{path}' is no name of a file"):
        outputs.check_file("--output", path)


def test_folders_are_tried_likewise(place):
    for path in ("folder", "a/new"):
        outputs.check_folder("--output", place / path)
    assert not (place / "a").exists()
    for path in ("file", "file/new", "socket", "", "/proc/new"):
        with pytest.raises(ValueError, match="--output: .*(no folder|No such file|no name)"):
            outputs.check_folder("--output", path and place / path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permissions_decide(place):
    (place / "folder").chmod(0o500)
    with pytest.raises(ValueError, match="Permission denied"):
        outputs.check_file("--output", place / "folder/new")


@pytest.mark.parametrize("path", ["file", "new", "a/new/folder/new", "link"])
def test_what_is_written_stands_there_and_nothing_else(place, path):
    names = {*contents(place)}
    outputs.write_file("--output", place / path, "é\n")
    assert (place / path).read_text(encoding="utf-8") == "é\n"
    assert {*contents(place)} - names <= {"new", "a"}


@pytest.mark.parametrize("there", [False, True])
def test_the_content_is_kept_where_writing_fails(place, there, monkeypatch):
    """/dev/full is a disk without room."""
    if there:
        path = "/dev/full"
    else:
        path = place / "new"
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(type(place), "replace", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(outputs.NotWritten, match="--output: .* could not be written: No space left.*is in ") as error:
        outputs.write_file("--output", path, "all the work")
    kept = str(error.value).rpartition(" is in ")[2]
    assert open(kept).read() == "all the work"
    os.unlink(kept)
    assert not (place / "new").exists() and not [*place.glob(".*")]


def test_the_content_is_printed_where_there_is_no_room_for_it(monkeypatch, capsysbinary):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    with pytest.raises(outputs.NotWritten, match="its content is on standard output"):
        outputs.write_file("--output", "/dev/full", "all the work\n")
    assert capsysbinary.readouterr().out == b"all the work\n"


PROGRAMS = {
    "paddle_te.env": ["--save"],
    "paddle_te.runs.compare": ["run", "--output"],
    "paddle_te.runs.convergence": ["run", "run", "--output"],
    "tools.benchmark.paired": ["run", "run", "--output"],
    "tools.benchmark.scaling_model": ["--output"],
    "tools.benchmark.timeline": ["trace", "--page"],
}


@pytest.mark.parametrize("module", PROGRAMS)
def test_programs_try_their_files_before_they_work(place, module, capsys):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main([*PROGRAMS[module], str(place / "file/new.html")])
    assert ended.value.code == 2
    assert f"{PROGRAMS[module][-1]}: {place}/file/new.html cannot be" in capsys.readouterr().err
