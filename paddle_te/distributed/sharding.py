"""Sharding whose communication overlaps with the backward pass, on nvgpu."""

from paddle.distributed.fleet.utils import tensor_fusion_helper
from paddle.distributed.fleet.utils.tensor_fusion_helper import HOOK_ACTION, FusedCommBuffer


def prepare_sharding():
    """Lets Paddle lay gradients that it reduces together into one buffer on nvgpu, and scale no more than a rank's own.

    Paddle 3.3 refuses devices that are not in its table of alignments in bytes; 256 is cudaMalloc's on every GPU. Where
    the collective cannot average, it divides each rank's whole buffer, of which after a reduce-scatter the others'
    parts are never read: for 8 billion float32 gradients 64 GB of memory traffic a step instead of 64 / ranks.
    """
    tensor_fusion_helper.alignment.setdefault("nvgpu", 256)
    FusedCommBuffer.scale_grads = _scale_own_grads


def _scale_own_grads(self, scale_grads=FusedCommBuffer.scale_grads):
    """FusedCommBuffer.scale_grads, which is shown this rank's part of the buffer alone."""
    whole, group = self.grad_storage, self._comm_group
    if self._act == HOOK_ACTION.REDUCE_SCATTER and not self._free_grads_in_comm and whole is not None:
        size = whole._numel() // group.nranks
        self.grad_storage = whole._slice(group.rank * size, (group.rank + 1) * size)
    try:
        scale_grads(self)
    finally:
        self.grad_storage = whole
