"""Repairs of Paddle's sharding."""

import contextlib
import json
import re
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.autograd import PyLayer
from paddle.base.framework import EagerParamBase
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_optimizer_stage2 as stage2
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_stage3 as stage3
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2 import GroupShardedStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_storage import ParamStorage
from paddle.distributed.fleet.utils.tensor_fusion_helper import FusedCommBuffer
from paddlenlp.peft import LoRAConfig
from paddlenlp.trainer.unified_checkpoint import sharding_split_param_utils as split_params

from paddle_te import device
from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.loading import read_config
from paddle_te.hosts.paddlenlp.lora import target_modules
from paddle_te.models.lora import add_lora
from paddle_te.upstream import (
    gathering_order,
    overwritten_main_grads,
    padding_slices,
    stage2_averages,
    stage2_storage,
    stage3_gradients,
    stage3_prefetch,
    stage3_storage,
)
from paddle_te.upstream.stage2_storage import DeviceParamStorage
from tests import model_cases
from tests.unit.hosts.paddlenlp.native import draw_adapters


def test_weights_of_stage_2_are_laid_out_where_they_are():
    """As Paddle's storage lays them out, which takes its way through the host: padding, values, views of one buffer."""
    values = [paddle.randn(shape).astype("bfloat16") for shape in ([3, 5], [7], [2, 4])]
    padding = [1, 1, 0]
    size = sum(value.size for value in values) + sum(padding)
    buffers = []
    for storage in (DeviceParamStorage(size, "bfloat16", "cpu"), ParamStorage(size, paddle.bfloat16, "cpu")):
        weights = [EagerParamBase.from_tensor(value.clone()) for value in values]
        align = dict(zip([weight.name for weight in weights], padding, strict=True))
        storage.add_rank_params(weights, align, convert_gpu=isinstance(storage, DeviceParamStorage))
        for weight, value in zip(weights, values, strict=True):
            assert weight.shape == value.shape and weight.dtype == paddle.bfloat16 and not weight.stop_gradient
            assert (weight == value).all()
        buffers.append(storage.buffer.astype("float32").numpy())
        storage.buffer.fill_(2.0)
        assert all((weight == 2).all() for weight in weights)
    np.testing.assert_array_equal(*buffers)


def test_storage_by_device(repair):
    repair(stage2_storage)
    assert isinstance(stage2.ParamStorage(size=4, dtype="float32", device="nvgpu"), DeviceParamStorage)
    assert not isinstance(stage2.ParamStorage(size=4, dtype="float32", device="cpu"), DeviceParamStorage)


@pytest.mark.parametrize(
    "told, scale_in_opt, divided",
    [([False, True], True, False), ([False, False], True, True), ([False, True], False, True)],
    ids=["last", "nobody told", "float16"],
)
def test_stage_2_divides_once(monkeypatch, repair, told, scale_in_opt, divided):
    """Two micro-batches' gradients of 1 on each of two ranks, of which this one keeps the sums."""
    sections = []

    @contextlib.contextmanager
    def section(name):
        sections.append(name)
        yield
        sections.clear()

    def reduce(*_):
        gradient.set_value((gradient + 1 + 1) / (2 if sections else 1))

    monkeypatch.setattr(device, "nvgpu_section", section)
    monkeypatch.setattr(device, "kind", lambda: "nvgpu")
    monkeypatch.setattr(stage2_averages._reducing, "original", lambda *_: reduce)
    monkeypatch.setattr(stage2_averages._dividing, "original", lambda _: gradient.scale_(0.5))
    repair(stage2_averages)
    for _ in range(2):
        gradient, model = paddle.zeros([1]), GroupShardedStage2.__new__(GroupShardedStage2)
        vars(model).update(_dp_group=None, _offload=False, scale_in_opt=scale_in_opt)
        hook = GroupShardedStage2._get_reduce_fn(model, 0, SimpleNamespace(name="w"), 0)
        for is_last in told:
            vars(model)["is_last_microbatch"] = is_last
            hook()
        assert gradient.item() == (4 if divided else 2)
        GroupShardedStage2._grad_scale(model)
        assert gradient.item() == 2


