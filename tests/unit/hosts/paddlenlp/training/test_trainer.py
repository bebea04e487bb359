"""What a run of run_pretrain.py's main function logs, saves and ends with, where PaddleNLP's Trainer goes wrong."""

import json
import math
import shutil
import time
from types import SimpleNamespace

import paddle
import pytest
from paddlenlp.trainer import Trainer, TrainerCallback

from paddle_te.hosts.paddlenlp.training import pretrain
from paddle_te.hosts.paddlenlp.training.trainer import PretrainingTrainer, draw_own_numbers
from tests.pretraining import run


@pytest.fixture
def logged(monkeypatch):
    """A list that gets the values of each log line, from all runs."""
    lines, log = [], PretrainingTrainer.log

    def kept(self, logs, **kwargs):
        log(self, logs, **kwargs)
        lines.append({"step": self.state.global_step, **logs})

    monkeypatch.setattr(PretrainingTrainer, "log", kept)
    return lines


def log_of(output):
    return [json.loads(line) for line in (output / "train_log.jsonl").read_text().splitlines()]


def checkpoints(output):
    return sorted(path.name for path in output.glob("checkpoint-*"))


def test_the_logged_rate_is_that_of_the_step(monkeypatch, tmp_path, logged):
    run(monkeypatch, tmp_path, max_steps=5, save_strategy="no", lr_scheduler_type="cosine")
    fallen = [1e-5 + (1e-3 - 1e-5) * (1 + math.cos(math.pi * (step - 2) / 3)) / 2 for step in (3, 4, 5)]
    wanted = [0.5e-3, 1e-3, *fallen]  # 2 steps of warm-up
    assert [line["lr"] for line in log_of(tmp_path)] == pytest.approx(wanted)
    assert [line["learning_rate"] for line in logged if "loss" in line] == pytest.approx(wanted)


def test_the_first_rate_of_a_longer_run_is_its_schedules(monkeypatch, tmp_path):
    """The checkpoint of a run of two steps holds the rate of its last step, which is the schedule's least."""
    flags = dict(lr_scheduler_type="cosine", warmup_steps=0, save_steps=2)
    run(monkeypatch, tmp_path / "longer", max_steps=2, **flags)
    run(monkeypatch, tmp_path / "longer", max_steps=4, resume_from_checkpoint="auto", **flags)
    run(monkeypatch, tmp_path / "whole", max_steps=4, **flags)
    longer, whole = ([line["lr"] for line in log_of(tmp_path / name)] for name in ("longer", "whole"))
    assert longer[2:] == whole[2:] and longer[1] < whole[1]


def test_the_last_steps_are_logged_and_saved(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path, max_steps=5, save_steps=3, logging_steps=2)
    assert [line["step"] for line in log_of(tmp_path)] == [2, 4, 5]
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-5"]


CHECKPOINT = 12 * 5_048_576  # float32 weights and two moments of the model's parameters


@pytest.mark.parametrize("free, flags, refused", [
    (CHECKPOINT - 1, dict(save_steps=100), True),  # the last step is saved
    (CHECKPOINT, dict(save_steps=1), False),
    (CHECKPOINT // 3, dict(ignore_save_lr_and_optim="true"), False),  # weights
    (0, dict(save_strategy="no"), False),
])  # fmt: skip
def test_a_disk_without_room_for_a_checkpoint(monkeypatch, tmp_path, caplog, free, flags, refused):
    monkeypatch.setattr("paddle_te.runs.room.free_bytes", lambda folder: free)
    if not refused:
        assert run(monkeypatch, tmp_path, max_steps=1, **flags)
        return
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, tmp_path, max_steps=1, **flags)
    assert stop.value.code == 1 and not (tmp_path / "train_log.jsonl").exists()
    assert f"--output_dir {tmp_path}: a node's part of a checkpoint takes about 0.06 GB" in caplog.text


