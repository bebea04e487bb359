"""Fine-tuning with LoRA over several ranks, on nvgpu's host runtime, against one process.

pd in float32; te in fp8 over weights that exist in fp8 only, with TE's kernels emulated in NumPy. te in bf16, and other
families: test_finetune_families.py.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from tests.nvgpu_processes import python_path
from tests.pretraining import words
from tests.processes import run as run_process
from tests.small_checkpoints import random_words, save_models, save_tokenizer, write_lines
from tests.te_weights import relative

REPOSITORY = Path(__file__).parents[3]
LAYOUTS = {
    "tp2": dict(tensor_parallel_degree=2),
    "sp_tp2": dict(tensor_parallel_degree=2, sequence_parallel="true"),
    "sep2": dict(sep_parallel_degree=2),
    "sharding2": dict(sharding_parallel_degree=2, sharding="stage2", per_device_train_batch_size=2),
}

ADAPTER = "lora_model_state.pdparams"
SCRIPT = REPOSITORY / "llm/llama/run_finetune.py"
EMULATED_TE = REPOSITORY / "tests/multiprocess/distributed/finetune.py"
HALF = dict(
    transformer_engine_backend="transformer_engine",
    device="nvgpu",
    bf16="true",
    fp16_opt_level="O2",
    amp_master_grad="true",
)
# weights that exist in fp8 only: tensor parallel ranks quantize their shares as one process does the whole
FP8 = HALF | dict(use_fp8="true", fp8_recipe="current", quantize_base="fp8")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    paddle.seed(9)
    # fp8 GEMMs take multiples of 16 on each of two ranks
    save_models(folder, seed=9, initializer_range=0.05, intermediate_size=128)
    (folder / "tokenizer").mkdir()
    save_tokenizer(folder / "tokenizer")
    (folder / "data").mkdir()
    generator = np.random.default_rng(9)
    questions = [random_words(generator, n % 4 + 1) for n in range(13)]  # the second step has a tail of 5
    answers = ["a list" + n % 5 * " of lists" for n in range(13)]
    write_lines(
        folder / "data/train.json",
        [{"src": question, "tgt": answer} for question, answer in zip(questions, answers, strict=True)],
    )
    return folder


# Of all runs.
COMMON = dict(
    do_train="true",
    src_length=40,
    max_length=64,
    pad_to_max_length="true",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    logging_steps=1,
    disable_tqdm="true",
    report_to="none",
)


def start(arguments, logs, processes=1, environment=()):
    """Runs a script with its words in so many processes, whose output is in the folder `logs`; fails with its end."""
    command = [sys.executable]
    if processes > 1:
        devices = ",".join(map(str, range(processes)))
        command += ["-m", "paddle.distributed.launch", "--devices", devices, "--log_dir", logs]
    environment = os.environ | dict(environment) | dict(PYTHONPATH=python_path(), OMP_NUM_THREADS="1")
    try:
        run_process([*command, *arguments], check=True, env=environment)
    except AssertionError as error:
        said = "".join(log.read_text()[-6000:] for log in sorted(logs.glob("workerlog.*")))
        pytest.fail(f"{error}\n{said}")


def run(place, output, processes=1, environment=(), script=SCRIPT, **flags):
    """(losses, adapter) of run_finetune.py."""
    flags = (
        COMMON
        | dict(
            model_name_or_path=place / "paddle",
            tokenizer_name_or_path=place / "tokenizer",
            dataset_name_or_path=place / "data",
            output_dir=output,
            transformer_engine_backend="paddle",
            lora="true",
            lora_rank=4,
            max_steps=4,
            learning_rate=1e-2,
            device="cpu" if processes == 1 else "nvgpu",
        )
        | flags
    )
    start([script, *words(flags)], output / "logs", processes, environment)
    losses = [json.loads(line)["loss"] for line in (output / "train_log.jsonl").read_text().splitlines()]
    adapter = paddle.load(str(output / ADAPTER))
    return losses, {name: value.astype("float32").numpy() for name, value in adapter.items()}


PACKED = dict(zero_padding="true")


@pytest.fixture(scope="module")
def one_process(place, warm_start):
    """The runs in one process, of samples and of packed ones, that begin with an adapter whose B is not zero."""
    run(place, place / "start", environment=warm_start, max_steps=1)
    plain = run(place, place / "one", environment=warm_start, lora_path=place / "start")
    return plain, run(place, place / "one-packed", environment=warm_start, lora_path=place / "start", **PACKED)


@pytest.mark.parametrize("layout, packed", [("tp2", False), ("sp_tp2", True), ("sep2", True), ("sharding2", False)])
def test_lora_learns_as_in_one_process(place, one_process, warm_host, layout, packed):
    flags = LAYOUTS[layout] | (PACKED if packed else {}) | dict(merge_lora="true")
    losses, adapter = run(place, place / layout, 2, warm_host, lora_path=place / "start", **flags)
    want, weights = one_process[packed]
    assert want[-1] < want[0] - 0.1 and losses == pytest.approx(want, rel=1e-5)
    assert adapter.keys() == weights.keys()  # whole, whatever the layout
    for name, value in weights.items():
        assert adapter[name].shape == value.shape
        assert relative(adapter[name], value) < 1e-3, name
    check_merged(place / "paddle", place / layout / "merged", adapter)


def check_merged(base, folder, adapter):
    """The base's weights with the products of a run's adapter, of rank 4 and alpha 8, whatever its layout."""
    base, merged = (paddle.load(str(path / "model_state.pdparams"), return_numpy=True) for path in (base, folder))
    assert base.keys() == merged.keys()
    for layer in (0, 1):
        stem = f"llama.layers.{layer}.transformer.layernorm_mlp"
        a, b = (
            [adapter[f"{stem}.{part}_proj.lora_{x}"].astype("float64") for part in ("gate", "up", "down")] for x in "AB"
        )
        gate, up, down = (2 * (x @ y).T for x, y in zip(a, b, strict=True))
        for name, delta in (("fc1_weight", np.concatenate([gate, up])), ("fc2_weight", down)):
            weight = base[f"{stem}.{name}"].astype("float64")
            np.testing.assert_allclose(merged[f"{stem}.{name}"], weight + delta, rtol=1e-5, atol=1e-6)
            assert relative(merged[f"{stem}.{name}"], weight) > 1e-3


SLOWLY = dict(learning_rate=1e-3)  # so that bf16's rounding stays small


@pytest.fixture(scope="module")
def exact(place, one_process, warm_start):
    return run(place, place / "slowly", environment=warm_start, lora_path=place / "start", **SLOWLY)[0]


def test_te_learns_as_in_one_process(place, exact, warm_host):
    """With SwiGLU computed again from what is kept of its input in fp8; full recompute: test_finetune_families.py."""
    flags = FP8 | SLOWLY | dict(lora_path=place / "start", script=EMULATED_TE, recompute_modules="mlp_act")
    flags |= dict(activation_func_fp8_input_store="true")
    want, weights = run(place, place / "te-one", 1, warm_host, **flags)
    losses, adapter = run(place, place / "te", 2, warm_host, **LAYOUTS["sp_tp2"], **flags)
    check_alike(place, losses, adapter, want, weights, exact)


def check_alike(place, losses, adapter, want, weights, exact):
    """A run over several ranks beside one process, and that beside pd in float32; the adapter is not what it was."""
    start = paddle.load(str(place / "start" / ADAPTER))
    assert want == pytest.approx(exact, rel=5e-3) and losses == pytest.approx(want, rel=5e-3)
    assert adapter.keys() == weights.keys()
    for name, value in weights.items():
        assert adapter[name].shape == value.shape
        assert relative(adapter[name], value) < 0.1, name
        assert relative(adapter[name], start[name].astype("float32").numpy()) > 2e-3, name
