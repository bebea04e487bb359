"""A reference that is a model of its own; over ranks in tests/multiprocess/distributed/test_preferences.py."""

import json

import numpy as np
import paddle

from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.loading import read_config
from paddle_te.hosts.paddlenlp.training.preference_reference import SecondModel
from paddle_te.models.experts import routers
from tests import model_cases


def test_it_takes_the_bias_of_experts_with_the_weights(tmp_path):
    """The bias moves by the load of experts, and is a buffer: without it the router would choose others."""
    (tmp_path / "config.json").write_text(json.dumps(model_cases.config("deepseek_v3-direct")))
    config = read_config(tmp_path)
    config.transformer_engine_backend = "paddle"
    trained, other = (model_class(config)(config) for _ in range(2))
    assert routers(trained)
    for router in routers(trained):
        router.expert_bias.set_value(paddle.randn(router.expert_bias.shape))
    reference = SecondModel(other)
    reference.take_weights(trained)
    trained.eval()
    tokens = paddle.arange(16).reshape([1, 16])
    with paddle.no_grad():
        want, found = (model(tokens)[0].numpy() for model in (trained, reference.model))
    np.testing.assert_array_equal(found, want)
