"""Repairs of Paddle's sharding."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.base.framework import EagerParamBase
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_optimizer_stage2 as stage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_storage import ParamStorage
from paddle.distributed.fleet.utils.tensor_fusion_helper import HOOK_ACTION, FusedCommBuffer
from paddlenlp.trainer.unified_checkpoint import sharding_split_param_utils as split_params

from paddle_te.upstream import overwritten_main_grads, own_gradients, padding_slices, stage2_storage
from paddle_te.upstream.stage2_storage import DeviceParamStorage


@pytest.mark.parametrize(
    "action, expected", [("REDUCE_SCATTER", [0, 1, 2 / 3, 1, 4, 5]), ("REDUCE", [0, 1 / 2, 1, 3 / 2, 2, 5 / 2])]
)
def test_a_rank_scales_its_own_gradients(repair, action, expected):
    """Of six over three ranks the second has those in the middle; what is reduced to one rank is all its own."""
    repair(own_gradients)
    ranks = 3 if action == "REDUCE_SCATTER" else 2
    waited = []
    buffer = FusedCommBuffer.__new__(FusedCommBuffer)
    buffer._act, buffer._free_grads_in_comm = getattr(HOOK_ACTION, action), False
    buffer._scale_after_comm, buffer._use_reduce_avg = True, False
    buffer._params, buffer._params_step_dict = [SimpleNamespace(name="w", stop_gradient=False)], {}
    buffer._comm_group = SimpleNamespace(nranks=ranks, rank=1)
    buffer._task = SimpleNamespace(wait=lambda: waited.append(True))
    storage = buffer.grad_storage = paddle.arange(6, dtype="float32")
    buffer.scale_grads()
    assert buffer.grad_storage is storage and waited
    np.testing.assert_allclose(storage.numpy(), expected, rtol=1e-6)


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
