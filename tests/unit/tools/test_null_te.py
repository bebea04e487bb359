"""The library that returns at once has all that the extension and Python look up in it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
from types import SimpleNamespace
from tools.benchmark import null_te
null_te.install()
from paddle_te import native
from paddle_te.native import DType, kernels, library
te = native.load(fp8=True)
stream = te.Stream(1, lambda size: SimpleNamespace(data_ptr=lambda: 4096))
matrix = te.Tensor(4096, (16, 16), DType.BFLOAT16)
te.gemm(matrix, matrix, matrix, True, False, stream)
te.launch(kernels.kernel("rotate", "rope.cu", stream.capability, ELEMENT="bfloat16"), 1, 32, 0, stream, 4096)
print(stream.capability, stream.sm_count, library.cudnn_version() >= (9, 12), te.counts())
"""


def test_te_runs_on_it():
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    found = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "(9, 0) 132 True {('gemm', 'bfloat16'): 1, ('launch', ''): 1}\n", found.stderr
