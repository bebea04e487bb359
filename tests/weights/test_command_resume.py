"""Training goes on from a converted checkpoint with its optimizer: the other backend's losses, then its own again."""

import json
import sys

import paddle
import pytest

from paddle_te.training import pretrain
from paddle_te.weights import convert

FLAGS = dict(
    model_name_or_path="tiny-llama-demo",
    tokenizer_name_or_path="none",
    mock_data="true",
    max_seq_length=32,
    per_device_train_batch_size=2,
    max_steps=6,
    save_steps=3,
    learning_rate=1e-3,
    warmup_steps=2,
    logging_steps=1,
    disable_tqdm="true",
    report_to="none",
    device="cpu",
    seed=7,
    do_train="true",
)


def train(monkeypatch, output, backend, **flags):
    """The losses of a run of the script in this process."""
    flags = FLAGS | flags | dict(output_dir=output, transformer_engine_backend=backend)
    words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    monkeypatch.setattr(sys, "argv", ["run_pretrain.py", *words])
    with paddle.utils.unique_name.guard():  # parameters are named as in a new process
        pretrain.main()
    lines = map(json.loads, (output / "train_log.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize("unified", [False, True])
def test_losses_go_on(monkeypatch, tmp_path, unified):
    flags = dict(unified_checkpoint="true") if unified else {}
    whole = train(monkeypatch, tmp_path / "whole", "none", **flags)
    assert sorted(whole) == list(range(1, 7)) and len(set(whole.values())) == 6

    checkpoint = tmp_path / "whole" / "checkpoint-3"
    te, back = tmp_path / "te", tmp_path / "back"
    convert(checkpoint, te, "pd2te", with_optimizer=True, progress=False)
    resume = dict(unified_checkpoint="true")
    other = train(monkeypatch, tmp_path / "other", "paddle", resume_from_checkpoint=te, **resume)
    assert sorted(other) == [4, 5, 6]
    for step, loss in other.items():
        assert loss == pytest.approx(whole[step], rel=1e-5), step

    # a fresh optimizer would show: this bound is far below what it changes
    fresh = train(monkeypatch, tmp_path / "fresh", "paddle", te_init_weight_path=te)
    assert abs(fresh[2] - whole[5]) > 1e-4 * whole[5]

    convert(te, back, "te2pd", with_optimizer=True, progress=False)
    again = train(monkeypatch, tmp_path / "again", "none", resume_from_checkpoint=back, **resume)
    assert again == {step: whole[step] for step in (4, 5, 6)}


def test_what_cannot_be_resumed_as_it_is_is_refused(monkeypatch, tmp_path, caplog):
    """A unified checkpoint without the flag, and another layout's: PaddleNLP would start with a fresh optimizer, or
    load what it finds."""
    train(monkeypatch, tmp_path / "first", "none", max_steps=3)
    checkpoint = tmp_path / "first" / "checkpoint-3"
    convert(checkpoint, tmp_path / "unified", "reshard", tensor_parallel_degree=1, with_optimizer=True, progress=False)
    convert(checkpoint, tmp_path / "tp2", "reshard", tensor_parallel_degree=2, progress=False)
    for name in ("tp2", "unified"):
        (tmp_path / name / ".checkpoint_done").touch()
        (tmp_path / name / "trainer_state.json").write_text('{"global_step": 3}')
        with pytest.raises(SystemExit) as stop:
            train(monkeypatch, tmp_path / "other", "none", resume_from_checkpoint=tmp_path / name)
        assert stop.value.code == 2
    assert (
        "has model_state.tp00.pdparams, model_state.tp01.pdparams, this run needs model_state.pdparams" in caplog.text
    )
    assert "unified is a unified checkpoint: resume it with --unified_checkpoint 1" in caplog.text
