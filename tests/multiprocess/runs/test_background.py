"""Checkpoints saved in the background: the order of marks, failures, kills, leftovers; the same files as without."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_te import manifest
from paddle_te.hosts.paddlenlp.training.trainer import PretrainingTrainer
from paddle_te.launch.__main__ import main as launch
from paddle_te.launch.supervise import Outcome, Supervisor
from paddle_te.manifest import MANIFEST, Manifest, damage, mark_complete, read
from paddle_te.runs import background, checkpoints
from paddle_te.runs.background import PREFIX, BackgroundSaver, remove_leftovers
from paddle_te.runs.checkpoints import CheckpointNotSaved, find_checkpoint, is_complete
from tests.pretraining import run

ROOT = Path(__file__).parents[3]
FLAGS = dict(
    model_name_or_path=ROOT / "tests/model",
    gradient_accumulation_steps=1,
    transformer_engine_backend="paddle",
    save_steps=1,
)

SAVING = "paddle_te.hosts.paddlenlp.training.checkpointing"


@pytest.fixture
def staging(tmp_path):
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


@pytest.fixture
def saver(staging):
    saver = BackgroundSaver(staging)
    yield saver
    saver.join()
    saver.close()


def stage(saver, name="checkpoint-7"):
    """Random files in the staging folder: ({name: bytes}, folder)."""
    contents = {f"{part}.{saver.rank}": random.randbytes(3000) for part in ("weights", "inner/optimizer")}
    staged = saver.folder / name
    (staged / "inner").mkdir(parents=True)
    for path, content in contents.items():
        (staged / path).write_bytes(content)
    return contents, staged


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_manifest(folder):
    """The files of a checkpoint but for its mark and its manifest, with which it must agree."""
    assert damage(folder) == []
    got = files(folder)
    assert set(read(folder).files) == got.keys() - {checkpoints.COMPLETE_MARK, MANIFEST}
    return {name: content for name, content in got.items() if name in read(folder).files}


class Gate:
    """A copier that stops before each file until it is let on."""

    def __init__(self, monkeypatch):
        self.open, self.waiting, self.copy = threading.Event(), threading.Event(), background._copy
        monkeypatch.setattr(background, "_copy", self)

    def __call__(self, *paths):
        self.waiting.set()
        assert self.open.wait(300)
        return self.copy(*paths)


def test_all_is_on_the_disk_before_a_mark(saver, tmp_path, monkeypatch):
    folder, events = tmp_path / "out/checkpoint-7", []
    for module in (background, checkpoints, manifest):
        monkeypatch.setattr(module, "sync", lambda path: events.append((path, sorted(os.listdir(folder)))))
    contents, staged = stage(saver)
    saver.start(staged, folder, lambda: events.append(("finish", is_complete(folder))))
    saver.wait()
    paths = [path for path, _ in events]
    data, mark = paths[:-5], paths[-5:]
    assert {folder / name for name in contents} | {folder, folder / "inner", folder.parent} == set(data)
    assert not any(name.startswith(".") for _, names in events[:-5] for name in names), "a mark came before the data"
    partials = [folder / ".manifest.json.partial", folder / ".checkpoint_done.partial"]
    assert mark == [partials[0], folder, partials[1], folder, "finish"] and events[-1][1]
    assert without_manifest(folder) == contents
    assert not any(saver.folder.iterdir()), "the staging is not free again"


def test_complete_when_all_ranks_are(staging, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-7"
    savers = [BackgroundSaver(staging, rank, 3) for rank in range(3)]
    staged = [stage(saver) for saver in savers]
    for rank in (0, 2):
        savers[rank].start(staged[rank][1], folder)
    savers[2].wait()
    time.sleep(2 * background.POLL_SECONDS)
    assert savers[0].in_flight() and not is_complete(folder)
    savers[1].start(staged[1][1], folder)
    for saver in savers:
        saver.wait()
        saver.close()
    expected = {name: content for contents, _ in staged for name, content in contents.items()}
    assert without_manifest(folder) == expected
    assert not any(staging.iterdir())


def test_files_of_one_name_from_several_ranks(staging, tmp_path):
    """The manifest holds what has become of them, whichever rank was the last."""
    folder, savers = tmp_path / "checkpoint-7", [BackgroundSaver(staging, rank, 2) for rank in range(2)]
    for saver in reversed(savers):
        contents, staged = stage(saver)
        (staged / "config.json").write_text(f"rank {saver.rank}")
        saver.start(staged, folder, run={"step": 7})
    for saver in savers:
        saver.wait()
        saver.close()
    assert without_manifest(folder)["config.json"] in (b"rank 0", b"rank 1") and read(folder).run == {"step": 7}


def test_one_at_a_time(saver, tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    saver.start(stage(saver, "checkpoint-1")[1], tmp_path / "checkpoint-1")
    assert gate.waiting.wait(300) and not is_complete(tmp_path / "checkpoint-1")
    saver.check()  # does not wait
    threading.Timer(0.2, gate.open.set).start()
    staged = stage(saver, "checkpoint-2")[1]
    saver.start(staged, tmp_path / "checkpoint-2")
    assert is_complete(tmp_path / "checkpoint-1")
    saver.wait()
    assert is_complete(tmp_path / "checkpoint-2")


def test_a_failure_is_told_once(saver, tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    mark_complete(tmp_path / "checkpoint-5", Manifest({}, {}))
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    (folder / "weights.0").symlink_to("/dev/full")
    saver.start(stage(saver)[1], folder)
    saver.join()
    assert not any(saver.folder.iterdir())
    with pytest.raises(CheckpointNotSaved, match="checkpoint-7 could not be saved: .*No space left.*untouched: 5"):
        saver.check()
    saver.check()
    assert find_checkpoint("auto", tmp_path) == str(tmp_path / "checkpoint-5")
    saver.start(stage(saver)[1], tmp_path / "checkpoint-8")
    saver.wait()
    assert is_complete(tmp_path / "checkpoint-8")


KILLED = """
import shutil, sys, time
from pathlib import Path
from paddle_te.runs import background
copy, names = background._copy, []
def slowly(*paths):
    names.append(paths)
    record = copy(*paths)
    if len(names) == 2:
        print("copying", flush=True)
        time.sleep(600)
    return record
