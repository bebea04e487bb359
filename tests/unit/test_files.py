"""Only regular files are opened: nothing else makes a reader wait, or read without end. The room for others."""

import os
import shutil
import sys

import pytest

from paddle_te import files
from paddle_te.files import free_bytes, open_file, read_file


def test_a_regular_file_and_a_link_to_one(tmp_path):
    (tmp_path / "file").write_bytes(b"\0content\r\n")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "file") == read_file(str(tmp_path / "link")) == b"\0content\r\n"


IN_ITS_PLACE = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda path: os.symlink("/dev/zero", path),
    "a link to itself": lambda path: os.symlink(path, path),
    "nothing": lambda path: None,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", IN_ITS_PLACE.values(), ids=IN_ITS_PLACE)
def test_what_is_no_file_is_an_error_that_names_it(tmp_path, make):
    path = tmp_path / "config.json"
    make(path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as error:
        open_file(path)
    assert error.value.filename == str(path) and error.value.strerror
    assert len(os.listdir("/proc/self/fd")) == before, "it leaves no file open"


@pytest.mark.parametrize("usage, free", [((2**60, 0, 2**59), 2**59), ((0, 0, 0), sys.maxsize)])
def test_room_of_a_disk_and_of_one_that_does_not_tell(tmp_path, monkeypatch, usage, free):
    monkeypatch.setattr(files, "_in_memory", lambda folder: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(*usage))
    assert free_bytes(tmp_path) == free


def test_room_in_memory_is_no_larger_than_what_is_available(monkeypatch):
    before, free = shutil.disk_usage("/dev/shm").free, free_bytes("/dev/shm")
    assert free <= max(before, shutil.disk_usage("/dev/shm").free)  # other processes' files come and go
    usage = shutil.disk_usage("/dev/shm")._replace(free=2**60)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert 0 < free_bytes("/dev/shm") < 2**60
