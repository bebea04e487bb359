"""run_finetune.py with TE's kernels emulated in NumPy (tests/emulated_te.py), for nvgpu's host runtime."""

import paddle

from paddle_te.training import finetune
from tests import emulated_te

paddle.set_device("nvgpu")
emulated_te.install()
finetune.main()
