"""run_pretrain.py as a user runs it: training, resume, initial weights, errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_te.hosts.paddlenlp.training import pretrain
from paddle_te.manifest import COMPLETE_MARK
from paddle_te.weights import convert
from tests.pretraining import FLAGS, losses, run

SCRIPT = Path(__file__).parents[3] / "llm/llama/run_pretrain.py"
VARIANTS = {
    "none": dict(transformer_engine_backend="none"),
    "pd": dict(transformer_engine_backend="paddle"),
    "pd-recompute": dict(transformer_engine_backend="paddle", recompute="true"),
    "pd-fp8": dict(transformer_engine_backend="paddle", use_fp8="true", fp8_amax_history_len=4, recompute="true"),
    "pd-fp8-current": dict(transformer_engine_backend="paddle", use_fp8="true", fp8_recipe="current"),
    "pd-packed": dict(transformer_engine_backend="paddle", reset_attention_mask="true", reset_position_ids="true"),
    "pd-fp8-head": dict(transformer_engine_backend="paddle", use_fp8="true", fp8_lm_head="true"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_exact(monkeypatch, tmp_path, variant):
    flags = VARIANTS[variant]
    whole = run(monkeypatch, tmp_path / "whole", **flags)
    assert sorted(whole) == list(range(1, 7)) and len(set(whole.values())) == 6
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    resumed = run(monkeypatch, tmp_path / "resumed", resume_from_checkpoint=checkpoint, **flags)
    assert resumed == {step: whole[step] for step in (4, 5, 6)}


def test_experts_in_the_log(monkeypatch, tmp_path):
    """What routers saw stands in each line, and a run goes on from its checkpoint to the bit."""
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    said = dict(model_type="mixtral", num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(sizes | said | dict(router_aux_loss_coef=0.01)))
    flags = dict(transformer_engine_backend="paddle", model_name_or_path=tmp_path / "model")
    flags |= dict(moe_expert_capacity_factor=1.0)
    whole = run(monkeypatch, tmp_path / "whole", **flags)
    lines = [json.loads(line) for line in (tmp_path / "whole/train_log.jsonl").read_text().splitlines()]
    assert all(1 <= line["expert_load"] <= 2 and 0 < line["dropped_tokens"] < 1 for line in lines)
    assert all(0.01 <= line["moe_aux_loss"] < 0.02 for line in lines)  # 1 is perfect balance
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    resumed = run(monkeypatch, tmp_path / "resumed", resume_from_checkpoint=checkpoint, **flags)
    assert resumed == {step: whole[step] for step in (4, 5, 6)}


def test_auto_takes_the_newest_complete_checkpoint(monkeypatch, tmp_path):
    flags = dict(transformer_engine_backend="paddle")
    first = run(monkeypatch, tmp_path, **flags)
    (tmp_path / "checkpoint-6" / COMPLETE_MARK).unlink()
    (tmp_path / "train_log.jsonl").unlink()
    again = run(monkeypatch, tmp_path, resume_from_checkpoint="auto", **flags)
    assert again == {step: first[step] for step in (4, 5, 6)}


def test_none_and_pd_train_alike_from_the_same_weights(monkeypatch, tmp_path):
    run(monkeypatch, tmp_path / "start", max_steps=1, save_steps=1)
    native, converted = tmp_path / "start" / "checkpoint-1", tmp_path / "converted"
    convert(native, converted, "pd2te", progress=False)
    flags = dict(weight_decay=20)  # a fiftieth of the weights a step: it shows which of them decay
    none = run(monkeypatch, tmp_path / "none", te_init_weight_path=native, **flags)
    flags["transformer_engine_backend"] = "paddle"
    pd = run(monkeypatch, tmp_path / "pd", te_init_weight_path=converted, **flags)
    for step, loss in none.items():
        assert abs(pd[step] - loss) < 1e-5 * loss
    scratch = run(monkeypatch, tmp_path / "scratch", transformer_engine_backend="paddle")
    assert abs(scratch[1] - none[1]) > 1e-4 * none[1], "the initial weights made no difference"


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(bf16="true", fp16_opt_level="O2"), "--bf16 true does not train on a plain CPU"),
        (dict(transformer_engine_backend="transformer_engine"), "transformer_engine"),
        (dict(transformer_engine_backend="other"), "it must be one of none, paddle, transformer_engine"),
        (dict(resume_from_checkpoint="5"), "complete checkpoints"),
        (dict(model_name_or_path="llama-9000b"), "llama-9000b"),
        (dict(tokenizer_name_or_path="/no/folder"), "tokenizer '/no/folder': there is no such folder"),
        (dict(mock_data="false"), "input_dir"),
        (
            dict(transformer_engine_backend="paddle", use_fp8="true", fp8_dpa="true", reset_attention_mask="true"),
            "no attention in fp8 over packed documents; leave out --reset_attention_mask",
        ),
        (dict(lr_scheduler_type="constant"), "linear"),
        (dict(learn_rate=1), "--learn_rate: there is no such flag; did you mean --learning_rate?"),
        (dict(max_steps="many"), "--max_steps: invalid int value: 'many'"),
    ],
)
def test_errors_come_before_work(monkeypatch, tmp_path, caplog, flags, message):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, tmp_path / "out", **flags)
    assert stop.value.code == 2
    assert message in caplog.text


def test_initial_weights_and_resume_exclude_each_other(monkeypatch, tmp_path, caplog):
    checkpoint = tmp_path / "out" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / COMPLETE_MARK).touch()
    (checkpoint / "trainer_state.json").write_text('{"global_step": 3}')
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "out", resume_from_checkpoint="auto", te_init_weight_path=checkpoint)
    assert "give one of them" in caplog.text


def test_a_folder_with_checkpoints_is_not_overwritten_in_silence(monkeypatch, tmp_path, caplog):
    flags = dict(transformer_engine_backend="paddle", max_steps=2, save_steps=1)
    run(monkeypatch, tmp_path, **flags)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, tmp_path, **flags)
    assert stop.value.code == 2 and "holds checkpoints (steps 1, 2)" in caplog.text


def test_fp8_does_not_resume_without_its_scales(monkeypatch, tmp_path, caplog):
    flags = dict(transformer_engine_backend="paddle", max_steps=2, save_steps=1)
    run(monkeypatch, tmp_path, **flags)
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, **flags, use_fp8="true", resume_from_checkpoint="1")
    assert "no fp8 scaling state" in caplog.text


def test_another_recipe_is_refused_before_weights_are_made(monkeypatch, tmp_path, caplog):
    flags = dict(transformer_engine_backend="paddle", use_fp8="true", max_steps=1, save_steps=1)
    run(monkeypatch, tmp_path, **flags, fp8_amax_history_len=2)
    monkeypatch.setattr(pretrain, "make_model", None)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, tmp_path, **flags | dict(max_steps=2), fp8_amax_history_len=3, resume_from_checkpoint="auto")
    assert stop.value.code == 2 and "--fp8_amax_history_len: 2 there, 3 here" in caplog.text


@pytest.mark.parametrize("backend, wrong", [("paddle", "native"), ("none", "te")])
def test_weights_of_the_other_layout_are_refused(monkeypatch, tmp_path, caplog, backend, wrong):
    other = "none" if backend == "paddle" else "paddle"
    run(monkeypatch, tmp_path / "start", max_steps=1, save_steps=1, transformer_engine_backend=other)
    weights = tmp_path / "start" / "checkpoint-1"
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "out", te_init_weight_path=weights, transformer_engine_backend=backend)
    assert "paddle-te convert --input_ckpt_path" in caplog.text


def test_arguments_from_a_json_file(tmp_path):
    flags = FLAGS | dict(output_dir=str(tmp_path / "out"), max_steps=1)
    (tmp_path / "arguments.json").write_text(json.dumps(flags))
    environment = os.environ | dict(
        PYTHONPATH=os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    words = [sys.executable, SCRIPT, tmp_path / "arguments.json", "--max_steps", "2"]
    subprocess.run(words, check=True, env=environment)
    assert sorted(losses(tmp_path / "out")) == [1, 2]
