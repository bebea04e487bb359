"""A small model's weights in te's layout, gradients for them, and Muon's steps on some ranks."""

from dataclasses import dataclass

import numpy as np
import paddle

from paddle_te.configs.families import FAMILIES
from paddle_te.configs.spec import spec_of
from paddle_te.optimizer import decay_matrices
from paddle_te.optimizer.compact_states import keep_compact
from paddle_te.optimizer.muon import bind_muon, use_muon
from paddle_te.weights.dims import Dims
from paddle_te.weights.layouts import te_layout

RATE, DECAY, MOMENTUM = 0.02, 0.1, 0.9
LLAMA = dict(
    model_type="llama", vocab_size=48, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=32, rms_norm_eps=1e-5,
)  # fmt: skip
MOE = LLAMA | dict(
    model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True,
    decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip


@dataclass
class Case:
    """A model's layout and sizes, its first weights and each step's gradients, by the layout's names."""

    layout: object
    dims: Dims
    weights: dict
    grads: list


def draw(seed, config=LLAMA, steps=3):
    spec = spec_of(config)
    layout, dims, draw = te_layout(family=FAMILIES[config["model_type"]]), Dims(spec), np.random.default_rng(seed)
    shapes = {layout.full_name(place): dims.slot_shape(place) for place in layout.tensors(spec)}
    numbers = [
        {name: draw.standard_normal(shape, "float32") for name, shape in shapes.items()} for _ in range(steps + 1)
    ]
    return Case(layout, dims, *numbers[:1], numbers[1:])


def share(case, name, array, tp):
    """A tensor parallel rank's part of a tensor."""
    if tp is None:
        return array
    place = case.layout.place(name)
    if place.slot.stacked:
        return np.split(array, tp.size)[tp.rank]
    parts = case.dims.take_apart(place, array)
    return case.dims.put_together(place, {p: a[case.dims.share(p, tp.size, tp.rank)] for p, a in parts.items()})


def make(case, tp=None, moments="float32", clip=None):
    """({name: parameter}, the Muon)."""
    parameters = {}
    paddle.utils.unique_name.switch()  # states have the same names each time
    for number, (name, array) in enumerate(case.weights.items()):
        tensor = paddle.to_tensor(share(case, name, array, tp))
        parameter = paddle.base.framework.EagerParamBase.from_tensor(tensor)
        parameter.stop_gradient, parameter.name = False, f"weight_{number}.w_0"
        parameters[name] = parameter
    schedule = paddle.optimizer.lr.LambdaDecay(RATE, lambda step: 1.0)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=[*parameters.values()], weight_decay=DECAY, grad_clip=clip)
    decay_matrices(optimizer)
    keep_compact(optimizer, moments, "float32")
    use_muon(optimizer, "paddle", MOMENTUM)
    bind_muon(optimizer, parameters, case.layout, case.dims, tp)
    return parameters, optimizer


def train(case, parameters, optimizer, steps=None, tp=None):
    """Make the steps; returns {name: array}."""
    for grads in case.grads if steps is None else steps:
        pairs = [(p, paddle.to_tensor(share(case, name, grads[name], tp))) for name, p in parameters.items()]
        optimizer._apply_optimize(None, None, pairs)
        optimizer._learning_rate.step()
    return {name: parameter.numpy() for name, parameter in parameters.items()}


def matrices(case, arrays):
    """{(name, part): [out, in]} of the tensors that Muon updates, as Hugging Face's layers have them."""
    found = {}
    for name, array in arrays.items():
        if case.layout.is_matrix(name):
            found |= {(name, part): a for part, a in case.dims.take_apart(case.layout.place(name), array).items()}
    return found
