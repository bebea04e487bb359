"""What these tests share; tests/nvgpu_processes.py has what paddle_te's tests use as well."""

import os

import pytest

from tests import nvgpu_processes, processes, seeds
from tests.fake_cupti import fake_cupti

__all__ = ["fake_cupti"]  # a fixture


def pytest_configure():
    processes.environment_of_children(os.environ)
    seeds.settle(os.environ)


@pytest.fixture(scope="session")
def plugin():
    """The folder of the host runtime for CUSTOM_DEVICE_ROOT."""
    return nvgpu_processes.build_host()
