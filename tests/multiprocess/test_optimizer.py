"""paddle_te.optimizer: the same bits as Paddle's clipping and AdamW, on the CPU and on nvgpu."""

from pathlib import Path

import paddle
import pytest

from paddle_te.optimizer import fuse_clipping
from tests.nvgpu_processes import build_host, run

STEPS = Path(__file__).parent / "optimizer_steps.py"


@pytest.mark.parametrize("device, more, cases", [("cpu", [], 2), ("nvgpu:0", ["emulated"], 11)])
def test_six_steps_are_bitwise_paddles(device, more, cases, seed):
    result = run(build_host(), STEPS, device, seed, *more)
    assert result.returncode == 0 and result.stdout.count("EQUAL") == cases, result.stderr[-3000:]


def test_what_it_leaves_alone():
    weight = paddle.create_parameter([4, 4], "float32")
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    alone = [
        paddle.optimizer.Adam(1e-3, parameters=[weight], grad_clip=clip),
        paddle.optimizer.AdamW(1e-3, parameters=[weight], grad_clip=paddle.nn.ClipGradByNorm(1.0)),
        paddle.optimizer.AdamW(1e-3, parameters=[{"params": [weight]}], grad_clip=clip),
    ]
    for optimizer in alone:
        before = type(optimizer), type(optimizer._grad_clip)
        fuse_clipping(optimizer)
        assert (type(optimizer), type(optimizer._grad_clip)) == before
    for clipping in (clip, None):
        fused = paddle.optimizer.AdamW(1e-3, parameters=[weight], grad_clip=clipping)
        fuse_clipping(fused)
        assert type(fused) is not paddle.optimizer.AdamW and isinstance(fused, paddle.optimizer.AdamW)
