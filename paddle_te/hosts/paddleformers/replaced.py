"""Names of PaddleFormers' modules that stand for something of ours for a while."""

from contextlib import contextmanager


@contextmanager
def replaced(module, **ours):
    """While it lasts, a module's names stand for ours."""
    kept = {name: getattr(module, name) for name in ours}
    for name, value in ours.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
