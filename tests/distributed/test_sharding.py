"""What paddle_te.distributed changes in Paddle's sharding."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.utils.tensor_fusion_helper import HOOK_ACTION, FusedCommBuffer

from paddle_te.distributed import prepare_sharding


@pytest.mark.parametrize(
    "action, expected", [("REDUCE_SCATTER", [0, 1, 2 / 3, 1, 4, 5]), ("REDUCE", [0, 1 / 2, 1, 3 / 2, 2, 5 / 2])]
)
def test_a_rank_scales_its_own_gradients(action, expected):
    """Of six over three ranks the second has those in the middle; what is reduced to one rank is all its own."""
    prepare_sharding()
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
