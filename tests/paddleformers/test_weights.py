"""What PaddleFormers saves is accepted; weights that contradict config.json, or their manifest, are refused."""

import json
import shutil

import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from paddle_te.hosts.paddleformers.weights import check_weights
from tests.unit.runs.completed import complete


@pytest.fixture
def folder(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "copy")


@pytest.mark.parametrize("change, message", [
    ({}, None),
    ({"vocab_size": 192}, "follows from vocab_size=192"),
    ({"num_hidden_layers": 1}, "only 1 layers"),
    ({"tie_word_embeddings": True}, "other numbers than 'model.embed_tokens.weight'"),
], ids=lambda value: str(value)[:12])  # fmt: skip
def test_agreement(folder, change, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    if message is None:
        check_weights(folder)
    else:
        with pytest.raises(ValueError, match=message):
            check_weights(folder)


def test_a_flipped_bit_behind_a_link(folder, tmp_path):
    """The launcher links to the weights, beside a config.json of its own."""
    complete(folder)
    start = tmp_path / "start"
    start.mkdir()
    (start / "config.json").write_text("{}")
    weights = next(folder.glob("model*.safetensors"))
    for path in folder.glob("model*"):
        (start / path.name).symlink_to(path)
    check_weights(start)
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=f"{weights.name} has another checksum"):
        check_weights(start)
