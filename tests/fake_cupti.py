"""The fixture `fake_cupti`, apart from tests/nvgpu_processes.py: ranks import that one, and not pytest."""

import shutil
import subprocess

import pytest

from tests.nvgpu_processes import PLUGIN_TESTS


@pytest.fixture(scope="session")
def fake_cupti(tmp_path_factory):
    """The library that nvgpu takes for NVIDIA's CUPTI where a process has loaded it; see fake_cupti.cpp."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("fake") / "libcupti.so.13"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcupti.so.13"]
    subprocess.run([*command, PLUGIN_TESTS / "fake_cupti.cpp", "-o", library], check=True)
    return library
