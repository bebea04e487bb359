"""te2formers and pd2formers: Hugging Face's folder with the state from which PaddleFormers' Trainer resumes.

That it resumes, with PaddleNLP's losses, shows tests/paddleformers/test_from_paddlenlp.py.
"""

import dataclasses
import json
import sys
from types import ModuleType

import numpy as np
import paddle
import pytest
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata

from paddle_te.weights import CheckpointError, convert
from tests.unit.weights.models import Model, assert_same
from tests.unit.weights.test_optimizer import MOMENTS, POWERS, in_layout, save_trained

STATE = {"global_step": 3, "epoch": 0.5, "log_history": [{"loss": 2.5, "step": 3}], "best_metric": None}


@pytest.fixture
def state_of(rng):
    return {kind: Model(rng) for kind in (*MOMENTS, "master_weights")}


@pytest.fixture
def trained(tmp_path, rng, state_of):
    """A model and its checkpoint's folder, of a layout and dtype."""

    def make(kind, dtype):
        model, source = Model(rng, dtype), tmp_path / "native"
        save_trained(source, model, state_of, master=dtype == "bfloat16")
        for folder in (source, tmp_path / "in"):
            if folder == tmp_path / "in":
                mode = "pd2te" if kind == "te" else "reshard"
                convert(source, folder, mode, with_optimizer=True, progress=False)
            (folder / "trainer_state.json").write_text(json.dumps(STATE))
            paddle.save({"last_epoch": 3, "last_lr": 0.1}, str(folder / "scheduler.pdparams"))
        return model, tmp_path / "in"

    return make


def in_formers(model, kind):
    """PaddleFormers' names and shapes: the head lies as Hugging Face's."""
    return {
        name.replace("llama.", "model."): tensor.T if name == "lm_head.weight" else tensor
        for name, tensor in in_layout(model, kind).items()
    }


