"""tools/benchmark/throughput.py: its runs, their turns, the search for the largest batch."""

import functools
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest

from tools.benchmark import throughput
from tools.benchmark.trainings import Command

GIB = 2**30


def test_runs_wait_for_their_gpus():
    """Two of one GPU run beside each other, one of both waits for them."""
    gpus, seen, begun = throughput.Gpus(["0", "1"]), [], Barrier(3, timeout=120)

    def run(count):
        if count == 2:
            begun.wait()
        with gpus.lend(count) as devices:
            if count == 1:
                begun.wait()
            seen.append(sorted(devices))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, [1, 1, 2]))
    assert sorted(seen[:2]) == [["0"], ["1"]] and seen[2] == ["0", "1"]
    assert gpus.free == ["0", "1"]


def test_a_run_that_takes_too_long_is_ended(tmp_path):
    command = Command(["sh", "-c", "echo $WORD; exec sleep 60"], {"WORD": "begun"})
    assert throughput.start(command, tmp_path / "log", timeout=2) is None
    assert (tmp_path / "log").read_text() == "begun\n"


RECORDS = [
    dict(step=step, step_time=seconds, loss=12 - step / 10, peak_memory_bytes=GIB)
    for step, seconds in ((2, 9.0), (4, 1.0), (6, 0.5), (8, 0.7), (10, 0.5))
]


def test_numbers_by_hand():
    """8192 tokens a rank in half a second; 16 layers over two ranks."""
    run = throughput.RUNS["8b-l16-x2"]
    found = throughput.measured(run, RECORDS, warmup=4, seconds=40.0)
    assert found["step_ms"]["all"] == [500, 700, 500] and found["step_ms"]["median"] == 500
    assert found["tokens_per_second"] == 32768 and found["tokens_per_second_per_gpu"] == 16384
    # 16 layers with 218,103,808 weights, lm_head with 525,336,576; causal attention 6·s·h a token and layer
    per_token = 6 * (16 * 218_103_808 + 525_336_576) + 16 * 6 * 8192 * 4096
    assert found["tflops_per_gpu"] == pytest.approx(16384 * per_token / 1e12)
    assert found["loss"] == [11.8, 11.0]
    assert found["start_seconds"] == 40 - 2 * (9 + 1 + 0.5 + 0.7 + 0.5)
    with pytest.raises(ValueError, match="no steps behind the first 10"):
        throughput.measured(run, RECORDS, warmup=10, seconds=40.0)


def test_tokens_are_those_of_the_data_ranks():
    assert throughput.RUNS["8b-x4-tp4"].global_size.tokens == 4 * 8192
    assert throughput.RUNS["8b-x4-tp2-stage1"].global_size.tokens == 4 * 8192
    assert throughput.RUNS["7b-x4"].global_size.tokens == 4 * 2 * 4096


def test_layouts_of_one_model_have_the_same_tokens_a_step():
    runs = {name: run for name, run in throughput.OUR_RUNS.items() if name.startswith("8b-x4-accumulated")}
    assert len(runs) > 9 and {run.global_size.tokens for run in runs.values()} == {64 * 8192}
    assert runs["8b-x4-accumulated-pp4-vp2"].layout == "pp4 × vp2"
    assert runs["8b-x4-accumulated-pp2-stage1"].layout == "pp2 × stage1 over 2"


