"""Tuning on preferences over several ranks, on nvgpu's host runtime, against one process: pd in float32."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_te.options.launcher import OVERLAPS
from tests.multiprocess.distributed.test_finetune import EMULATED_TE, FP8, HALF, start
from tests.pretraining import words
from tests.small_checkpoints import random_words, save_models, save_tokenizer, write_lines
from tests.te_weights import relative

SCRIPTS = Path(__file__).parents[3] / "llm/llama"
COMMON = dict(
    transformer_engine_backend="paddle",
    do_train="true",
    max_seq_len=64,
    max_prompt_len=32,
    gradient_accumulation_steps=2,
    max_steps=3,
    logging_steps=1,
    save_strategy="no",
    disable_tqdm="true",
    report_to="none",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    paddle.seed(9)
    save_models(folder, seed=9, initializer_range=0.05, intermediate_size=128)
    (folder / "tokenizer").mkdir()
    save_tokenizer(folder / "tokenizer")
    (folder / "data").mkdir()
    generator = np.random.default_rng(9)
    answers = [[random_words(generator, n % 3 + 1) for _ in range(2)] for n in range(13)]
    pairs = [
        {"prompt": random_words(generator, n % 2 + 1), "chosen": chosen, "rejected": f"{rejected} x"}
        for n, (chosen, rejected) in enumerate(answers)
    ]
    write_lines(folder / "data/train.json", pairs)
    return folder


def run(place, output, script, processes, environment, **flags):
    """(log, weights) of a run; weights: the adapter's, or the whole model's."""
    where = dict(model_name_or_path=place / "paddle", tokenizer_name_or_path=place / "tokenizer")
    where |= dict(dataset_name_or_path=place / "data", output_dir=output)
    where |= dict(device="cpu" if processes == 1 else "nvgpu")
    start([SCRIPTS / script, *words(COMMON | where | flags)], output / "logs", processes, environment)
    lines = [json.loads(line) for line in (output / "train_log.jsonl").read_text().splitlines()]
    kind = "lora_model_state" if "lora" in flags else "model_state"
    files = sorted(output.glob(f"{kind}*.pdparams"))  # one for each stage of a pipeline
    weights = [item for path in files for item in paddle.load(str(path)).items()]
    return lines, {name: value.astype("float32").numpy() for name, value in weights}


BATCH = dict(per_device_train_batch_size=2)
LORA = dict(lora="true", lora_rank=4, learning_rate=1e-2)
PRECOMPUTED = dict(precompute_ref_log_probs="true")
# {what is learned: (script, flags)}
LEARNED = {
    "dpo-lora": ("run_dpo.py", BATCH | LORA | dict(sft_loss_ratio=0.2)),
    "kto": ("run_kto.py", BATCH | dict(learning_rate=1e-3)),
    "dpo": ("run_dpo.py", BATCH | PRECOMPUTED | dict(learning_rate=1e-3)),
}
SHARDING3 = dict(sharding_parallel_degree=2, sharding="stage3", per_device_train_batch_size=1)
LAYOUTS = {
    "sp_tp2": ("dpo-lora", dict(tensor_parallel_degree=2, sequence_parallel="true")),
    "sharding3": ("kto", SHARDING3 | PRECOMPUTED),
    "pp2-lora": ("dpo-lora", dict(pipeline_parallel_degree=2)),
    "pp2": ("kto", dict(pipeline_parallel_degree=2)),
    "sep2": ("dpo", dict(sep_parallel_degree=2)),
}


@pytest.fixture(scope="module")
def one_process(place, warm_start):
    """{what is learned: (flags that ranks take, log, weights)}."""
    found = {}
    for name, (script, flags) in LEARNED.items():
        if "lora" in flags:  # ranks would draw other numbers than one process
            run(place, place / "start", script, 1, warm_start, **flags | dict(max_steps=1))
            flags = flags | dict(lora_path=place / "start")
        found[name] = flags, *run(place, place / name, script, 1, warm_start, **flags)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_learns_as_in_one_process(place, one_process, tmp_path, warm_host, layout):
    learned, degrees = LAYOUTS[layout]
    flags, want, weights = one_process[learned]
    lines, got = run(place, tmp_path, LEARNED[learned][0], 2, warm_host, **flags | degrees)
    check_alike(lines, want, rel=1e-4, abs=1e-5)
    assert got.keys() == weights.keys()
    for name, value in weights.items():
        assert relative(got[name], value) < 1e-3, name


def check_alike(lines, want, apart=(), **tolerances):
    """Two runs that learn have the same losses and log the same of answers, except for the names `apart`."""
    assert want[2]["loss"] < want[0]["loss"] - 1e-3
    names = [name for name in want[0] if name == "loss" or "/" in name]
    assert len(names) >= 7 and {*apart} <= {*names} and len(lines) == len(want) == 3
    names = [name for name in names if name not in apart]
    for mine, one in zip(lines, want, strict=True):
        assert {name: mine[name] for name in names} == pytest.approx({name: one[name] for name in names}, **tolerances)


def test_a_base_in_fp8_only_has_its_weights_on_each_stage(place, tmp_path, warm_host):
    """te, emulated: a pipeline's stages compute what one process does, to the bit."""
    where = dict(model_name_or_path=place / "paddle", tokenizer_name_or_path=place / "tokenizer")
    flags = COMMON | FP8 | LORA | BATCH | where | dict(dataset_name_or_path=place / "data")

    def losses(name, processes, **more):
        words_ = words(flags | more | dict(output_dir=tmp_path / name))
        start([EMULATED_TE, "dpo", *words_], tmp_path / name / "logs", processes, warm_host)
        lines = (tmp_path / name / "train_log.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    losses("start", 1, max_steps=1)
    both = [losses(f"on-{pp}", pp, lora_path=tmp_path / "start", pipeline_parallel_degree=pp) for pp in (1, 2)]
    assert both[0] == both[1] and abs(both[0][0] - np.log(2)) > 0.02  # the adapter does something at once


def test_the_reference_takes_weights_that_are_still_divided(place, tmp_path, warm_host):
    """With overlap the next forward would gather them. A reference that is renewed in each step rewards nothing."""
    where = dict(model_name_or_path=place / "paddle", tokenizer_name_or_path=place / "tokenizer")
    flags = COMMON | HALF | BATCH | where | dict(dataset_name_or_path=place / "data", output_dir=tmp_path)
    flags |= dict(transformer_engine_backend="paddle", learning_rate=5e-3, max_steps=4, logging_steps=2)
    flags |= dict(sharding="stage1", sharding_parallel_degree=2, sharding_parallel_config=OVERLAPS["stage1"])
    start([EMULATED_TE, "dpo", *words(flags | dict(ref_model_update_steps=1))], tmp_path / "logs", 2, warm_host)
    lines = [json.loads(line) for line in (tmp_path / "train_log.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx([np.log(2)] * 2, rel=1e-6)
    assert [line["rewards/margins"] for line in lines] == [0, 0]
    assert lines[0]["logps/chosen"] != lines[1]["logps/chosen"]
