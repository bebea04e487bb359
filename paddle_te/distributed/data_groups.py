"""Find the groups of fleet's hybrid topology whose ranks have other tokens."""

from typing import Any

from paddle.distributed import fleet
from paddle.distributed.communication.group import Group


def sequence_group() -> Group | None:
    """Return the ranks that share each sequence, fleet's sep group; None where there are none, or no topology."""
    hcg: Any = getattr(fleet.fleet, "_hcg", None)
    if hcg is None or hcg.get_sep_parallel_world_size() == 1:  # for which Paddle's own question is an assertion
        return None
    group: Group = hcg.get_sep_parallel_group()
    return group


def row_groups() -> list[Group] | None:
    """Return the groups whose ranks read other rows, of data parallelism and sharding; None without a topology."""
    hcg: Any = getattr(fleet.fleet, "_hcg", None)
    if hcg is None:
        return None
    groups = hcg.get_data_parallel_group(), hcg.get_sharding_parallel_group()
    return [group for group in groups if group is not None and group.nranks > 1]
