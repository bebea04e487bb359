"""PaddleFormers' checkpoints, of Hugging Face's names: from its own layers to ours and back."""

import json

import numpy as np
import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from safetensors.numpy import load_file

from paddle_te.configs.spec import spec_of
from paddle_te.hosts.paddleformers.configuration import decoder_config
from paddle_te.weights.layouts import hf_layout
from tests.paddleformers.llama import model_class, tiny_config, tokens, two_models
from tests.te_weights import relative, te_weights


def weights_in(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: array for file in dict.fromkeys(index.values()) for name, array in load_file(folder / file).items()}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_there_and_back(seed, tmp_path, kv_heads):
    """Ours reads what the host has written, and writes the same, bit for bit."""
    host, _ = two_models(np.random.default_rng(seed), num_key_value_heads=kv_heads)
    host.save_pretrained(str(tmp_path / "host"))
    config = tiny_config(num_key_value_heads=kv_heads)
    ours = model_class(config).from_pretrained(str(tmp_path / "host"), config=config)
    for source, target in zip(host.model.layers, ours.model.layers, strict=True):
        wanted = te_weights(source)
        for name, parameter in target.transformer.named_parameters():
            np.testing.assert_array_equal(parameter.numpy(), wanted[name])
    ours.save_pretrained(str(tmp_path / "ours"))
    theirs, again = (weights_in(tmp_path / name) for name in ("host", "ours"))
    layout, spec = hf_layout(), spec_of(decoder_config(config))
    assert again.keys() == theirs.keys() == {layout.full_name(place) for place in layout.tensors(spec)}
    for name, array in theirs.items():
        np.testing.assert_array_equal(again[name], array)


def test_tied_embeddings(seed, tmp_path):
    generator = np.random.default_rng(seed)
    tied = dict(tie_word_embeddings=True)
    config, host_config = tiny_config(**tied), tiny_config("none", **tied)
    ours = model_class(config)(config)
    ours.save_pretrained(str(tmp_path))
    host = model_class(host_config).from_pretrained(str(tmp_path), config=host_config)
    host.eval(), ours.eval()
    input_ids = tokens(generator, 2, 24)
    assert relative(ours(input_ids)[0], host(input_ids)[0]) < 1e-5
