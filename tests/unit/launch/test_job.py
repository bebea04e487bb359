"""How the launcher ends where it cannot write itself."""

import errno

import pytest

from paddle_te.launch import job
from paddle_te.launch.__main__ import main
from paddle_te.runs.lock import FolderLock

WORDS = ["--model_name=tiny-llama-demo", "--tokenizer_name=none", "--TP=1", "--precision=fp32", "--backend=pd"]
WORDS += ["--MOCK_DATA=1", "--DEVICE=cpu", "--DEVICES=0"]


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts a job whose lock fails by an error of this number."""

    def start(number):
        def fail(folder):
            raise OSError(number, "the reason", f"{folder}/.lock")

        monkeypatch.setattr(job, "FolderLock", fail)
        return main(["pretrain", *WORDS, f"--OUTPUT_DIR={tmp_path}"])

    return start


def test_a_full_disk_is_one_line(start, tmp_path, capsys):
    assert start(errno.ENOSPC) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path}/.lock could not be written: the reason; make room, or choose another folder"


def test_other_faults_are_shown_whole(start):
    with pytest.raises(OSError, match="the reason"):
        start(errno.ENOENT)


@pytest.mark.parametrize("trains", [True, False])
def test_only_training_moves_a_finished_model_aside(monkeypatch, tmp_path, trains):
    model = tmp_path / "model_state.pdparams"
    model.touch()
    monkeypatch.setattr(job, "_starts", lambda *arguments: 0)
    extra = "" if trains else "--do_train false --do_eval true"
    assert main(["pretrain", *WORDS, f"--OUTPUT_DIR={tmp_path}", f"--EXTRA_ARGS={extra}", "--OVERWRITE=1"]) == 0
    assert model.exists() == (not trains) == (not (tmp_path / "earlier-1" / model.name).exists())


def test_several_tasks_of_one_node_are_told_so(monkeypatch, tmp_path, capsys):
    """One of srun's tasks has the folder. With a folder each they may be as many runs."""
    monkeypatch.setattr(job, "_starts", lambda *arguments: 0)
    for name, value in dict(TASKS="8", NODES="1").items():
        monkeypatch.setenv(f"SLURM_STEP_NUM_{name}", value)
    folder = FolderLock(tmp_path)
    assert main(["pretrain", *WORDS, f"--OUTPUT_DIR={tmp_path / 'own'}"]) == 0
    capsys.readouterr()
    assert main(["pretrain", *WORDS, f"--OUTPUT_DIR={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: SLURM_STEP_NUM_TASKS: srun starts this 8 times on one node; start it once a node (")
    folder.release()
