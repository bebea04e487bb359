"""LoRA on single layers; on a model it is tested beside each host's own (tests/unit/hosts, tests/paddleformers)."""

from types import SimpleNamespace

import paddle
import pytest

from paddle_te.layers import LayerNormMLP
from paddle_te.layers.lora import LoRALayerNormMLP


@pytest.mark.parametrize("names", [("gate_proj",), ("up_proj", "down_proj")])
def test_dropout_of_the_mlp_is_that_without_lora(seed, names):
    """An adapter that has learned nothing adds zeros: the same numbers are dropped."""
    layer, x = LayerNormMLP(32, 48, hidden_dropout=0.4, backend="paddle"), paddle.randn([2, 8, 32])
    paddle.seed(seed)
    want = layer(x)
    parts = {"fc1_weight": {"gate_proj": 48, "up_proj": 48}, "fc2_weight": {"down_proj": 32}}
    LoRALayerNormMLP.enable(layer, parts, names, SimpleNamespace(r=2, scaling=2.0, lora_dropout=0.0))
    paddle.seed(seed)
    got = layer(x)
    assert 0.3 < float((got == x).astype("float32").mean()) < 0.5 and abs(got - want).max() < 1e-5
    layer.eval()
    assert (layer(x) == x).astype("float32").mean() < 0.1  # what is added may be lost in rounding
