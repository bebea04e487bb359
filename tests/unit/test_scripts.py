"""What every process that needs Paddle begins with."""

import gc

import pytest

from paddle_te.scripts import not_collecting


def test_the_collector_never_looks_at_what_was_imported():
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), not_collecting():
        assert not gc.isenabled()
        imported = [[]]
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() > before
    assert not any(found is imported for found in gc.get_objects())
