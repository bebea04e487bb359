"""What these tests share with nvgpu's."""

from tests.fake_cupti import fake_cupti

__all__ = ["fake_cupti"]  # a fixture
