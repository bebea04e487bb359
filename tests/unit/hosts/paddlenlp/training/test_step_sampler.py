"""Which samples each rank's micro-batches have."""

import pytest

from paddle_te.data.fillers import Filler
from paddle_te.hosts.paddlenlp.training.step_sampler import StepSampler


def steps(samples, batch_size, micro_batches, ranks, **settings):
    """The numbers of each step's samples, those of all ranks in order, and its fillers."""
    read = []
    for rank in range(ranks):
        sampler = StepSampler(range(samples), batch_size, micro_batches, ranks, rank, **settings)
        sampler.set_epoch(3)
        read.append(list(sampler))
        assert len(sampler) == len(read[-1]) and {len(batch) for batch in read[-1]} <= {batch_size}
    whole = [number for batches in zip(*read, strict=True) for batch in batches for number in batch]
    size = batch_size * micro_batches * ranks
    return [whole[start : start + size] for start in range(0, len(whole), size)]


def real(numbers):
    return [number for number in numbers if not isinstance(number, Filler)]


LAYOUTS = [(12, 1, 1), (3, 4, 1), (1, 12, 1), (1, 3, 4), (3, 2, 2), (4, 1, 3)]  # batch, micro-batches, ranks: 12


@pytest.mark.parametrize("samples", [5, 12, 13, 35])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sample_once_and_in_one_order(samples, layout):
    got = steps(samples, *layout, shuffle=True)
    assert [len(step) for step in got] == [12] * -(-samples // 12)
    assert sorted(sum(map(real, got), [])) == list(range(samples))
    assert [real(step) for step in got] == [real(step) for step in steps(samples, *LAYOUTS[0], shuffle=True)]


def test_orders_of_epochs():
    sampler = StepSampler(range(20), 2, shuffle=True)
    orders = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[2] != orders[1]
    assert steps(5, 2, 1, 1) == [[0, 1], [2, 3], [4, 4]]


def test_the_last_step_may_be_left_out():
    assert steps(13, 2, 3, 1, drop_last=True) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert steps(5, 2, 3, 1, drop_last=True) == []
