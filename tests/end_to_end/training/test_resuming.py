"""Resuming through the command: what is believed, what is passed over, and that a refusal is one line before work."""

import json
import shutil

import numpy as np
import paddle
import pytest

from paddle_te import manifest
from paddle_te.manifest import COMPLETE_MARK, MANIFEST
from paddle_te.runs.lock import NAME as LOCK
from tests.pretraining import run, watch_samples
from tests.unit.runs.completed import complete
from tests.unit.runs.hostile import hostile_pickle
from tests.unit.runs.test_verify import FLAGS, MODEL, flipped

STEPS = dict(max_steps=3, save_steps=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder of a finished run with checkpoints of steps 1, 2 and 3, its losses)."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        return folder, run(patch, folder, **FLAGS | STEPS)


@pytest.fixture
def out(whole, tmp_path):
    return shutil.copytree(whole[0], tmp_path / "out")


def times(folder):
    """{file: when it was written}, but for the lock of the run that has the folder."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != LOCK}


@pytest.fixture
def refused(monkeypatch, out, caplog, capfd):
    """Runs the command, which must end with status 2 and one line; returns that line."""

    def refuse(**flags):
        before = times(out)
        caplog.clear()
        with pytest.raises(SystemExit) as stop:
            run(monkeypatch, out, **FLAGS | STEPS | dict(resume_from_checkpoint="auto") | flags)
        assert stop.value.code == 2
        (line,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
        assert "\n" not in line and "Traceback" not in capfd.readouterr().err
        assert before == times(out), "something was changed"
        return line

    return refuse


def older(checkpoint):
    """Makes it one of a version without manifests."""
    (checkpoint / MANIFEST).unlink()
    (checkpoint / COMPLETE_MARK).write_bytes(b"")


def test_auto_falls_back_to_the_newest_good_one(monkeypatch, whole, out, seed, caplog):
    """And with the same numbers as the run that was not disturbed; what was damaged is set aside and told."""
    flipped(out / "checkpoint-3/optimizer.pdopt", np.random.default_rng(seed))
    (out / "checkpoint-2/trainer_state.json").unlink()
    resumed = run(monkeypatch, out, **FLAGS | STEPS, resume_from_checkpoint="auto", save_total_limit=1)
    assert resumed == whole[1]
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any(
        "checkpoint-3 is damaged and is passed over: optimizer.pdopt has another checksum" in line for line in told
    )
    assert any("checkpoint-2 is damaged and is passed over: trainer_state.json is missing" in line for line in told)
    assert {path.name for path in (out / "earlier-1").iterdir()} == {"checkpoint-2", "checkpoint-3"}
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-3"}


@pytest.mark.parametrize("wrong", ["missing", "shape"])
def test_moments_that_are_not_the_weights_are_passed_over(monkeypatch, whole, out, caplog, wrong):
    """In a checkpoint whose manifest vouches for them."""
    folder = out / "checkpoint-3"
    path, run_values = folder / "optimizer.pdopt", manifest.read(folder).run
    state = paddle.load(str(path))
    name = next(key for key in state if key.endswith("moment1_0") and len(state[key].shape) == 2)
    moment = state.pop(name)
    if wrong == "shape":
        state[name] = moment[:-1]
    paddle.save(state, str(path))
    complete(folder, run_values)
    assert run(monkeypatch, out, **FLAGS | STEPS, resume_from_checkpoint="auto") == whole[1]
    assert "checkpoint-3 is damaged and is passed over" in caplog.text and "moment1_0 of" in caplog.text


def test_a_renamed_checkpoint_is_passed_over(monkeypatch, whole, out, caplog):
    (out / "checkpoint-1").rename(out / "checkpoint-9")
    assert run(monkeypatch, out, **FLAGS | STEPS | dict(max_steps=4), resume_from_checkpoint="auto").keys() == {
        1,
        2,
        3,
        4,
    }
    assert "its folder's name says step 9, manifest.json says step 1" in caplog.text
    assert (out / "earlier-1/checkpoint-9").is_dir()


def test_a_damaged_step_is_refused(refused, out, tmp_path):
    (out / "checkpoint-3/model_state.pdparams").write_bytes(b"")
    assert "checkpoint-3 is damaged and is not used: model_state.pdparams has 0 bytes" in refused(
        resume_from_checkpoint=3
    )
    (out / "checkpoint-2/rng_state.pth").write_bytes(hostile_pickle(tmp_path / "ran"))
    complete(out / "checkpoint-2")
    assert "rng_state.pth: refused: it holds posix.system" in refused(resume_from_checkpoint=2)
    assert not (tmp_path / "ran").exists()
    (out / "checkpoint-1/config.json").unlink()
    assert "all complete checkpoints" in refused()


def test_a_finished_run_trains_and_saves_nothing(monkeypatch, out, caplog):
    before = times(out)
    for flags in (dict(resume_from_checkpoint="auto"), dict(resume_from_checkpoint=3, max_steps=2)):
        run(monkeypatch, out, **FLAGS | STEPS | flags)
        assert "step 3: the run is finished with --max_steps" in caplog.text
        assert before == times(out)
        caplog.clear()


def test_a_changed_batch_goes_on_with_the_next_sample(monkeypatch, tmp_path):
    """Whatever the batch was: twice another one, in the same run. Random tokens, of which no two samples are alike."""
    flags = FLAGS | dict(save_steps=1, gradient_accumulation_steps=2, per_device_train_batch_size=1)
    runs = watch_samples(monkeypatch)
    run(monkeypatch, tmp_path / "whole", **flags, max_steps=8)
    every = [row for rows in runs.pop().values() for row in rows]
    run(monkeypatch, tmp_path / "out", **flags, max_steps=2)
    for max_steps, batch in ((4, dict(gradient_accumulation_steps=1)), (6, dict(per_device_train_batch_size=3))):
        run(monkeypatch, tmp_path / "out", **flags | batch, max_steps=max_steps, resume_from_checkpoint="auto")
    seen = [row for steps in runs for rows in steps.values() for row in rows]
    assert [len(rows) for steps in runs for rows in steps.values()] == [2, 2, 1, 1, 6, 6]
    assert seen[:16] == every
    state = json.loads((tmp_path / "out/checkpoint-6/trainer_state.json").read_text())
    assert state["consumed_samples"] == len(seen) == len({*seen})


def test_an_older_one_without_a_manifest_is_resumed(monkeypatch, whole, out, caplog):
    older(out / "checkpoint-1")
    resumed = run(monkeypatch, out, **FLAGS | STEPS | dict(max_steps=2), resume_from_checkpoint=1)
    assert resumed == {step: whole[1][step] for step in (1, 2)}
    assert "checkpoint-1 has no manifest.json" in caplog.text


def variant(tmp_path, **values):
    """A folder with the model's configuration, but for some values."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    config = json.loads((MODEL / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    return dict(model_name_or_path=folder)


