"""What these tests share with nvgpu's."""

from tests.nvgpu_processes import fake_cupti

__all__ = ["fake_cupti"]  # a fixture
