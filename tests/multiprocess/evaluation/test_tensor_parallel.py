"""run_eval.py in two processes, which share the model, gives the numbers and texts of a single one."""

import json
from pathlib import Path

import pytest

from tests.nvgpu_processes import run_ranks
from tests.processes import run
from tests.unit.training.small import save_models, save_tokenizer, write_lines

SCRIPT = Path(__file__).parents[3] / "llm/llama/run_eval.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    save_models(folder, seed=5)
    (folder / "tokenizer").mkdir()
    save_tokenizer(folder / "tokenizer")
    write_lines(folder / "docs.jsonl", [{"text": "the names of the frames"}, {"text": "a function returns its value"}])
    return folder


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_two_processes_are_one(place, tmp_path, backend, nvgpu_host, warm_start):
    def words(output, device):
        flags = dict(
            model_name_or_path=place / backend,
            tokenizer_name_or_path=place / "tokenizer",
            transformer_engine_backend=backend,
            perplexity=place / "docs.jsonl",
            prompts="for",
            max_new_tokens=8,
            max_seq_length=48,
            output_file=output,
            device=device,
        )
        return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]

    arguments = words(tmp_path / "two.json", "nvgpu")
    codes, outputs = run_ranks(nvgpu_host["CUSTOM_DEVICE_ROOT"], 2, SCRIPT, *arguments, **warm_start)
    assert codes == [0, 0], outputs
    assert "perplexity: loss" in outputs[0] and "perplexity: loss" not in outputs[1]
    run(["python", SCRIPT, *words(tmp_path / "one.json", "cpu")], check=True)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text())["results"] for name in ("one", "two"))
    assert two["generation"] == one["generation"]
    assert two["perplexity"] == pytest.approx(one["perplexity"], rel=1e-5)
