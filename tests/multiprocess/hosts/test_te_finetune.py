"""Fine-tuning, preference tuning, likelihoods, generation, the fused loss, dropout and what saves memory, on backend
transformer_engine where there is no GPU.

The tests of tests/gpu themselves, in a process whose device is nvgpu's host runtime and whose TE kernels are NumPy.
"""

import os
import re
import sys
from pathlib import Path

from tests.nvgpu_processes import python_path
from tests.processes import run

ROOT = Path(__file__).parents[3]

FILES = {
    "test_finetune": 12,
    "test_generation": 8,
    "test_cross_entropy": 14,
    "test_dropout": 12,
    "test_memory": 4,
    "test_preferences": 2,
}  # how many tests of each run here
# The families whose packed steps run in fp8 here: of each kind of layer, of which a GPU has all families
PACKED_IN_FP8 = ("llama", "gpt", "glm4", "mixtral")
WITHOUT = "olmoe"  # whose layers are OLMo-2's attention and Mixtral's experts


def test_on_emulated_kernels(nvgpu_host):
    files = [f"tests/gpu/{name}.py" for name in FILES]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.unit.hosts.paddlenlp.emulated_gpu", *files]
    command += ["-k", f"not {WITHOUT} and (not test_packed_steps or not delayed or {' or '.join(PACKED_IN_FP8)})"]
    environment = os.environ | nvgpu_host | {"PYTHONPATH": python_path()}
    result = run(command, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout[-6000:]
    for name, least in FILES.items():
        assert len(re.findall(rf"{name}.py::.* PASSED", result.stdout)) >= least, result.stdout[-6000:]
    assert "SKIPPED" not in result.stdout, result.stdout[-1000:]
