"""LoRA on single layers; on a model it is tested beside each host's own (tests/unit/hosts, tests/paddleformers)."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_te import native
from paddle_te.layers import LayerNormMLP
from paddle_te.layers.lora import LoRALayerNormMLP
from paddle_te.ops.te import kernel_choice, program
from tests import emulated_te, stored_input_cases
from tests.stored_input_cases import RECIPES, make, train
from tests.te_weights import relative


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
    dropped = (got == x).astype("float32").mean()
    assert 0.25 < dropped < 0.55 and abs(got - want).max() < 1e-5  # 200 seeds: 0.4, and up to 0.075 away
    layer.eval()
    assert (layer(x) == x).astype("float32").mean() < 0.1  # what is added may be lost in rounding


# 49 seeds: at most 0.082 in fp8
@pytest.mark.parametrize("recipe, bound", [("16bits", 0.03), ("delayed", 0.13), ("current", 0.13), ("block", 0.13)])
@pytest.mark.parametrize("norms, over", [("after", "all"), ("both", "head")])
def test_te_computes_what_pd_does_with_all_norms(seed, monkeypatch, norms, over, recipe, bound):
    emulated_te.install(monkeypatch.setattr)
    shared = dict(norms=norms, qk_norm_type="RMSNorm", qk_norm_before_rope=True, qk_norm_over=over)
    for options in ({}, dict(recompute_modules=("layernorm", "mlp_act"))):
        want, got = (
            train(seed, backend, RECIPES[recipe], "lora", **shared, **options)
            for backend in ("paddle", "transformer_engine")
        )
        assert any("lora" in name for name in want)
        errors = {name: relative(got[name], want[name]) for name in want}
        assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_norm_writes_what_the_library_writes_casts_and_copies(seed, monkeypatch, recipe):
    """The same bits, in fp8 and 16 bits, and the residual's copy; 512 is a size that our norm takes."""
    emulated_te.install(monkeypatch.setattr)
    for name, number in (("HIDDEN", 512), ("HEADS", 8)):
        monkeypatch.setattr(stored_input_cases, name, number)
    given, copies = (seed, "transformer_engine", RECIPES[recipe], "lora over fp8"), ("memcpy_async", "bfloat16")
    got = train(*given)
    assert copies not in native.load().counts()
    monkeypatch.setattr(kernel_choice, "norm", lambda *_: False)
    program.clear()
    want = train(*given)
    program.clear()
    assert native.load().counts()[copies] == 2
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, name)


def test_what_is_taken_away_are_adapters_alone(seed):
    layer = make(seed, "paddle", adapter="lora", norms="both").layernorm_mlp
    assert {name for name, _ in layer.split_mapping()} == {"gate_proj.lora_B", "up_proj.lora_B", "down_proj.lora_A"}
    layer.disable()
    assert type(layer) is LayerNormMLP and [*layer._sub_layers] == ["post_norm"]
