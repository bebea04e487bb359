"""pytest -p tests.unit.models.emulated_gpu: tests/gpu on nvgpu's host runtime, TE's kernels emulated in NumPy."""

import tests.conftest
from tests import emulated_te

tests.conftest.missing_gpu = lambda: None
emulated_te.install()
