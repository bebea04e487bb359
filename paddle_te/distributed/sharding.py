"""Sharding on nvgpu: communication that overlaps with the backward pass, and stage 2 that begins at once."""

import paddle
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_optimizer_stage2 as stage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_storage import InternalStorage, ParamStorage
from paddle.distributed.fleet.utils import tensor_fusion_helper
from paddle.distributed.fleet.utils.tensor_fusion_helper import HOOK_ACTION, FusedCommBuffer


def prepare_sharding():
    """Lets Paddle lay gradients that it reduces together into one buffer on nvgpu, scale no more than a rank's own and
    clear none that te's GEMMs write anew, and lay stage 2's weights together on the device.

    Paddle 3.3 refuses devices that are not in its table of alignments in bytes; 256 is cudaMalloc's on every GPU. Where
    the collective cannot average, it divides each rank's whole buffer, of which after a reduce-scatter the others'
    parts are never read: for 8 billion float32 gradients 64 GB of memory traffic a step instead of 64 / ranks.
    """
    tensor_fusion_helper.alignment.setdefault("nvgpu", 256)
    FusedCommBuffer.scale_grads = _scale_own_grads
    DygraphShardingOptimizerV2.clear_grad = _clear_grad
    DygraphShardingOptimizerV2.reduce_gradients = _reduce_gradients
    stage2.ParamStorage = _param_storage


def gather_weights(optimizer):
    """Ends what overlapping sharding leaves for the next forward. To be called by all ranks before weights are read in
    another way, as when they are saved; `optimizer`: the outermost one.

    Stage 1 with split_param gathers a bucket of weights when the first of its layers is called; until then the other
    ranks' parts of it are those of the step before (with Paddle 3.3 and PaddleNLP alone such weights are saved). Other
    stages' broadcasts may be under way.
    """
    while optimizer is not None:
        if vars(optimizer).get("_broadcast_overlap"):
            paddle.device.synchronize()
        if isinstance(optimizer, DygraphShardingOptimizerV2) and optimizer._all_gather_overlap_forward:
            for bucket in optimizer._comm_buffer_list:
                _gather_bucket(optimizer, bucket)
        optimizer = vars(optimizer).get("_inner_opt")


def _gather_bucket(optimizer, bucket):
    """What Paddle's hook before a layer's forward does."""
    if bucket.status == FusedCommBuffer.Status.SHARDED:
        optimizer._try_start_bucket_param_sync([bucket])
    if bucket.status == FusedCommBuffer.Status.SYNCING:
        if bucket.sync_param_task is not None:  # None: it is frozen
            bucket.sync_param_task.wait()
        bucket.status = FusedCommBuffer.Status.READY


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


def _clear_grad(self, set_to_zero=True, clear_grad=DygraphShardingOptimizerV2.clear_grad):
    """Stage 1's clear_grad with split_param, whose main gradients lie in buffers that stay: those of te's GEMMs, which
    the next step's first micro-batch overwrites, are not cleared only to be added to (8 bytes of memory traffic each).
    """
    kept = []
    for param in self._parameter_list:
        # False: written in this step, so te writes it
        if set_to_zero and getattr(param, "overwrite_main_grad", None) is False and param.main_grad is not None:
            kept.append((param, param.main_grad))
            param.main_grad = None  # which leaves it out
    try:
        clear_grad(self, set_to_zero)
    finally:
        for param, main_grad in kept:
            param.main_grad = main_grad
            param.overwrite_main_grad = True


def _reduce_gradients(self, parameter_list, hcg, reduce_gradients=DygraphShardingOptimizerV2.reduce_gradients):
    """Its reduce_gradients, before which a gradient that nothing has overwritten, the last step's, becomes zero."""
    for param in self._parameter_list:
        if getattr(param, "overwrite_main_grad", False):
            param.main_grad.zero_()
            param.overwrite_main_grad = False
    reduce_gradients(self, parameter_list, hcg)


def _param_storage(size, dtype, device):
    return (_DeviceParamStorage if device == "nvgpu" else ParamStorage)(size=size, dtype=dtype, device=device)


class _DeviceParamStorage(ParamStorage):
    """Stage 2's buffer of the weights that a rank updates, made on the device.

    Paddle makes it in the host's memory as float32 zeros, casts these on one core and copies every weight there and
    back: for Llama-3-8B over two GPUs more than a minute and 6 bytes a weight of host memory on each rank.
    """

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
