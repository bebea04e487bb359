"""Routers while a model trains: the auxiliary loss in a step of several micro-batches, the bias, and what is logged."""

import numpy as np
import paddle
import pytest

from paddle_te.configs.families import FAMILIES
from paddle_te.hosts.paddlenlp.families import config_class, model_class
from paddle_te.layers.moe import MoEAuxLossAutoScaler, MoEConfig, MoELayer
from paddle_te.models.experts import (
    ROUTING,
    drop_step,
    routers,
    routing_values,
    scaled_auxiliary_loss,
    update_biases,
)

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.3, seq_length=24,
)  # fmt: skip


def make(**said):
    config = config_class(FAMILIES["mixtral"])(**SIZES | said, transformer_engine_backend="paddle")
    model = model_class(config)(config)
    model.train()
    return model


def router_gradient(coefficient, micro_batches, ids):
    paddle.seed(3)
    model = make(moe_aux_loss_coeff=coefficient)
    with scaled_auxiliary_loss(micro_batches):
        for part in ids.chunk(micro_batches):
            (model(part, labels=part)[0] / micro_batches).backward()
    assert MoEAuxLossAutoScaler.main_loss_backward_scale == 1.0
    return routers(model)[0].weight.grad.numpy(), [float(router.statistics.aux_loss or 0) for router in routers(model)]


def test_the_auxiliary_loss_weighs_as_the_micro_batches(seed):
    """Two equal micro-batches are one: the loss that balances them must not count twice."""
    half = paddle.randint(0, 64, [1, 24])
    ids = paddle.concat([half, half])
    once, losses = router_gradient(0.5, 1, half)
    twice, _ = router_gradient(0.5, 2, ids)
    without, none = router_gradient(0.0, 2, ids)
    assert np.linalg.norm(twice - once) < 1e-5 * np.linalg.norm(once)
    assert np.linalg.norm(once - without) > 1e-3 * np.linalg.norm(once)
    assert all(loss > 0 for loss in losses) and none == [0, 0]


def test_config_json_says_the_coefficient_where_the_run_does_not(seed):
    said = [routers(make(**words))[0].config.moe_aux_loss_coeff for words in (
        {}, {"router_aux_loss_coef": 0.02}, {"router_aux_loss_coef": 0.02, "moe_aux_loss_coeff": 0.0}
    )]  # fmt: skip
    assert said == [0.001, 0.02, 0.0]


def test_what_is_logged(seed):
    """Against the numbers of tokens that the experts got."""
    model = make(moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.2, moe_expert_capacity_factor=0.5)
    assert routing_values(model, 1) == {}
    ids = paddle.randint(0, 64, [2, 24])
    model(ids, labels=ids)
    values = routing_values(model, 1)
    seen = [router.statistics.tokens_per_expert.numpy() for router in routers(model)]
    assert {*values} == {*ROUTING}
    assert values["expert_load"] == pytest.approx(max(tokens.max() / 24 for tokens in seen))
    dropped = sum(np.maximum(tokens - 12, 0).sum() for tokens in seen)  # an expert takes 48 · 2 / 4 · 0.5
    assert values["dropped_tokens"] == pytest.approx(dropped / (2 * 96))
    assert 0.1 <= values["moe_aux_loss"] < 0.2  # 1 is perfect balance
    z_losses = [float(router.statistics.z_loss) for router in routers(model)]
    assert values["moe_z_loss"] == pytest.approx(np.mean(z_losses))


def test_forced_balance(seed):
    model = make(moe_router_force_load_balancing=True)
    ids = paddle.randint(0, 64, [2, 24])
    model(ids, labels=ids)
    assert routing_values(model, 1)["expert_load"] == 1


def test_the_bias_of_busy_experts_falls(seed):
    options = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    layer = MoELayer(MoEConfig(16, 8, 4, backend="paddle", **options))
    layer(paddle.randn([10, 16])).sum().backward()
    tokens = layer.router.statistics.tokens_per_expert.numpy()
    update_biases(layer)
    np.testing.assert_allclose(layer.router.expert_bias.numpy(), 1e-3 * np.sign(tokens.mean() - tokens), rtol=1e-6)


def test_no_bias_moves_by_a_step_that_is_left_out(seed):
    options = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    layer = MoELayer(MoEConfig(16, 8, 4, backend="paddle", **options))
    layer(paddle.randn([10, 16])).sum().backward()
    drop_step(layer)
    update_biases(layer)
    assert not layer.router.expert_bias.numpy().any()
