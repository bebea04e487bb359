import numpy as np
import pytest


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)
