"""training.health: nothing that is not finite is trained on or saved, and what --on_nan makes of it."""

import json
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddlenlp.trainer import Trainer

from paddle_te.hosts.paddlenlp.training import health, pretrain
from paddle_te.hosts.paddlenlp.training.health import FEWEST_LOSSES, Spikes, not_finite
from paddle_te.hosts.paddlenlp.training.trainer import PretrainingTrainer
from paddle_te.runs import rollback
from paddle_te.runs.checkpoints import complete_checkpoints
from paddle_te.runs.rollback import ROLLED_BACK
from tests.end_to_end.training.injection import Injection, replaced
from tests.pretraining import ON_MOCK_DATA, numbers, words

ROOT = Path(__file__).parents[3]
COMMON = ON_MOCK_DATA | dict(model_name_or_path=ROOT / "tests/model", max_seq_length=16, max_steps=4, save_steps=1)
BACKENDS = {
    "none": dict(transformer_engine_backend="none"),
    "pd": dict(transformer_engine_backend="paddle"),
    "pd-fused": dict(transformer_engine_backend="paddle", use_fused_linear_cross_entropy="true"),
    "pd-fp8": dict(transformer_engine_backend="paddle", use_fp8="true", fp8_amax_history_len=4),
}
BAD_STEP = 3


@pytest.fixture
def train(monkeypatch, tmp_path, caplog):
    """train(injection, folder below tmp_path, **flags) runs pretraining in this process; returns its exit status."""

    def run(injection=None, output="out", **flags):
        flags = COMMON | flags | dict(output_dir=tmp_path / output)
        caplog.clear()
        with monkeypatch.context() as patch, paddle.utils.unique_name.guard():
            patch.setattr(sys, "argv", ["run_pretrain.py", *words(flags)])
            if injection:
                injection.install(patch.setattr)
            try:
                pretrain.main()
            except SystemExit as ended:
                return ended.code
        return 0

    return run


def saved(folder):
    return [step for step, _ in complete_checkpoints(folder)]


def weights(folder, step):
    return {
        name: value.numpy()
        for name, value in paddle.load(str(folder / f"checkpoint-{step}/model_state.pdparams")).items()
    }


INJECTIONS = [
    ("loss", float("nan"), "the loss is nan"),
    ("loss", float("inf"), "the loss is inf"),
    ("gradient", float("nan"), "the gradient norm is nan"),
    ("gradient", float("-inf"), "the gradient norm is "),
    ("weight", float("nan"), "layers.1"),
    ("weights", float("nan"), "llama.embed_tokens.weight is not finite, nor are"),
    ("optimizer state", float("nan"), "llama.embed_tokens.weight is not finite"),
    ("saved weight", float("nan"), "layers.1"),
]
CASES = [
    *(("pd", *injection) for injection in INJECTIONS),
    *((backend, *INJECTIONS[i]) for backend in ("none", "pd-fused") for i in (2, 4, 5, 6)),
    *(("pd-fp8", *INJECTIONS[i]) for i in (2, 5)),
]


