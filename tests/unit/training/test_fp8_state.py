"""What a run says of its fp8 recipe."""

from types import SimpleNamespace

import pytest

from paddle_te import fp8
from paddle_te.training import fp8_state


@pytest.mark.parametrize("attention, process, told", [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_attention_in_fp8_is_warned_of_once(caplog, monkeypatch, attention, process, told):
    monkeypatch.setattr(fp8_state, "recipe_of", lambda config: fp8.DelayedScaling(fp8_dpa=attention))
    fp8_state.tell_fp8_attention(None, SimpleNamespace(process_index=process))
    assert ("leave fp8_dpa out of long runs" in caplog.text) == told


def test_16_bits_have_nothing_to_tell(caplog, monkeypatch):
    monkeypatch.setattr(fp8_state, "recipe_of", lambda config: None)
    fp8_state.tell_fp8_attention(None, SimpleNamespace(process_index=0))
    assert not caplog.text
