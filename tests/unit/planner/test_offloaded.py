"""Which of the optimizer's states lie on the host, and what comes late."""

from dataclasses import replace

import pytest

from paddle_te.planner import offloaded, speed
from tests.unit.planner.round_numbers import ROUND, SMALL, layout


def test_pieces_without_a_slot_are_late():
    """In backward, of 12 slots: fc1's 24.5 pieces are 13 more than there are slots, and the first of these waits for
    two copies; fc2's 12.3 are one more. Six of ten of each have their states on the host, and the rest is small."""
    model = replace(SMALL, ffn=int(24.5 * 2**23) // 2000, vocabulary=100)
    assert offloaded.late_pieces(model, 1, 0.6) == 6 * (13 + 1) + 6 * (1 + 1)
    assert offloaded.late_pieces(model, 4, 0.6) == offloaded.late_pieces(model, 1, 0) == 0
    gpu, settings = replace(ROUND, pcie=1, hbm=1e30), layout(offload_optimizer=0.6)
    in_backward = settings.but(optimizer_in_backward="unclipped")
    assert speed.states_ms(model, in_backward, gpu, 1e9) == pytest.approx(96 * 2**23 * 12 / 1e6)
    assert speed.states_ms(model, settings, gpu, 1e9) == pytest.approx(0)