def test_all_runs_are_possible(tmp_path, monkeypatch):
    """The launcher takes each one's arguments, and run_pretrain's flags come through."""
    from paddle_te.launch import dpo, finetune, kto, pretrain, tuning_data
    from paddle_te.launch.plan import make_plan

    jobs = {"pretrain": pretrain, "finetune": finetune, "dpo": dpo, "kto": kto}
    monkeypatch.setattr(throughput.finetuning.Finetuning, "_write_weights", lambda self, path: path.touch())  # 13 GB
    monkeypatch.setattr(throughput.finetuning, "SAMPLES", 40)
    read = functools.cache(tuning_data.read_tokenizer_folder)  # runs share them: 37 reads of 7 folders
    monkeypatch.setattr(tuning_data, "read_tokenizer_folder", read)
    for name, run in (throughput.OUR_RUNS | throughput.FINETUNING_RUNS | throughput.PREFERENCE_RUNS).items():
        devices = [str(number) for number in range(run.gpus)]
        wanted = throughput.Conditions(tmp_path / name, devices, steps=12, warmup=4, timeout=60)
        arguments = [*run.launch_arguments(wanted), "--DRY_RUN=1"]
        plan, _ = make_plan(jobs[run.job], arguments, {"CUSTOM_DEVICE_ROOT": ""})
        flags = plan.command[plan.command.index("--model_name_or_path") :]
        assert flags[-len(shlex.split(run.flags)) :] == shlex.split(run.flags) or not run.flags
        assert run.base is None or run.base in throughput.RUNS


def test_trl_gets_the_pairs_of_our_runs(tmp_path):
    """The same files, with as many pairs a step as four of our rows hold."""
    run = throughput.TRL_RUNS["trl-dpo-qwen2.5-7b-x1-4-pairs"].tiny
    ours = throughput.PREFERENCE_RUNS["dpo-qwen2.5-7b-x1-fp8-base"]
    wanted = throughput.Conditions(tmp_path / "trl", ["0"], steps=5, warmup=2, timeout=60, trl=tmp_path)
    settings = json.loads(run.command(wanted).words[-1])
    assert str(ours.tiny.inputs(wanted)["dataset"]) == settings["pairs"].removesuffix("/train.json")
    mean = (ours.lengths - 1).mean()
    assert abs(settings["batch"] * settings["micro_batches"] - ours.size.micro_batches * 8192 / mean) < 3
    pair = json.loads(open(settings["pairs"]).readline())
    tokens = 2 * len(pair["prompt"].split()) + len(pair["chosen"].split()) + len(pair["rejected"].split()) + 2
    assert tokens == (ours.tiny.lengths - 1)[0]


def test_kto_counts_each_answer_beside_the_one_before():
    """As many tokens as the data set makes of the same pairs, but for the end of each answer, which is no input."""
    run = throughput.PREFERENCE_RUNS["kto-qwen2.5-7b-x1-fp8-base"]
    question, better, worse = throughput.preferences.lengths_of_pairs(8192)[0]
    before = throughput.preferences.lengths_of_pairs(8192)[-1, 2]
    assert list(run.lengths[:2]) == [2 * question + better + before + 3, 2 * question + worse + better + 3]
    assert len(run.lengths) == 2 * throughput.preferences.PAIRS


@pytest.mark.parametrize("capacity", [None, 100 * GIB])
@pytest.mark.parametrize("most", [0, 1, 2, 5, 8, 23])
def test_largest_batch(most, capacity):
    """Found by doubling and bisection, and with known memory in a few tries."""
    tried = []

    def train(batch):
        tried.append(batch)
        if batch > most:
            return dict(status="failed", reason="Out of memory error on nvgpu:0. Cannot allocate 1GB memory (exit 1)")
        return dict(status="ok", peak_bytes=int((100 - 4 * most - 3 + 4 * batch) * GIB))

    found = throughput.find_largest_batch(train, capacity)
    assert found["status"] == "ok" and found["batch"] == most
    assert found["tried"] == tried and len(set(tried)) == len(tried)
    assert found["best"] == (train(most) if most else None)
    if capacity and most > 2:
        assert len(found["tried"]) == 4


def test_another_failure_ends_the_search():
    found = throughput.find_largest_batch(lambda batch: dict(status="failed", reason="ValueError: no (exit status 2)"))
    assert found["status"] == "failed" and found["reason"] == "batch 1: ValueError: no (exit status 2)"


@pytest.mark.parametrize(
    "text, reason",
    [
        (
            "ResourceExhaustedError: \n\nOut of memory error on nvgpu:0. Cannot allocate 2GB\n [x.cc:3]\n",
            "Out of memory",
        ),
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n", "CUDA out of memory"),
        ("Traceback\n  raise\nValueError: loss is nan\nlaunch: the job ended with status 1", "ValueError: loss is nan"),
        ("error: TP=4 must divide\n", "error: TP=4 must divide"),
        ("Killed", "Killed"),
        ("", "no output"),
    ],
)
def test_reason_of_a_failure(text, reason):
    assert throughput.last_error(text).startswith(reason)


