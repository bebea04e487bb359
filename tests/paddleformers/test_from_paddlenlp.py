"""A run that PaddleNLP has begun goes on in PaddleFormers: its losses beside those of PaddleNLP's own continuation."""

import json
import shutil
import subprocess

import numpy as np
import pytest

pytest.importorskip("paddleformers", reason="needs PaddleFormers: HOST=paddleformers bash scripts/test.sh")

from paddle_te.hosts.paddleformers.recipes import train
from paddle_te.weights import convert
from tests.nvgpu_processes import ROOT
from tests.paddleformers.recipe import indexed, losses_in, write_indexed

BEFORE, STEPS = 3, 6
DELAYED = dict(use_fp8=True, fp8_recipe="delayed")
BF16 = dict(bf16=True, fp16_opt_level="O2", amp_master_grad=True)


@pytest.fixture(scope="module")
def paddlenlps_python():
    """The Python of an environment with PaddleNLP, which is first on PATH as scripts/test.sh has it."""
    python = shutil.which("python")
    there = "import importlib.util as util; raise SystemExit(util.find_spec('paddlenlp') is None)"
    if python is None or subprocess.run([python, "-c", there]).returncode:
        pytest.skip("needs a Python with PaddleNLP first on PATH: HOST=paddleformers bash scripts/test.sh")
    return python


def run_paddlenlp(python, output, **settings):
    """The loss of each step, from the run's log."""
    flags = dict(
        tokenizer_name_or_path="none",
        split="100,0,0",
        max_seq_length=32,
        per_device_train_batch_size=2,
        learning_rate=0.001,
        min_learning_rate=0.001,
        lr_scheduler_type="linear",
        warmup_steps=0,
        weight_decay=0,
        max_steps=STEPS,
        save_steps=BEFORE,
        logging_steps=1,
        device="nvgpu",
        do_train=True,
        report_to="none",
        disable_tqdm=True,
        output_dir=output,
    )
    words = [str(word) for name, value in (flags | settings).items() for word in (f"--{name}", value)]
    subprocess.run([python, ROOT / "llm/llama/run_pretrain.py", *words], check=True, cwd=ROOT)
    return [
        json.loads(line)["loss"] for line in (output / "train_log.jsonl").read_text().splitlines() if "loss" in line
    ]


@pytest.mark.parametrize(
    "mode, settings, bound",
    [
        ("te2formers", dict(BF16, transformer_engine_backend="paddle", **DELAYED), 5e-4),
        ("pd2formers", dict(transformer_engine_backend="none"), 1e-6),
    ],
)
def test_goes_on(paddlenlps_python, recipe_of, model_folder, tmp_path, caplog, mode, settings, bound):
    """With weights, moments, master weights, step, place in the data and fp8 scales. In bfloat16 the hosts' updates
    round differently, so that only the first loss is the same."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_indexed(corpus)
    shutil.copytree(model_folder, tmp_path / "model")  # PaddleNLP writes into it
    data = dict(model_name_or_path=tmp_path / "model", input_dir=f"1.0 {corpus / 'LONG'}")
    whole = run_paddlenlp(paddlenlps_python, tmp_path / "whole", **data, **settings)
    begun = tmp_path / "begun"
    convert(tmp_path / f"whole/checkpoint-{BEFORE}", begun, mode, progress=False)
    for file in model_folder.glob("tokenizer*"):
        shutil.copy(file, begun)
    recipe = recipe_of("PT") | indexed(corpus / "LONG") | settings
    places = dict(model_name_or_path=str(begun), resume_from_checkpoint=str(begun), output_dir=str(tmp_path / "output"))
    with caplog.at_level("INFO", "PaddleFormers"):
        train(recipe | places | dict(device="nvgpu", max_steps=STEPS, weight_decay=0.0))
    assert len(whole) == STEPS and whole[0] != whole[-1]
    got = losses_in(caplog.text)
    np.testing.assert_allclose(got[0], whole[BEFORE], rtol=1e-6)
    np.testing.assert_allclose(got, whole[BEFORE:], rtol=bound)