OTHERS = [
    dict(num_hidden_layers=2),
    dict(rope_theta=5e5),
    dict(rms_norm_eps=1e-6),
    dict(tie_word_embeddings=True),
    dict(hidden_size=32),
    dict(intermediate_size=192),
    dict(vocab_size=256),
    dict(num_attention_heads=2),
    dict(rope_scaling_type="linear", rope_scaling_factor=2.0),
]


def test_another_model_is_refused(refused, out, tmp_path):
    """By the manifest, and without one by config.json, also where the optimizer's state is left out."""
    for i, values in enumerate(OTHERS):
        if i == len(OTHERS) // 2:
            older(out / "checkpoint-3")
        flags = variant(tmp_path, **values) | dict(ignore_load_lr_and_optim=str(bool(i % 2)).lower())
        line = refused(**flags)
        assert "checkpoint-3 is of another model: " in line and all(name in line for name in values)


@pytest.mark.parametrize("weights_only", ["true", "false"])
def test_the_other_backends_weights_are_translated(monkeypatch, whole, out, caplog, weights_only):
    flags = FLAGS | STEPS | dict(resume_from_checkpoint=out / "checkpoint-2", ignore_load_lr_and_optim=weights_only)
    same = run(monkeypatch, out / "same", **flags)
    assert (same == {3: whole[1][3]}) == (weights_only == "false")
    other = run(monkeypatch, out / "other", **flags | dict(transformer_engine_backend="none"))
    assert other == pytest.approx(same, rel=1e-5)
    assert "its layout is undivided, in Transformer Engine's layout; this run's layout is undivided" in caplog.text


