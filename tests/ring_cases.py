"""Ring attention of several ranks in one process: a rank is a thread, and what travels goes through queues."""

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace

import paddle

from paddle_te.distributed import ContextParallel
from paddle_te.layers.ring_attention import _RingAttention
from paddle_te.ops.heads import Attention, Scores

TIMEOUT = 60  # seconds for what a rank waits for


class Rank(ContextParallel):
    """One of the ranks; group: their Queues, from which they take what the rank before them sends."""

    def start_shift(self, x):
        """As ContextParallel's."""
        self.group[(self.rank + 1) % self.size].put(x)
        return SimpleNamespace(wait=lambda: self.group[self.rank].get(timeout=TIMEOUT))


def whole(parts):
    """[b, s, ...] of each rank's tokens."""
    pieces = [part.chunk(2, 1) for part in parts]
    return paddle.concat([first for first, _ in pieces] + [second for _, second in reversed(pieces)], 1)


def run(tensors, dout, ranks, scale, ops):
    """(out, dq, dk, dv) of whole sequences, in float32; tensors: q, k, v of whole sequences."""
    group, device = [Queue() for _ in range(ranks)], paddle.get_device()

    def rank(number):
        paddle.set_device(device)
        cp, ctx = Rank(group, number, ranks, "p2p"), SimpleNamespace()
        with paddle.no_grad():
            out = _RingAttention.forward(ctx, *map(cp.own_tokens, tensors), scale, cp, ops)
            return out, *_RingAttention.backward(ctx, cp.own_tokens(dout))

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(rank, range(ranks)))
    assert all(queue.empty() for queue in group)
    return [whole(parts).astype("float32") for parts in zip(*results, strict=True)]


def reference(tensors, dout, scale, ops):
    """The same of one rank by dot_product_attention, in the dtype of the tensors."""
    tensors = [tensor.detach() for tensor in tensors]
    for tensor in tensors:
        tensor.stop_gradient = False
    out = ops.dot_product_attention(*tensors, Attention(Scores(scale)))
    out.backward(dout)
    return [out.astype("float32"), *(tensor.grad.astype("float32") for tensor in tensors)]
