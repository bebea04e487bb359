"""run_finetune.py as a user runs it: every backend alike, LoRA, packing, resume, merging, errors."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from paddle_te.folders import MERGED_FROM
from paddle_te.hosts.paddlenlp.evaluation import evaluate
from paddle_te.hosts.paddlenlp.training import finetune
from paddle_te.hosts.paddlenlp.training.finetune_trainer import FinetuningTrainer
from paddle_te.layers import cross_entropy
from paddle_te.weights import check_layout, convert
from tests import chats
from tests.pretraining import watch_samples
from tests.small_checkpoints import random_words, save_models, save_tokenizer, write_lines
from tests.unit.hosts.paddlenlp.test_lora import ours_name

COMMON = dict(
    src_length=40,
    max_length=64,
    per_device_train_batch_size=4,
    max_steps=6,
    save_steps=3,
    learning_rate=3e-3,
    logging_steps=1,
    disable_tqdm="true",
    report_to="none",
    device="cpu",
    do_train="true",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Checkpoints of one model, a tokenizer, data of 20 samples; 20 chats and a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("finetune")
    paddle.seed(5)
    save_models(folder, seed=5, initializer_range=0.05)
    (folder / "tokenizer").mkdir()
    save_tokenizer(folder / "tokenizer")
    generator = np.random.default_rng(5)
    records = [{"src": random_words(generator, n % 5 + 1), "tgt": random_words(generator, 2)} for n in range(20)]
    (folder / "data").mkdir()
    write_lines(folder / "data/train.json", records)
    write_lines(folder / "data/dev.json", records[:3])
    (folder / "chats").mkdir()
    texts = [[random_words(generator, 1) for _ in range(2 * (n % 3 + 1))] for n in range(20)]
    records = [{"messages": chats.turns(*each, system=random_words(generator, 1))} for each in texts]
    write_lines(folder / "chats/train-00000-of-00001.jsonl", records)
    write_lines(folder / "chats/validation.jsonl", records[:3])
    chats.save_tokenizer(folder / "chatml", chats.MARKED["chatml"])
    return folder


def start(monkeypatch, main, **flags):
    words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    monkeypatch.setattr(sys, "argv", ["command", *words])
    with paddle.utils.unique_name.guard():  # parameters are named as in a new process
        main()


def run(monkeypatch, place, output, backend="paddle", data="data", **flags):
    """Runs the script in this process; returns the losses of its log. data: the folder of `place`."""
    tokenizer = "chatml" if data == "chats" else "tokenizer"
    where = dict(model_name_or_path=place / backend, tokenizer_name_or_path=place / tokenizer)
    where |= dict(dataset_name_or_path=place / data, output_dir=output, transformer_engine_backend=backend)
    start(monkeypatch, finetune.main, **(COMMON | where | flags))
    lines = map(json.loads, (Path(output) / "train_log.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize("packed, data", [("false", "data"), ("true", "data"), ("false", "chats"), ("true", "chats")])
def test_none_and_pd_learn_alike(monkeypatch, place, tmp_path, packed, data):
    flags = dict(zero_padding=packed, data=data, max_length=96 if data == "chats" else 64)
    none, pd = (run(monkeypatch, place, tmp_path / b, b, **flags) for b in ("none", "paddle"))
    assert none[6] < none[1] - 0.3
    assert pd == pytest.approx(none, rel=1e-5)


def test_lora_of_none_and_pd_learn_alike(monkeypatch, place, tmp_path):
    """From the same A and B, which have other names only."""
    flags = dict(lora="true", lora_rank=4, lora_targets="attention", learning_rate=1e-2)
    run(monkeypatch, place, tmp_path / "first", "none", max_steps=1, **flags)
    run(monkeypatch, place, tmp_path / "ours", "paddle", max_steps=1, **flags)
    weights = paddle.load(str(tmp_path / "first/lora_model_state.pdparams"))
    assert len(weights) == 2 * 4 * 2
    paddle.save({ours_name(n): w for n, w in weights.items()}, str(tmp_path / "ours/lora_model_state.pdparams"))
    starts = dict(none=tmp_path / "first", paddle=tmp_path / "ours")
    none, pd = (run(monkeypatch, place, tmp_path / b, b, lora_path=starts[b], **flags) for b in starts)
    assert none[6] < none[1] - 0.1
    assert pd == pytest.approx(none, rel=1e-5)


VARIANTS = {
    "full": {},
    "lora-in-backward": dict(lora="true", optimizer_in_backward="last_norm"),
    "lora-dropout-recompute": dict(lora="true", lora_dropout=0.1, recompute="true"),
    "lora-fp8": dict(lora="true", lora_targets="mlp", use_fp8="true", fp8_amax_history_len=4, fp8_lm_head="true"),
    "lora-fp8-base": dict(
        lora="true", lora_targets="mlp", use_fp8="true", quantize_base="fp8", keep_fp8_transpose_cache="true"
    ),
    "packed": dict(zero_padding="true", per_device_train_batch_size=1),
    "chats": dict(data="chats", max_length=80, lora="true", zero_padding="true", per_device_train_batch_size=3),
    # the checkpoint is of the last step of an epoch, and of the first; no epoch fills its last step
    "epoch-end": dict(lora="true", lora_dropout=0.1, per_device_train_batch_size=2, gradient_accumulation_steps=4),
    "epoch-begin": dict(per_device_train_batch_size=3, gradient_accumulation_steps=4),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_exact(monkeypatch, place, tmp_path, variant):
    flags = VARIANTS[variant]
    whole = run(monkeypatch, place, tmp_path / "whole", **flags)
    checkpoint = tmp_path / "whole/checkpoint-3"
    resumed = run(monkeypatch, place, tmp_path / "resumed", resume_from_checkpoint=checkpoint, **flags)
    assert len(whole) == 6 and resumed == {step: whole[step] for step in (4, 5, 6)}


def test_a_changed_batch_goes_on_with_the_next_sample_of_the_pass(monkeypatch, place, tmp_path):
    """Of 20 samples 8 in steps of 4, 6 in steps of 2, the others and a second pass in steps of 3."""
    runs, flags = watch_samples(monkeypatch), dict(pad_to_max_length="true", save_steps=1, max_steps=-1)
    flags |= dict(num_train_epochs=2, data_seed=3, dataloader_drop_last="true")
    run(monkeypatch, place, tmp_path / "whole", **flags)
    whole = [row for rows in runs.pop().values() for row in rows]
    run(monkeypatch, place, tmp_path / "out", **flags | dict(max_steps=2))
    flags["resume_from_checkpoint"] = "auto"
    run(monkeypatch, place, tmp_path / "out", **flags | dict(per_device_train_batch_size=2, max_steps=5))
    run(monkeypatch, place, tmp_path / "out", **flags | dict(per_device_train_batch_size=3))
    assert [len(rows) for steps in runs for rows in steps.values()] == [4, 4, 2, 2, 2] + [3] * 8
    assert [row for steps in runs for rows in steps.values() for row in rows] == whole[:38]
    assert sorted(whole[:20]) == sorted(whole[20:]) and whole[:20] != whole[20:]
    state = json.loads((tmp_path / "out/checkpoint-13/trainer_state.json").read_text())
    assert (state["consumed_samples"], state["epoch"]) == (40, 2)
    run(monkeypatch, place, tmp_path / "out", **flags | dict(per_device_train_batch_size=3))
    assert len(runs) == 3  # it was finished


def test_the_seed_decides_on_the_order(monkeypatch, place, tmp_path):
    runs, flags = watch_samples(monkeypatch), dict(pad_to_max_length="true", max_steps=5, save_steps=100)
    for i, seeds in enumerate((dict(seed=1), dict(seed=2), dict(seed=2, data_seed=1))):
        run(monkeypatch, place, tmp_path / str(i), **flags | seeds)
    first, other, same = ([row for rows in steps.values() for row in rows] for steps in runs)
    assert first == same != other and sorted(first) == sorted(other)


@pytest.mark.parametrize("flags", [dict(lora="true"), dict(max_steps=-1, num_train_epochs=1, save_steps=5)])
def test_a_finished_run_trains_nothing_and_leaves_the_same_model(monkeypatch, place, tmp_path, caplog, flags):
    """Also one that was stopped between its last checkpoint and its end: what follows training is done."""
    run(monkeypatch, place, tmp_path, **flags)
    checkpoints = sorted(path for path in tmp_path.rglob("checkpoint-*/*"))
    before = {path: path.stat().st_mtime_ns for path in checkpoints}
    (name,) = (path.name for path in tmp_path.glob("*model_state.pdparams"))
    weights = paddle.load(str(tmp_path / name), return_numpy=True)
    (tmp_path / name).unlink()
    run(monkeypatch, place, tmp_path, resume_from_checkpoint="auto", do_eval="true", **flags)
    assert "the run is finished with --" in caplog.text
    last = max(int(path.name.removeprefix("checkpoint-")) for path in tmp_path.glob("checkpoint-*"))
    assert f"evaluation after step {last}: " in caplog.text
    assert before == {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("checkpoint-*/*"))}
    again = paddle.load(str(tmp_path / name), return_numpy=True)
    assert again.keys() == weights.keys()
    for key, value in weights.items():
        np.testing.assert_array_equal(again[key], value)


def test_a_resumed_run_needs_room_for_what_it_saves_only(monkeypatch, place, tmp_path, caplog):
    """From the last checkpoint on, that is the model, a third of weights with both of their moments."""
    run(monkeypatch, place, tmp_path, max_steps=5)
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "more/checkpoint-3")
    model = sum(w.nbytes for w in paddle.load(str(tmp_path / "model_state.pdparams"), return_numpy=True).values())
    monkeypatch.setattr("paddle_te.runs.room.free_bytes", lambda folder: model)
    assert run(monkeypatch, place, tmp_path, max_steps=5, resume_from_checkpoint="auto").keys() >= {4, 5}
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, place, tmp_path / "more", max_steps=6, resume_from_checkpoint="auto")
    assert stop.value.code == 1 and "a node's part of a checkpoint takes about" in caplog.text


def test_another_adapter_or_other_data_is_refused(monkeypatch, place, tmp_path, caplog):
    run(monkeypatch, place, tmp_path / "out", lora="true", max_steps=1, save_steps=1)
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data/train.json", [{"src": "a", "tgt": "b"}] * 20)
    for flags, message in (
        (dict(lora="true", lora_rank=2), "of another model: adapter is rank"),
        (dict(lora="true", dataset_name_or_path=tmp_path / "data"), "of a run with other data: source is"),
    ):
        with pytest.raises(SystemExit) as stop:
            run(monkeypatch, place, tmp_path / "out", resume_from_checkpoint="auto", **flags)
        assert stop.value.code == 2 and message in caplog.text


def test_recompute_gives_the_same_losses(monkeypatch, place, tmp_path):
    flags = dict(lora="true", max_steps=4)
    plain = run(monkeypatch, place, tmp_path / "plain", **flags)
    for granularity in ("full", "core_attn"):
        again = dict(recompute="true", recompute_granularity=granularity)
        assert run(monkeypatch, place, tmp_path / granularity, **again, **flags) == plain


@pytest.mark.parametrize("flags", [{}, dict(lora="true"), VARIANTS["packed"]], ids=["full", "lora", "packed"])
def test_fused_loss_learns_and_evaluates_alike(monkeypatch, place, tmp_path, flags):
    """Most labels are of questions, and ignored: chunks without any answer are among them."""
    monkeypatch.setattr(cross_entropy, "CHUNK_TOKENS", 10)
    evaluations, evaluate = [], FinetuningTrainer.evaluate

    def recorded(*args, **kwargs):
        evaluations.append(evaluate(*args, **kwargs))
        return evaluations[-1]

    monkeypatch.setattr(FinetuningTrainer, "evaluate", recorded)
    plain, fused = (
        run(
            monkeypatch,
            place,
            tmp_path / switch,
            **flags,
            do_eval="true",
            use_fused_linear_cross_entropy=switch,
        )
        for switch in ("false", "true")
    )
    assert plain[6] < plain[1] - 0.01 and fused == pytest.approx(plain, rel=1e-5)
    losses = [metrics["eval_loss"] for metrics in evaluations]
    half = len(losses) // 2
    assert half and losses[half:] == pytest.approx(losses[:half], rel=1e-5)


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_adapter_and_merged_model_evaluate_alike(monkeypatch, place, tmp_path, caplog, backend):
    flags = dict(lora="true", lora_rank=4, rslora=str(backend == "none").lower(), learning_rate=1e-2, do_eval="true")
    run(monkeypatch, place, tmp_path / "out", backend, **flags)
    evaluated = [record.message for record in caplog.records if record.message.startswith("evaluation after step")]
    assert evaluated and len({*evaluated}) == len(evaluated)  # the last step once
    where = dict(model_name_or_path=place / backend, tokenizer_name_or_path=place / "tokenizer")
    merge = dict(output_dir=tmp_path / "out", transformer_engine_backend=backend, lora="true", merge_lora="true")
    start(monkeypatch, finetune.main, **where, **merge, lora_path=tmp_path / "out", device="cpu", report_to="none")
    merged = tmp_path / "out/merged"
    check_layout(merged, "native" if backend == "none" else "te")
    assert f"{merged} is complete: the model of {place / backend} with the adapter" in caplog.text
    with pytest.raises(SystemExit) as stop:  # there is one already
        start(monkeypatch, finetune.main, **where, **merge, lora_path=tmp_path / "out", device="cpu", report_to="none")
    assert stop.value.code == 2 and f"{merged}: not empty" in caplog.text

    docs = write_lines(tmp_path / "docs.jsonl", [{"text": "the list of names"}, {"text": "a module"}])
    losses = {}
    for name, model, extra in (
        ("base", where, {}),
        ("adapter", where, dict(lora_path=tmp_path / "out")),
        ("merged", dict(model_name_or_path=merged), {}),
    ):
        common = dict(transformer_engine_backend=backend, perplexity=docs, output_file=tmp_path / "r.json")
        start(monkeypatch, evaluate.main, **model, **extra, **common)
        losses[name] = json.loads((tmp_path / "r.json").read_text())["results"]["perplexity"]["loss"]
    assert losses["merged"] == pytest.approx(losses["adapter"], rel=1e-5)
    assert abs(losses["merged"] - losses["base"]) > 1e-3


def test_a_run_that_is_started_again_leaves_what_it_has_merged(monkeypatch, place, tmp_path, caplog):
    """As Slurm requeues it. A model of another adapter, or one that is not complete, is moved, and not lost."""
    flags = dict(lora="true", merge_lora="true", max_steps=2, save_steps=1, lr_scheduler_type="constant")
    flags |= dict(resume_from_checkpoint="auto")
    run(monkeypatch, place, tmp_path, **flags)
    merged = tmp_path / "merged"
    before = {path: path.stat().st_mtime_ns for path in merged.iterdir()}
    run(monkeypatch, place, tmp_path, **flags)
    assert f"{merged} is there already: the model of {place / 'paddle'} with the adapter in" in caplog.text
    assert before == {path: path.stat().st_mtime_ns for path in merged.iterdir()}

    first = (merged / "model_state.pdparams").read_bytes()
    run(monkeypatch, place, tmp_path, **flags | dict(max_steps=3))
    assert f"{merged} was of other weights, or not complete, and was moved to {tmp_path / 'earlier-1'}" in caplog.text
    second = (merged / "model_state.pdparams").read_bytes()
    assert (tmp_path / "earlier-1/merged/model_state.pdparams").read_bytes() == first != second

    for path in (merged / "tokenizer_config.json", merged / MERGED_FROM):  # killed before these were written
        path.unlink()
    run(monkeypatch, place, tmp_path, **flags | dict(max_steps=3))
    assert (merged / "model_state.pdparams").read_bytes() == second
    assert {path.name for path in merged.iterdir()} == {path.name for path in before}
    assert (tmp_path / "earlier-2/merged").is_dir() and not (tmp_path / "earlier-3").exists()


def hf_folders(folder, place, run):
    """The model and a run's merged one, in Hugging Face's layout."""
    assert convert(folder / run / "merged", folder / "merged-hf", "te2hf", progress=False) == []
    return place / "hf", folder / "merged-hf"


def test_a_base_in_fp8_learns_as_one_in_its_own_precision(monkeypatch, place, tmp_path):
    flags = dict(lora="true", lora_rank=4, learning_rate=1e-2)
    want = run(monkeypatch, place, tmp_path / "plain", **flags)
    flags |= dict(use_fp8="true", fp8_recipe="current", quantize_base="fp8", merge_lora="true")
    got = run(monkeypatch, place, tmp_path / "fp8", **flags)
    # Of models and samples drawn at random: rounding to fp8 made 1 % in one of some hundred, and learning makes 10 %.
    assert want[6] < want[1] - 0.1 and got == pytest.approx(want, rel=3e-2)
    check_layout(tmp_path / "fp8/merged", "te")
    base, merged = (load_file(path / "model.safetensors") for path in hf_folders(tmp_path, place, "fp8"))
    adapter = paddle.load(str(tmp_path / "fp8/lora_model_state.pdparams"), return_numpy=True)
    a, b = (adapter[f"llama.layers.1.transformer.layernorm_mlp.up_proj.lora_{x}"].astype("float64") for x in "AB")
    name = "model.layers.1.mlp.up_proj.weight"  # 2 = alpha / rank; the base is the original, not its fp8
    np.testing.assert_allclose(merged[name], base[name] + 2 * (a @ b).T, rtol=1e-5, atol=1e-6)
    with pytest.raises(SystemExit):  # the same adapter, but over other weights
        run(monkeypatch, place, tmp_path / "fp8", resume_from_checkpoint=tmp_path / "plain/checkpoint-3", **flags)


def test_tokens_are_counted_without_padding(monkeypatch, place, tmp_path):
    run(monkeypatch, place, tmp_path / "out", max_steps=2)
    line = json.loads((tmp_path / "out/train_log.jsonl").read_text().splitlines()[-1])
    per_sample = line["tokens_per_second"] * line["step_time"] / 4
    assert 5 < per_sample < 40  # samples of 64 tokens there are none


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(do_train="false"), "nothing to do"),
        (dict(lora_targets="query"), "all, attention, mlp"),
        (dict(merge_lora="true"), "--merge_lora true needs --lora true"),
        (dict(merge_lora="true", lora="true", do_train="false"), "there is no adapter; give it with --lora_path"),
        (dict(rslora="true"), "--rslora true needs --lora true"),
        (dict(lora="true", lora_path="nowhere"), "holds no LoRA adapter"),
        (dict(quantize_base="fp8", use_fp8="true"), "--quantize_base fp8 needs --lora true"),
        (dict(quantize_base="fp8", lora="true"), "--quantize_base fp8 needs --use_fp8 true"),
        (dict(keep_fp8_transpose_cache="true", lora="true", use_fp8="true"), "true needs --quantize_base fp8"),
        (dict(min_learning_rate=1e-6), "--min_learning_rate 1e-06 is for pretraining"),
        (dict(use_fp8="true", pad_to_multiple_of=8), "multiple of 16"),
        (dict(transformer_engine_backend="transformer_engine"), "transformer_engine"),
        (dict(bf16="true", fp16_opt_level="O2"), "does not train on a plain CPU"),
        (dict(dataset_name_or_path="nowhere"), "nowhere"),
        (dict(model_name_or_path="tiny-llama-demo"), "no such folder"),
        (dict(src_length=64), "--src_length"),
        (dict(use_fp8="true", fp8_dpa="true", zero_padding="true"), "--fp8_dpa: "),
    ],
)
def test_errors_come_before_work(monkeypatch, place, tmp_path, caplog, flags, message):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, place, tmp_path / "out", **flags)
    assert stop.value.code == 2 and message in caplog.text
    assert not list((tmp_path / "out").glob("*/model_state*"))


def test_weights_of_the_other_layout_are_refused(monkeypatch, place, tmp_path, caplog):
    with pytest.raises(SystemExit):
        run(monkeypatch, place, tmp_path / "out", model_name_or_path=place / "none")
    assert "--mode pd2te" in caplog.text
