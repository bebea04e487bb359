"""Experiment trackers: logins, before a run, and SwanLab and MLflow, of which the hosts have no callback that works."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any, Protocol

from paddle_te.training.callback import Callback

PROJECT = "paddle_te"  # where the user names none
_EVALUATION = "eval_"


def check_logins(names: Collection[str], every: Iterable[str], wandb_api_key: str | None) -> None:
    """Raise ValueError for a tracker that cannot log in: its library would end the start of training.

    Asks the job's first process, the only one that reports. A terminal is asked for Weights & Biases' key.

    names: --report_to's. every: those that the host takes for "all", the installed ones that it knows. wandb_api_key:
    the host logs in to Weights & Biases with it.
    """
    if os.environ.get("PADDLE_TRAINER_ID", "0") != "0":
        return
    asked = {*(every if "all" in names else names)}
    if "wandb" in asked and not wandb_api_key:
        _log_in_to_wandb()
    if "swanlab" in asked:
        _find_key_of_swanlab()


def _log_in_to_wandb() -> None:
    import wandb

    try:
        wandb.login(verify=False)  # offline and disabled modes need no key
    except (wandb.errors.Error, ValueError) as error:
        raise ValueError(
            f"--report_to wandb: {' '.join(str(error).split())} Run wandb login, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline and upload the run later with wandb sync; or name other trackers"
        ) from error


def _find_key_of_swanlab() -> None:
    import swanlab

    settings = swanlab.Settings()
    if settings.mode == "online" and not settings.api_key:
        raise ValueError(
            "--report_to swanlab: SwanLab has no API key; run swanlab login, set SWANLAB_API_KEY, or set "
            "SWANLAB_MODE=offline and upload the run later with swanlab sync; or name other trackers"
        )


class Tracker(Protocol):
    """An experiment tracker's run."""

    def start(self, name: str | None, folder: str, settings: dict[str, Any]) -> None:
        """Open the run. name: None lets the tracker choose one. folder: for what it keeps on this machine."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Record the values of a step."""

    def finish(self) -> None:
        """Close the run."""


class SwanLab:
    """SwanLab's run; its environment variables (SWANLAB_PROJECT, SWANLAB_MODE and others) apply."""

    def start(self, name: str | None, folder: str, settings: dict[str, Any]) -> None:
        """See `Tracker`."""
        import swanlab

        project = os.environ.get("SWANLAB_PROJECT", PROJECT)
        folder = os.environ.get("SWANLAB_LOG_DIR", folder)
        self._run = swanlab.init(project=project, experiment_name=name, logdir=folder, config=settings)

    def log(self, values: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        self._run.log(values, step=step)

    def finish(self) -> None:
        """See `Tracker`."""
        self._run.finish()


class MLflow:
    """MLflow's run; its environment variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID) apply."""

    def start(self, name: str | None, folder: str, settings: dict[str, Any]) -> None:
        """See `Tracker`."""
        import mlflow

        self._mlflow = mlflow
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"} & os.environ.keys():
            mlflow.set_experiment(PROJECT)
        mlflow.start_run(run_id=os.environ.get("MLFLOW_RUN_ID"), run_name=name)
        most = 6000  # MLflow refuses a longer value, or one whose parameter another start has set otherwise
        mlflow.set_tags({key: str(value)[:most] for key, value in settings.items()})

    def log(self, values: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        self._mlflow.log_metrics(values, step=step)

    def finish(self) -> None:
        """See `Tracker`."""
        self._mlflow.end_run()


TRACKERS: dict[str, type[Tracker]] = {"swanlab": SwanLab, "mlflow": MLflow}


class TrackerCallback(Callback):
    """Sends the Trainer's logs to a tracker, from the first process of the job.

    It must come behind the callbacks that add to the logs. What is logged outside of training, such as a test's
    results, goes to no tracker, as with the hosts' callback for VisualDL. A run that ends with an error stays open:
    the tracker's library marks it as crashed when the process ends.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._open = False  # only in the job's first process

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the run, with the Trainer's arguments as its settings."""
        if state.is_world_process_zero:
            name = args.run_name if args.run_name != args.output_dir else None
            os.makedirs(args.logging_dir, exist_ok=True)
            self._tracker.start(name, args.logging_dir, args.to_sanitized_dict())
            self._open = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the numbers of a log line."""
        if self._open:
            self._tracker.log(tracked_values(logs), state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the run."""
        if self._open:
            self._tracker.finish()
            self._open = False


def tracker_callbacks(names: Iterable[str]) -> list[TrackerCallback]:
    """Return a callback for each name of TRACKERS among the names."""
    return [TrackerCallback(TRACKERS[name]()) for name in names if name in TRACKERS]


def tracked_values(logs: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a log line under train/ and eval/, the names that the hosts' callbacks give them."""
    return {
        "eval/" + name.removeprefix(_EVALUATION) if name.startswith(_EVALUATION) else "train/" + name: float(value)
        for name, value in logs.items()
        if isinstance(value, int | float)
    }
