import pytest

from paddle_te import upstream


@pytest.fixture(autouse=True)
def _as_installed():
    """Paddle as it is: a command that an earlier test ran in this process has left its repairs."""
    upstream.undo()


@pytest.fixture
def repair():
    """Applies a repair for one test."""
    applied = []

    def apply(module):
        module.apply()
        applied.append(module)

    yield apply
    for module in applied:
        module.undo()
