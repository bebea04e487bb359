"""Fine-tuning, likelihoods, generation and the fused loss on backend transformer_engine where there is no GPU.

The tests of tests/gpu themselves, in a process whose device is nvgpu's host runtime and whose TE kernels are NumPy.
"""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.distributed.conftest import nvgpu_host  # noqa: F401 (a fixture)
from tests.processes import run
from tests.tools.nvgpu_processes import python_path

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("file, least", [("test_finetune", 12), ("test_generation", 8), ("test_cross_entropy", 10)])
def test_on_emulated_kernels(nvgpu_host, file, least):  # noqa: F811
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.llama.emulated_gpu", f"tests/gpu/{file}.py"]
    environment = os.environ | nvgpu_host | {"PYTHONPATH": python_path()}
    result = run(command, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout[-6000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert int(passed[1]) >= least and "skipped" not in result.stdout, result.stdout[-1000:]
