"""Save unified checkpoints of sharding stage 1 with split_param, where a rank's slice of a weight is only padding.

Paddle pads each weight to a multiple of 256 bytes and cuts the buffer of all weights at equal lengths, also within a
padding. PaddleNLP takes such a rank for one that has a part of the weight: it sends the rank's empty rest, which Paddle
refuses, and nobody receives. The rank has nothing to send and nothing to save.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle.distributed as dist
from paddle import Tensor
from paddlenlp.trainer.unified_checkpoint import sharding_split_param_utils as utils

from paddle_te.upstream.replacement import Replacement

PACKAGE, VERSION = "paddlenlp", "3.0.0b4"
SYMPTOM = "OVERLAP=1 with a unified checkpoint ends at its first save: “The tensor must be contiguous”."


def _without_padding(
    state_dict: dict[str, Tensor],
    partial: Iterable[str],
    shapes: dict[str, tuple[Any, int, int, int]],
    send_table: dict[str, list[tuple[int, int, int]]],
    recv_table: Any,
    is_master_weights: bool = False,
    *more: Any,
) -> Any:
    """Replace `merge_splited_param`, with its arguments.

    shapes: {weight: (shape, elements, its place in the buffer, padded elements)}; send_table: {weight: [(rank, begin,
    end) of its slice in the buffer]}, which loses the slices of padding, as state_dict loses this rank's.
    """
    for name in set(partial):
        _, size, start, _ = shapes[name]
        send_table[name] = [part for part in send_table[name] if part[1] < start + size]
    rank = dist.get_rank()
    for key, tensor in list(state_dict.items()):
        name = key if is_master_weights else utils.generate_base_static_name(key)[0]
        if name in partial and int(tensor.numel()) > 1 and all(part[0] != rank for part in send_table[name]):
            del state_dict[key]
    return _merge.original(state_dict, partial, shapes, send_table, recv_table, is_master_weights, *more)


_merge = Replacement(utils, "merge_splited_param", _without_padding)
apply, undo = _merge.apply, _merge.undo