@pytest.mark.parametrize("kind", ["te", "pd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_and_state(tmp_path, monkeypatch, state_of, trained, kind, dtype):
    model, source = trained(kind, dtype)
    out = tmp_path / "out"
    assert convert(source, out, f"{kind}2formers", progress=False, checksums=True) == []
    convert(source, tmp_path / "hf", f"{kind}2hf", progress=False)
    (weights,) = (tmp_path / "hf").glob("*.safetensors")
    assert (out / "model-00001-of-00001.safetensors").read_bytes() == weights.read_bytes()
    moments = {f"{k}.{m}": v for m in MOMENTS for k, v in in_formers(state_of[m], kind).items()}
    names = in_formers(model, kind)
    powers = {f"{k}.{power}": np.array([value], np.float32) for k in names for power, value in POWERS.items()}
    masters = {f"{k}.w_0": v for k, v in in_formers(state_of["master_weights"], kind).items()}
    contents = dict(model_state=names, optimizer_state=moments | powers)
    contents["master_weight"] = masters if dtype == "bfloat16" else {}
    for folder, tensors in contents.items():
        assert_same(paddle.load(str(out / folder / "0_0.distcp"), return_numpy=True), tensors)
        metadata = paddle.load(str(out / folder / "0.metadata"))
        stored = dtype if folder == "model_state" else "float32"
        assert metadata.state_dict_metadata == {
            name: [LocalTensorMetadata((0,) * value.ndim, value.shape, stored, value.shape)]
            for name, value in tensors.items()
        }
        assert metadata.storage_metadata == {
            LocalTensorIndex(name, (0,) * value.ndim, local_shape=value.shape): "0_0.distcp"
            for name, value in tensors.items()
        }
        assert metadata.flat_mapping == {name: (name,) for name in tensors}
    for module in paddleformers_modules():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    state = paddle.load(str(out / "trainer_state.bin"))
    assert state.__dict__ == STATE
    assert (out / "scheduler.pdparams").read_bytes() == (source / "scheduler.pdparams").read_bytes()


def test_tied_weights(tmp_path, state_of, trained):
    """They are saved under both names, their optimizer's state under the head's."""
    model, source = trained("pd", "bfloat16")
    native = tmp_path / "native"
    (native / "config.json").write_text(json.dumps(model.config | {"tie_word_embeddings": True}))
    for name in ("model_state.pdparams", "optimizer.pdopt"):  # a tied model has one parameter
        saved = paddle.load(str(native / name))
        head = len(saved.pop("StructuredToParameterName@@", model.native)) - 1
        for content in (saved, saved.get("master_weights", {})):
            for key in [key for key in content if key == "lm_head.weight" or key.startswith(f"linear_{head}.")]:
                del content[key]
        paddle.save(saved, str(native / name))
    out = tmp_path / "out"
    convert(native, out, "pd2formers", progress=False)
    files = {
        folder: paddle.load(str(out / folder / "0_0.distcp"), return_numpy=True)
        for folder in ("model_state", "optimizer_state", "master_weight")
    }
    embedding = "llama.embed_tokens.weight"
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert_same({name: files["model_state"][name]}, {name: model.native[embedding]})
    wanted = {f"lm_head.weight.{kind}": state_of[kind].native[embedding] for kind in MOMENTS}
    wanted |= {f"lm_head.weight.{kind}": np.array([value], np.float32) for kind, value in POWERS.items()}
    outside = {key: value for key, value in files["optimizer_state"].items() if "embed" in key or "lm_head" in key}
    assert_same(outside, wanted)
    masters = {key: value for key, value in files["master_weight"].items() if "embed" in key or "lm_head" in key}
    assert_same(masters, {"lm_head.weight.w_0": state_of["master_weights"].native[embedding]})


def test_from_the_files_of_ranks(tmp_path, rng):
    """Tensor parallelism over 2 and sharding over 3 give the same files as one process."""
    model, state_of = Model(rng, kv_heads=4), {kind: Model(rng, kv_heads=4) for kind in MOMENTS}
    for folder, degree, shards in ((tmp_path / "one", 1, None), (tmp_path / "ranks", 2, 3)):
        for tp in range(degree):
            save_trained(folder, model, state_of, tp, degree, shards)
        (folder / "trainer_state.json").write_text(json.dumps(STATE))
        paddle.save({"last_epoch": 3, "last_lr": 0.1}, str(folder / "scheduler.pdparams"))
        convert(folder, tmp_path / f"out_{folder.name}", "pd2formers", progress=False)
    one, ranks = (
        {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
        for out in (tmp_path / "out_one", tmp_path / "out_ranks")
    )
    assert one == ranks and len(one) == 12


def paddleformers_modules():
    """PaddleFormers' module with the class that its Trainer's state is of, and the packages around it."""
    *packages, module = (
        ModuleType(name)
        for name in ("paddleformers", "paddleformers.trainer", "paddleformers.trainer.trainer_callback")
    )
    module.TrainerState = dataclasses.make_dataclass("TrainerState", [])
    return [*packages, module]


def test_refusals(tmp_path, rng, trained):
    _, source = trained("te", "float32")

    def refused(message, source=source, mode="te2formers", **options):
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "out", mode, progress=False, **options)
        assert not (tmp_path / "out").exists()

    refused("--with_optimizer: a conversion for PaddleFormers takes all state along", with_optimizer=True)
    refused("Hugging Face's layout is whole", tensor_parallel_degree=2)
    refused("is in Transformer Engine's layout, not one for pd2formers", mode="pd2formers")
    (source / "scheduler.pdparams").unlink()
    refused("scheduler.pdparams: missing; training cannot go on")
    (source / "trainer_state.json").unlink()
    refused("trainer_state.json")
    qwen = Model(rng, family="qwen2")
    save_trained(tmp_path / "qwen", qwen, dict.fromkeys(MOMENTS, qwen))
    refused("PaddleFormers makes Qwen2 with paddlefleet", tmp_path / "qwen", "pd2formers")
    native = tmp_path / "native"
    state = paddle.load(str(native / "optimizer.pdopt"))
    moments = {key: value.astype("bfloat16") if "moment" in key else value for key, value in state.items()}
    paddle.save(moments, str(native / "optimizer.pdopt"))
    refused(r"moment1_0 in bfloat16 \(--optim_moments", native, "pd2formers")
