import json
import logging
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.utils import unique_name
from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments
from paddlenlp.trainer.trainer_callback import ProgressCallback
from paddlenlp.transformers import LlamaForCausalLM

from paddle_te.hosts.paddlenlp.training.callbacks import install_callbacks
from paddle_te.hosts.paddlenlp.training.progress import ProgressBarCallback
from paddle_te.runs.checkpoints import STOPPED_MARK
from paddle_te.runs.convergence import TRAIN_LOG, TRAIN_SUMMARY
from paddle_te.runs.screen import TERMINAL
from paddle_te.training import throughput
from paddle_te.training.signals import ExitSignalCallback
from paddle_te.training.throughput import ThroughputCallback, exact_loss, model_flops_per_token, peak_tflops
from tests.sizes import TINY

SEQ_LENGTH = 32
CONFIG = TINY | dict(seq_length=SEQ_LENGTH)


class RandomTokens(paddle.io.Dataset):
    def __init__(self, seed, vocab_size=128, samples=64):
        tokens = np.random.default_rng(seed).integers(0, vocab_size, (samples, SEQ_LENGTH + 1))
        self.samples = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class RecordingTrainer(Trainer):
    """Keeps each step's loss as the model computed it."""

    def __init__(self, *args, **kwargs):
        self.step_losses = []
        super().__init__(*args, **kwargs)

    def _get_item_from_loss(self, loss):
        self.step_losses.append(super()._get_item_from_loss(loss))
        return self.step_losses[-1]


def make_trainer(tiny_config, output_dir, seed, exit_signal=None, kind=TrainingArguments, **overrides):
    settings = dict(
        output_dir=str(output_dir),
        do_train=True,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_steps=1000,
        learning_rate=1e-3,
        warmup_steps=2,
        device="cpu",
        seed=seed,
        report_to=["visualdl"],
        skip_memory_metrics=True,
    )
    arguments, data = kind(**{**settings, **overrides}), RandomTokens(seed, samples=256)
    model = LlamaForCausalLM(tiny_config())
    trainer = RecordingTrainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    install_callbacks(trainer, exit_signal)
    return trainer


def read_log(folder):
    return [json.loads(line) for line in (folder / TRAIN_LOG).read_text().splitlines()]


@pytest.fixture
def trained(tiny_config, tmp_path, seed):
    trainer = make_trainer(tiny_config, tmp_path, seed)
    trainer.train()
    return trainer, tmp_path


def test_train_log_has_every_step_with_exact_losses(trained):
    trainer, folder = trained
    records = read_log(folder)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["loss"] for record in records] == trainer.step_losses
    for record in records:
        assert set(record) == {"step", "loss", "lr", "tokens_per_second", "step_time", "peak_memory_bytes"}
        assert record["tokens_per_second"] * record["step_time"] == pytest.approx(2 * 2 * SEQ_LENGTH)
        assert record["peak_memory_bytes"] >= sum(4 * p.size for p in trainer.model.parameters())
    assert [record["lr"] for record in records] == pytest.approx([0, 5e-4, 1e-3, 5e-4])  # of 2 steps of warm-up, and 2


def test_summary(trained):
    trainer, folder = trained
    records, summary = read_log(folder), json.loads((folder / TRAIN_SUMMARY).read_text())
    steady = [record["step_time"] for record in records[1:]]
    assert summary["backend"] == "none" and summary["steps"] == 4 and summary["devices"] == 1
    assert summary["final_loss"] == records[-1]["loss"]
    assert summary["step_time"] == pytest.approx(sum(steady) / 3)
    assert summary["tokens_per_second"] == pytest.approx(2 * 2 * SEQ_LENGTH * 3 / sum(steady))
    flops = model_flops_per_token(trainer.model.config)
    assert summary["model_tflops_per_device"] == pytest.approx(summary["tokens_per_second"] * flops / 1e12)