@pytest.mark.parametrize("backend, what, value, message", CASES)
def test_nothing_is_saved_that_is_not_finite(train, tmp_path, caplog, backend, what, value, message):
    assert train(Injection(what, value), **BACKENDS[backend]) == 1
    (line,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith(f"step {BAD_STEP}: ") and message in line and "\n" not in line
    assert f"the last good checkpoint is {tmp_path / 'out/checkpoint-2'}" in line
    assert saved(tmp_path / "out") == [1, 2]
    assert all(np.isfinite(value).all() for value in weights(tmp_path / "out", 2).values())
    assert not (tmp_path / "out/checkpoint-3").exists()


def without_step(losses, step):
    return {number: loss for number, loss in losses.items() if number != step}


def test_a_bad_step_that_has_updated_weights_in_backward_is_not_saved(train, tmp_path, caplog):
    flags = dict(optimizer_in_backward="last_norm", gradient_accumulation_steps=1, transformer_engine_backend="paddle")
    assert train(Injection("loss"), **flags) == 1
    assert "the loss is nan, and weights have been updated by it (--optimizer_in_backward)" in caplog.text
    assert saved(tmp_path / "out") == list(range(1, BAD_STEP))


@pytest.mark.parametrize("backend", ["none", "pd", "pd-fp8"])
def test_a_step_left_out_changes_nothing(train, tmp_path, backend):
    """Weights, moments, fp8 scales and the schedule are those of a run that never had the step: of one that goes on
    from the checkpoint before it with the data of the step skipped."""
    injection, flags = Injection("loss"), dict(max_steps=5, logging_steps=1, warmup_steps=4) | BACKENDS[backend]
    assert train(injection, on_nan="skip", **flags) == 0
    records = log(tmp_path / "out")
    assert set(records) == {1, 2, 4, 5}  # no loss of step 3 in the log
    assert injection.rates[3] == injection.rates[2] < injection.rates[4]
    summary = json.loads((tmp_path / "out/train_summary.json").read_text())
    assert summary["skipped_steps"] == 1 and summary["rollbacks"] == []

    assert train(None, "two", **flags | dict(max_steps=2, decay_steps=5)) == 0
    (tmp_path / "two/rollbacks.json").write_text('[{"good": 2, "bad": 3, "reason": "told by a test"}]')
    assert train(None, "two", **flags, resume_from_checkpoint="auto") == 0
    assert records == log(tmp_path / "two")
    assert numbers(tmp_path / "out") == numbers(tmp_path / "two")


def log(folder):
    """{step: loss} of train_log.jsonl."""
    lines = map(json.loads, (folder / "train_log.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def test_a_mean_over_several_steps_leaves_the_bad_one_out(train, tmp_path):
    assert train(Injection("loss"), on_nan="skip", logging_steps=4) == 0
    assert train(None, "each") == 0
    each = log(tmp_path / "each")
    (mean,) = log(tmp_path / "out").values()
    assert abs(mean - (each[1] + each[2] + each[4]) / 3) < 2e-3  # step 4 has other weights
    (line,) = map(json.loads, (tmp_path / "out/train_log.jsonl").read_text().splitlines())
    assert line["skipped_steps"] == 1


@pytest.mark.parametrize("logging_steps", [1, 3])
def test_what_is_logged_is_known_without_a_second_wait(train, monkeypatch, logging_steps):
    """PaddleNLP's number, the same, is not read from the device, where it would come behind AdamW."""
    ours, read = PretrainingTrainer._get_item_from_loss, []
    logged = []

    def both(trainer, losses):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_get_item_from_loss", lambda _, losses: read.append(losses) or losses.item())
            number = ours(trainer, losses)
        logged.append((number, losses.item()))
        return number

    monkeypatch.setattr(PretrainingTrainer, "_get_item_from_loss", both)
    flags = dict(max_steps=6, logging_steps=logging_steps, gradient_accumulation_steps=2)
    assert train(Injection("loss"), on_nan="skip", **flags) == 0
    # where all that was to be logged is a step that was left out, there is no number to know
    assert len(read) == (logging_steps == 1) and len(logged) == 6 // logging_steps
    assert all(number == on_device for number, on_device in logged)


def test_so_many_in_a_row_end_the_run(train, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(health, "MOST_SKIPPED", 3)
    injection = Injection("gradient", steps=range(2, 9))
    assert train(injection, on_nan="skip", max_steps=8) == 1
    assert "step 5: the gradient norm is nan; 3 steps before it are left out already" in caplog.text
    assert train(Injection("gradient", steps=(2, 3, 4, 6, 7)), "two", on_nan="skip", max_steps=8) == 0


def test_weights_that_are_broken_cannot_be_skipped(train, tmp_path, caplog):
    assert train(Injection("weight"), on_nan="skip") == 1
    assert saved(tmp_path / "out") == [1, 2] and "before its update" in caplog.text


def test_a_rollback_goes_past_the_broken_batches(train, tmp_path, caplog):
    flags = dict(max_steps=8, save_steps=2, on_nan="rollback")
    assert train(Injection("weight", steps=[5]), **flags) == ROLLED_BACK
    assert "Back to" in caplog.text and "past the batches of steps 5 to 5" in caplog.text
    assert saved(tmp_path / "out") == [2, 4]
    assert train(Injection("gradient", steps=[7]), **flags, resume_from_checkpoint="auto") == ROLLED_BACK
    assert "steps 5 to 5 are left out" in caplog.text
    assert train(None, **flags, resume_from_checkpoint="auto") == 0
    assert set(log(tmp_path / "out")) == {1, 2, 3, 4, 6, 8}
    summary = json.loads((tmp_path / "out/train_summary.json").read_text())
    assert [(back["good"], back["bad"]) for back in summary["rollbacks"]] == [(4, 5), (6, 7)]


def test_a_rollback_over_the_last_step_saves_the_end(train, tmp_path):
    flags = dict(max_steps=4, save_steps=2, on_nan="rollback")
    assert train(Injection("gradient", steps=[4]), **flags) == ROLLED_BACK
    assert train(None, **flags, resume_from_checkpoint="auto") == 0
    assert saved(tmp_path / "out") == [2, 4]


def test_rollbacks_that_do_not_help_end_the_run(train, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(rollback, "MOST", 1)
    flags = dict(max_steps=6, save_steps=2, on_nan="rollback")
    always = Injection("gradient", steps=range(3, 7))
    assert train(always, **flags) == ROLLED_BACK
    assert train(always, **flags, resume_from_checkpoint="auto") == 1
    assert "1 rollbacks to it have not helped" in caplog.text


def test_a_rollback_without_a_checkpoint_begins_anew(train, tmp_path):
    flags = dict(max_steps=4, save_steps=4, on_nan="rollback")
    assert train(Injection("gradient", steps=[2]), **flags) == ROLLED_BACK
    assert train(None, **flags, resume_from_checkpoint="auto") == 0
    assert set(log(tmp_path / "out")) == {3, 4}
    (tmp_path / "out/checkpoint-4").rename(tmp_path / "moved")
    assert train(None, **flags) == 0  # a new run in the same folder
    assert set(log(tmp_path / "out")) == {1, 2, 3, 4}


def test_a_spike_is_treated_as_on_nan_says(train, tmp_path, caplog):
    spike = Injection("loss", value=50.0, steps=[13])
    flags = dict(max_steps=14, save_steps=20)
    assert train(spike, **flags) == 0  # off by default
    assert train(spike, "on", spike_factor=1.5, **flags) == 1
    assert "step 13: the loss of 5" in caplog.text and "over 1.5 times 4." in caplog.text


def test_spikes_stay_out_of_the_median():
    spikes = Spikes(2.0)
    assert not any(spikes.fault(1.0) for _ in range(FEWEST_LOSSES))
    assert all(spikes.fault(2.5) for _ in range(200))
    assert spikes.fault(1.9) is None
    assert not any(Spikes(None).fault(loss) for loss in [1.0] * 20 + [1e30])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_element_of_every_tensor_counts(dtype, seed):
    generator = np.random.default_rng(seed)
    tensors = {str(i): paddle.to_tensor(generator.normal(size=(7, 5)).astype("float32")) for i in range(6)}
    tensors["whole numbers"], tensors["empty"] = paddle.arange(3), paddle.zeros([0, 4])
    tensors["huge, whose squares are infinite"] = paddle.full([3], 3e38 if dtype != "float16" else 6e4)
    tensors = {name: t.astype(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    assert not_finite(tensors.items()) == []
    for name, value in ("1", np.nan), ("4", -np.inf):
        broken = replaced(tensors[name].astype("float32").numpy(), value)
        tensors[name] = paddle.to_tensor(broken).astype(dtype)
    assert not_finite(tensors.items()) == ["1", "4"]


@pytest.mark.parametrize("flags, message", [
    (dict(on_nan="ignore"), "it must be one of stop, skip, rollback"),
    (dict(spike_factor="nan"), "--spike_factor nan: it must be a number above 1"),
    (dict(spike_factor=1), "--spike_factor 1.0: it must be a number above 1"),
])  # fmt: skip
def test_flags_that_mean_nothing_are_refused(train, caplog, flags, message):
    assert train(**flags) == 2 and message in caplog.text
