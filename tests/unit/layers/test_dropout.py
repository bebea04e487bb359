"""pd's dropout of attention and of what a layer adds to its input: its numbers, which ranks drop the same, refusals.

tests/gpu/test_dropout.py has the same for te.
"""

import sys
from types import SimpleNamespace

import paddle
import pytest
from paddle.distributed.fleet.layers.mpu.random import RNGStatesTracker

from paddle_te import fp8
from paddle_te.distributed import random_numbers
from paddle_te.layers import DotProductAttention, LayerNormMLP, RotaryPositionEmbedding, TransformerLayer, dropout_add
from paddle_te.ops import get_ops
from tests import emulated_te
from tests.dropout_cases import DTYPE, HALVES, check_attention, check_hidden, check_recompute
from tests.layer_cases import ATTENTION


@pytest.mark.parametrize("how", ["causal", "mask", "documents"])
def test_the_softmax_is_dropped(seed, how):
    check_attention("cpu", "paddle", how, seed)


@pytest.mark.parametrize("kind", HALVES)
def test_what_is_added_to_the_input_is_dropped(seed, kind):
    check_hidden("cpu", "paddle", kind, None, seed)


def test_recompute_drops_the_same(seed):
    check_recompute("cpu", "paddle", None, seed)


def test_which_ranks_drop_the_same(monkeypatch):
    """As in Megatron: heads are each rank's own, and so are tokens under sequence parallelism only."""
    attention, hidden, split = [], [], []
    for rank in 0, 1:
        tracker = RNGStatesTracker()
        monkeypatch.setattr(
            sys.modules[random_numbers.__module__], "get_rng_state_tracker", lambda tracker=tracker: tracker
        )
        tracker.add("global_seed", 5)
        tracker.add("local_seed", 7 + rank)
        ones = paddle.ones([1, 8, 2, 16])
        core = DotProductAttention(16, "paddle", attention_dropout=0.5)
        core.tp = SimpleNamespace(sequence_parallel=False)
        attention.append(core(ones, ones, ones))
        for results, parallel in (hidden, False), (split, True):
            tp = SimpleNamespace(sequence_parallel=parallel)
            results.append(dropout_add(paddle.ones([8, 16]), paddle.zeros([8, 16]), 0.5, tp))
    assert (hidden[0] == hidden[1]).all() and (hidden[0] == 0).any()
    assert not (attention[0] == attention[1]).all() and not (split[0] == split[1]).all()


@pytest.mark.parametrize("make, message", [
    (lambda: DotProductAttention(16, "paddle", attention_dropout=1.0), "attention_dropout=1.0: .* below 1"),
    (lambda: LayerNormMLP(16, 32, hidden_dropout=-0.1, backend="paddle"), "hidden_dropout=-0.1"),
    (lambda: TransformerLayer(32, 48, 4, hidden_dropout=2, backend="paddle"), "hidden_dropout=2"),
])  # fmt: skip
def test_what_is_no_probability_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("backend", DTYPE)
def test_fp8_attention_has_none(monkeypatch, backend):
    emulated_te.install(monkeypatch.setattr)
    make = HALVES["multi_head_attention"]
    layer = make(attention_dropout=0.1, backend=backend, params_dtype=DTYPE[backend])
    x, freqs = paddle.ones([1, 16, 256]).astype(DTYPE[backend]), RotaryPositionEmbedding(64)(16)
    with fp8.fp8_autocast(True, ATTENTION["dpa"]), pytest.raises(ValueError, match="fp8_dpa: .* no dropout"):
        layer(x, freqs)


@pytest.mark.parametrize("capability, deterministic, arguments, message", [
    ((9, 0), "1", (64, 4, False, 0.1), "no dropout with a sliding window"),
    ((10, 0), "1", (64, -1, True, 0.1), "no dropout with a mask"),
    ((10, 0), "0", (64, -1, False, 0.1), "no dropout with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"),
    ((9, 0), "1", (68, -1, False, 0), "heads have 68 numbers; .* 9.0 .* multiples of 8 up to 256"),
    ((8, 0), "1", (192, -1, False, 0), "heads have 192 numbers; .* 8.0 .* up to 128"),
    ((9, 0), "0", (64, 4, True, 0.1), None),
    ((10, 0), "1", (64, -1, False, 0.1), None),
    ((10, 0), "0", (64, 4, True, 0), None),
    ((9, 0), "1", (256, -1, False, 0), None),
])  # fmt: skip
def test_what_attention_cudnn_has(monkeypatch, capability, deterministic, arguments, message):
    emulated_te.install(monkeypatch.setattr)
    monkeypatch.setattr(emulated_te.Stream, "capability", capability)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", deterministic)
    check = get_ops("transformer_engine").check_attention
    if message is None:
        return check(*arguments)
    with pytest.raises(ValueError, match=message):
        check(*arguments)