def test_visualdl_receives_the_measurements(trained):
    from visualdl import LogReader

    trainer, folder = trained
    (log,) = (path for path in folder.rglob("vdlrecords*"))
    reader = LogReader(file_path=str(log))
    names = reader.get_tags()["scalar"]
    for metric in (
        "loss",
        "learning_rate",
        "tokens_per_second",
        "tokens_per_second_per_device",
        "samples_per_second",
        "step_time",
        "peak_memory_bytes",
        "model_tflops_per_device",
    ):
        assert f"train/{metric}" in names
    shown = [item.value for item in reader.get_data("scalar", "train/loss")]
    assert shown == pytest.approx(trainer.step_losses)


def test_lines_and_bar_show_loss_and_speed(tiny_config, tmp_path, seed, capfd, caplog, monkeypatch):
    monkeypatch.setenv(TERMINAL, "1")
    caplog.set_level(logging.INFO, "paddle_te")
    trainer = make_trainer(tiny_config, tmp_path, seed)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert ProgressBarCallback in kinds and ProgressCallback not in kinds
    trainer.train()
    loss = trainer.step_losses[-1]
    assert f"loss {loss:.4f}" in (error := capfd.readouterr().err) and "tokens/s" in error
    (line,) = [message for message in caplog.messages if message.startswith(f"step {trainer.state.max_steps}/")]
    assert f"loss {loss:.5f}" in line and "tokens/s" in line


def test_logging_every_second_step_logs_the_mean(tiny_config, tmp_path, seed):
    trainer = make_trainer(tiny_config, tmp_path, seed, logging_steps=2)
    trainer.train()
    records = read_log(tmp_path)
    assert [record["step"] for record in records] == [2, 4]
    np.testing.assert_allclose([record["loss"] for record in records], np.array(trainer.step_losses) / 2, atol=1e-8)
    for record in records:
        assert record["tokens_per_second"] * record["step_time"] == pytest.approx(2 * 2 * SEQ_LENGTH)


def test_resume_keeps_the_lines_before_it_and_replaces_the_rest(tiny_config, tmp_path, seed):
    with unique_name.guard():  # optimizer states are saved under names that Paddle counts per process
        make_trainer(tiny_config, tmp_path, seed, save_steps=2).train()
    before = read_log(tmp_path)
    with open(tmp_path / "train_log.jsonl", "a") as log:
        log.write('{"step": 5, "lo')  # a crash, or a full disk, in the middle of a line
    with unique_name.guard():
        resumed = make_trainer(tiny_config, tmp_path, seed, save_steps=2)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    after = read_log(tmp_path)
    assert after[:2] == before[:2]
    assert [record["step"] for record in after] == [1, 2, 3, 4]
    assert [record["loss"] for record in after[2:]] == resumed.step_losses
    assert after[2]["step_time"] != before[2]["step_time"]


def throughput_callback():
    callback = ThroughputCallback.of(SimpleNamespace(**CONFIG))
    callback.flops_per_token = 10**9
    return callback


class Run:
    """Drives a callback as the Trainer does, without one, by a clock of its own."""

    def __init__(self, callback, output_dir, monkeypatch):
        self.clock = SimpleNamespace(now=0.0)
        monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: self.clock.now))
        self.callback, self.control = callback, SimpleNamespace()
        self.state = SimpleNamespace(global_step=0, is_world_process_zero=True)
        self.args = SimpleNamespace(
            output_dir=str(output_dir),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            dataset_world_size=2,
            world_size=4,
        )
        self.send("on_train_begin")

    def send(self, event, **kwargs):
        getattr(self.callback, event)(self.args, self.state, self.control, **kwargs)

    def step(self, seconds, save_seconds=0.0, log=True):
        self.send("on_step_begin")
        self.clock.now += seconds
        self.state.global_step += 1
        self.send("on_step_end")
        if not log:
            return None
        logs = {"loss": 1.0, "learning_rate": 0.1}
        self.send("on_log", logs=logs)
        if save_seconds:
            self.clock.now += save_seconds
            self.send("on_save")
        return logs


def test_step_time_counts_training_and_not_saving(tmp_path, monkeypatch):
    run = Run(throughput_callback(), tmp_path, monkeypatch)
    run.step(0.02, save_seconds=1.0)
    logs = run.step(0.02)
    assert logs["step_time"] == pytest.approx(0.02)


