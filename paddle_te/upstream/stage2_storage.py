"""Stage 2's buffer of the weights that a rank updates is made on the device.

Paddle makes it in the host's memory as float32 zeros, casts these on one core and copies every weight there and back:
for Llama-3-8B over two GPUs more than a minute and 6 bytes a weight of host memory on each rank.
"""

import paddle
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_optimizer_stage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_storage import InternalStorage, ParamStorage

from paddle_te.upstream.replacement import Replacement

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Sharding stage 2 of a large model takes more than a minute, and much host memory, to start on nvgpu."


class DeviceParamStorage(ParamStorage):
    """Paddle's buffer, laid out where the weights are."""

    def __init__(self, size, dtype, device):
        InternalStorage.__init__(self, size, dtype, device)
        self.param2align = None

    @paddle.no_grad()
    def add_rank_params(self, trainable_params, param2align, convert_gpu=True):
        """Moves the weights into the buffer, one after another, each followed by its padding."""
        self.param2align = param2align
        for param in trainable_params:
            shape = param.shape
            place = self.buffer._slice(self._fill, self._fill + param._numel())
            place.get_tensor()._set_dims(shape)
            place.copy_(param, False)
            self._convert_buffer(param, shape, param2align[param.name])
            self._params.append(param)
            self._param_ids.append(id(param))


def _param_storage(size, dtype, device):
    return (DeviceParamStorage if device == "nvgpu" else ParamStorage)(size=size, dtype=dtype, device=device)


_replacement = Replacement(group_sharded_optimizer_stage2, "ParamStorage", _param_storage)
apply, undo = _replacement.apply, _replacement.undo