background._copy = slowly
saver = background.BackgroundSaver(sys.argv[1])
(saver.folder / "checkpoint-9").mkdir()
for name in "abc":
    (saver.folder / "checkpoint-9" / name).write_text(name)
saver.start(saver.folder / "checkpoint-9", Path(sys.argv[2]) / "checkpoint-9")
saver.wait()
"""


def test_killed_while_it_copies(staging, saver, tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    mark_complete(tmp_path / "checkpoint-5", Manifest({}, {}))
    child = subprocess.Popen([sys.executable, "-c", KILLED, staging, tmp_path], stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout.readline() == b"copying\n"
    remove_leftovers(staging)
    assert len(list(staging.iterdir())) == 2, "a living process's staging was removed"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert sorted(files(tmp_path / "checkpoint-9")) == ["a", "b"]
    assert find_checkpoint("auto", tmp_path) == str(tmp_path / "checkpoint-5")
    with pytest.raises(FileNotFoundError, match="not complete"):
        find_checkpoint("9", tmp_path)
    remove_leftovers(staging)
    assert list(staging.iterdir()) == [saver.folder]


def test_the_launcher_removes_what_killed_ranks_left(staging, tmp_path, monkeypatch):
    def killed(self):  # a Supervisor
        self.child.kill()
        (staging / f"{PREFIX}killed" / "checkpoint-1").mkdir(parents=True)
        return Outcome(-signal.SIGKILL, step=1)

    monkeypatch.setattr(Supervisor, "run", killed)
    extra = f"--staging_dir {staging}"
    knobs = dict(DEVICE="cpu", DEVICES="0", MOCK_DATA=1, OUTPUT_BASE=tmp_path, EXTRA_ARGS=extra)
    arguments = dict(model_name="tiny-llama-demo", tokenizer_name="none", TP=1, precision="fp32")
    words = [f"--{key}={value}" for key, value in (arguments | knobs).items()]
    assert launch(["pretrain", *words]) == 137
    assert not any(staging.iterdir())


# ------------------------------------------------------------------------------------------------- whole runs


def last_error(caplog):
    return [record.message for record in caplog.records if record.levelname == "ERROR"][-1]


def test_the_same_checkpoints_and_an_exact_resume(monkeypatch, tmp_path, staging):
    """Files equal those of a run without, but for what holds the time and the run's folder."""
    flags = dict(use_fp8="true", fp8_amax_history_len=2, save_total_limit=2, max_steps=4, save_steps=1)
    flags |= dict(do_eval="true", evaluation_strategy="steps", eval_steps=1, eval_iters=1)
    flags |= dict(metric_for_best_model="loss", load_best_model_at_end="true")
    output = {name: tmp_path / name / "out" for name in ("without", "with")}
    whole = run(monkeypatch, output["without"], **FLAGS | flags)
    assert run(monkeypatch, output["with"], **FLAGS | flags, staging_dir=staging) == whole
    assert not any(staging.iterdir())

    names = {name: sorted(path.name for path in folder.glob("checkpoint-*")) for name, folder in output.items()}
    assert names["with"] == names["without"] and len(names["with"]) in (2, 3)
    for checkpoint in names["with"]:
        plain, mine = files(output["without"] / checkpoint), files(output["with"] / checkpoint)
        assert mine.keys() == plain.keys()
        states = [json.loads(each.pop("trainer_state.json")) for each in (plain, mine)]
        assert states[1]["best_model_checkpoint"] == states[0]["best_model_checkpoint"].replace("without", "with")
        assert states[1]["best_metric"] == states[0]["best_metric"]
        for each in (plain, mine):
            assert each.pop("training_args.bin") and each.pop(MANIFEST) and each.pop(checkpoints.COMPLETE_MARK)
        assert damage(output["with"] / checkpoint) == []
        assert mine == plain
        arguments = paddle.load(str(output["with"] / checkpoint / "training_args.bin"))
        assert arguments.output_dir == str(output["with"])

    for name in ("checkpoint-4", "train_log.jsonl"):
        path = output["with"] / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    resumed = run(monkeypatch, output["with"], **FLAGS | flags, staging_dir=staging, resume_from_checkpoint="auto")
    assert resumed == {4: whole[4]}


