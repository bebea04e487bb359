"""Saves that are interrupted: runs killed at random moments, in one process and under TP2; a disk that is full."""

import resource

import pytest

from paddle_te.hosts.paddlenlp.training import checkpointing
from paddle_te.runs.checkpoints import complete_checkpoints
from tests.multiprocess.runs.kills import FLAGS, kill_and_compare
from tests.pretraining import run


@pytest.mark.parametrize("ways", [["one process"], ["tp2", "tp2, background"]], ids=["one process", "tp2"])
def test_killed_while_saving(ways, tmp_path, nvgpu_host):
    for way in ways:
        print(way, kill_and_compare(tmp_path, way, 3, nvgpu_host))


# the file that has no room; or, where that is renamed into place, how long any file may be: weights have 0.8 MB here
FULL = [("model_state.pdparams", {}), ("optimizer.pdopt", {}), ("trainer_state.json", {}), ("rng_state.pth", {})]
FULL += [("fp8_state.pp00.pdparams.partial", dict(use_fp8="true", fp8_amax_history_len=2))]
FULL += [("optimizer.pdopt", dict(staging_dir="/dev/shm"))]
FULL += [(500_000, dict(unified_checkpoint="true")), (1_000_000, dict(unified_checkpoint="true"))]


@pytest.mark.parametrize("what, flags", FULL)
def test_a_full_disk_is_one_clear_error(monkeypatch, tmp_path, caplog, what, flags):
    """The file leads to /dev/full, where every write lacks space; or the process may write none longer than that."""
    flags = FLAGS | flags | dict(max_steps=4)
    whole = run(monkeypatch, tmp_path / "whole", **flags)
    remove = checkpointing.remove_checkpoint

    def remove_and_fill_the_disk(folder):
        remove(folder)
        if folder.name == "checkpoint-3" and isinstance(what, int):
            resource.setrlimit(resource.RLIMIT_FSIZE, (what, kept[1]))
        elif folder.name == "checkpoint-3":
            folder.mkdir()
            (folder / what).symlink_to("/dev/full")

    output, kept = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patched:
        patched.setattr(checkpointing, "remove_checkpoint", remove_and_fill_the_disk)
        try:
            with pytest.raises(SystemExit) as stop:
                run(patched, output, **flags)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert stop.value.code == 1
    error = [record.message for record in caplog.records if record.levelname == "ERROR"][-1]
    assert "checkpoint-3 could not be saved" in error
    assert ("File too large" if isinstance(what, int) else "No space left on device") in error
    assert "untouched: 1, 2. Make room" in error
    assert [step for step, _ in complete_checkpoints(output)] == [1, 2]

    assert run(monkeypatch, output, **flags, resume_from_checkpoint="auto") == whole
    assert [step for step, _ in complete_checkpoints(output)] == [3, 4]
