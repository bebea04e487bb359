"""One rank of several that exchange rows; started by test_exchange.py. "OK" at the end."""

import sys

import numpy as np
import paddle
from paddle.distributed import fleet

from paddle_te.distributed import TensorParallel

ROWS, COLS = 3, 8  # that each rank sends to each other one


def main(ranks):
    paddle.set_device("nvgpu")
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = dict(dp_degree=1, mp_degree=ranks, pp_degree=1)
    fleet.init(is_collective=True, strategy=strategy)
    tp = TensorParallel.from_fleet(sequence_parallel=True)
    others = np.repeat([rank for rank in range(ranks) if rank != tp.rank], ROWS)[:, None] * np.ones([1, COLS])
    sent, expected = 16 * tp.rank + others, 16 * others + tp.rank
    got = tp.start_exchange(paddle.to_tensor(sent).astype("bfloat16")).wait()
    np.testing.assert_array_equal(got.astype("float32").numpy(), expected)
    print("OK")


if __name__ == "__main__":
    main(int(sys.argv[1]))
