"""The lines and the progress bar of a training."""

import logging
from types import SimpleNamespace

import pytest
from paddlenlp.trainer import TrainerControl, TrainerState

from paddle_te.hosts.paddlenlp.training.progress import ProgressBarCallback
from paddle_te.runs import screen
from paddle_te.runs.lines import step_values
from paddle_te.training.lines import LinesCallback

ARGUMENTS = SimpleNamespace(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=3,
    dataset_world_size=4,
    world_size=8,
    device="nvgpu:0",
    output_dir="out",
)
LOGS = dict(loss=8.3675, learning_rate=2e-6, tokens_per_second=21900.4)


def train(callback, first=True):
    """Two steps after the fifth, of the job's first process or another, each with the Trainer's logs."""
    state = TrainerState(max_steps=7, global_step=5, is_world_process_zero=first, is_local_process_zero=True)
    control = TrainerControl()
    callback.on_train_begin(ARGUMENTS, state, control)
    for state.global_step in (6, 7):
        callback.on_step_end(ARGUMENTS, state, control)
        callback.on_log(ARGUMENTS, state, control, logs=dict(LOGS))
    callback.on_log(ARGUMENTS, state, control, logs=dict(eval_loss=8.25))
    callback.on_log(ARGUMENTS, state, control, logs=dict(train_runtime=3.0))
    callback.on_train_end(ARGUMENTS, state, control)


def test_the_first_process_says_where_training_is(caplog):
    caplog.set_level(logging.INFO, "paddle_te")
    train(LinesCallback("te-fp8", 128))
    values = "loss 8.36750, learning rate 2e-06, 21,900 tokens/s"
    assert caplog.messages == [
        "training steps 6 to 7, each of 24 sequences of 128 tokens, with backend te-fp8 on 8 x nvgpu",
        f"step 6/7: {values}",
        f"step 7/7: {values}",
        "evaluation after step 7: loss 8.25000",
        "training ended after step 7; its files are in out",
    ]


def test_other_processes_say_nothing(caplog):
    caplog.set_level(logging.INFO, "paddle_te")
    train(LinesCallback("te", 128), first=False)
    assert not caplog.messages


def test_every_value_has_its_unit():
    more = dict(step_time=0.3054, mfu=0.4567, peak_memory_bytes=3 * 2**29, skipped_steps=2, something_else=1)
    said = "0.305 s a step, MFU 45.7%, at most 1.50 GiB, 2 steps left out"
    assert step_values(more) == said


@pytest.mark.parametrize("first, terminal", [(True, True), (True, False), (False, True)])
def test_the_bar_is_the_first_processs_on_a_terminal(monkeypatch, capfd, first, terminal):
    """Also where the launcher copies its output there, which sets the variable."""
    monkeypatch.setenv(screen.TERMINAL, "1" if terminal else "")
    train(ProgressBarCallback(), first)
    error = capfd.readouterr().err
    assert ("7/7" in error and "loss 8.3675, 21900 tokens/s" in error) == (first and terminal), error
