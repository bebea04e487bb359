"""Random numbers of tests depend on PADDLE_TE_SEED and on a test's own name, not on other tests or the process."""

import os
import random
import zlib
from contextlib import contextmanager

import numpy as np

VARIABLE = "PADDLE_TE_SEED"


def settle(environ):
    """Makes a number of PADDLE_TE_SEED=fresh, which all of pytest's workers then share; without any it is 0."""
    given = environ.get(VARIABLE) or "0"
    environ[VARIABLE] = str(int.from_bytes(os.urandom(3), "little")) if given == "fresh" else given


def seed_of(name):
    """The seed of a test or of a fixture that several tests share."""
    return zlib.crc32(name.encode(), int(os.environ[VARIABLE])) % 2**24


def set_seed(value):
    import paddle

    random.seed(value)
    np.random.seed(value)
    paddle.seed(value)


@contextmanager
def drawing_for(name):
    """Draws what is shared from a seed of its own, and leaves the generators as they were."""
    import paddle

    python, numpy, paddles = random.getstate(), np.random.get_state(), paddle.get_rng_state("cpu")
    set_seed(seed_of(name))
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        paddle.set_rng_state(paddles, "cpu")
