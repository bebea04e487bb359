"""Runs of SwanLab and MLflow without a network: where they go, and [(step, name, value)] that they hold."""

from contextlib import contextmanager
from pathlib import Path


def without_network(folder, monkeypatch):
    """Let SwanLab and MLflow keep runs in a folder, also those of a process that goes on."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)  # MLflow sets it for the processes that a run starts
    monkeypatch.setenv("MLFLOW_TRACKING_URI", Path(folder, "mlruns").as_uri())


@contextmanager
def without_logins(folder, monkeypatch):
    """Let trackers' libraries find no login, in files or the environment, while it lasts."""
    import wandb

    monkeypatch.chdir(folder)
    for name in ("HOME", "WANDB_CONFIG_DIR", "SWANLAB_ROOT"):
        monkeypatch.setenv(name, str(folder))
    for name in ("NETRC", "WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE", "PADDLE_TRAINER_ID"):
        monkeypatch.delenv(name, raising=False)
    yield
    wandb.teardown()  # it keeps what it has read of them


def swanlab(folder):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (path,) = folder.rglob("run-*.swanlab")
    reader, values = DataStoreReader(), []
    reader.open(path)
    for content in reader:
        scalar = Record.FromString(content).scalar
        values += [(scalar.step, scalar.key, scalar.value.number)] if scalar.key else []
    return values


def mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'paddle_te'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.tags["learning_rate"] == "0.001"
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    return [(point.step, point.key, point.value) for history in histories for point in history]
