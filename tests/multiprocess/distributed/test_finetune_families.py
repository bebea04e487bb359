"""run_finetune.py on backend te with Qwen2, Mistral and GPT: whole and LoRA, with packed samples, in bf16 and fp8, in
one process; over two ranks with Qwen2, GPT and two families of ours, OLMo-2 with norms of all heads, which the ranks
share, and Gemma 3 with windows, norms of each head and four norms of a layer.

TE's kernels are emulated on nvgpu's host runtime, pd in float32 on the CPU is the truth. A process runs all families.
"""

import json

import numpy as np
import paddle
import pytest

from tests.multiprocess.distributed import jobs
from tests.multiprocess.distributed.test_finetune import ADAPTER, COMMON, EMULATED_TE, HALF, LAYOUTS, PACKED, start
from tests.pretraining import words
from tests.small_checkpoints import VOCABULARY, random_words, save_models, save_tokenizer, write_lines
from tests.te_weights import relative

OWN = {"qwen2": dict(tie_word_embeddings=True), "mistral": dict(sliding_window=20), "gpt": {}}
OF_OURS = {
    "olmo2": dict(num_key_value_heads=4),
    "gemma3_text": dict(head_dim=32, sliding_window=20, sliding_window_pattern=2),
}
SHARED = ["qwen2", "gpt", *OF_OURS]  # families over two ranks
LENGTH = dict(max_steps=3, learning_rate=1e-3)
FP8 = HALF | dict(use_fp8="true")
LORA = dict(lora="true", lora_rank=4)
IN_FP8_ONLY = FP8 | dict(fp8_recipe="current", quantize_base="fp8")
RECOMPUTED = dict(recompute="true", recompute_granularity="full")
# What is learned, as pd does it, and as te does
TE = {
    "whole-bf16": (PACKED, HALF),
    "lora-bf16": (LORA, HALF),
    "lora-fp8": (LORA | PACKED, IN_FP8_ONLY | RECOMPUTED),
}
# {layout: {what is learned: families}}
PARALLEL = {"sharding2": {"lora-bf16": SHARED, "lora-fp8": ["qwen2"]}, "sp_tp2": {"lora-fp8": SHARED}}
LOSS = {"bf16": 5e-3, "fp8": 3e-2}


def flags_of(place, family, output, backend="transformer_engine", **flags):
    folders = dict(model_name_or_path=place / family / "paddle", tokenizer_name_or_path=place / "tokenizer")
    folders |= dict(dataset_name_or_path=place / "data", output_dir=place / output / family)
    if "lora" in flags and output != "start":
        folders["lora_path"] = place / "start" / family
    return words(COMMON | LENGTH | folders | dict(transformer_engine_backend=backend) | flags)


def finetune(place, environment, runs, processes=1):
    """Runs one after another, each a list of words."""
    (place / "runs.json").write_text(json.dumps(runs))
    start([EMULATED_TE, place / "runs.json"], place / "logs", processes, environment)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    for family, own in OWN.items():
        save_models(folder / family, seed=9, initializer_range=0.05, intermediate_size=128, family=family, **own)
    for family, own in OF_OURS.items():
        tokens = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, vocab_size=VOCABULARY)
        sizes = dict(intermediate_size=128, max_position_embeddings=128, num_hidden_layers=2)
        jobs.make_own_weights(folder / family, model_type=family, **tokens, **sizes, **own)
        (folder / family / "te").rename(folder / family / "paddle")
    (folder / "tokenizer").mkdir()
    save_tokenizer(folder / "tokenizer")
    (folder / "data").mkdir()
    generator = np.random.default_rng(9)
    # answers of one length: the loss is a mean over each rank's answers
    questions = [random_words(generator, n % 4 + 1) for n in range(16)]
    write_lines(folder / "data/train.json", [{"src": question, "tgt": "a list"} for question in questions])
    return folder


@pytest.fixture(scope="module")
def one_process(place, warm_host):
    """Runs pd's and te's runs, of our own families those that two ranks are compared with.

    The adapters begin with one whose B is not zero.
    """
    kinds = dict(start=LORA | dict(max_steps=1, learning_rate=1e-2)) | {
        kind: learned for kind, (learned, _) in TE.items()
    }
    runs = [(kind, learned | dict(backend="paddle", device="cpu")) for kind, learned in kinds.items()]
    runs += [(f"te-{kind}", learned | precision) for kind, (learned, precision) in TE.items()]
    shared = ["start", "te-lora-bf16", "te-lora-fp8"]
    finetune(
        place,
        warm_host,
        [
            flags_of(place, family, output, **flags)
            for output, flags in runs
            for family in [*OWN, *(OF_OURS if output in shared else ())]
        ],
    )


def losses(place, output, family):
    lines = (place / output / family / "train_log.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def adapter(place, output, family):
    return {
        name: value.astype("float32").numpy()
        for name, value in paddle.load(str(place / output / family / ADAPTER)).items()
    }


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("kind", TE)
def test_te_learns_what_pd_learns(place, one_process, kind, family):
    want, got = losses(place, kind, family), losses(place, f"te-{kind}", family)
    assert len(want) == LENGTH["max_steps"] and (want[-1] < want[0] - 0.3 or kind.startswith("lora"))
    assert got == pytest.approx(want, rel=LOSS[kind.split("-")[1]])


@pytest.mark.parametrize("layout", PARALLEL)
def test_over_two_ranks(place, one_process, warm_host, layout):
    cases = [(kind, family) for kind, families in PARALLEL[layout].items() for family in families]
    runs = []
    for kind, family in cases:
        learned, precision = TE[kind]
        runs.append(flags_of(place, family, f"{layout}-{kind}", **learned | precision | LAYOUTS[layout]))
    finetune(place, warm_host, runs, 2)
    for kind, family in cases:
        ranks, one = f"{layout}-{kind}", f"te-{kind}"
        assert losses(place, ranks, family) == pytest.approx(losses(place, one, family), rel=5e-3), family
        got, want, start = (adapter(place, output, family) for output in (ranks, one, "start"))
        assert {name: value.shape for name, value in got.items()} == {name: value.shape for name, value in want.items()}
        # all of it: where a gradient is next to nothing, as the keys' is, AdamW makes whole steps of its rounding
        got, want, start = (np.concatenate([each[name].ravel() for name in want]) for each in (got, want, start))
        assert relative(got, want) < 0.05 and relative(got, start) > 0.02, (kind, family)
