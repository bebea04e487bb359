"""Make stage 2's buffer of the weights that a rank updates on the device.

Paddle makes it in the host's memory as float32 zeros, casts these on one core and copies every weight there and back:
for Llama-3-8B over two GPUs more than a minute and 6 bytes a weight of host memory on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import paddle
from paddle import Tensor
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_optimizer_stage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_storage import InternalStorage, ParamStorage

from paddle_te.upstream.replacement import Replacement

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Sharding stage 2 of a large model takes more than a minute, and much host memory, to start on nvgpu."


class DeviceParamStorage(ParamStorage):
    """Paddle's buffer, laid out where the weights are."""

    def __init__(self, size: int, dtype: Any, device: str) -> None:
        InternalStorage.__init__(self, size, dtype, device)
        self.param2align = None

    @paddle.no_grad()
    def add_rank_params(
        self, trainable_params: Iterable[Tensor], param2align: Mapping[str, int], convert_gpu: bool = True
    ) -> None:
        """Move the weights into the buffer, one after another, each followed by its padding."""
        self.param2align = param2align
        for param in trainable_params:
            shape = param.shape
            place = self.buffer._slice(self._fill, self._fill + param._numel())
            place.get_tensor()._set_dims(shape)
            place.copy_(param, False)
            self._convert_buffer(param, shape, param2align[param.name])
            self._params.append(param)
            self._param_ids.append(id(param))


def _param_storage(size: int, dtype: Any, device: str) -> ParamStorage:
    return (DeviceParamStorage if device == "nvgpu" else ParamStorage)(size=size, dtype=dtype, device=device)


_replacement = Replacement(group_sharded_optimizer_stage2, "ParamStorage", _param_storage)
apply, undo = _replacement.apply, _replacement.undo
