"""The lock of a run's folder; tests/multiprocess/launch/test_restart.py has two runs in one folder."""

import resource

import pytest

from paddle_te.runs.lock import NAME, FolderLock


def test_where_it_cannot_be_written_its_file_is_named(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as a full disk, but for the number
    try:
        with pytest.raises(OSError) as error:
            FolderLock(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.filename == str(tmp_path / NAME)
