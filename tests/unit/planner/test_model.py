"""The planner's reading of a model."""

from paddle_te import configs
from paddle_te.planner.model import Model


def test_layers_with_experts_among_others():
    """GLaM has them in every second layer."""
    model = Model.of(configs.read("glam-126m-64e"))
    assert (model.sparse, model.outputs, model.routed, model.topk) == (0.5, 32, 1, 2)
