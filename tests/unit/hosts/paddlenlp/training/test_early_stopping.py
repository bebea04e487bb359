"""When training ends early, in runs of run_pretrain.py's main function, and after a resume."""

import json

import pytest

from paddle_te.hosts.paddlenlp.training.early_stopping import without_improvement
from tests.pretraining import run


@pytest.mark.parametrize(
    "values, greater, count",
    [
        ([], False, 0),
        ([3], False, 0),
        ([3, 2, 1], False, 0),
        ([3, 2, 2, 4], False, 2),
        ([3, 1, 2, 1.5, 0.5], False, 0),
        ([0.1, 0.3, 0.2, float("nan")], True, 2),
        ([0.1, 0.2], True, 0),
    ],
)
def test_without_improvement(values, greater, count):
    assert without_improvement(values, greater) == count


def evaluations(output):
    state = json.loads(sorted(output.glob("checkpoint-*"))[-1].joinpath("trainer_state.json").read_text())
    return [entry["step"] for entry in state["log_history"] if "eval_loss" in entry]


EVALUATING = dict(do_eval="true", eval_steps=1, eval_iters=1)
NEVER = EVALUATING | dict(learning_rate=1e-30, min_learning_rate=0)  # no weight changes, hence no loss


def test_a_run_ends_and_is_finished(monkeypatch, tmp_path, caplog):
    flags = dict(max_steps=9, save_steps=100, early_stopping_patience=2)
    losses = run(monkeypatch, tmp_path, **NEVER, **flags)
    assert (
        list(losses) == [1, 2, 3] and "2 evaluations in a row was no better: training ends after step 3" in caplog.text
    )
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    before = (tmp_path / "train_log.jsonl").read_text()
    run(monkeypatch, tmp_path, **NEVER, **flags, resume_from_checkpoint="auto")
    assert "the run has ended; nothing is trained" in caplog.text
    assert (tmp_path / "train_log.jsonl").read_text() == before


def test_a_resumed_run_counts_on(monkeypatch, tmp_path):
    flags = dict(save_steps=2, early_stopping_patience=3, decay_steps=9)
    run(monkeypatch, tmp_path, **NEVER, **flags, max_steps=2)
    losses = run(monkeypatch, tmp_path, **NEVER, **flags, max_steps=9, resume_from_checkpoint="auto")
    assert list(losses) == [1, 2, 3, 4] and evaluations(tmp_path) == [1, 2, 3, 4]


def test_a_run_that_improves_goes_on(monkeypatch, tmp_path):
    flags = EVALUATING | dict(early_stopping_patience=6)
    assert list(run(monkeypatch, tmp_path, **flags, save_strategy="no")) == [1, 2, 3, 4, 5, 6]
