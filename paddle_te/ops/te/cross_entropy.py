"""Cross-entropy with its gradient, by a kernel of our own."""

import paddle
import paddle.distributed as dist

from paddle_te.native.cross_entropy import cross_entropy_loss, cross_entropy_stats
from paddle_te.ops.te import runtime
from paddle_te.ops.te.runtime import dense, dtype_code


def cross_entropy(logits, labels, ignore_index, *, tp=None, train=True):
    """(loss, dlogits) of logits [n, vocab / tp.size], which dlogits overwrites: see `paddle_te.ops`."""
    rt, code = runtime.current(), dtype_code("logits", logits)
    (rows, columns), rank, size = logits.shape, *((0, 1) if tp is None else (tp.rank, tp.size))
    labels = dense(labels.astype("int64"))
    stats, loss = rt.empty([3, rows], paddle.float32), rt.empty([rows, 1], paddle.float32)
    at, where = (logits.data_ptr(), labels.data_ptr(), stats.data_ptr()), (rows, columns, rank * columns)
    cross_entropy_stats(rt.te, rt.stream, *at, *where, code)
    if tp is not None:
        stats = _of_all_ranks(stats, tp)
        at = *at[:2], stats.data_ptr()
    cross_entropy_loss(rt.te, rt.stream, *at, loss.data_ptr(), *where, size * columns, ignore_index, train, code)
    return loss, logits if train else None


def _of_all_ranks(stats, tp):
    """[greatest, sum of exp(x - greatest), label's logit] of each rank's columns -> of the whole vocabulary."""
    mine, rest = stats[0], stats[1:]
    greatest = mine.clone()
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=tp.group)
    rest = paddle.stack([rest[0] * paddle.exp(mine - greatest), rest[1]])
    return paddle.concat([greatest.unsqueeze(0), tp.all_reduce(rest)])