def test_the_summary_counts_each_step_once(tmp_path, monkeypatch):
    """Also where the last interval has fewer steps than the others; the first is warm-up."""
    run = Run(throughput_callback(), tmp_path, monkeypatch)
    for seconds, log in [(9.0, False), (9.0, True), (0.1, False), (0.1, True), (0.4, True)]:
        run.step(seconds, log=log)
    run.send("on_train_end")
    assert json.loads((tmp_path / TRAIN_SUMMARY).read_text())["step_time"] == pytest.approx(0.6 / 3)


def test_speed_is_the_jobs_and_the_devices(tmp_path, monkeypatch):
    run = Run(throughput_callback(), tmp_path, monkeypatch)
    run.step(0.01)
    logs = run.step(0.05)
    exact = read_log(tmp_path)[-1]
    assert exact["tokens_per_second"] == pytest.approx(2 * 2 * SEQ_LENGTH / exact["step_time"])
    assert logs["tokens_per_second_per_device"] == pytest.approx(exact["tokens_per_second"] / 4, abs=0.1)
    assert logs["samples_per_second"] == pytest.approx(4 / exact["step_time"], abs=0.01)
    tflops = exact["tokens_per_second"] / 4 * 1e9 / 1e12
    assert logs["model_tflops_per_device"] == pytest.approx(tflops, abs=1e-4)


def test_other_logs_are_left_alone(tmp_path, monkeypatch):
    run = Run(throughput_callback(), tmp_path, monkeypatch)
    run.step(0.01)
    for logs in ({"eval_loss": 1.0}, {"train_loss": 1.0, "train_runtime": 2.0}):
        run.send("on_log", logs=(seen := dict(logs)))
        assert seen == logs
    assert len(read_log(tmp_path)) == 1


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    run = Run(throughput_callback(), tmp_path / "run", monkeypatch)
    (tmp_path / "run" / TRAIN_LOG).unlink()
    run.state.is_world_process_zero = False
    run.step(0.01)
    run.send("on_train_end")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    "flags, name",
    [
        ({}, "none"),
        ({"transformer_engine_backend": "none"}, "none"),
        ({"transformer_engine_backend": "paddle", "use_fp8": False}, "pd"),
        ({"transformer_engine_backend": "paddle", "use_fp8": True}, "pd-fp8"),
        ({"transformer_engine_backend": "transformer_engine", "use_fp8": True}, "te-fp8"),
    ],
)
def test_the_runs_name_is_its_backends(flags, name):
    assert ThroughputCallback.of(SimpleNamespace(**CONFIG, **flags)).backend == name


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flops_count_every_product_of_the_model(tiny_config, seed, kv_heads):
    config = tiny_config(num_key_value_heads=kv_heads)
    model = LlamaForCausalLM(config)
    products = [p.shape for name, p in model.named_parameters() if len(p.shape) == 2 and "embed_tokens" not in name]
    forward = sum(2 * rows * columns for rows, columns in products)
    query_keys = attention_values = 2 * SEQ_LENGTH * config.hidden_size
    forward += config.num_hidden_layers * (query_keys + attention_values)
    assert model_flops_per_token(config) == 3 * forward
    weights = sum(rows * columns for rows, columns in products)
    assert model_flops_per_token(config, lora=True) == 3 * forward - 2 * weights, "which have no gradients"


def test_exact_loss_undoes_the_trainers_rounding(seed):
    losses = np.random.default_rng(seed).uniform(0.125, 20, 10_000).astype(np.float32)
    assert [exact_loss(round(float(loss), 8), steps=1) for loss in losses] == losses.tolist()


@pytest.mark.parametrize(
    "name, fp8, peak",
    [
        ("NVIDIA H200", False, 989),
        ("NVIDIA H100 80GB HBM3", True, 1979),
        ("NVIDIA GB300", True, 5000),
        ("NVIDIA GH200 480GB", False, 989),
        ("NVIDIA A100-SXM4-80GB", False, 312),
        ("NVIDIA A100-SXM4-80GB", True, None),
        ("NVIDIA H100 PCIe", False, 756),
        ("NVIDIA L40S", False, 362),
        ("cpu", True, None),
    ],
)
def test_the_devices_peak(name, fp8, peak):
    assert peak_tflops(name, fp8) == peak


