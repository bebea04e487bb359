"""data.course: each sample once a pass, in each layout, and none twice where the batch changes on the way."""

import pytest

from paddle_te.data.course import Course, Share, in_order, micro_batches, shuffled
from paddle_te.data.fillers import Filler


def read(course, order, until, share, ranks):
    """The samples of steps course.first + 1 to `until`, as all ranks read them."""
    done, start = course.place(course.first)
    seen, steps = [], until - course.first
    while steps > 0:
        each = [list(micro_batches(course, order, done, start, Share(*share, ranks, rank))) for rank in range(ranks)]
        flat = [sample for row in zip(*each, strict=True) for batch in row for sample in batch]
        seen += flat[: steps * course.batch]
        steps -= len(flat) // course.batch
        done, start = done + 1, 0
    return seen


@pytest.mark.parametrize("order", [in_order(24), shuffled(24, 5)])
@pytest.mark.parametrize("share, ranks", [((2, 2), 1), ((1, 4), 1), ((1, 2), 2), ((1, 1), 4)])
def test_a_layout_does_not_change_what_a_step_reads(order, share, ranks):
    assert read(Course(24, 4), order, 12, share, ranks) == [*order(0), *order(1)]


def test_the_order_is_the_seeds_and_changes_from_pass_to_pass():
    first, again, other = shuffled(50, 1), shuffled(50, 1), shuffled(50, 2)
    assert [*first(0)] == [*again(0)] != [*first(1)] and [*first(0)] != [*other(0)]
    assert sorted(first(3)) == list(range(50))


@pytest.mark.parametrize("batches", [(4, 2), (2, 8), (6, 4), (1, 12), (8, 3)])
def test_a_changed_batch_goes_on_with_the_next_sample(batches):
    before, after = batches
    order, steps = shuffled(24, 7), 2
    whole = Course(24, before)
    resumed = Course(24, after, first=steps, consumed=whole.consumed_at(steps))
    seen = read(whole, order, steps, (before, 1), 1)
    seen += read(resumed, order, resumed.last_step(1), (after, 1), 1)
    assert seen == [*order(0)][: len(seen)] and 24 - len(seen) < after


def test_resuming_at_any_step_is_as_not_having_stopped():
    whole, order = Course(23, 4), shuffled(23, 3)
    every = read(whole, order, 15, (4, 1), 1)
    for step in range(15):
        resumed = Course(23, 4, first=step, consumed=whole.consumed_at(step))
        assert read(resumed, order, 15, (4, 1), 1) == every[4 * step :]
        assert resumed.last_step(3) == whole.last_step(3) == 15
        assert resumed.epoch(15) == whole.epoch(15) == 3


@pytest.mark.parametrize("passes, steps", [(1, 5), (2, 10), (1.5, 7), (0.5, 2), (0.1, 0)])
def test_steps_of_so_many_passes(passes, steps):
    assert Course(23, 4).last_step(passes) == steps


def test_a_smaller_last_step_counts_as_a_step():
    course = Course(23, 4, drop_last=False)
    assert course.steps_a_pass == 6 and course.last_step(2) == 12
    assert [course.place(step) for step in (5, 6, 7)] == [(0, 20), (1, 0), (1, 4)]
    resumed = Course(23, 8, first=5, consumed=20, drop_last=False)
    assert resumed.place(6) == (1, 0) and resumed.last_step(2) == 9


def test_what_is_done_is_not_done_again():
    assert Course(24, 4, first=6, consumed=24).last_step(1) == 6
    assert Course(24, 8, first=6, consumed=20).last_step(1) == 6  # fewer are left than a step takes
    assert Course(24, 8, first=6, consumed=20).place(6) == (1, 0)


@pytest.mark.parametrize("ranks, size", [(1, 4), (2, 2), (4, 1)])
def test_fillers_fill_up_the_last_step(ranks, size):
    course, order = Course(7, 4, drop_last=False), shuffled(7, 1)
    each = [[*micro_batches(course, order, 0, 4, Share(size, 1, ranks, rank))] for rank in range(ranks)]
    (step,) = ([sample for batch in row for sample in batch] for row in zip(*each, strict=True))
    assert step == [*order(0)[4:], order(0)[4]]
    assert [type(sample) for sample in step] == [int, int, int, Filler]
