"""The learning rate of each step, in words of all hosts."""

from types import SimpleNamespace

import pytest

from paddle_te.training.schedule import tell_long_warm_up


@pytest.mark.parametrize("warm_up, process, told", [(5, 0, False), (6, 0, True), (6, 1, False), (0, 0, False)])
def test_a_warm_up_that_the_run_does_not_reach_the_end_of_is_told(caplog, warm_up, process, told):
    tell_long_warm_up(SimpleNamespace(warmup_steps=warm_up, process_index=process, learning_rate=3e-4), 5)
    assert ("warmup_steps 6 is more than the 5 steps of this run" in caplog.text) == told
    assert ("does not reach 0.0003" in caplog.text) == told
