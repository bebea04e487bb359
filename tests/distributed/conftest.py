"""The plug-in's host runtime, built once."""

import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "nvgpu/build.py"


@pytest.fixture(scope="session")
def nvgpu_host():
    """The environment of processes that use nvgpu's host runtime."""
    built = subprocess.run([sys.executable, BUILD, "--runtime", "host"], check=True, capture_output=True, text=True)
    return dict(CUSTOM_DEVICE_ROOT=built.stdout.splitlines()[-1])
