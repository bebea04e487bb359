"""The groups of fleet's topology whose ranks have other tokens."""

from types import SimpleNamespace

import pytest
from paddle.distributed import fleet

from paddle_te.distributed import row_groups, sequence_group


class Topology:
    """Stand in for fleet's topology; dp, sharding, sep: how many ranks each of its groups has."""

    def __init__(self, dp: int, sharding: int, sep: int) -> None:
        degrees = {"dp": dp, "sharding": sharding, "sep": sep}
        self.groups = {name: SimpleNamespace(nranks=ranks) for name, ranks in degrees.items()}

    def get_data_parallel_group(self) -> SimpleNamespace:
        return self.groups["dp"]

    def get_sharding_parallel_group(self) -> SimpleNamespace:
        return self.groups["sharding"]

    def get_sep_parallel_world_size(self) -> int:
        return self.groups["sep"].nranks

    def get_sep_parallel_group(self) -> SimpleNamespace:
        assert self.groups["sep"].nranks > 1, "sep not exist"
        return self.groups["sep"]


@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 2)])
def test_ranks_with_other_tokens(monkeypatch, degrees):
    """Paddle asserts that there are ranks with parts of sequences."""
    topology = Topology(*degrees)
    monkeypatch.setattr(fleet.fleet, "_hcg", topology, raising=False)
    groups = [*(row_groups() or []), sequence_group()]
    assert [group.nranks for group in groups if group is not None] == [degree for degree in degrees if degree > 1]
