"""What the planner says of layers that --fp8_skip_layers keeps out of fp8."""

import pytest

from paddle_te import configs
from paddle_te.planner.gpus import GPUS
from paddle_te.planner.layout import extra_arguments, layout
from paddle_te.planner.memory import memory_of_step
from paddle_te.planner.model import Model
from paddle_te.planner.skipped import share_in_16_bits
from paddle_te.planner.speed import time_of_step

MODEL = Model.of(configs.read("llama-3-8b"))
ALL = "first:16,last:16"


def made(skipped="", precision="fp8", **flags):
    more = {"fp8_skip_layers": skipped} if skipped else {}
    return layout(flags.pop("gpus", 1), 8192, precision=precision, **more, **flags)


def test_shares():
    piped = made("first:2,last:1", gpus=4, pp=4, micro_batches=4)
    assert [share_in_16_bits(MODEL, piped, stage) for stage in range(4)] == [2 / 8, 0, 0, 1 / 8]
    assert share_in_16_bits(MODEL, piped) == 3 / 32
    assert share_in_16_bits(MODEL, made("first:2", precision="bf16")) == 0


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_between_fp8_and_bf16(micro_batches):
    """With all layers in 16 bits as bf16; with half of them in the middle."""
    gpu, flags = GPUS["h100"], dict(micro_batches=micro_batches)
    jobs = made(**flags), made("first:16", **flags), made(ALL, **flags), made(precision="bf16", **flags)
    times = [time_of_step(MODEL, job, gpu)["layers"] for job in jobs]
    kept = [(found := memory_of_step(MODEL, job)).activations + found.fp8_weights for job in jobs]
    for fp8, half, skipped, bf16 in (times, kept):
        assert abs(fp8 / bf16 - 1) > 0.02  # fp8 copies of the weights take more than fp8 activations spare
        assert half == pytest.approx((fp8 + bf16) / 2) and skipped == pytest.approx(bf16)


def test_the_command_says_it():
    assert "--fp8_skip_layers first:1,last:1" in extra_arguments(made("first:1,last:1"))
