"""A small model learns to copy a token over 4,095 positions: across the pieces of a shared sequence, and in the
document of a packed one that it belongs to (tools/needle.py, which ends with status 1 where the model does not)."""

import os
import sys
from pathlib import Path

import paddle
import pytest

from paddle_te.native import library
from tests.nvgpu_processes import python_path
from tests.processes import run

SCRIPT = Path(__file__).parents[2] / "tools/needle.py"
TE = dict(transformer_engine_backend="transformer_engine", bf16="true", fp16_opt_level="O2", amp_master_grad="true")
PACKED = dict(documents=2, per_device_train_batch_size=4, per_device_eval_batch_size=4)


@pytest.mark.parametrize("gpus, flags", [
    (1, PACKED),
    (2, PACKED | dict(sep_parallel_degree=2)),
    (2, dict(context_parallel_degree=2)),
], ids=["packed", "packed-sep2", "cp2"])  # fmt: skip
def test_the_needle_is_found(gpu, tmp_path, gpus, flags):
    if gpus > len(library.gpus()):
        pytest.skip(f"needs {gpus} GPUs")
    command = [sys.executable]
    if gpus > 1:
        devices = ",".join(map(str, range(gpus)))
        command += ["-m", "paddle.distributed.launch", "--devices", devices, "--log_dir", tmp_path / "logs"]
    device = "gpu" if paddle.is_compiled_with_cuda() else "nvgpu"
    flags = TE | flags | dict(output_dir=tmp_path / "out", device=device)
    command += [SCRIPT, *[word for name, value in flags.items() for word in (f"--{name}", str(value))]]
    run(command, env=os.environ | dict(PYTHONPATH=python_path()), check=True)
