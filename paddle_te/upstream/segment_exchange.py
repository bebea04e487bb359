"""Exchange heads for tokens among ranks that share sequences (sep), as PaddleNLP means it.

Since Paddle 3.0 `alltoall` takes the list to fill first. PaddleNLP 3.0.0b4 still gives it the list to send first, so
that what was just computed is overwritten and the result is memory that nobody has written.
"""

from __future__ import annotations

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed.communication.group import Group
from paddlenlp.transformers import segment_parallel_utils as utils

from paddle_te.upstream.replacement import Replacement

PACKAGE, VERSION = "paddlenlp", "3.0.0b4"
SYMPTOM = "Backend none with sep_parallel_degree above 1 trains on garbage: the first loss is NaN or wrong."


@paddle.no_grad()
def _reshard_qkv(x: Tensor, group: Group, split_axis: int = 2, concat_axis: int = 0) -> Tensor:
    """Replace PaddleNLP's, with its arguments: split x along one axis, and put it together along the other."""
    pieces = [piece.contiguous() for piece in x.split(dist.get_world_size(group), split_axis)]
    received = [paddle.empty_like(piece) for piece in pieces]
    dist.alltoall(received, pieces, group=group)
    return paddle.concat(received, concat_axis)


_exchange = Replacement(utils, "_reshard_qkv", _reshard_qkv)
apply, undo = _exchange.apply, _exchange.undo
