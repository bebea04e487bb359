"""run_pretrain.py's main function in this process: a small model on mock data and the CPU."""

import json
import sys
from pathlib import Path

import numpy as np
import paddle
from paddlenlp.trainer import Trainer

from paddle_te.hosts.paddlenlp.training import pretrain
from paddle_te.hosts.paddlenlp.training.trainer import PretrainingTrainer
from paddle_te.manifest import STATE_SUFFIXES
from paddle_te.runs.checkpoints import complete_checkpoints

ON_MOCK_DATA = dict(
    tokenizer_name_or_path="none",
    mock_data="true",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    logging_steps=1,
    disable_tqdm="true",
    report_to="none",
    device="cpu",
    do_train="true",
)
FLAGS = ON_MOCK_DATA | dict(
    model_name_or_path="tiny-llama-demo", max_seq_length=32, max_steps=6, save_steps=3, warmup_steps=2, seed=7
)


def words(flags):
    """As they stand on a command line."""
    return [str(word) for key, value in flags.items() for word in (f"--{key}", value)]


def command(output, **flags):
    """The words behind the script's name."""
    return words(FLAGS | flags | dict(output_dir=output))


def run(monkeypatch, output, **flags):
    """Pretrains, and returns the losses of the run's log."""
    monkeypatch.setattr(sys, "argv", ["run_pretrain.py", *command(output, **flags)])
    with paddle.utils.unique_name.guard():  # parameters are named as in a new process
        pretrain.main()
    return losses(output)


def watch_samples(monkeypatch):
    """A list that gets {step: [what each row of the step's micro-batches holds]} of each run from now on."""
    runs, begin, step = [], Trainer.train, PretrainingTrainer.training_step

    def train(self, *args, **kwargs):
        runs.append({})
        return begin(self, *args, **kwargs)

    def training_step(self, model, inputs, step_control=0):
        rows = [row.tobytes() for row in inputs["input_ids"].numpy()]
        runs[-1].setdefault(self.state.global_step + 1, []).extend(rows)
        return step(self, model, inputs, step_control)

    monkeypatch.setattr(Trainer, "train", train)
    monkeypatch.setattr(PretrainingTrainer, "training_step", training_step)
    return runs


def losses(output):
    """{step: loss} of the log that a run has left."""
    lines = map(json.loads, (Path(output) / "train_log.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def numbers(output):
    """{file and name: (dtype, shape, bytes)} of the newest complete checkpoint: weights, moments, schedule, scales; of
    other state files than Paddle's {file: bytes}. Dicts' order does not count: overlapping ranks differ in it."""
    found, (_, newest) = {}, complete_checkpoints(output)[-1]

    def collect(name, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{name} {key}", inner)
        else:
            array = np.asarray(value)
            found[name] = array.dtype.str, array.shape, array.tobytes()

    for path in newest.rglob("*"):
        if path.suffix in (".pdparams", ".pdopt"):
            collect(path.name, paddle.load(str(path), return_numpy=True))
        elif path.suffix in STATE_SUFFIXES:
            found[path.name] = path.read_bytes()
    return found
