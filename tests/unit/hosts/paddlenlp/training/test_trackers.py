"""Each tracker's own library, without a network, gets what VisualDL gets."""

import struct

import pytest

from paddle_te.hosts.paddlenlp.training.arguments import PreTrainingArguments
from tests.tracker_files import mlflow, swanlab, without_network
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


EVALUATED = dict(kind=PreTrainingArguments, evaluation_strategy="steps", eval_steps=2, per_device_eval_batch_size=64)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONSOLE", "off")  # else it reads what later tests write
    without_network(tmp_path, monkeypatch)


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
