"""A process that trains on the CPU and recomputes on nvgpu; with an argument, without the repair rng_tracker."""

import sys

import paddle
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker
from paddlenlp.trainer import set_seed

from paddle_te import upstream
from paddle_te.distributed import recompute

if len(sys.argv) == 1:
    upstream.apply("rng_tracker")


def step():
    """The gradient of a layer with dropout that is computed again in backward, and what was dropped."""
    x = paddle.ones([64])
    x.stop_gradient = False

    def drop(x):
        with get_rng_state_tracker().rng_state("local_seed"):
            return paddle.nn.functional.dropout(x, 0.5)

    y = recompute(drop, x)
    y.sum().backward()
    assert (y == x.grad).all(), "backward dropped others than forward"
    return y.tolist()


paddle.set_device("cpu")
set_seed(1)
before = step()
state = paddle.get_rng_state()[0]
paddle.set_device("nvgpu:0")
step()
paddle.seed(3)
step()
paddle.set_device("cpu")
assert step() != before, "the CPU's stream of random numbers began anew"
print("well")
