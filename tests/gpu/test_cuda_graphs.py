"""--cuda_graphs: the bits that there are without, and that graphs were launched."""

import sys

import numpy as np
import pytest

from paddle_te import native
from tests import pretraining
from tests.gpu.test_memory import LAYERS, train
from tests.processes import run
from tests.small_models import VOCABULARY, truth

STEPS = 10
PROGRAMS = 2 * 2  # of each layer's two halves forward and backward
MAIN_GRADS = "--amp_master_grad true --release_grads true"


@pytest.mark.parametrize("settings", [
    {},
    dict(use_fp8=True),
    dict(use_fp8=True, fp8_recipe="current", recompute_modules=["layernorm"]),
    dict(use_fp8=True, offload_activations=2),
], ids=["bf16", "fp8", "fp8-current-norms-again", "fp8-offload"])  # fmt: skip
def test_they_change_no_bit(gpu, poisoned, monkeypatch, caplog, seed, settings):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    _, weights = truth(num_hidden_layers=LAYERS)
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, [STEPS, 2, 64])
    losses, want = train(gpu, weights, ids, **settings)
    assert np.isfinite(losses).all() and len({*losses}) == STEPS
    before = native.load().graph_counts()
    got_losses, got = train(gpu, weights, ids, cuda_graphs=True, **settings)
    after = native.load().graph_counts()
    counts = {name: after[name] - before[name] for name in after}
    print(counts)
    assert got_losses == losses
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    assert not [record for record in caplog.records if record.name == "paddle_te.native"], "all can be captured"
    # not in delayed scaling's first step, and each program is first run once without
    assert counts["launched"] >= (STEPS - 1) * LAYERS * PROGRAMS - PROGRAMS
    assert 0 < counts["instantiated"] <= counts["captured"] <= counts["launched"]


def pretrain(gpu, output, flags):
    """(losses, numbers of the checkpoint, output) of a run as a user starts it."""
    device, number = gpu.split(":")
    variables = dict(DEVICE=device, DEVICES=number, DETERMINISTIC=1, MOCK_DATA=1, MAX_STEPS=STEPS, SAVE_STEPS=STEPS)
    variables |= dict(OUTPUT_DIR=output, model_name="llama-125m", tokenizer_name="none", max_seqlen=1024)
    variables |= dict(FSDP=1, TP=1, GA=2, backend="te", precision="fp8", EXTRA_ARGS=flags)
    words = [f"--{key}={value}" for key, value in variables.items()]
    result = run([sys.executable, "-m", "paddle_te.launch", "pretrain", *words], check=True)
    return pretraining.losses(output), pretraining.numbers(output), result.stdout + result.stderr


def test_they_change_no_bit_of_a_run_with_main_gradients(gpu, tmp_path):
    losses, numbers, _ = pretrain(gpu, tmp_path / "without", MAIN_GRADS)
    got_losses, got, output = pretrain(gpu, tmp_path / "with", f"{MAIN_GRADS} --cuda_graphs true")
    lines = [line for line in output.splitlines() if "CUDA graphs: " in line]
    print(*lines, sep="\n")
    assert len(losses) == STEPS and numbers and (losses, numbers) == (got_losses, got)
    assert len(lines) == 1 and "launches of recorded programs" in lines[0]
