"""One rank of two that share the amaxes of delayed scaling; started by test_amax.py. "OK" at the end."""

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_te import fp8
from paddle_te.fp8.emulation import emulated_fp8_linear


def train(layer, recipe, group, rank):
    """Four steps whose amaxes are known: of x 10·step + 1 + rank, of dy (step + 1) / (rank + 1)."""
    weight = paddle.ones([16, 16])
    weight.stop_gradient = False
    for step in range(4):
        x = paddle.full([2, 16], float(10 * step + 1 + rank))
        with fp8.fp8_autocast(fp8_recipe=recipe, fp8_group=group):
            y = emulated_fp8_linear(x, weight, layer.fp8.begin_forward()[0])
        y.backward(paddle.full_like(y, float(step + 1) / (rank + 1)))


def main():
    paddle.set_device("nvgpu")
    dist.init_parallel_env()
    rank, recipe = dist.get_rank(), fp8.DelayedScaling(amax_history_len=4)
    layer = paddle.nn.Layer()
    layer.fp8 = fp8.ModuleScaling(1, fp8.amax_and_scale_update)
    train(layer, recipe, dist.new_group([0, 1]), rank)

    def state():
        return fp8.state_dict(layer, recipe)["modules"][""]

    # rows: the running step (each rank's own), then steps 0, 1, 2: the greater of the ranks' amaxes
    own = state()
    np.testing.assert_array_equal(own["forward"]["amax_history"][:, 0], [31 + rank, 2, 12, 22])
    np.testing.assert_array_equal(own["backward"]["amax_history"][:, 0], [4 / (rank + 1), 1, 2, 3])
    assert own["forward"]["scale"][0] == np.float32(448) / np.float32(22)
    assert own["backward"]["scale"][0] == np.float32(57344) / np.float32(3)

    fp8.reduce_amax(layer, recipe)
    reduced = state()
    for direction, amax in (("forward", [32, 1]), ("backward", [4])):
        np.testing.assert_array_equal(reduced[direction]["amax_history"][0], amax)
        np.testing.assert_array_equal(reduced[direction]["amax_history"][1:], own[direction]["amax_history"][1:])
    fp8.new_step()
    np.testing.assert_array_equal(state()["forward"]["amax_history"][:, 0], [0, 12, 22, 32])
    print("OK")


main()