def test_modes_largest_batches_are_kept(tmp_path, monkeypatch):
    """Of each mode, on GPUs of their own; each try is in the file, the table has the best."""

    def execute(run, conditions):
        assert (conditions.steps, conditions.warmup, len(conditions.devices)) == (3, 1, 1)
        row = dict(run=run.described, seconds=1.0, versions={})
        most = {"none": 2, "core_attn": 3, "full": 0}[run.recompute]
        if run.batch > most:
            return row | dict(status="failed", reason="Out of memory error on nvgpu:0.")
        records = RECORDS[:3]
        return row | dict(status="ok") | throughput.measured(run, records, 2, 9.0)

    monkeypatch.setattr(throughput, "execute", execute)
    monkeypatch.setattr(throughput, "visible_devices", lambda kind, environ: ["0", "1"])
    path = tmp_path / "result.json"
    assert throughput.main(["--runs", "--at_once", "--largest_batch", "8b-l16-x1", "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    found = result["largest_batch"]["8b-l16-x1"]
    assert {mode: row["batch"] for mode, row in found.items()} == {"none": 2, "core_attn": 3, "full": 0}
    assert {f"8b-l16-x1-core_attn-b{batch}" for batch in found["core_attn"]["tried"]} <= result["tries"].keys()
    table = path.with_suffix(".md").read_text()
    assert "| core_attn | 3 | 1.1 |" in table and "| full | 0 |" in table


def test_too_many_gpus_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(throughput, "visible_devices", lambda kind, environ: ["0", "1"])
    with pytest.raises(SystemExit):
        throughput.parse_arguments(["--runs", "8b-x4"])
    assert "need 4 GPUs; visible here: 2" in capsys.readouterr().err
    assert {throughput.RUNS[name].gpus for name in throughput.parse_arguments([]).runs} == {1, 2}


def test_help():
    done = subprocess.run([sys.executable, throughput.__file__, "--help"], capture_output=True, text=True, check=True)
    assert "8b-x4-tp4" in done.stdout


def test_runs_of_fine_tuning_share_files_with_those_of_their_size_only(tmp_path):
    """Llama-2-7B and Llama-3-8B are equally wide and deep."""

    def model(name, **changes):
        run = replace(throughput.RUNS[name], **changes)
        wanted = throughput.Conditions(tmp_path / f"{name}{len(changes)}", ["0"], steps=12, warmup=4, timeout=60)
        return run.inputs(wanted)["model_name"]

    first, second = model("lora-8b-x1"), model("sft-7b-x1")
    read = [json.loads((folder / "config.json").read_text()) for folder in (first, second)]
    assert [(config["vocab_size"], config["num_key_value_heads"]) for config in read] == [(128256, 8), (32000, 32)]
    assert (model("lora-8b-x1-fp8-base"), model("sft-7b-x1-2-rows")) == (first, second)
    size = throughput.MODELS["llama-3-8b"]
    longer = replace(size, dims=replace(size.dims, sequence=4096))
    assert model("lora-8b-x1", size=longer) != first


def test_numbers_of_fine_tuning():
    """Tokens are those that the run logs, without padding; a sample's label of its first token is none of them."""
    run = throughput.RUNS["lora-7b-x1"]
    records = [record | {"tokens_per_second": speed} for record, speed in zip(RECORDS, (1, 1, 5, 7, 9), strict=True)]
    found = throughput.measured(run, records, warmup=4, seconds=40.0)
    assert found["tokens_per_second"] == 7 and found["tflops_per_gpu"] is None
    assert found["samples_per_second"] == pytest.approx(7 / (run.lengths.mean() - 1))
    assert 350 < run.lengths.mean() < 500 and run.lengths.max() <= 2048  # e^(1/2) · 300, less what is cut off