def test_initial_weights_of_another_model_are_refused(monkeypatch, out, tmp_path, caplog):
    """Fewer layers than the run's: the others would stay at random weights."""
    for layers in (2, 8):
        flags = FLAGS | STEPS | variant(tmp_path, num_hidden_layers=layers)
        with pytest.raises(SystemExit) as stop:
            run(monkeypatch, tmp_path / "new", **flags, te_init_weight_path=out / "checkpoint-3")
        assert stop.value.code == 2
        assert f"a model with num_hidden_layers=6, this run's has num_hidden_layers={layers}" in caplog.text


def test_a_configuration_that_no_llama_has_is_refused(refused, tmp_path):
    """One of PaddleNLP's own, through the command; all values: tests/unit/weights/test_huggingface.py."""
    for values in (dict(hidden_act="gelu"), dict(rope_theta="x"), dict(vocab_size=-5), dict(num_attention_heads=0)):
        assert f"config.json: {next(iter(values))}=" in refused(**variant(tmp_path, **values))


def test_other_data_is_refused(monkeypatch, whole, refused, out, caplog):
    line = refused(seed=8, resume_from_checkpoint=2)
    assert "checkpoint-2 is of a run with other data: seed is 7 there and 8 here" in line
    run(monkeypatch, out, **FLAGS | STEPS, seed=8, resume_from_checkpoint=2, ignore_data_skip="true")


def test_weights_without_their_optimizer_are_refused(refused, out):
    (out / "checkpoint-3/optimizer.pdopt").unlink()
    complete(out / "checkpoint-3")
    assert "checkpoint-3 has no optimizer: --ignore_load_lr_and_optim true" in refused()


def test_saves_and_loads_are_timed(monkeypatch, whole, tmp_path, caplog):
    """In the log and in VisualDL: bytes, seconds, and whether they were compared with a manifest."""
    from visualdl import LogReader

    folder, _ = whole
    flags = FLAGS | dict(max_steps=2, save_steps=1, report_to="visualdl")
    with caplog.at_level("INFO"):
        run(monkeypatch, tmp_path / "out", **flags, te_init_weight_path=folder / "checkpoint-3")
        run(monkeypatch, tmp_path / "out", **flags | dict(max_steps=3), resume_from_checkpoint="auto")
    agree, size = "agree with its manifest", (folder / "checkpoint-3" / "model_state.pdparams").stat().st_size
    lines = [line for line in caplog.messages if " GB loaded from " in line or " GB saved in " in line]
    loads = [line for line in lines if " GB loaded from " in line]
    assert f"{size / 1e9:,.3f} GB loaded from {folder}/checkpoint-3 in " in loads[0] and agree in loads[0]
    assert f"loaded from {tmp_path}/out/checkpoint-2 in " in loads[1] and agree in loads[1]
    assert len(loads) == 2 and len(lines) == 2 + 3
    values = {}
    for file in (tmp_path / "out").rglob("vdlrecords*"):
        reader = LogReader(file_path=str(file))
        for tag in reader.get_tags().get("scalar", []):
            values.setdefault(tag, []).extend((record.id, record.value) for record in reader.get_data("scalar", tag))
    assert [step for step, _ in sorted(values["train/save_bytes"])] == [2, 2, 3]
    assert sorted(values["train/load_verified"]) == [(1, 1.0), (3, 1.0)]
    assert min(value for _, value in values["train/load_seconds"]) > 0
    assert min(value for _, value in values["train/save_bytes"]) > 3 * size  # AdamW's moments, too


@pytest.mark.parametrize("name", ["model_state.pdparams", "config.json"])
def test_initial_weights_with_a_flipped_bit(monkeypatch, out, tmp_path, caplog, name):
    """8.318 instead of 7.478 as the first loss, in silence."""
    checkpoint = out / "checkpoint-3"
    path = checkpoint / name
    if name == "config.json":
        path.write_text(path.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-04'))
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    flags = FLAGS | dict(max_steps=1, te_init_weight_path=checkpoint, model_name_or_path=checkpoint)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, tmp_path / "new", **flags)
    assert stop.value.code == 2 and f"{name} has another checksum" in caplog.text
    run(monkeypatch, tmp_path / "new", **flags, verify_checkpoint="none")
    assert "not compared with its manifest.json (--verify_checkpoint none)" in caplog.text
