"""Training goes on from a converted checkpoint with its optimizer: the other backend's losses, then its own again."""

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from paddle_te.weights import convert
from tests.pretraining import run


def train(monkeypatch, output, backend, **flags):
    """The losses of a run."""
    return run(monkeypatch, output, transformer_engine_backend=backend, gradient_accumulation_steps=1, **flags)


@pytest.mark.parametrize("unified", [False, True])
def test_losses_go_on(monkeypatch, tmp_path, caplog, unified):
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
    assert "resuming" in caplog.text and "has no manifest.json" not in caplog.text


def spread(folder):
    """Spreads a unified checkpoint of one file a kind over two, as two pipeline stages save it; without a manifest."""
    (folder / "manifest.json").unlink(missing_ok=True)
    (folder / ".checkpoint_done").write_text("")
    order = list(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])
    for stem in ("model", "optimizer"):
        whole = folder / f"{stem}-00001-of-00001.safetensors"
        tensors = load_file(whole)
        whole.unlink()
        index_file = folder / f"{stem}.safetensors.index.json"
        stage = {name: 1 + (order.index(name.partition("/")[0]) >= len(order) // 2) for name in tensors}
        weight_map = {name: f"{stem}-{n:05d}-of-00002.safetensors" for name, n in stage.items()}
        for file in sorted(set(weight_map.values())):
            mine = {name: tensors[name] for name in tensors if weight_map[name] == file}
            save_file(mine, folder / file, metadata={"format": "np"})
        index_file.write_text(json.dumps(json.loads(index_file.read_text()) | {"weight_map": weight_map}))


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_a_unified_checkpoint_in_several_files_is_loaded_whole(monkeypatch, tmp_path, backend):
    """PaddleNLP alone reads the first file on one device, and trains the other weights from random ones."""
    whole = train(monkeypatch, tmp_path / "whole", backend, unified_checkpoint="true")
    checkpoint = tmp_path / "whole/checkpoint-3"
    spread(checkpoint)
    for unified in ("true", "false"):
        again = train(
            monkeypatch, tmp_path / unified, backend, unified_checkpoint=unified, resume_from_checkpoint=checkpoint
        )
        assert again == {step: whole[step] for step in (4, 5, 6)}


def test_what_cannot_be_resumed_whole_is_refused(monkeypatch, tmp_path, caplog):
    """In one line, before there is a model: no optimizer, a missing file, another precision."""
    train(monkeypatch, tmp_path / "first", "none", max_steps=3)
    checkpoint = tmp_path / "first/checkpoint-3"
    convert(checkpoint, tmp_path / "tp2", "reshard", tensor_parallel_degree=2, progress=False)
    convert(checkpoint, tmp_path / "unified", "reshard", with_optimizer=True, progress=False)
    for name in ("trainer_state.json", "scheduler.pdparams"):
        shutil.copy(checkpoint / name, tmp_path / "tp2")
    (tmp_path / "tp2/.checkpoint_done").touch()
    spread(tmp_path / "unified")
    (tmp_path / "unified/optimizer-00002-of-00002.safetensors").unlink()
    reasons = {
        "tp2": "optimizer.tp00.pdopt: missing",
        "unified": "optimizer-00002-of-00002.safetensors: missing; optimizer.safetensors.index.json names it",
    }
    for name, reason in reasons.items():
        with pytest.raises(SystemExit) as stop:
            train(monkeypatch, tmp_path / f"other_{name}", "none", resume_from_checkpoint=tmp_path / name)
        assert stop.value.code == 2
        assert reason in caplog.records[-1].message and "\n" not in caplog.records[-1].message
