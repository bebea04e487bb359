"""A heartbeat's socket is closed when it goes; its signs are tested in tests/unit/training/test_liveness.py."""

import gc
import warnings

from paddle_te.runs.heartbeat import Heartbeat


def test_no_open_socket_is_left():
    """Also where it is part of a cycle, which the collector takes apart in an order of its own."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            heartbeat = Heartbeat({})
            heartbeat.itself = heartbeat
        del heartbeat
        gc.collect()
    assert not [str(each.message) for each in told if issubclass(each.category, ResourceWarning)]