def test_closing_values_are_of_the_steps_of_this_process(monkeypatch, tmp_path, logged):
    flags = dict(save_steps=2, decay_steps=5)
    run(monkeypatch, tmp_path, **flags, max_steps=2)
    losses = run(monkeypatch, tmp_path, **flags, max_steps=5, resume_from_checkpoint="auto")
    for closing, steps in zip((line for line in logged if "train_runtime" in line), ([1, 2], [3, 4, 5]), strict=True):
        assert closing["train_loss"] == pytest.approx(sum(losses[step] for step in steps) / len(steps), rel=1e-6)
        seconds = closing["train_runtime"]
        assert closing["train_steps_per_second"] == pytest.approx(len(steps) / seconds, rel=1e-2, abs=1e-4)
        assert closing["train_samples_per_second"] == pytest.approx(4 * len(steps) / seconds, rel=1e-2, abs=1e-4)


def test_interval_speeds_leave_out_evaluating_and_saving(monkeypatch, tmp_path, logged):
    clock, since = time.time, []
    monkeypatch.setattr(time, "time", lambda: clock() + 1000 * len(since))

    class Slow(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            since.append("1000 s")

    install = pretrain.install_callbacks
    monkeypatch.setattr(
        pretrain, "install_callbacks", lambda trainer, *rest: (install(trainer, *rest), trainer.add_callback(Slow))
    )
    flags = dict(do_eval="true", eval_steps=1, eval_iters=1, max_steps=2, save_strategy="no")
    run(monkeypatch, tmp_path, **flags)
    second = [line for line in logged if "loss" in line][1]
    assert second["interval_runtime"] < 500 and since


BEST = dict(do_eval="true", eval_steps=1, save_steps=1, eval_iters=2, load_best_model_at_end="true", max_steps=3)


def test_the_best_weights_are_loaded_from_another_layouts_files(monkeypatch, tmp_path):
    """As of tensor parallel ranks: PaddleNLP looks for a file that is not there, and warns."""
    loaded, load = [], PretrainingTrainer.load_weights
    monkeypatch.setattr(
        PretrainingTrainer, "load_weights", lambda self, folder: loaded.append(folder) or load(self, folder)
    )
    other = iter([True])
    own = Trainer._set_state_dict_in_model
    monkeypatch.setattr(
        Trainer, "_set_state_dict_in_model", lambda self, state: next(other, False) and own(self, state)
    )
    run(monkeypatch, tmp_path / "own", **BEST)
    assert not loaded and not list(other)  # it was loaded from the run's own file
    monkeypatch.setattr(
        "paddle_te.hosts.paddlenlp.training.checkpointing.PADDLE_WEIGHTS_NAME", "model_state.tp00.pdparams"
    )
    run(monkeypatch, tmp_path / "other", **BEST)
    assert len(loaded) == 1 and loaded[0].startswith(str(tmp_path / "other/checkpoint-"))


def test_a_best_checkpoint_that_is_gone_is_told_before_work(monkeypatch, tmp_path, caplog):
    run(monkeypatch, tmp_path, **BEST)
    last = tmp_path / "checkpoint-3/trainer_state.json"
    best = json.loads(last.read_text())["best_model_checkpoint"]
    assert not best.endswith("checkpoint-3")
    shutil.rmtree(best)
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, **BEST | dict(max_steps=5), resume_from_checkpoint=3)
    assert "as the best checkpoint, which is not there" in caplog.text


@pytest.mark.parametrize("hybrid, differ", [(False, True), (True, False)])
def test_data_parallel_ranks_drop_other_numbers(hybrid, differ):
    drawn = []
    for rank in range(2):
        paddle.seed(3)
        draw_own_numbers(SimpleNamespace(world_size=2, use_hybrid_parallel=hybrid, seed=3, process_index=rank))
        drawn.append(paddle.rand([8]).tolist())
    assert (drawn[0] != drawn[1]) is differ