def test_te_overwrites_what_is_not_cleared(repair):
    """Stage 1 with split_param: of three weights te has written two in this step, and the second not in the next."""
    repair(overwritten_main_grads)
    weights = [EagerParamBase.from_tensor(paddle.zeros([2])) for _ in range(3)]
    for weight in weights:
        weight.main_grad = paddle.ones([2])
    for weight in weights[:2]:
        weight.overwrite_main_grad = False
    reduced = []
    buffer = SimpleNamespace(scale_grads=lambda: reduced.append([weight.main_grad.tolist() for weight in weights]))
    self = SimpleNamespace(
        _parameter_list=weights,
        sd_release_grads=False,
        comm_overlap=True,
        _enable_timer=False,
        _comm_buffer_list=[buffer],
    )
    DygraphShardingOptimizerV2.clear_grad(self)
    assert [weight.main_grad.tolist() for weight in weights] == [[1, 1], [1, 1], [0, 0]]
    assert [getattr(weight, "overwrite_main_grad", None) for weight in weights] == [True, True, None]
    weights[0].main_grad.fill_(5.0)  # as te's GEMM does
    weights[0].overwrite_main_grad = False
    DygraphShardingOptimizerV2.reduce_gradients(self, weights, None)
    assert reduced == [[[5, 5], [0, 0], [0, 0]]]
    assert not any(getattr(weight, "overwrite_main_grad", False) for weight in weights)


