"""Pipeline stages: weights that two of them share, and transfers between them on nvgpu."""

import ctypes
from contextlib import contextmanager

import paddle.distributed as dist
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication

from paddle_te import device


def count_shared_weights_once(model):
    """Lets clipping count a weight that pipeline stages share (tied embeddings) once in the global norm.

    Paddle's clipping skips weights whose `is_firstly_shared` is False, but its PipelineLayer marks none (3.3.1): it
    looks for the name of the attribute ("embedding_weight") among the names of parameters. Does nothing to a model that
    is no PipelineLayer.
    """
    for shared in getattr(model, "shared_comm", {}).values():
        for name in shared["weight_attr"]:
            getattr(shared["layer"], name).is_firstly_shared = dist.get_rank() == min(shared["ranks"])


def group_pipeline_transfers():
    """Lets the sends and receives of one batch progress together, as Paddle does on its own GPU devices.

    An interleaved pipeline's stages send along a ring before they receive. Paddle's process group of a custom device
    runs the transfers of a batch one after another (ProcessGroup::StartCoalescing is empty there), and a large NCCL
    send ends only with its receive, so every stage would wait for the next. Does nothing where the nvgpu plug-in is not
    loaded. Raises ValueError for a plug-in that is too old.
    """
    path = device.nvgpu_library()
    if path is None:
        return
    library = ctypes.CDLL(path)
    if not hasattr(library, "nvgpu_group_start"):
        raise ValueError(f"{path} cannot run virtual pipeline stages: build it again with nvgpu/build.py")

    @contextmanager
    def grouped(group, tasks=None):
        # the transfers of a batch are all on the stream that computes: there are no tasks to wait for
        _check(library.nvgpu_group_start())
        try:
            yield
        finally:
            _check(library.nvgpu_group_end())

    p2p_communication._coalescing_manager = grouped


def _check(status):
    if status:
        raise RuntimeError("nvgpu could not group a pipeline's transfers; it printed why")
