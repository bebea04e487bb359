"""run_dpo.py and run_kto.py as a user runs them: a toy task, every backend alike, references, resume, errors."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_te.hosts.paddlenlp.training import dpo, kto
from paddle_te.hosts.paddlenlp.training.trainer import PretrainingTrainer
from paddle_te.runs import rollback
from tests.small_checkpoints import random_words, save_models, save_tokenizer, write_lines

COMMON = dict(
    max_seq_len=128,
    max_prompt_len=40,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2,
    per_device_eval_batch_size=1,
    max_steps=6,
    save_steps=3,
    learning_rate=1e-3,
    logging_steps=1,
    disable_tqdm="true",
    report_to="none",
    device="cpu",
    do_train="true",
)
WORDS = "good fine kind warm true".split(), "bad cold false harsh mean".split()


def pairs(generator, count):
    """Questions of random words; better answers have other words than worse ones."""
    found = []
    for number in range(count):
        chosen, rejected = (" ".join(generator.choice(words, generator.integers(2, 5))) for words in WORDS)
        found.append({"prompt": random_words(generator, number % 3 + 1), "chosen": chosen, "rejected": rejected})
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    paddle.seed(5)
    save_models(folder, seed=5, initializer_range=0.05)
    (folder / "tokenizer").mkdir()
    save_tokenizer(folder / "tokenizer")
    generator = np.random.default_rng(5)
    (folder / "pairs").mkdir()
    write_lines(folder / "pairs/train.json", pairs(generator, 30))
    write_lines(folder / "pairs/dev.json", pairs(generator, 20))
    return folder


def watch_evaluations(monkeypatch):
    """The list to which what each evaluation logs is added."""
    evaluated, log = [], PretrainingTrainer.log

    def watching(self, logs, **kwargs):
        evaluated.extend([dict(logs)] if "eval_loss" in logs else [])
        return log(self, logs, **kwargs)

    monkeypatch.setattr(PretrainingTrainer, "log", watching)
    return evaluated


def run(monkeypatch, place, output, backend="paddle", main=dpo.main, **flags):
    """Runs the script in this process; returns its log, {step: line}, and what its evaluations gave."""
    where = dict(model_name_or_path=place / backend, tokenizer_name_or_path=place / "tokenizer")
    where |= dict(dataset_name_or_path=place / "pairs", output_dir=output, transformer_engine_backend=backend)
    words = [str(word) for key, value in (COMMON | where | flags).items() for word in (f"--{key}", value)]
    monkeypatch.setattr(sys, "argv", ["command", *words])
    evaluated = watch_evaluations(monkeypatch)
    with paddle.utils.unique_name.guard():  # parameters are named as in a new process
        main()
    lines = list(map(json.loads, (Path(output) / "train_log.jsonl").read_text().splitlines()))
    return {line["step"]: line for line in lines}, evaluated


def rewards(lines):
    return {step: [line[f"rewards/{name}"] for name in ("chosen", "rejected")] for step, line in lines.items()}


@pytest.mark.parametrize("backend, flags", [
    ("paddle", dict(lora="true", lora_rank=8, learning_rate=1e-2)),
    ("none", dict(lora="true", lora_rank=8, learning_rate=1e-2)),
    ("paddle", dict(learning_rate=2e-3)),
    ("paddle", dict(learning_rate=5e-3, loss_type="simpo", beta=2.0)),
])  # fmt: skip
def test_a_small_model_learns_which_answers_are_better(monkeypatch, place, tmp_path, backend, flags):
    """Questions that it has not seen: at first a coin decides, in the end 95 % are right."""
    flags |= dict(do_eval="true", max_steps=24, save_steps=100, eval_steps=24)
    lines, evaluated = run(monkeypatch, place, tmp_path, backend, **flags)
    assert evaluated[-1]["eval_rewards/accuracies"] >= 0.95
    assert evaluated[-1]["eval_rewards/margins"] > 0.1
    assert lines[24]["loss"] < lines[1]["loss"] - 0.05
    if "loss_type" not in flags:  # the reference is the model itself
        assert lines[1]["loss"] == pytest.approx(np.log(2), rel=1e-5) and rewards(lines)[1] == pytest.approx([0, 0])


def test_none_and_pd_learn_alike(monkeypatch, place, tmp_path):
    flags = dict(sft_loss_ratio=0.5, loss_type="ipo", beta=0.5, do_eval="true", eval_steps=6)
    (none, at_none), (pd, at_pd) = (run(monkeypatch, place, tmp_path / b, b, **flags) for b in ("none", "paddle"))
    for step in none:
        for name in ("loss", "rewards/chosen", "rewards/margins", "logps/rejected", "ipo_loss", "sft_loss"):
            assert pd[step][name] == pytest.approx(none[step][name], rel=1e-4, abs=1e-5), (step, name)
    assert at_pd[-1]["eval_loss"] == pytest.approx(at_none[-1]["eval_loss"], rel=1e-4)
    assert none[6]["loss"] == pytest.approx(none[6]["ipo_loss"] + none[6]["sft_loss"], rel=1e-4)
    assert none[6]["rewards/margins"] > none[1]["rewards/margins"] + 1e-3


def test_roundings_of_policy_and_reference_cancel_out(monkeypatch, place, tmp_path):
    """Under delayed scaling both need the same scales: with the weights that it began with, no answer is rewarded."""
    flags = dict(lora="true", lora_rank=4, use_fp8="true", quantize_base="fp8")
    lines, _ = run(monkeypatch, place, tmp_path, learning_rate=1e-20, save_strategy="no", max_steps=4, **flags)
    assert [lines[step]["loss"] for step in lines] == pytest.approx([np.log(2)] * 4, rel=1e-6)
    assert np.ptp([lines[step]["logps/chosen"] for step in lines]) > 0.1  # other pairs in each step


@pytest.mark.parametrize("flags", [{}, dict(lora="true", lora_rank=4)])
def test_a_reference_computed_before_is_the_same(monkeypatch, place, tmp_path, flags):
    flags |= dict(do_eval="true", eval_steps=6, learning_rate=5e-3)
    once, at_once = run(monkeypatch, place, tmp_path / "once", precompute_ref_log_probs="true", **flags)
    each, at_each = run(monkeypatch, place, tmp_path / "each", **flags)
    for step in each:
        assert once[step]["loss"] == pytest.approx(each[step]["loss"], rel=1e-5)
        assert once[step]["rewards/chosen"] == pytest.approx(each[step]["rewards/chosen"], rel=1e-3, abs=1e-5)
    assert abs(each[6]["rewards/margins"]) > 1e-2
    assert at_once[-1]["eval_rewards/margins"] == pytest.approx(at_each[-1]["eval_rewards/margins"], rel=1e-3, abs=1e-4)
    said = json.loads((tmp_path / "once/reference_log_probs/train.json").read_text())
    assert np.array(said["log_probs"]).shape == (30, 2) and np.max(said["log_probs"]) < 0


def test_a_file_of_another_reference_is_refused(monkeypatch, place, tmp_path, caplog):
    run(monkeypatch, place, tmp_path, precompute_ref_log_probs="true", max_steps=1, save_strategy="no")
    path = tmp_path / "reference_log_probs/train.json"
    before = path.read_text()
    run(monkeypatch, place, tmp_path, precompute_ref_log_probs="true", max_steps=1, save_strategy="no")
    assert path.read_text() == before
    with pytest.raises(ValueError, match="of other data or another model"):
        run(
            monkeypatch, place, tmp_path, precompute_ref_log_probs="true", max_steps=1, save_strategy="no",
            max_prompt_len=39,
        )  # fmt: skip


VARIANTS = {
    "full": {},
    "updated": dict(ref_model_update_steps=3, learning_rate=5e-3),
    "computed-before": dict(precompute_ref_log_probs="true"),
    "lora-fp8-base": dict(lora="true", lora_targets="mlp", use_fp8="true", quantize_base="fp8"),
    "lora-fp8-recompute": dict(lora="true", lora_targets="mlp", use_fp8="true", recompute="true"),
    "orpo": dict(loss_type="orpo", pref_loss_ratio=0.1),
    "kto": dict(main=kto.main, lora="true", lora_dropout=0.1),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_exact(monkeypatch, place, tmp_path, variant):
    flags = VARIANTS[variant]
    whole, _ = run(monkeypatch, place, tmp_path / "whole", **flags)
    checkpoint = tmp_path / "whole/checkpoint-3"
    resumed, _ = run(monkeypatch, place, tmp_path / "resumed", resume_from_checkpoint=checkpoint, **flags)
    names = [name for name in whole[4] if name == "loss" or name.startswith(("rewards/", "logps/"))]
    assert len(whole) == 6 and len(names) >= 6
    for step in (4, 5, 6):
        assert {name: resumed[step][name] for name in names} == {name: whole[step][name] for name in names}


def test_the_reference_takes_the_trained_weights(monkeypatch, place, tmp_path):
    fixed, _ = run(monkeypatch, place, tmp_path / "fixed", learning_rate=5e-3)
    moved, _ = run(monkeypatch, place, tmp_path / "moved", learning_rate=5e-3, ref_model_update_steps=3)
    assert [moved[step]["loss"] for step in (1, 2, 3)] == [fixed[step]["loss"] for step in (1, 2, 3)]
    assert moved[4]["loss"] == pytest.approx(np.log(2), rel=1e-4) and fixed[4]["loss"] < np.log(2) - 1e-3
    with pytest.raises(SystemExit):
        run(
            monkeypatch, place, tmp_path / "resumed", ref_model_update_steps=2, save_steps=2,
            resume_from_checkpoint=tmp_path / "moved/checkpoint-3",
        )  # fmt: skip


def test_the_reference_takes_weights_behind_steps_that_are_left_out(monkeypatch, place, tmp_path):
    """After a rollback to step 3 that leaves out step 4 the reference begins step 5 with the weights of step 3."""
    monkeypatch.setattr(rollback, "read_rollbacks", lambda _: [rollback.Rollback(good=3, bad=4, reason="a test")])
    flags = dict(learning_rate=5e-3, ref_model_update_steps=3)
    run(monkeypatch, place, tmp_path / "whole", max_steps=3, **flags)
    checkpoint = tmp_path / "whole/checkpoint-3"
    lines, _ = run(monkeypatch, place, tmp_path / "resumed", resume_from_checkpoint=checkpoint, **flags)
    assert lines[5]["loss"] == pytest.approx(np.log(2), rel=1e-4) and lines[6]["loss"] < np.log(2) - 1e-3


def test_kto_learns_and_counts(monkeypatch, place, tmp_path):
    flags = dict(main=kto.main, lora="true", lora_rank=8, learning_rate=1e-2, max_steps=24, save_steps=100)
    lines, evaluated = run(monkeypatch, place, tmp_path, do_eval="true", eval_steps=24, **flags)
    assert evaluated[-1]["eval_rewards/accuracies"] >= 0.95 and evaluated[-1]["eval_rewards/margins"] > 0.1
    assert evaluated[-1]["eval_count/chosen"] == evaluated[-1]["eval_count/rejected"] == 20
    assert lines[1]["loss"] == pytest.approx(0.5, rel=1e-5) and lines[24]["loss"] < 0.48
    assert lines[1]["count/chosen"] + lines[1]["count/rejected"] > 1


def test_paddlenlps_file_of_arguments(monkeypatch, place, tmp_path):
    """llm/config/llama/dpo_argument.json of PaddleNLP 3.0.0b4, with other folders, sizes and device."""
    said = {
        "model_name_or_path": str(place / "paddle"), "train_dataset_path": str(place / "pairs/train.json"),
        "dev_dataset_path": str(place / "pairs/dev.json"), "output_dir": str(tmp_path / "out"),
        "tokenizer_name_or_path": str(place / "tokenizer"), "device": "cpu", "transformer_engine_backend": "paddle",
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "per_device_eval_batch_size": 1,
        "num_train_epochs": 1, "max_steps": 2, "learning_rate": 1e-06, "warmup_steps": 10, "logging_steps": 1,
        "evaluation_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1,
        "max_seq_len": 128, "max_prompt_len": 64, "bf16": False, "fp16_opt_level": "O2", "do_train": True,
        "do_eval": True, "disable_tqdm": True, "load_best_model_at_end": True, "tensor_parallel_degree": 1,
        "sharding": "", "use_flash_attention": True, "flash_mask": True, "recompute": False,
        "recompute_granularity": "full", "beta": 0.1, "benchmark": False, "loss_type": "sigmoid",
        "label_smoothing": 0.0, "unified_checkpoint": True, "autotuner_benchmark": False, "lazy": False, "seed": 42,
    }  # fmt: skip
    (tmp_path / "dpo.json").write_text(json.dumps(said))
    monkeypatch.setattr(sys, "argv", ["run_dpo.py", str(tmp_path / "dpo.json")])
    evaluated = watch_evaluations(monkeypatch)
    with paddle.utils.unique_name.guard():
        dpo.main()
    lines = list(map(json.loads, (tmp_path / "out/train_log.jsonl").read_text().splitlines()))
    assert [line["step"] for line in lines] == [1, 2]
    assert len(evaluated) >= 2 and all("eval_rewards/accuracies" in each for each in evaluated)


@pytest.mark.parametrize(
    "flags, says",
    [
        (dict(loss_type="kto"), "--loss_type kto: it must be one of sigmoid, hinge, "),
        (dict(dataset_name_or_path="nowhere"), "nowhere: no such file or folder"),
        (dict(max_seq_len=16, max_prompt_len=8), "no pair is left: 0 fit; left out: 30 with more tokens"),
        (dict(pipeline_parallel_degree=2, gradient_accumulation_steps=2), "--pipeline_parallel_degree 2"),
    ],
)
def test_wrong_input_ends_with_2_in_one_line(monkeypatch, place, tmp_path, caplog, flags, says):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, place, tmp_path, **flags)
    assert ended.value.code == 2
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1 and "\n" not in said[0]
    assert re.search(says, said[0]), said