@pytest.mark.gpu
def test_the_gpus_name_is_the_drivers():
    if "nvgpu" not in paddle.device.get_all_custom_device_type() and not paddle.is_compiled_with_cuda():
        pytest.skip("this Paddle computes on no GPU")
    paddle.set_device("gpu" if paddle.is_compiled_with_cuda() else "nvgpu")
    try:
        assert throughput.device_name().startswith("NVIDIA ")
    finally:
        paddle.set_device("cpu")


def test_the_share_of_the_peak_is_logged_where_the_peak_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "device_name", lambda: "NVIDIA A100-SXM4-80GB")
    run = Run(throughput_callback(), tmp_path, monkeypatch)
    run.step(0.01)
    logs = run.step(0.01)
    assert logs["mfu"] == pytest.approx(logs["model_tflops_per_device"] / 312, abs=1e-4)
    run.send("on_train_end")
    summary = json.loads((tmp_path / TRAIN_SUMMARY).read_text())
    assert summary["mfu"] == pytest.approx(summary["model_tflops_per_device"] / 312)
    assert summary["device"] == "NVIDIA A100-SXM4-80GB"


@pytest.fixture
def exit_signal():
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGUSR1, signal.SIGTERM)}
    yield ExitSignalCallback()
    for signum, handler in before.items():
        signal.signal(signum, handler)


class SignalAt(TrainerCallback):
    """Sends this process SIGUSR1 during a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_saves_at_the_end_of_the_step_and_a_resumed_run_goes_on(tiny_config, tmp_path, seed, exit_signal):
    settings = dict(max_steps=4, logging_steps=3)
    with unique_name.guard():
        make_trainer(tiny_config, tmp_path / "whole", seed, **settings).train()
    with unique_name.guard():
        stopped = make_trainer(tiny_config, tmp_path / "run", seed, exit_signal=exit_signal, **settings)
        stopped.add_callback(SignalAt(2))
        stopped.train()
    assert stopped.state.global_step == 2 and (tmp_path / "run" / STOPPED_MARK).read_text() == "2\n"
    assert [record["step"] for record in read_log(tmp_path / "run")] == [2], "the loss up to there is not lost"
    with unique_name.guard():
        resumed = make_trainer(tiny_config, tmp_path / "run", seed, exit_signal=ExitSignalCallback(), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert resumed.state.global_step == 4 and not (tmp_path / "run" / STOPPED_MARK).exists()
    whole, rest = read_log(tmp_path / "whole"), read_log(tmp_path / "run")
    assert whole[0]["loss"] * 3 == pytest.approx(rest[0]["loss"] * 2 + rest[1]["loss"], rel=1e-6)


def test_a_signal_in_the_last_step_leaves_nothing_to_resume(tiny_config, tmp_path, seed, exit_signal):
    trainer = make_trainer(tiny_config, tmp_path, seed, max_steps=2, exit_signal=exit_signal)
    trainer.add_callback(SignalAt(2))
    trainer.train()
    assert exit_signal.stopping and not (tmp_path / STOPPED_MARK).exists()


LATE = """
import ctypes, signal, sys
from paddle_te.upstream import deferred_imports
deferred_imports.apply()  # as the commands do: it takes half as long
from paddle_te.training.signals import ExitSignalCallback
ExitSignalCallback()
libc = ctypes.CDLL(None)
libc.on_exit(getattr(libc, "raise"), None)  # called with the exit status: the signal comes when Python has ended
sys.exit(int(signal.SIGUSR1))
"""


def test_a_signal_while_the_process_ends_does_not_kill_it():
    """Slurm's is repeated every ten seconds; libraries take a while to end."""
    assert subprocess.run([sys.executable, "-c", LATE]).returncode == signal.SIGUSR1


def test_a_signal_while_the_ranks_agree_is_for_the_next_step(monkeypatch, exit_signal):
    """The other rank has said no before it came: this one must not stop alone, nor forget it."""
    said = []

    def all_reduce(flag, op):
        said.append(flag.item())
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr("paddle.distributed.all_reduce", all_reduce)
    assert not exit_signal._agreed(2)
    assert exit_signal._agreed(2) and said == [0, 1]
