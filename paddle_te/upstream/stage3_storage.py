"""Take a rank's parts of the weights in stage 3 on the device.

Paddle makes a copy of each weight in the host's memory: float16 zeros, which it casts to bfloat16 on one core. It
writes the weight into that copy only to keep a part. For Llama-3-8B over two GPUs this takes more than 90 seconds.
"""

import paddle
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3

from paddle_te.upstream.replacement import Replacement, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "Sharding stage 3 of a large model takes minutes, and much host memory, to start on nvgpu."


def _param_storage(self: Theirs, param: Theirs, buffer_size: int) -> None:
    """Replace GroupShardedStage3._param_storage, where the weight is on nvgpu and its part stays there."""
    if self._default_device != "nvgpu" or self._offload:
        _storage.original(self, param, buffer_size)
    else:
        keep_part(self, param)


@paddle.no_grad()
def keep_part(self: Theirs, param: Theirs) -> None:
    """Leave of a weight this rank's part, with zeros where that is padding, and the part's master weight.

    The whole weight is let go before the master weight is made, which for two ranks fits into its memory.
    """
    (start, end), size, shape = self._param2buffer[param.name][self._rank], param._numel(), param.shape
    part = paddle.zeros([end - start], param.dtype)
    if start < size:
        param.get_tensor()._set_dims([size])
        part._slice(0, min(end, size) - start).copy_(param._slice(start, min(end, size)), False)
        param.get_tensor()._set_dims(shape)
    param._clear_data()
    part.name = f"slice@{param.name}"
    param.fw_storage, param.status = part, "part"
    if param.trainable and param.dtype in (paddle.bfloat16, paddle.float16):
        master = part.astype("float32")
        master.name = param.name
        self._optim._master_weights[part.name] = master


_storage = Replacement(GroupShardedStage3, "_param_storage", _param_storage)
apply, undo = _storage.apply, _storage.undo
