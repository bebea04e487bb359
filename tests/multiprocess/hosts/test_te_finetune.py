"""Fine-tuning, preference tuning, likelihoods, generation, the fused loss, dropout and what saves memory, on backend
transformer_engine where there is no GPU.

The tests of tests/gpu themselves, in a process whose device is nvgpu's host runtime and whose TE kernels are NumPy.
"""

import os
import re
import sys
from pathlib import Path

import pytest

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
# A GPU has all families and precisions. Here they train packed steps where attention is of another kind: without
# rotation, with neighbours turned together, a part of a head turned, windows in all layers or in some, sinks, latent
# vectors; and with experts that a token goes to beside a shared one.
PACKED = ("llama", "gpt", "glm4", "phi3", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen2_moe")
PACKED_IN_FP8 = ("llama", "gpt", "glm4")
CHOSEN = " and ".join([
    "not olmoe",  # whose layers are OLMo-2's attention and Mixtral's experts
    f"(not (test_packed_steps and bf16) or {' or '.join(PACKED)})",
    f"(not (test_packed_steps and delayed) or {' or '.join(PACKED_IN_FP8)})",
    "not test_the_optimizers_states",  # unit/optimizer/test_offloaded_states.py
])  # fmt: skip


# The first takes longer than all others together.
@pytest.mark.parametrize("names", [list(FILES)[:1], list(FILES)[1:]], ids=["finetune", "others"])
def test_on_emulated_kernels(nvgpu_host, names):
    files = [f"tests/gpu/{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.unit.hosts.paddlenlp.emulated_gpu", *files]
    command += ["-k", CHOSEN]
    environment = os.environ | nvgpu_host | {"PYTHONPATH": python_path()}
    result = run(command, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout[-6000:]
    for name in names:
        assert len(re.findall(rf"{name}.py::.* PASSED", result.stdout)) >= FILES[name], result.stdout[-6000:]
    assert "SKIPPED" not in result.stdout, result.stdout[-1000:]