def test_training_goes_on_meanwhile_and_waits_at_the_end(monkeypatch, tmp_path, staging):
    """The copier is stopped until a later step has been logged; the last checkpoint is awaited before the end."""
    output, gate, seen = tmp_path / "out", Gate(monkeypatch), []

    def open_when_step_3_is_there():
        gate.waiting.wait(300)
        log, deadline = output / "train_log.jsonl", time.monotonic() + 300
        while (not seen or '"step": 3,' not in seen[-1]) and time.monotonic() < deadline:
            seen.append(log.read_text())
            time.sleep(0.01)
        seen.append(is_complete(output / "checkpoint-2"))
        gate.open.set()

    thread = threading.Thread(target=open_when_step_3_is_there, daemon=True)
    thread.start()
    run(monkeypatch, output, **FLAGS | dict(save_steps=2, max_steps=4, staging_dir=staging))
    thread.join()
    assert '"step": 3,' in seen[-2] and seen[-1] is False
    assert is_complete(output / "checkpoint-2") and is_complete(output / "checkpoint-4")


def test_training_that_fails_loses_no_checkpoint_on_its_way(monkeypatch, tmp_path, staging, capfd):
    gate, step = Gate(monkeypatch), PretrainingTrainer.training_step

    def fail_in_step_2(self, *args, **kwargs):
        if self.state.global_step == 1:
            assert gate.waiting.wait(300) and not is_complete(tmp_path / "out/checkpoint-1")
            threading.Timer(0.3, gate.open.set).start()
            raise RuntimeError("the loss is NaN")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(PretrainingTrainer, "training_step", fail_in_step_2)
    with pytest.raises(RuntimeError, match="NaN"):
        run(monkeypatch, tmp_path / "out", **FLAGS, staging_dir=staging)
    assert "RuntimeError: the loss is NaN" in capfd.readouterr().err, "it is not said before the wait"
    assert is_complete(tmp_path / "out/checkpoint-1") and not any(staging.iterdir())


def test_an_output_folder_of_each_nodes_own_is_refused(monkeypatch, tmp_path, staging, caplog):
    monkeypatch.setattr(f"{SAVING}.os.path.exists", lambda path: ".shared." not in path)
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "out", **FLAGS, staging_dir=staging)
    assert "must be a folder that all nodes share; rank 0 does not see" in last_error(caplog)
    assert not any((tmp_path / "out").glob(".shared.*")) and not any(staging.iterdir())


def test_no_room_is_said_before_the_first_step(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("paddle_te.runs.room.free_bytes", lambda folder: 10**6 if folder == "/dev/shm" else 10**9)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, tmp_path / "out", **FLAGS, staging_dir="/dev/shm")
    assert stop.value.code == 1
    assert (
        "--staging_dir /dev/shm: a node's part of a checkpoint takes about 0.02 GB, and 0.00 GB are free. Make"
        in last_error(caplog)
    )
    log = tmp_path / "out/train_log.jsonl"
    assert not log.exists()


def test_staging_that_fills_up_is_one_clear_error(monkeypatch, tmp_path, staging, caplog):
    make = BackgroundSaver.__init__

    def with_a_full_disk(self, *args):
        make(self, *args)
        mkdir = Path.mkdir

        def fill(path, **kwargs):
            mkdir(path, **kwargs)
            if path == self.folder / "checkpoint-2":
                (path / "optimizer.pdopt").symlink_to("/dev/full")

        monkeypatch.setattr(Path, "mkdir", fill)

    monkeypatch.setattr(BackgroundSaver, "__init__", with_a_full_disk)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, tmp_path / "out", **FLAGS, staging_dir=staging)
    assert stop.value.code == 1
    assert "checkpoint-2 could not be saved" in last_error(caplog) and "untouched: 1." in last_error(caplog)
    assert not any(staging.iterdir())


def test_the_estimate_of_room_holds(monkeypatch, tmp_path, staging):
    """float32 weights and two moments: what is written is at most what was asked for, and not much less."""
    asked = []
    monkeypatch.setattr(f"{SAVING}.check_room", lambda shares, remedy: asked.append(shares[0][1]))
    run(monkeypatch, tmp_path / "out", **FLAGS | dict(max_steps=1, staging_dir=staging))
    written = sum(map(len, files(tmp_path / "out/checkpoint-1").values()))
    surely, staged = asked  # in the output folder, in the staging folder
    assert np.clip(written, 0.9 * (staged - 2**24), staged) == written
    assert 0.95 * written < surely <= written
