"""Compare two ranks, which divide a layer's experts, with one process that has all experts. The ranks are threads."""

import contextlib
import copy
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_te import fp8
from paddle_te.distributed import ExpertParallel, TensorParallel
from paddle_te.layers import base
from paddle_te.layers.moe import MoELayer, router, update_expert_bias
from tests import emulated_te
from tests.moe_te_cases import CONFIGS, HIDDEN, SIZES, TOKENS, draw, relative
from tests.poison import poison_allocations
from tests.thread_ranks import Group, Rank

RANKS = 2
# layout: (whether ranks share tensor parallelism, whether each has tokens of its own, dispatcher)
LAYOUTS = {
    "tensor": (True, False, "allgather"),
    "sequence": (True, True, "allgather"),
    "samples gathered": (False, True, "allgather"),
    "samples sent": (False, True, "alltoall"),
}
KINDS = ["mixtral", "qwen2", "deepseek", "losses", "recompute"]


def make(monkeypatch, group, rank, layout, **options):
    """A rank's layer."""
    tensor, split, kind = LAYOUTS[layout]
    ranks = Rank(group, rank, RANKS, sequence_parallel=split)
    tp = ranks if tensor else None
    ep = ExpertParallel(ranks) if tensor else ExpertParallel(ranks, Group(1))
    monkeypatch.setattr(TensorParallel, "from_fleet", lambda sequence_parallel=False: tp)
    monkeypatch.setattr(ExpertParallel, "from_fleet", lambda tp: ep)
    monkeypatch.setattr(base, "get_rng_state_tracker", lambda: paddle.nn.Layer)
    monkeypatch.setattr(paddle.nn.Layer, "rng_state", contextlib.nullcontext, raising=False)
    options |= dict(sequence_parallel=tensor and split, set_parallel_mode=True, moe_token_dispatcher_type=kind)
    return MoELayer(**SIZES, **options)


def share(name, value, rank, tensor):
    """A rank's part of a weight, or of its gradient."""
    if name.startswith("experts."):
        return np.split(value, RANKS)[rank]
    if tensor and name == "shared_experts.fc1_weight":
        return np.concatenate([np.split(part, RANKS)[rank] for part in np.split(value, 2)])
    return np.split(value, RANKS, 1)[rank] if tensor and name == "shared_experts.fc2_weight" else value


def train(layer, values, x, dy, steps=1, recipe=None, group=None):
    """{name: float32 array} of output and gradients of the last step."""
    named = {**dict(layer.named_parameters()), "router.expert_bias": layer.router.expert_bias}
    for name, tensor in named.items():
        if tensor is not None:
            tensor.set_value(paddle.to_tensor(values[name]).astype(tensor.dtype))
    dtype = layer.ln_weight.dtype
    for _ in range(steps):
        layer.clear_gradients()
        inputs = paddle.to_tensor(x).astype(dtype).detach()
        inputs.stop_gradient = False
        with fp8.fp8_autocast(recipe is not None, recipe, group):
            y = layer(inputs)
        y.backward(paddle.to_tensor(dy).astype(dtype))
    found = {"y": y - inputs, "x": inputs.grad} | {name: p.grad for name, p in layer.named_parameters()}
    return {name: value.astype("float32").numpy() for name, value in found.items()}


def train_ranks(monkeypatch, layout, values, options, **more):
    """[what `train` returns] of each rank."""
    group, (tensor, split, _) = Group(RANKS), LAYOUTS[layout]
    layers = [make(monkeypatch, group, rank, layout, **options) for rank in range(RANKS)]
    monkeypatch.setattr(dist, "all_reduce", group.take_greatest)

    def run(rank):
        mine = {name: share(name, value, rank, tensor) for name, value in values.items()}
        x, dy = (np.split(values[name], RANKS)[rank] if split else values[name] for name in ("x", "dy"))
        return train(layers[rank], mine, x, dy, group=group, **more)

    return group.run(run)


def whole(name, found, layout):
    """What the ranks' parts of an output or gradient make."""
    tensor, split, _ = LAYOUTS[layout]
    parts = [of_rank[name] for of_rank in found]
    if name in ("x", "y") and split or name.startswith("experts."):
        return np.concatenate(parts)
    if tensor and name == "shared_experts.fc1_weight":
        halves = [np.split(part, 2) for part in parts]
        return np.concatenate([half[i] for i in range(2) for half in halves])
    if tensor and name == "shared_experts.fc2_weight":
        return np.concatenate(parts, 1)
    return sum(parts) if split else parts[0]


