"""The angles of scaled rotary positions against formulas in float64. tests/unit/hosts/paddlenlp compares
with PaddleNLP, and tests/end_to_end/weights with transformers."""

import numpy as np
import paddle
import pytest

from paddle_te.layers import RotaryPositionEmbedding
from tests import rope_formulas

DIM, BASE, TRAINED = 64, 1e6, 512


def angles(frequency_of, positions):
    """Float64 [..., DIM]."""
    frequencies = np.array([frequency_of(pair) for pair in range(DIM // 2)])
    return np.asarray(positions)[..., None] * np.tile(frequencies, 2)


def rope(**scaling):
    return RotaryPositionEmbedding(DIM, BASE, rope_scaling=scaling, max_position_embeddings=TRAINED)


@pytest.mark.parametrize("factor, further", [(4.0, {}), (8.0, dict(beta_fast=16, beta_slow=2)), (40.0, {})])
def test_yarn(factor, further):
    layer = rope(rope_type="yarn", factor=factor, original_max_position_embeddings=TRAINED, **further)
    slow_and_fast = {name.removeprefix("beta_"): value for name, value in further.items()}
    want = angles(lambda n: rope_formulas.yarn(n, DIM, BASE, factor, TRAINED, **slow_and_fast), np.arange(4000))
    np.testing.assert_allclose(layer(4000).numpy(), want, rtol=2e-6)
    assert layer.attention_factor == pytest.approx(rope_formulas.yarn_attention_factor(factor))


@pytest.mark.parametrize("given, want", [
    (dict(attention_factor=1.3), 1.3),
    (dict(mscale=2.0, mscale_all_dim=1.0), (0.2 * np.log(4) + 1) / (0.1 * np.log(4) + 1)),
    (dict(mscale=2.0), 0.1 * np.log(4) + 1),
])  # fmt: skip
def test_yarns_attention_factor(given, want):
    layer = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=TRAINED, **given)
    assert layer.attention_factor == pytest.approx(want)


def test_dynamic_follows_the_length_and_comes_back():
    layer = rope(rope_type="dynamic", factor=3.0)
    for length in (TRAINED, 700, 2000, 700, 100):
        want = angles(lambda n: rope_formulas.dynamic(n, DIM, BASE, 3.0, TRAINED, length), np.arange(length))  # noqa: B023
        np.testing.assert_allclose(layer(length).numpy(), want, rtol=2e-6)


def test_dynamic_beyond_its_length_has_no_angle_of_a_position_alone():
    layer = rope(rope_type="dynamic", factor=3.0)
    layer.check_any_position(TRAINED)
    want = angles(lambda n: rope_formulas.plain(n, DIM, BASE), [[3, 0], [400, 1]])
    np.testing.assert_allclose(layer.at(paddle.to_tensor([[3, 0], [400, 1]])).numpy(), want, rtol=2e-6)
    with pytest.raises(ValueError, match="rope type dynamic: in a sequence of 513 tokens, beyond .*=512"):
        layer.check_any_position(TRAINED + 1)


@pytest.mark.parametrize("kind", ["ntk", "linear"])
def test_one_factor_for_all_positions(kind):
    positions = [0, 1, 77, 8191]
    frequency = {
        "ntk": lambda n: rope_formulas.ntk(n, DIM, BASE, 4.0),
        "linear": lambda n: rope_formulas.plain(n, DIM, BASE) / 4,
    }[kind]
    got = rope(rope_type=kind, factor=4.0).at(paddle.to_tensor(positions))
    np.testing.assert_allclose(got.numpy(), angles(frequency, positions), rtol=2e-6)


def test_dynamic_needs_to_know_the_trained_length():
    with pytest.raises(ValueError, match="dynamic needs rope_scaling's factor and max_position_embeddings"):
        RotaryPositionEmbedding(DIM, BASE, rope_scaling={"rope_type": "dynamic", "factor": 3.0})
