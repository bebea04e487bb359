"""run_eval.py in two processes, which share each layer or have half of the layers each, gives the numbers and texts of
a single one, with a LoRA adapter in the weights, too."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.nvgpu_processes import run_ranks
from tests.processes import run
from tests.small_checkpoints import save_models, save_tokenizer, write_lines
from tests.te_weights import SIZES

FAMILIES = {"llama": {}, "qwen2": dict(tie_word_embeddings=True), "gpt": {}}
SCRIPT = Path(__file__).parents[3] / "llm/llama/run_eval.py"


ADAPTED = "llama", "paddle"


def save_adapter(folder):
    """PEFT's folder of a random adapter beside q and down of ADAPTED."""
    generator, tensors, rank = np.random.default_rng(7), {}, 2
    width, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    for layer in range(SIZES["num_hidden_layers"]):
        for module, columns in (("self_attn.q_proj", width), ("mlp.down_proj", inner)):
            for factor, shape in (("A", (rank, columns)), ("B", (width, rank))):
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight"
                tensors[name] = 0.3 * generator.standard_normal(shape, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = dict(peft_type="LORA", r=rank, lora_alpha=4, target_modules=["q_proj", "down_proj"])
    (folder / "adapter_config.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    for family, own in FAMILIES.items():
        save_models(folder / family, seed=5, family=family, **own)
    (folder / "tokenizer").mkdir()
    save_tokenizer(folder / "tokenizer")
    save_adapter(folder / "adapter")
    texts = "the names of the frames", "a function returns its value", "the class of the frames has a name"
    write_lines(folder / "docs.jsonl", [{"text": text} for text in texts])
    return folder


@pytest.mark.parametrize("family, backend, stages", [
    ("llama", "none", 1), ("llama", "paddle", 1), ("llama", "paddle", 2),
    ("qwen2", "none", 1), ("qwen2", "paddle", 1), ("gpt", "paddle", 1), ("gpt", "paddle", 2),
])  # fmt: skip
def test_two_processes_are_one(place, tmp_path, family, backend, stages, nvgpu_host, warm_start):
    def words(output, device, **more):
        flags = dict(
            model_name_or_path=place / family / backend,
            tokenizer_name_or_path=place / "tokenizer",
            transformer_engine_backend=backend,
            perplexity=place / "docs.jsonl",
            max_seq_length=48,
            batch_size=2,  # of three documents: the second batch has another shape
            output_file=output,
            device=device,
        )
        flags |= dict(lora_path=place / "adapter") if (family, backend) == ADAPTED else {}
        flags |= more | (dict(prompts="for", max_new_tokens=8) if stages == 1 else {})
        return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]

    two = words(tmp_path / "two.json", "nvgpu", pipeline_parallel_degree=stages)
    codes, outputs = run_ranks(nvgpu_host["CUSTOM_DEVICE_ROOT"], 2, SCRIPT, *two, **warm_start)
    assert codes == [0, 0], outputs
    assert "perplexity: loss" in outputs[0] and "perplexity: loss" not in outputs[1]
    run(["python", SCRIPT, *words(tmp_path / "one.json", "cpu")], check=True, env=os.environ | warm_start)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text())["results"] for name in ("one", "two"))
    assert two["perplexity"] == pytest.approx(one["perplexity"], rel=1e-5)
    assert two.get("generation") == one.get("generation")
