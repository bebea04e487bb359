"""run_finetune.py with TE's kernels emulated in NumPy (tests/emulated_te.py), for nvgpu's host runtime."""

import runpy
from pathlib import Path

import paddle

from tests import emulated_te

paddle.set_device("nvgpu")
emulated_te.install()
runpy.run_path(str(Path(__file__).parents[2] / "llm/llama/run_finetune.py"), run_name="__main__")
