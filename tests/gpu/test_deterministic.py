"""DETERMINISTIC=1 of the launcher, on the real kernels."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import pretraining
from tests.processes import run

STEPS = 10  # without it two runs of this model part in the fourth


def pretrain(gpu, output, precision):
    """(losses, numbers of the checkpoint) of a run on the GPU, which others use at the same time."""
    device, number = gpu.split(":")
    variables = dict(DEVICE=device, DEVICES=number, DETERMINISTIC=1, MOCK_DATA=1, MAX_STEPS=STEPS, SAVE_STEPS=STEPS)
    variables |= dict(OUTPUT_DIR=output, model_name="llama-125m", tokenizer_name="none", max_seqlen=2048)
    variables |= dict(FSDP=1, TP=1, GA=1, backend="te", precision=precision)
    words = [f"--{key}={value}" for key, value in variables.items()]
    run([sys.executable, "-m", "paddle_te.launch", "pretrain", *words], check=True)
    return pretraining.losses(output), pretraining.numbers(output)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_two_equal_runs_give_equal_bits(gpu, tmp_path, precision):
    with ThreadPoolExecutor(2) as pool:
        (losses, numbers), other = pool.map(
            lambda name: pretrain(gpu, tmp_path / name, precision), ("one", "the other")
        )
    assert len(losses) == STEPS and numbers and (losses, numbers) == other
