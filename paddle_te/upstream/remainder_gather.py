"""Gather unified checkpoints of tensor parallel ranks with remainders of master weights, which are int16.

Paddle's gather has no int16. Nothing is computed while tensors are gathered, so they go as bfloat16, which has as many
bits, and become int16 again.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import Tensor
from paddlenlp.trainer.unified_checkpoint import utils

from paddle_te.upstream.replacement import Replacement

PACKAGE, VERSION = "paddlenlp", "3.0.0b4"
SYMPTOM = "--master_weights bf16_remainder with TP and a unified checkpoint: “Data type (int16) is not supported”."


def _distributed_gather(tensor: Tensor, *args: Any, **kwargs: Any) -> list[Tensor] | None:
    """Replace PaddleNLP's: gather the tensors of all ranks on one of them, None on the others."""
    if tensor.dtype != paddle.int16:
        return _gather.original(tensor, *args, **kwargs)
    gathered = _gather.original(tensor.view("bfloat16"), *args, **kwargs)
    return gathered and [part.view("int16") for part in gathered]


_gather = Replacement(utils, "distributed_gather", _distributed_gather)
apply, undo = _gather.apply, _gather.undo
