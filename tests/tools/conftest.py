"""A stand-in for NVIDIA's CUPTI."""

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fake_cupti(tmp_path_factory):
    """The library that nvgpu takes for CUPTI where a process has loaded it; see fake_cupti.cpp."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("fake") / "libcupti.so.13"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcupti.so.13"]
    subprocess.run([*command, Path(__file__).parent / "fake_cupti.cpp", "-o", library], check=True)
    return library
