"""Layers of families that are not a Llama's against transformers': norms, their places, rotation and windows."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_te.layers import RotaryPositionEmbedding, TransformerLayer
from tests.family_layers import FAMILIES, FFN, HEADS, HIDDEN, KV_HEADS, TOKENS, digest, parts, values

PYTHON = os.environ.get("PADDLE_TE_HF_PYTHON")
STORED = json.loads((Path(__file__).parent / "family_transformers.json").read_text())  # see tests/family_peers.py


def check(family, seed, expected):
    """Output and all gradients."""
    options, head_dim, percent, base, eps = FAMILIES[family]
    sizes = dict(kv_channels=head_dim, qk_norm_eps=eps, backend="paddle", params_dtype="float32")
    layer = TransformerLayer(HIDDEN, FFN, HEADS, KV_HEADS, eps, **sizes, **options)
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == parts(family).keys()
    given = values(family, {name: parameter.shape for name, parameter in parameters.items()}, seed)
    for name, parameter in parameters.items():
        parameter.set_value(given[name])
    x = paddle.to_tensor(given["x"], stop_gradient=False)
    y = layer(x, rotary_pos_emb=RotaryPositionEmbedding(head_dim, base, rotary_percent=percent)(TOKENS))
    y.backward(paddle.to_tensor(given["dy"]))
    found = {"y": y, "x": x.grad} | {name: parameter.grad for name, parameter in parameters.items()}
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        error = np.linalg.norm(np.array(digest(found[name].numpy())) - want) / np.linalg.norm(want)
        assert error < 5e-6, (name, error)


@pytest.mark.parametrize("family", FAMILIES)
def test_as_transformers_computed_it(family):
    check(family, 37, STORED[family])


@pytest.mark.skipif(not PYTHON, reason="PEERS=1 installs transformers")
def test_as_transformers_computes_it(seed):
    command = [PYTHON, "-m", "tests.family_peers", str(seed)]
    root = Path(__file__).parents[3]
    answers = json.loads(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)
    for family in FAMILIES:
        check(family, seed, answers[family])
