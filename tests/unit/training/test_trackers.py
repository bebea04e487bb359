"""Logins of trackers, by their own libraries."""

from contextlib import nullcontext

import pytest

from paddle_te.training.trackers import check_logins
from tests.tracker_files import without_logins


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    with without_logins(tmp_path, monkeypatch):
        yield


@pytest.mark.parametrize("said, problem", [
    (dict(), "No API key configured."),
    (dict(WANDB_API_KEY="short"), "WANDB_API_KEY invalid: "),
    (dict(WANDB_MODE="ofline"), "1 validation error for Settings"),
])  # fmt: skip
def test_weights_and_biases_without_a_login(monkeypatch, said, problem):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^--report_to wandb: {problem}.* set WANDB_MODE=offline and upload the run"):
        check_logins(["visualdl", "wandb"], [], None)


def test_swanlab_without_a_login():
    with pytest.raises(ValueError, match=r"^--report_to swanlab: SwanLab has no API key; run swanlab login, set"):
        check_logins(["swanlab"], [], None)


def test_a_key_of_weights_and_biases_is_none_of_swanlab():
    check_logins(["wandb"], [], "key")
    with pytest.raises(ValueError, match="^--report_to swanlab"):
        check_logins(["wandb", "swanlab"], [], "key")


@pytest.mark.parametrize("installed, refused", [("wandb", True), ("swanlab", True), ("visualdl", False)])
def test_all_is_what_the_host_knows(installed, refused):
    with pytest.raises(ValueError, match=f"^--report_to {installed}") if refused else nullcontext():
        check_logins(["all"], ["tensorboard", installed], None)


@pytest.mark.parametrize("said", [
    dict(WANDB_MODE="offline", SWANLAB_MODE="offline"),
    dict(WANDB_MODE="disabled", SWANLAB_API_KEY="key"),
    dict(PADDLE_TRAINER_ID="1"),  # reports nothing
])  # fmt: skip
def test_runs_that_need_no_login_or_have_one(monkeypatch, said):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    check_logins(["wandb", "swanlab", "mlflow"], [], None)
