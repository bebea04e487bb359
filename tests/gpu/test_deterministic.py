"""DETERMINISTIC=1 of the launcher, on the real kernels."""

import sys

import pytest

from tests import pretraining
from tests.processes import run

STEPS = 10  # without it two runs of this model part in the fourth


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_two_equal_runs_give_equal_bits(gpu, tmp_path, precision):
    device, number = gpu.split(":")
    for name in "one", "other":
        variables = dict(DEVICE=device, DEVICES=number, DETERMINISTIC=1, MOCK_DATA=1, MAX_STEPS=STEPS, SAVE_STEPS=STEPS)
        variables |= dict(OUTPUT_DIR=tmp_path / name, model_name="llama-125m", tokenizer_name="none")
        variables |= dict(max_seqlen=2048, FSDP=1, TP=1, GA=1, backend="te", precision=precision)
        words = [f"--{key}={value}" for key, value in variables.items()]
        run([sys.executable, "-m", "paddle_te.launch", "pretrain", *words], check=True)
    losses, others = (pretraining.losses(tmp_path / name) for name in ("one", "other"))
    assert len(losses) == STEPS and losses == others
    weights, others = (pretraining.numbers(tmp_path / name) for name in ("one", "other"))
    assert weights and weights == others
