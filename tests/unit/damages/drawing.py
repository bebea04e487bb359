"""How many examples hypothesis draws: the same few in each run, or with HYPOTHESIS_PROFILE=deep many others."""

import os

from hypothesis import HealthCheck, settings

PROFILES = {"default": dict(max_examples=14, derandomize=True), "deep": dict(max_examples=400)}
drawn = settings(
    **PROFILES[os.environ.get("HYPOTHESIS_PROFILE", "default")],
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