@pytest.mark.parametrize("rank", range(3))
def test_a_slice_of_padding_is_neither_sent_nor_saved(repair, monkeypatch, rank):
    """A weight of six elements, padded to twelve, in a buffer of which each of three ranks has four."""
    repair(padding_slices)
    transfers = []
    stream = SimpleNamespace(
        send=lambda tensor, dst: transfers.append(("to", dst, tensor.tolist())),
        recv=lambda tensor, src: transfers.append(("from", src, tensor.fill_(9).shape)),
    )
    monkeypatch.setattr(split_params, "dist", SimpleNamespace(get_rank=lambda: rank, stream=stream))
    monkeypatch.setattr(padding_slices.dist, "get_rank", lambda: rank)
    state = {
        "w_moment1_0": paddle.arange(4 * rank, 4 * rank + 4, dtype="float32"),
        "w_beta1_pow_acc_0": paddle.ones([1]),
    }
    slices = [(each, 4 * each, 4 * each + 4) for each in range(3)]
    merged = split_params.merge_splited_param(state, ["w"], {"w": ([2, 3], 6, 0, 12)}, {"w": slices}, {"w": 0})
    assert transfers == [[("from", 1, [2])], [("to", 0, [4, 5])], []][rank]
    whole = {"w_moment1_0": [[0, 1, 2], [3, 9, 9]]} if rank == 0 else {}
    assert {name: value.tolist() for name, value in merged.items()} == whole | {"w_beta1_pow_acc_0": [1]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rank", range(3))
def test_parts_of_stage_3_are_taken_where_the_weights_are(rank, dtype):
    """As Paddle takes them through the host. Of six elements, padded to twelve, the second of three
    ranks has two, and the third none."""
    value, kept = paddle.randn([2, 3]).astype(dtype), []
    for take in (
        stage3.GroupShardedStage3._param_storage,
        lambda self, param, _: stage3_storage.keep_part(self, param),
    ):
        weight = stage3._PartitionParam(EagerParamBase.from_tensor(value.clone(), name="w"))
        self = SimpleNamespace(
            _param2buffer={"w": [(0, 4), (4, 8), (8, 12)]},
            _rank=rank,
            _offload=False,
            _optim=SimpleNamespace(_master_weights={}),
        )
        take(self, weight, 12)
        part, masters = weight.fw_storage, self._optim._master_weights
        assert weight.shape == [2, 3] and not weight._is_initialized() and not weight.stop_gradient
        assert (weight.status, part.name, part.dtype) == ("part", "slice@w", value.dtype)
        assert [(key, master.name) for key, master in masters.items()] == [("slice@w", "w")] * (dtype == "bfloat16")
        kept.append([tensor.astype("float32").tolist() for tensor in (part, *masters.values())])
    assert kept[0] == kept[1]
    assert kept[1] == [(value.astype("float32").flatten().tolist() + 6 * [0.0])[4 * rank :][:4]] * len(kept[1])


def test_parts_by_device(repair, monkeypatch):
    repair(stage3_storage)
    taken = []
    monkeypatch.setattr(stage3_storage, "keep_part", lambda *_: taken.append("on the device"))
    monkeypatch.setattr(stage3_storage._storage, "original", lambda *_: taken.append("through the host"))
    for kind, offload in (("nvgpu", False), ("nvgpu", True), ("gpu", False)):
        self = SimpleNamespace(_default_device=kind, _offload=offload)
        stage3.GroupShardedStage3._param_storage(self, None, 0)
    assert taken == ["on the device", "through the host", "through the host"]


class SaysNo(PyLayer):
    """x times the sum of a weight. The backward reads that, and says that it does not read the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.saved = x, weight.sum(), weight.shape
        weight.read_in_backward = False
        return x * ctx.saved[1]

    @staticmethod
    def backward(ctx, dy):
        x, factor, shape = ctx.saved
        return dy * factor, paddle.expand(dy * x, shape)


class Scaled(nn.Layer):
    """Multiplies its input with the sum of `size` weights. Its forward and its backward are noted in `events`."""

    says_no = False  # that its backward reads the weights

    def __init__(self, size, events):
        super().__init__()
        self.weight = self.create_parameter([size], default_initializer=nn.initializer.Uniform(0.5, 1.5))
        self.size, self.events = size, events

    def forward(self, x):
        self.events.append(f"forward {self.size}")
        return SaysNo.apply(x, self.weight) if self.says_no else x * self.weight.sum()


class Rank:
    """One of two ranks in stage 3 that hold equal numbers, with what GroupShardedStage3 has after its constructor.

    The layers have 2, 4, 6, … weights. `events` notes when each computes, and what is sent.
    """

    def __init__(self, monkeypatch, layers):
        self.events = []
        self.layers = [Scaled(2 * n, self.events) for n in range(1, layers + 1)]
        for layer in self.layers:
            half = layer.weight[: layer.size // 2].detach()
            layer.weight.set_value(paddle.concat([half, half]))
        self.whole = [layer.weight.numpy() for layer in self.layers]
        # Paddle's keeps its dicts for all instances
        self._task_flow = stage3.TaskFlow(full_param={}, full_grad={}, use_calc={})
        self._group = SimpleNamespace(nranks=2, process_group=SimpleNamespace(all_gather=self.gather))
        self._order_tracer = {"order": 0, "layer": []}
        self._rank, self._world_size_scaling, self._dp_group = 0, 0.5, None
        self._sync_comm = self._offload = self.use_main_grad = False
        self._trainable_params = {id(layer): [stage3._PartitionParam(layer.weight)] for layer in self.layers}
        self._param2buffer_size = {layer.weight.name: layer.size for layer in self.layers}
        self._param2buffer = {layer.weight.name: [(0, layer.size // 2)] for layer in self.layers}
        for layer in self.layers:
            layer.weight.fw_storage = layer.weight[: layer.size // 2].detach().clone()
            layer.weight.status = "part"
            layer.weight._clear_data()
            stage3.GroupShardedStage3._register_forward_all_hooks(self, layer, self._task_flow)
            hook = stage3.GroupShardedStage3._get_allreduce_fn(self, layer.weight)
            layer.weight._register_backward_hook(self.noted(layer.size, hook))
        for module in (stage3, stage3_gradients):
            monkeypatch.setattr(
                module,
                "dist",
                SimpleNamespace(
                    all_reduce=self.all_reduce, reduce_scatter=self.reduce_scatter, ReduceOp=paddle.distributed.ReduceOp
                ),
            )

    def noted(self, size, hook):
        def backward(*_):
            self.events.append(f"backward {size}")
            hook()

        return backward

    def gather(self, part, out):
        self.events.append(f"gather {out.size}")
        out.set_value(paddle.concat([part, part]))
        return SimpleNamespace(wait=lambda: self.events.append(f"wait {out.size}"))

    def all_reduce(self, tensor, group):
        tensor.scale_(2.0)

    def reduce_scatter(self, part, whole, op, group, sync_op):
        assert op == paddle.distributed.ReduceOp.AVG
        self.events.append(f"reduce {whole.size}")
        part.set_value(whole[: part.size])
        return SimpleNamespace(wait=lambda: self.events.append(f"reduced {whole.size}"))

    def pass_through(self, training=True):
        """A micro-batch; its events."""
        self.events.clear()
        x = paddle.ones([1])
        x.stop_gradient = False
        with paddle.set_grad_enabled(training):
            for layer in self.layers:
                x = layer(x)
        if training:
            x.backward()
        return x.item(), " ".join(self.events)


def test_stage_3_gathers_ahead(monkeypatch, repair):
    """From the third pass on a module's gather is launched before the module ahead of it computes, in forward and
    backward; the last one's weights stay for its backward. A "backward" is that the weight's gradient is complete."""
    repair(stage3_prefetch)
    monkeypatch.setattr(stage3_prefetch, "AHEAD", 1)  # one module
    rank = Rank(monkeypatch, 3)
    passes = [rank.pass_through()[1] for _ in range(4)]
    assert (
        passes[2]
        == passes[3]
        == (
            "gather 2 wait 2 gather 4 forward 2 wait 4 gather 6 forward 4 wait 6 gather 4 forward 6 "
            "wait 4 gather 2 backward 6 wait 2 backward 4 backward 2"
        )
    )
    monkeypatch.setattr(stage3_prefetch, "AHEAD", 7)
    assert rank.pass_through()[1].startswith("gather 2 wait 2 gather 4 gather 6 forward 2 wait 4 ")
    assert {layer.weight.status for layer in rank.layers} == {"part"}


def test_stage_3_gathers_nothing_for_a_backward_that_reads_no_weights(monkeypatch, repair):
    """The second of three modules, from the second such pass on, and then the third. In the first one its weights come
    ahead in vain."""
    repair(stage3_prefetch)
    repair(stage3_gradients)
    monkeypatch.setattr(stage3_prefetch, "AHEAD", 1)
    rank = Rank(monkeypatch, 3)
    values = [rank.pass_through()[0] for _ in range(2)]
    for says_no, gathered_in_backward in ((4, "4 2"), (4, "2"), (4, "2"), (6, "2 4"), (6, "4 2")):
        for layer in rank.layers:
            layer.says_no = layer.size == says_no
        value, events = rank.pass_through()
        values.append(value)
        _, _, events = events.partition("gather 6 ")
        assert re.findall(r"gather (\d)", events) == gathered_in_backward.split()
        assert {layer.weight.status for layer in rank.layers} == {"part"}
    assert not rank._task_flow.full_param and values == [values[0]] * 7
    stage3_gradients._finish(rank)
    product = np.prod([whole.sum() for whole in rank.whole])
    for layer, whole in zip(rank.layers, rank.whole, strict=True):
        np.testing.assert_allclose(layer.weight.bw_storage.numpy(), 7 * product / whole.sum(), rtol=1e-5)


def test_stage_3_evaluates_between_steps(monkeypatch, repair):
    """An evaluation is a pass of another kind: what it leaves gathered is used, and nothing stays; not behind an
    update either."""
    repair(stage3_prefetch)
    monkeypatch.setattr(stage3_prefetch._update, "original", lambda self: None)
    rank = Rank(monkeypatch, 3)
    values = [rank.pass_through(training)[0] for training in (True, True, True, False, False, True, True)]
    assert values == [values[0]] * 7
    assert {layer.weight.status for layer in rank.layers} == {"part"} and not rank._task_flow.full_param
    rank.pass_through(training=False)
    assert rank._task_flow.full_param
    stage3.GroupShardedStage3._update_params_slice(rank)
    assert not rank._task_flow.full_param


def test_stage_3_copies_neither_weights_nor_outputs(monkeypatch, repair):
    """A rank keeps its parts, and a module's output is read where it is."""
    repair(stage3_prefetch)
    repair(stage3_gradients)
    rank, copies = Rank(monkeypatch, 3), []
    parts = [layer.weight.fw_storage for layer in rank.layers]
    for owner, name in ((paddle, "assign"), (paddle.Tensor, "clone")):
        monkeypatch.setattr(owner, name, lambda *_, copy=name: copies.append(copy))
    for _ in range(3):
        rank.pass_through()
        assert {layer.weight.status for layer in rank.layers} == {"part"} and not rank._task_flow.full_param
    assert all(layer.weight.fw_storage is part for layer, part in zip(rank.layers, parts, strict=True))
    assert not copies


@pytest.mark.parametrize("under_way", [0, 1])
def test_stage_3_reduces_beside_backward(monkeypatch, repair, under_way):
    """A gradient's reduction ends after those of the layers below it have begun, or with the step."""
    repair(stage3_gradients)
    monkeypatch.setattr(stage3_gradients, "UNDER_WAY", under_way)
    rank = Rank(monkeypatch, 3)
    events = rank.pass_through()[1]
    order = [event for event in events.split(" ") if "reduc" in event]
    assert order == [["reduce", "reduced"] * 3, ["reduce", "reduce", "reduced", "reduce", "reduced"]][under_way]
    stage3_gradients._finish(rank)
    assert rank.events[-1] == "reduced 2"


def test_te_overwrites_gradients_of_stage_3(repair, monkeypatch):
    """Of two weights te has written the first one's gradient in the pass before. Only padding is cleared in it."""
    repair(stage3_gradients)
    monkeypatch.setattr(stage3_gradients.paddle, "empty", lambda *args: paddle.full(args[0], 7, args[1]))
    weights = [EagerParamBase.from_tensor(paddle.zeros([2, 3]), name=name) for name in "ab"]
    task_flow = stage3.TaskFlow(full_param={}, full_grad={}, use_calc={})
    for weight in weights:
        weight.main_grad = None
    weights[0].overwrite_main_grad = False
    stage3._create_params_grad(weights, {"a": 8, "b": 8}, task_flow)
    assert [weight.main_grad.tolist() for weight in weights] == [[[7] * 3] * 2, [[0] * 3] * 2]
    assert [getattr(weight, "overwrite_main_grad", None) for weight in weights] == [True, None]
    weights[0].main_grad.fill_(5.0)  # as te's GEMM does
    assert task_flow.full_grad["a"].tolist() == [5] * 6 + [0] * 2


def test_stage_3_has_the_numbers_of_paddles(monkeypatch, seed):
    """Outputs, and gradients added up over micro-batches, with the repairs and without, to the bit."""
    found = []
    for repairs in ((), (stage3_prefetch, stage3_gradients)):
        for module in repairs:
            module.apply()
        try:
            paddle.seed(seed)
            rank = Rank(monkeypatch, 4)
            outputs = [rank.pass_through()[0] for _ in range(4)]
            if repairs:
                stage3_gradients._finish(rank)
            found.append((outputs, [layer.weight.bw_storage.tolist() for layer in rank.layers]))
        finally:
            for module in repairs:
                module.undo()
    assert found[0] == found[1]
    product = np.prod([whole.sum() for whole in rank.whole])
    expected = [[4 * product / whole.sum()] * (whole.size // 2) for whole in rank.whole]
    for got, wanted in zip(found[0][1], expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


class Gathering:
    """Stand in for a bucket of one weight and for the task that gathers it; place: where it comes in a set."""

    def __init__(self, weight, place, seen):
        self.weight, self.place, self.seen = weight, place, seen
        self.status, self.sync_param_task = FusedCommBuffer.Status.SHARDED, None

    def __hash__(self):
        return self.place

    def sync_params(self, sync, param2task):
        self.seen.append(f"gather {self.weight}")
        self.sync_param_task = self

    def wait(self):
        self.seen.append(f"wait for {self.weight}")


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_all_ranks_gather_a_layers_weights_in_the_same_order(places, repair):
    """The first bucket is under way, as Paddle leaves it behind the last layer, and the layer needs the other two."""
    repair(gathering_order)
    layer, seen = nn.Linear(2, 2), []
    buckets = [Gathering(name, place, seen) for name, place in zip("abc", (2, *places), strict=True)]
    optimizer = object.__new__(DygraphShardingOptimizerV2)
    of_weights = {layer.weight.name: [buckets[1]], layer.bias.name: [buckets[2]]}
    vars(optimizer).update(_comm_buffer_list=buckets, param2bucket=of_weights)
    optimizer._try_start_bucket_param_sync()
    hook = layer.register_forward_pre_hook(optimizer.make_forward_hook())
    layer(paddle.ones([1, 2]))
    layer(paddle.ones([1, 2]))
    hook.remove()
    assert seen == ["gather a", "gather b", "wait for b", "gather c", "wait for c"]


class Late:
    """Stand in for a bucket of stage 1, whose weight is there after `wait` only."""

    def __init__(self, weight):
        self.weight, self.value, self.status = weight, weight.numpy(), FusedCommBuffer.Status.SHARDED
        self.sync_param_task = self
        weight.set_value(np.full_like(self.value, np.nan))

    def sync_params(self, sync, param2task):
        """Begin."""

    def wait(self):
        self.weight.set_value(self.value)


def small_model(name, folder):
    """A model of ours, and what gives its loss."""
    (folder / "config.json").write_text(json.dumps(model_cases.config(name)))
    config = read_config(folder)
    config.transformer_engine_backend = "paddle"
    model, tokens = model_class(config)(config), paddle.to_tensor(model_cases.tokens(37))
    model.train()
    return model, lambda: model(tokens[:, :-1], labels=tokens[:, 1:])[0].item()


def leave_to_gather(model):
    """Let the next forward gather each weight that is trained, in a bucket of its own."""
    buckets = {weight.name: [Late(weight)] for weight in model.parameters() if not weight.stop_gradient}
    optimizer, all_buckets = object.__new__(DygraphShardingOptimizerV2), [bucket for (bucket,) in buckets.values()]
    vars(optimizer).update(_layers=model, _comm_buffer_list=all_buckets, param2bucket=buckets)
    vars(optimizer).update(_all_gather_overlap_forward=True)
    optimizer._register_pre_forward_hooks()


@pytest.mark.parametrize("name", model_cases.MODELS)
def test_each_weight_is_gathered_before_it_is_read(name, repair, tmp_path):
    repair(gathering_order)
    model, loss = small_model(name, tmp_path)
    before = loss()
    leave_to_gather(model)
    assert loss() == before


@pytest.mark.parametrize("name", ["qwen3", "qwen2_moe", "deepseek_v3"])
def test_each_weight_of_an_adapter_is_gathered_before_it_is_read(name, repair, tmp_path):
    """What the adapter stands beside is frozen, and in no bucket."""
    repair(gathering_order)
    model, loss = small_model(name, tmp_path)
    for weight in model.parameters():
        weight.stop_gradient = True
    add_lora(model, LoRAConfig(target_modules=target_modules("all"), r=4, lora_alpha=8))
    draw_adapters(model)
    before = loss()
    leave_to_gather(model)
    assert loss() == before
