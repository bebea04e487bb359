"""PaddleFormers as throughput.py's and hosts.py's host: what its recipe says, and what is read from its log.

What it needs to train is not here; tests/paddleformers has recipes that train.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from paddlenlp.data.indexed_dataset import MMapIndexedDataset

from paddle_te import configs
from paddle_te.configs.spec import spec_of
from paddle_te.weights.layouts import hf_layout
from tools.benchmark import formers, hosts, throughput
from tools.benchmark.trainings import Conditions

LOG = """
[2026-11-24 05:50:02,879] [    INFO] - loss: 9.92692471, learning_rate: 0.0005, global_step: 3, \
current_memory_allocated: 0.0753, max_memory_allocated: 1.5, max_memory_reserved: 1.7, interval_runtime: 0.25, ppl: 2.1
[2026-11-24 05:50:03,609] [    INFO] - [DataLoad global_step: 4] data_load_time: 0.18 ms (over 1 micro-batches)
[2026-11-24 05:50:03,609] [    INFO] - loss: 8.5, learning_rate: 0.0005, global_step: 4, interval_runtime: 0.5, ppl: 3.1
"""


def test_log(tmp_path):
    (tmp_path / "log").write_text(LOG)
    assert formers.logged(tmp_path / "log") == [
        dict(step=3, step_time=0.25, loss=9.92692471, peak_memory_bytes=3 << 29),
        dict(step=4, step_time=0.5, loss=8.5, peak_memory_bytes=0),
    ]


def test_recipe_and_its_data(tmp_path):
    run = throughput.RUNS["formers-8b-l16-x1"].tiny
    conditions = Conditions(tmp_path, ["2"], steps=3, warmup=1, timeout=1, paddleformers=Path(sys.executable))
    command = run.command(conditions)
    recipe = json.loads(Path(command.words[-1]).read_text())
    assert command.environment == {"FLAGS_selected_nvgpus": "2"}
    assert (recipe["transformer_engine_backend"], recipe["bf16"], recipe["max_steps"]) == ("paddle", True, 3)
    assert json.loads((tmp_path / "model/config.json").read_text())["vocab_size"] == run.size.vocabulary
    corpus = MMapIndexedDataset(recipe["input_dir"].split()[1], skip_warmup=True)
    assert len(corpus) == 1
    tokens, _ = corpus.get(0)
    assert len(tokens) == 3 * run.size.tokens + 1
    np.testing.assert_array_equal(tokens, np.fromfile(tmp_path / "random.bin", "int32"))
    assert len(set(tokens.tolist())) > run.size.vocabulary / 2 and tokens.max() < run.size.vocabulary


def test_without_paddleformers(tmp_path):
    conditions = Conditions(tmp_path, ["0"], steps=3, warmup=1, timeout=1, paddleformers=Path(sys.executable))
    row = throughput.execute(throughput.RUNS["formers-8b-l16-x1"], conditions)
    assert row["status"] == "missing" and "--paddleformers" in row["reason"]


def test_random_weights_are_a_llamas():
    config = configs.read("tiny-llama-demo")
    names = {hf_layout().full_name(place) for place in hf_layout().tensors(spec_of(config))}
    assert hosts.shapes(config).keys() == names


@pytest.mark.parametrize("steps", [7, 45])
def test_difference_of_curves(steps):
    curve = np.linspace(9, 5, steps)
    later = curve.copy()
    later[-1] *= 1.1
    found = hosts.compared(curve, later)
    assert found["first"] == 0 and found["greatest"] == pytest.approx(0.1)
    last = curve[-(steps // max(1, steps // 20)) :]
    assert found["windows"] == pytest.approx(0.1 * last[-1] / last.sum())
