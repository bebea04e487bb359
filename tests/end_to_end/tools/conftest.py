"""A stand-in for NVIDIA's CUPTI."""

import shutil

import pytest

from tests.nvgpu_processes import compile_fake_cupti


@pytest.fixture(scope="session")
def fake_cupti(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    return compile_fake_cupti(tmp_path_factory.mktemp("fake"))
