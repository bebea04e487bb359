"""Tensor parallel shares of stacked tensors."""

import numpy as np
import paddle
import pytest

from paddle_te.configs.families import QWEN2, QWEN2_MOE
from paddle_te.configs.spec import spec_of
from paddle_te.weights import Dims, layer_splits, te_layout
from paddle_te.weights.splits import Split

DIMS = Dims(
    spec_of(
        dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=64,
        )
    )
)  # fmt: skip


def test_the_layers_splits():
    """Norms are whole on every rank; q, k and v, gate and up are split on their rows, the others on their columns."""
    prefix = "transformer."
    assert layer_splits(te_layout(family=QWEN2), DIMS) == {
        f"{prefix}self_attention.layernorm_qkv.weight": Split(0, (32, 16, 16)),
        f"{prefix}self_attention.layernorm_qkv.bias": Split(0, (32, 16, 16)),
        f"{prefix}self_attention.proj.weight": Split(1, (32,)),
        f"{prefix}layernorm_mlp.fc1_weight": Split(0, (48, 48)),
        f"{prefix}layernorm_mlp.fc2_weight": Split(1, (48,)),
    }


def test_a_layer_with_experts():
    """Ranks have some experts whole, and each a share of the shared one."""
    dims = Dims(spec_of(dict(model_type="qwen2_moe", hidden_size=32, num_hidden_layers=1, num_attention_heads=8)))
    splits = layer_splits(te_layout(family=QWEN2_MOE), dims)
    assert {name.partition("moe_layer.")[2]: split for name, split in splits.items() if "moe" in name} == {
        "experts.fc1_weight": Split(0, (60,)),
        "experts.fc2_weight": Split(0, (60,)),
        "shared_experts.fc1_weight": Split(0, (5632, 5632)),
        "shared_experts.fc2_weight": Split(1, (5632,)),
    }


@pytest.mark.parametrize("make", [np.asarray, paddle.to_tensor])
def test_shares_are_parts_of_every_part(seed, make):
    weight = np.random.default_rng(seed).standard_normal([64, 6]).astype("float32")
    split = Split(0, (32, 16, 16))
    shares = [split.share(make(weight), 2, rank) for rank in range(2)]
    rows = [[*range(0, 16), *range(32, 40), *range(48, 56)], [*range(16, 32), *range(40, 48), *range(56, 64)]]
    for share, mine in zip(shares, rows, strict=True):
        np.testing.assert_array_equal(np.asarray(share), weight[mine])
    np.testing.assert_array_equal(np.asarray(split.whole(shares)), weight)
    columns = Split(1, (6,))
    shares = [columns.share(make(weight), 3, rank) for rank in range(3)]
    np.testing.assert_array_equal(np.asarray(shares[1]), weight[:, 2:4])
    np.testing.assert_array_equal(np.asarray(columns.whole(shares)), weight)


@pytest.mark.parametrize("split, what", [(Split(0, (32, 10)), "10 rows"), (Split(1, (10,)), "10 columns")])
def test_what_does_not_divide_is_refused(split, what):
    with pytest.raises(ValueError, match=f"{what} cannot be split over 4 tensor parallel ranks"):
        split.share(np.zeros([42, 10]), 4, 0)
