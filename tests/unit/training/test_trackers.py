"""Logins of trackers, by their own libraries."""

import pytest

from paddle_te.training.trackers import check_logins


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    """Who has no files of a login."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "WANDB_CONFIG_DIR", "SWANLAB_ROOT"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("NETRC", "WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE", "PADDLE_TRAINER_ID"):
        monkeypatch.delenv(name, raising=False)
    import wandb

    yield
    wandb.teardown()


@pytest.mark.parametrize("said, problem", [
    (dict(), "No API key configured."),
    (dict(WANDB_API_KEY="short"), "WANDB_API_KEY invalid: "),
    (dict(WANDB_MODE="ofline"), "1 validation error for Settings"),
])  # fmt: skip
def test_weights_and_biases_without_a_login(monkeypatch, said, problem):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^--report_to wandb: {problem}.* set WANDB_MODE=offline and upload the run"):
        check_logins(["visualdl", "wandb"])


def test_swanlab_without_a_login():
    with pytest.raises(ValueError, match=r"^--report_to swanlab: SwanLab has no API key; run swanlab login, set"):
        check_logins(["swanlab"])


@pytest.mark.parametrize("said", [
    dict(WANDB_MODE="offline", SWANLAB_MODE="offline"),
    dict(WANDB_MODE="disabled", SWANLAB_API_KEY="key"),
    dict(PADDLE_TRAINER_ID="1"),  # reports nothing
])  # fmt: skip
def test_runs_that_need_no_login_or_have_one(monkeypatch, said):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    check_logins(["wandb", "swanlab", "mlflow"])
