"""The device of Paddle on which tests of a GPU run."""

import os

import pytest

from paddle_te.env import training_device


def gpu_device() -> str:
    """Return Paddle's name for an NVIDIA GPU, gpu or nvgpu; skip the test where this Paddle has none."""
    device = training_device()
    if device == "cpu":
        pytest.skip(f"this Paddle has no GPU device (CUSTOM_DEVICE_ROOT={os.environ.get('CUSTOM_DEVICE_ROOT')})")
    return device
