"""Whether a model's weights can be in a machine's memory at all, before any of them is made."""

import numpy as np

from paddle_te import device
from paddle_te.host import HostConfig
from paddle_te.planner.model import Model, check_size, described


def check_room(config: HostConfig, dtype: str, in_fp8: bool = False) -> None:
    """Raise ValueError for a model whose weights this process's device cannot hold, even with nothing beside them.

    config: PaddleNLP's configuration. dtype: of its weights, by name. in_fp8: those of the GEMMs exist in fp8 only.
    """
    check_size(config, "config.json")
    model, sharing = Model.of(config), max(config.tensor_parallel_degree, 1) * max(config.pipeline_parallel_degree, 1)
    width = 1 if in_fp8 else 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    needed, memory = model.parameters * width // sharing, device.total_memory()
    where, memory = ("the GPU", memory) if memory else ("this machine", device.host_memory())
    if needed > memory:
        shared = f", shared by {sharing} processes" if sharing > 1 else ""
        kind = "fp8" if in_fp8 else dtype
        raise ValueError(
            f"config.json: {described(model)}{shared}: {needed / 1e9:,.0f} GB of weights in {kind} for each "
            f"process, and {where} has {memory / 1e9:,.0f} GB; take a smaller model, or more processes with "
            "--tensor_parallel_degree or --pipeline_parallel_degree"
        )