def in_one_process(values, options, layout, **more):
    """What one process computes: of ranks with other samples, each one's by itself, since the losses are theirs."""
    layer = MoELayer(**SIZES, **options, backend="paddle")
    tensor, _, _ = LAYOUTS[layout]
    if tensor or "recipe" in more:
        return train(layer, values, values["x"], values["dy"], **more)
    found = [train(layer, values, *[np.split(values[n], RANKS)[r] for n in ("x", "dy")]) for r in range(RANKS)]
    together = {name: sum(part[name] for part in found) for name in found[0]}
    return together | {name: np.concatenate([part[name] for part in found]) for name in ("x", "y")}


def drawn(options, seed, only_first=False):
    """Numbers for the tensors; only_first: no token chooses an expert of the second rank."""
    values = draw(MoELayer(**SIZES, **options, backend="paddle"), seed)
    if only_first:
        values["x"][:, 0], values["ln_weight"][0] = 3.0, 1.0
        values["router.weight"][SIZES["num_moe_experts"] // 2 :, 0] = -64.0
    return values


@pytest.mark.parametrize("only_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_are_one(layout, kind, only_first, seed, monkeypatch):
    options = CONFIGS[kind]
    values = drawn(options, seed, only_first)
    want = in_one_process(values, options, layout)
    found = train_ranks(monkeypatch, layout, values, options | dict(backend="paddle"))
    assert not only_first or kind == "deepseek" or not found[1]["experts.fc1_weight"].any()
    for name, value in want.items():
        assert relative(whole(name, found, layout), value) < 2e-6, name


def test_ranks_that_share_sequences_have_one_bias(seed, monkeypatch):
    """Each has routed other tokens of the same sequences; the bias moves by the load of all of them."""
    options = CONFIGS["deepseek"]
    values = drawn(options, seed)
    group = Group(RANKS)
    options = options | dict(backend="paddle")
    layers = [MoELayer(**SIZES, **options), *(make(monkeypatch, group, r, "sequence", **options) for r in range(RANKS))]
    parts = [values["x"], *np.split(values["x"], RANKS)]

    def run(rank):
        layer, x = layers[rank], paddle.to_tensor(parts[rank], stop_gradient=False)
        layer.router.weight.set_value(paddle.to_tensor(values["router.weight"]))
        layer.router(x)[0].sum().backward()
        update_expert_bias(layer)
        return layer.router.expert_bias.numpy()

    want = run(0)
    monkeypatch.setattr(dist, "all_reduce", group.add)
    found = group.run(lambda rank: run(rank + 1))
    assert (np.abs(want) > 0).any() and all((bias == want).all() for bias in found)


def test_losses_are_of_whole_sequences(seed, monkeypatch):
    """Ranks of sep parallelism add up gradients of the balance loss and the z-loss of all their tokens, each once."""
    options = CONFIGS["losses"]
    values = drawn(options, seed)
    one, *layers = [MoELayer(**SIZES, **options, backend="paddle") for _ in range(RANKS + 1)]
    want, group = train(one, values, values["x"], values["dy"]), Group(RANKS)
    for rank, layer in enumerate(layers):
        layer.router.sharing = (Rank(group, rank, RANKS, sequence_parallel=True),)

    def run(rank):
        return train(layers[rank], values, *(np.split(values[name], RANKS)[rank] for name in ("x", "dy")))

    found = group.run(run)
    for name, value in want.items():
        parts = [of_rank[name] for of_rank in found]
        assert relative(np.concatenate(parts) if name in ("x", "y") else sum(parts), value) < 2e-6, name
    losses = [layer.router.statistics for layer in layers]
    assert losses[0].aux_loss.item() == losses[1].aux_loss.item() and losses[0].z_loss.item() == losses[1].z_loss.item()


def test_a_loss_of_each_sequence_is_refused_where_ranks_divide_it(monkeypatch):
    monkeypatch.setattr(router, "sequence_group", lambda: SimpleNamespace(nranks=RANKS, rank=0))
    with pytest.raises(ValueError, match="'seq_aux_loss' is of whole sequences, which ranks of sep"):
        MoELayer(**SIZES, set_parallel_mode=True, moe_router_load_balancing_type="seq_aux_loss", backend="paddle")


@pytest.mark.parametrize("only_first", [False, True])
def test_all_ranks_share_scales(only_first, seed, monkeypatch):
    """In fp8 two ranks round as one process does, with delayed scaling to the bit but for sums."""
    recipe = fp8.DelayedScaling(amax_history_len=2, first_step="delayed")
    values = drawn({}, seed, only_first)
    want = in_one_process(values, {}, "sequence", recipe=recipe, steps=3)
    found = train_ranks(monkeypatch, "sequence", values, dict(backend="paddle"), recipe=recipe, steps=3)
    for name, value in want.items():
        assert relative(whole(name, found, "sequence"), value) < 1e-5, name


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_te(layout, recipe, monkeypatch):
    """And the scale of all experts is one under delayed scaling, as in one process."""
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)
    options = CONFIGS["mixtral" if recipe else "qwen2"]  # shared MLPs of 24 tokens and columns are none for fp8
    values = drawn(options, 37)
    more = dict(recipe=fp8.DelayedScaling(amax_history_len=2), steps=3) if recipe else {}
    want = in_one_process(values, options, layout, **more)
    found = train_ranks(monkeypatch, layout, values, options | dict(params_dtype="bfloat16"), **more)
    for name, value in want.items():
        assert relative(whole(name, found, layout), value) < (0.1 if recipe else 2e-2), name


@pytest.mark.parametrize("layout", ["tensor", "sequence", "samples gathered"])
def test_gathering_does_not_wait_for_the_device(layout, monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    values = drawn({}, 37)
    group = Group(RANKS)
    layers = [make(monkeypatch, group, rank, layout, params_dtype="bfloat16") for rank in range(RANKS)]
    x = paddle.to_tensor(values["x"]).astype("bfloat16").detach()
    x.stop_gradient = False

    def refuse(*_, **__):
        raise AssertionError("the host waits")

    def run(rank):
        layers[rank](x).sum().backward()

    group.run(run)  # records
    for name in ("numpy", "tolist", "item", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(paddle.Tensor, name, refuse)
    group.run(run)


def test_a_token_goes_to_a_rank_once(monkeypatch):
    group = Group(RANKS)
    layers = [make(monkeypatch, group, rank, "samples sent", backend="paddle") for rank in range(RANKS)]
    sent = {}

    def run(rank):
        routing_map = paddle.zeros([TOKENS, SIZES["num_moe_experts"]], "bool")
        routing_map[:, :2] = True  # two experts of the first rank
        routing_map[: TOKENS // 3, -1] = True
        probs = routing_map.astype("float32")
        arrived = layers[rank].dispatcher.dispatch(paddle.ones([TOKENS, HIDDEN]), probs, routing_map)
        sent[rank] = arrived
        assert int(arrived.routing_map.astype("int64").sum()) == (4 * TOKENS, 2 * (TOKENS // 3))[rank]

    group.run(run)
    assert [sent[rank].routes.sent for rank in range(RANKS)] == [[TOKENS, TOKENS // 3]] * 2
    assert [sent[rank].tokens.shape[0] for rank in range(RANKS)] == [2 * TOKENS, 36]  # eighths of 48


def test_experts_that_ranks_cannot_divide_are_refused(monkeypatch):
    ep = ExpertParallel(Rank(Group(3), 0, 3, True), Group(1))
    monkeypatch.setattr(ExpertParallel, "from_fleet", lambda tp: ep)
    with pytest.raises(ValueError, match="num_moe_experts=8 is not divisible by the 3 ranks that divide them"):
        MoELayer(**SIZES, set_parallel_mode=True, backend="paddle")


def test_experts_that_other_ranks_have_too_can_be_copied():
    """As Paddle does where it saves a parameter; the group of the ranks that have them cannot."""
    weight = paddle.create_parameter([2, 3, 4], "float32")
    ExpertParallel(Rank(Group(RANKS), 0, RANKS, True), Group(RANKS)).mark(weight)
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(weight.color["group"])
    assert (copy.deepcopy(weight) == weight).all()


def test_ranks_draw_other_experts(monkeypatch, seed):
    drawn = []
    for rank in range(RANKS):
        paddle.seed(seed)
        layer = make(monkeypatch, Group(RANKS), rank, "samples sent", backend="paddle")
        drawn.append((layer.experts.fc1_weight.numpy(), layer.router.weight.numpy(), paddle.rand([3]).numpy()))
    (first, router, next_numbers), (second, other_router, other_next) = drawn
    assert (router == other_router).all() and (next_numbers == other_next).all()
    assert not np.isclose(first, second).mean() > 0.01
