"""What these tests share; tests/nvgpu_processes.py has what paddle_te's tests use as well."""

import os
import shutil

import pytest

from tests import nvgpu_processes, processes


def pytest_configure():
    processes.environment_of_children(os.environ)


@pytest.fixture(scope="session")
def plugin():
    """The folder of the host runtime for CUSTOM_DEVICE_ROOT."""
    return nvgpu_processes.build_host()


@pytest.fixture(scope="session")
def fake_cupti(tmp_path_factory):
    """A stand-in for NVIDIA's CUPTI."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    return nvgpu_processes.compile_fake_cupti(tmp_path_factory.mktemp("fake"))
