"""Which checkpoint a run resumes from."""

import pytest

from paddle_te import manifest
from paddle_te.manifest import COMPLETE_MARK, CheckpointDamaged
from paddle_te.runs import checkpoints
from paddle_te.runs.checkpoints import (
    complete_checkpoints,
    find_checkpoint,
    flush,
    remove_checkpoint,
    rotate_checkpoints,
)
from tests.unit.runs.completed import complete


@pytest.fixture
def output_dir(tmp_path):
    for step, is_complete in ((9, True), (10, True), (100, True), (200, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if is_complete:
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


def folders(output_dir):
    return {path.name for path in output_dir.iterdir()}


def test_rotation_keeps_the_newest_and_the_best(output_dir):
    for step in (150, 160):
        (output_dir / f"checkpoint-{step}").mkdir()
    saved = output_dir / "checkpoint-160"
    complete(saved)
    rotate_checkpoints(output_dir, None, saved)
    rotate_checkpoints(output_dir, 0, saved)
    assert len(folders(output_dir)) == 7
    rotate_checkpoints(output_dir, 2, saved, best=str(output_dir / "checkpoint-9"))
    # 150 was left by a killed run; 200 may still be written
    assert folders(output_dir) == {f"checkpoint-{name}" for name in (9, 100, 160, 200, "best")}
    rotate_checkpoints(output_dir, 1, saved)
    assert folders(output_dir) == {f"checkpoint-{name}" for name in (160, 200, "best")}


def test_the_mark_goes_first(output_dir, monkeypatch):
    folder = output_dir / "checkpoint-100"
    (folder / "weights").touch()

    def killed(*args, **kwargs):
        assert not (folder / COMPLETE_MARK).exists() and (folder / "weights").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(folder)
    assert find_checkpoint("auto", output_dir) == str(output_dir / "checkpoint-10")
    remove_checkpoint(folder)
    remove_checkpoint(folder)  # nothing to remove
    assert not folder.exists()


def test_everything_is_flushed_before_the_mark(output_dir, monkeypatch):
    folder, synced = output_dir / "checkpoint-200", []
    (folder / "inner").mkdir()
    for name in ("a", "inner/b"):
        (folder / name).touch()
    for module in (checkpoints, manifest):
        monkeypatch.setattr(module, "sync", synced.append)
    flush(folder)
    assert {folder, folder / "a", folder / "inner", folder / "inner/b", output_dir} == set(synced)
    complete(folder)
    partials = [folder / ".manifest.json.partial", folder / ".checkpoint_done.partial"]
    assert synced[-4:] == [partials[0], folder, partials[1], folder] and not any(path.exists() for path in partials)


def test_the_last_good_one_is_never_removed(tmp_path):
    """Also where the newest ones have lost files since, or have a later number than the one just saved."""
    for step in (10, 20, 30, 40):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}/weights").write_text("numbers")
        complete(tmp_path / f"checkpoint-{step}")
    rotate_checkpoints(tmp_path, 1, tmp_path / "checkpoint-20")
    assert folders(tmp_path) == {"checkpoint-20", "checkpoint-40"}
    for damaged in (20, 40):
        (tmp_path / f"checkpoint-{damaged}/weights").write_text("")
    (tmp_path / "checkpoint-10").mkdir()
    complete(tmp_path / "checkpoint-10")
    rotate_checkpoints(tmp_path, 1, tmp_path / "checkpoint-20")
    assert folders(tmp_path) == {"checkpoint-10", "checkpoint-20", "checkpoint-40"}


def test_auto_passes_over_bad_ones_and_says_why(output_dir):
    told, wrong = [], {"checkpoint-100": ["weights is missing"], "checkpoint-10": list("abcde")}
    found = find_checkpoint("auto", output_dir, lambda folder: wrong.get(folder.name, []), told.append)
    assert found == str(output_dir / "checkpoint-9")
    assert "checkpoint-100 is damaged and is passed over: weights is missing" in told[0]
    assert told[1].endswith("a; b; c; and 2 more")


def test_bad_ones_are_refused_where_no_other_will_do(output_dir):
    told = []
    with pytest.raises(CheckpointDamaged, match="checkpoint-10 is damaged and is not used: no good; .*9, 10, 100"):
        find_checkpoint("10", output_dir, lambda folder: ["no good"])
    with pytest.raises(CheckpointDamaged, match="all complete checkpoints in .*steps 9, 10, 100.* are damaged"):
        find_checkpoint("auto", output_dir, lambda folder: ["no good"], told.append)
    assert len(told) == 3


def test_later_checkpoints_are_set_aside(tmp_path):
    """As of a run that is overwritten, or goes on from an earlier step: neither `auto` nor a limit must see them."""
    for step in (10, 20, 30):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-notes").mkdir()
    assert checkpoints.set_aside(tmp_path, "auto") is checkpoints.set_aside(tmp_path, 30) is None
    assert checkpoints.set_aside(tmp_path, 10) == tmp_path / "earlier-1"
    assert {path.name for path in (tmp_path / "earlier-1").iterdir()} == {"checkpoint-20", "checkpoint-30"}
    assert checkpoints.set_aside(tmp_path, "none") == tmp_path / "earlier-2"
    assert {path.name for path in tmp_path.iterdir()} == {"earlier-1", "earlier-2", "checkpoint-notes"}


@pytest.mark.parametrize("resume_step", ["none", "auto"])
def test_a_finished_model_is_set_aside_where_a_run_starts_anew(tmp_path, resume_step):
    for name in ("lora_model_state.pdparams", "lora_config.json"):
        (tmp_path / name).touch()
    (tmp_path / "checkpoint-10").mkdir()  # not complete
    (tmp_path / "merged").mkdir()
    kept = checkpoints.set_aside(tmp_path, resume_step)
    moved = {"lora_model_state.pdparams", "merged"} | ({"checkpoint-10"} if resume_step == "none" else set())
    assert kept == tmp_path / "earlier-1" and {path.name for path in kept.iterdir()} == moved
    (tmp_path / "merged").mkdir()  # of an adapter elsewhere
    assert checkpoints.set_aside(tmp_path, resume_step) is None
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20/.checkpoint_done").touch()
    assert checkpoints.set_aside(tmp_path, "auto") is checkpoints.set_aside(tmp_path, 20) is None  # the run goes on
