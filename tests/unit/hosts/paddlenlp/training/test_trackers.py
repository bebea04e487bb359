"""Each tracker's own library, without a network, gets what VisualDL gets."""

import struct
from pathlib import Path

import pytest

from paddle_te.hosts.paddlenlp.training.arguments import PreTrainingArguments
from tests.unit.hosts.paddlenlp.training.test_callbacks import make_trainer


def tensorboard(folder):
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.rglob("events.out.tfevents.*")
    content, place, values = path.read_bytes(), 0, []
    while place < len(content):  # length, its checksum, the event, its checksum
        (length,) = struct.unpack_from("<Q", content, place)
        event = Event.FromString(content[place + 12 : place + 12 + length])
        values += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        place += length + 16
    return values


def wandb(folder):
    import json

    import wandb
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.finish()  # PaddleNLP leaves that to the end of the process
    wandb.teardown()
    (path,) = folder.rglob("run-*.wandb")
    values = []
    with WBDataStoreReader() as reader:
        reader.open(path)
        while (record := reader.scan()) is not None:
            items = Record.FromString(record).history.item
            line = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            values += [(line["train/global_step"], name, value) for name, value in line.items()]
    return values


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


EVALUATED = dict(kind=PreTrainingArguments, evaluation_strategy="steps", eval_steps=2, per_device_eval_batch_size=64)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONSOLE", "off")  # else it reads what later tests write
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)  # MLflow sets it for the processes that a run starts
    monkeypatch.setenv("MLFLOW_TRACKING_URI", Path(tmp_path, "mlruns").as_uri())


@pytest.mark.parametrize("read", [tensorboard, wandb, swanlab, mlflow])
def test_a_tracker_gets_what_visualdl_gets(tiny_config, tmp_path, seed, offline, read):
    trainer = make_trainer(tiny_config, tmp_path, seed, report_to=[read.__name__], **EVALUATED)
    trainer.train()
    values = read(tmp_path)
    assert [value for _, name, value in values if name == "train/loss"] == pytest.approx(trainer.step_losses)
    for name in ("learning_rate", "tokens_per_second", "model_tflops_per_device", "peak_memory_bytes"):
        assert [step for step, other, _ in values if other == f"train/{name}"] == [1, 2, 3, 4]
    assert [step for step, name, _ in values if name == "eval/loss"] == [2, 4]


@pytest.mark.parametrize("read", [swanlab, mlflow])
def test_an_evaluation_after_training_opens_no_other_run(tiny_config, tmp_path, seed, offline, read):
    trainer = make_trainer(tiny_config, tmp_path, seed, report_to=[read.__name__], **EVALUATED)
    trainer.train()
    trainer.evaluate()
    assert [step for step, name, _ in read(tmp_path) if name == "eval/loss"] == [2, 4]
