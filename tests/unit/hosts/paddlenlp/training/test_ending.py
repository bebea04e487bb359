"""How a training command ends where the disk cannot be written."""

import errno

import pytest

from paddle_te.hosts.paddlenlp.training.ending import run_to_end
from paddle_te.outputs import DISK_FAULTS


@pytest.mark.parametrize("number", sorted(DISK_FAULTS))
def test_a_disk_that_cannot_be_written_is_one_line(caplog, number):
    def command():
        raise OSError(number, "the reason", "output/train_log.jsonl")

    with pytest.raises(SystemExit) as stop:
        run_to_end(command)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert stop.value.code == 1 and "\n" not in record.getMessage()
    assert record.getMessage().startswith("output/train_log.jsonl could not be written: the reason.")


def test_other_faults_are_shown_whole():
    def command():
        raise OSError(errno.ENOENT, "no such file", "nowhere")

    with pytest.raises(OSError, match="nowhere"):
        run_to_end(command)


def test_ctrl_c_is_one_line(caplog):
    """That the process shows no traceback either is test_leaving.py."""

    def command():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_to_end(command)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage().startswith("interrupted by Ctrl-C. Complete checkpoints are untouched")
