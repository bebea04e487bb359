"""pytest -p tests.unit.hosts.paddlenlp.emulated_gpu: tests/gpu on nvgpu's host runtime, TE's kernels in NumPy."""

import tests.conftest
from tests import emulated_te

tests.conftest.missing_gpu = lambda: None
emulated_te.install()
