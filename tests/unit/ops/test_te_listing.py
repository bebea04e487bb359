"""The recorded program that docs/background/recorded-programs.md explains is the one that is recorded."""

import re
from pathlib import Path

import paddle
import pytest

from paddle_te import fp8
from paddle_te.ops import get_ops
from paddle_te.ops.te import autograd, program, runtime
from paddle_te.ops.te.linear import LINEAR, LinearSettings
from paddle_te.ops.te.listing import listing
from tests import emulated_te

PAGE = Path(__file__).parents[3] / "docs/background/recorded-programs.md"


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    program.clear()


def linear_listing(recipe):
    """Return the listing of y = x · Wᵀ with x [64, 32] and W [48, 32]."""
    rt, tensors = runtime.current(), [paddle.zeros(shape, "bfloat16") for shape in ([64, 32], [48, 32])]
    for tensor in tensors:
        tensor.stop_gradient = False
    with fp8.fp8_autocast(True, recipe):
        quantizers = fp8.ModuleScaling(1, get_ops("transformer_engine").amax_and_scale_update).begin_forward()
    return listing(autograd.prepare(rt, LINEAR, [*tensors, None, None], LinearSettings(None, True), quantizers), rt)


def test_the_pages_listing():
    [block] = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block.splitlines() == linear_listing(fp8.DelayedScaling(first_step="delayed"))
