"""Which checkpoint a run resumes from."""

import pytest

from paddle_te.training.checkpoints import COMPLETE_MARK, complete_checkpoints, find_checkpoint


@pytest.fixture
def output_dir(tmp_path):
    for step, complete in ((9, True), (10, True), (100, True), (200, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if complete:
            (folder / COMPLETE_MARK).touch()
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-best" / COMPLETE_MARK).touch()
    return tmp_path


def test_auto_is_the_latest_complete_one(output_dir):
    assert find_checkpoint("auto", output_dir) == str(output_dir / "checkpoint-100")
    assert [step for step, _ in complete_checkpoints(output_dir)] == [9, 10, 100]


def test_auto_starts_from_scratch_where_there_is_none(tmp_path):
    assert find_checkpoint("auto", tmp_path) is None
    assert find_checkpoint("auto", tmp_path / "new") is None


@pytest.mark.parametrize("resume", [None, "none", False])
def test_none(output_dir, resume):
    assert find_checkpoint(resume, output_dir) is None


def test_step_and_folder(output_dir):
    assert find_checkpoint("9", output_dir) == str(output_dir / "checkpoint-9")
    assert find_checkpoint(str(output_dir / "checkpoint-10"), "elsewhere") == str(output_dir / "checkpoint-10")


def test_missing_and_incomplete_ones_are_refused(output_dir):
    with pytest.raises(FileNotFoundError, match="checkpoint-11 is not there; .*9, 10, 100"):
        find_checkpoint("11", output_dir)
    with pytest.raises(FileNotFoundError, match="checkpoint-200 is not complete"):
        find_checkpoint("200", output_dir)
