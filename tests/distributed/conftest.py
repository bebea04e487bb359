"""The plug-in's host runtime, built once."""

import pytest

from tests.nvgpu_processes import build_host


@pytest.fixture(scope="session")
def nvgpu_host():
    """The environment of processes that use nvgpu's host runtime."""
    return dict(CUSTOM_DEVICE_ROOT=build_host())
