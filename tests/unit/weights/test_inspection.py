import json
import re
import sys

import pytest

from paddle_te.weights import CheckpointError, command
from paddle_te.weights.inspection import inspect
from paddle_te.weights.tensors import TensorRef
from tests.unit.weights.models import Model, save_config, save_single


@pytest.fixture
def ranks(tmp_path, rng, monkeypatch):
    """A checkpoint of two tensor parallel ranks, whose tensors must not be read."""
    model = Model(rng, "bfloat16")
    for tp in (0, 1):
        save_single(tmp_path / "pd", model.rank(tp, 2), "bfloat16", variant=f"tp{tp:02d}")
    save_config(tmp_path / "pd", model)
    monkeypatch.setattr(TensorRef, "read", None)
    return tmp_path / "pd", model


def facts_and_table(text):
    facts, _, table = text.partition("\n\n")
    return dict(line.split(maxsplit=1) for line in facts.splitlines()), table.splitlines()


def test_names_shapes_degrees_and_step(ranks):
    folder, model = ranks
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 30}))
    for tp, shard in ((0, 0), (0, 1), (1, 0), (1, 1)):
        (folder / f"optimizer.tp{tp:02d}_shard{shard:02d}.pdopt").touch()
    facts, table = facts_and_table(inspect(folder))
    assert facts["parameters"] == f"{sum(tensor.size for tensor in model.native.values()):,}"
    assert facts["model"] == "Llama, 2 layers" and facts["layout"] == "PaddleNLP's native"
    assert facts["degrees"] == "tensor parallel 2, sharding 2" and facts["dtypes"] == "bfloat16"
    assert facts["optimizer"] == "4 .pdopt files" and facts["step"] == "30"
    assert [line.split()[0] for line in table[1:]] == list(model.native)
    line = next(line for line in table if "layers.1.self_attn.o_proj" in line)
    assert re.split("  +", line)[1:] == ["[16, 32]", "[32, 32]", "bfloat16", "model_state.tp00.pdparams"]


def test_what_a_folder_of_weights_lacks(ranks):
    facts, _ = facts_and_table(inspect(ranks[0]))
    assert facts["optimizer"] == "none" and facts["step"] == "no trainer_state.json"


def test_the_command_writes_nothing(ranks, monkeypatch, capsys):
    folder, _ = ranks
    monkeypatch.setattr(sys, "argv", ["convert", "--inspect", "--input_ckpt_path", str(folder)])
    before = sorted(folder.parent.rglob("*"))
    command.main()
    assert capsys.readouterr().out == inspect(folder) + "\n" and sorted(folder.parent.rglob("*")) == before


def test_a_damaged_state(ranks):
    (ranks[0] / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="trainer_state.json: global_step is missing"):
        inspect(ranks[0])
