"""One of the ranks that divide experts and train on different samples; started by test_expert_parallel.py.

    experts.py SEED OUT

Trains a model of two layers for four clipped steps in each case, a backend with a dispatcher, and writes the losses and
weights to OUT.CASE.RANKS.RANK.npz. The samples of a step are the same however many ranks there are.
"""

import sys
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.utils import mix_precision_utils as mixed

from paddle_te import upstream
from paddle_te.distributed.expert_parallel import make_groups
from paddle_te.layers import TransformerLayer
from paddle_te.layers.moe import MoELayer
from paddle_te.layers.moe.lora import LoRAGroupedMLP
from paddle_te.optimizer import fuse_clipping
from tests import emulated_te

HIDDEN, FFN, HEADS, EXPERTS, CLASSES = 64, 32, 2, 4, 10
BATCH, TOKENS, STEPS = 4, 16, 4
CLIP = 0.05  # which all gradients exceed
# name: (backend, dtype, dispatcher)
CASES = {
    "pd_allgather": ("paddle", "float32", "allgather"),
    "pd_alltoall": ("paddle", "float32", "alltoall"),
    "te_allgather": ("transformer_engine", "bfloat16", "allgather"),
    "te_alltoall": ("transformer_engine", "bfloat16", "alltoall"),
    "pd_lora": ("paddle", "float32", "allgather"),
}
LORA = SimpleNamespace(r=4, scaling=2.0, lora_dropout=0.0)


class Net(paddle.nn.Layer):
    """Two layers, of which the second's mixture has a shared MLP, and a classifier of each token."""

    def __init__(self, backend, dtype, dispatcher):
        super().__init__()
        options = dict(num_moe_experts=EXPERTS, moe_token_dispatcher_type=dispatcher)
        mixtures = [options, options | dict(moe_shared_expert_intermediate_size=FFN, moe_shared_expert_gate=True)]
        self.layers = paddle.nn.LayerList(
            TransformerLayer(
                HIDDEN,
                FFN,
                HEADS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                max_sequence_length=TOKENS,
                feed_forward=MoELayer.in_layer(**each),
                set_parallel_mode=True,
                fuse_wgrad_accumulation=backend != "paddle",
                backend=backend,
                params_dtype=dtype,
            )
            for each in mixtures
        )
        self.head = paddle.nn.Linear(HIDDEN, CLASSES, bias_attr=False)

    def forward(self, x, labels):
        """x [b, s, h], labels [b, s] -> the mean loss."""
        for layer in self.layers:
            x = layer(x)
        return paddle.nn.functional.cross_entropy(self.head(x.astype("float32")), labels)


def add_lora(net):
    """Freezes the model, but for A and B beside its experts."""
    for parameter in net.parameters():
        parameter.stop_gradient = True
    for layer in net.layers:
        parts = {"fc1_weight": {"gate_proj": FFN, "up_proj": FFN}, "fc2_weight": {"down_proj": HIDDEN}}
        LoRAGroupedMLP.enable(layer.moe_layer.experts, parts, ("gate_proj", "up_proj", "down_proj"), LORA)


def draw_weights(net, seed, rank, ranks):
    """Gives the model the numbers of a whole one."""
    draw = np.random.default_rng(seed)
    for name, parameter in net.named_parameters():
        divided = ranks > 1 and ".experts." in name
        shape = [parameter.shape[0] * (ranks if divided else 1), *parameter.shape[1:]]
        value = draw.normal(0, shape[-1] ** -0.5, shape) if len(shape) > 1 else draw.normal(1, 0.1, shape)
        value = np.split(value, ranks)[rank] if divided else value
        parameter.set_value(paddle.to_tensor(value.astype("float32")).astype(parameter.dtype))


def train(case, seed, rank, ranks):
    """{name: array} of losses and weights."""
    backend, dtype, _ = CASES[case]
    net = Net(*CASES[case])
    if "lora" in case:
        add_lora(net)
    draw_weights(net, seed, rank, ranks)
    clip = paddle.nn.ClipGradByGlobalNorm(CLIP)
    trained = [parameter for parameter in net.parameters() if not parameter.stop_gradient]
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=trained, grad_clip=clip, multi_precision=True, epsilon=1e-4)
    fuse_clipping(optimizer)
    layer, optimizer = mixed.MixPrecisionLayer(net, dtype="bfloat16"), mixed.MixPrecisionOptimizer(optimizer)
    if ranks > 1:
        layer, optimizer = fleet.distributed_model(layer), fleet.distributed_optimizer(optimizer)
    draw, losses, part = np.random.default_rng(seed + 1), [], BATCH // ranks
    for _ in range(STEPS):
        x = draw.normal(0, 1, (BATCH, TOKENS, HIDDEN)).astype("float32")[rank * part :][:part]
        labels = draw.integers(0, CLASSES, (BATCH, TOKENS))[rank * part :][:part]
        loss = layer(paddle.to_tensor(x).astype(dtype), paddle.to_tensor(labels))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        total = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(float(total) / ranks)
    weights = {name: value.astype("float32").numpy() for name, value in net.state_dict().items()}
    return dict(losses=losses, **weights)


def main(seed, out):
    paddle.set_device("nvgpu")
    ranks = dist.get_world_size()
    emulated_te.install()
    upstream.apply()
    if ranks > 1:
        strategy = fleet.DistributedStrategy()
        degrees = dict(dp_degree=1, mp_degree=1, pp_degree=1, sharding_degree=ranks)
        strategy.hybrid_configs = degrees | dict(order=["dp", "pp", "sharding", "sep", "mp"])
        strategy.hybrid_configs["sharding_configs"].split_param = True
        fleet.init(is_collective=True, strategy=strategy)
        make_groups(2)
    for case in CASES:
        np.savez(f"{out}.{case}.{ranks}.{dist.get_rank()}.npz", **train(case, seed, dist.get_rank(), ranks))


main(int(sys.argv[1]), sys.argv[2])
