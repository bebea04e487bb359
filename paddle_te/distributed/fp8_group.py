"""Find the ranks whose amaxes are reduced under delayed scaling."""

from functools import lru_cache

import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.communication.group import Group


@lru_cache
def fp8_group() -> Group | None:
    """Return the ranks that share amax: all of one pipeline stage, so that their scales are the same.

    None in one process. Collective: every rank must call it the first time.
    """
    if dist.get_world_size() == 1:
        return None
    hcg = getattr(fleet.fleet, "_hcg", None)
    if hcg is None:  # plain data parallelism, for which PaddleNLP does not initialise fleet
        return dist.new_group(list(range(dist.get_world_size())))
    stages = hcg.topology().get_dim("pipe")
    groups = [dist.new_group(hcg.topology().get_axis_list("pipe", stage)) for stage in range(stages)]
    return groups[hcg.get_stage_id()]
