"""torchtitan as throughput.py's peer: what its trainer is given, and what is read from its log.

torchtitan itself needs a GPU. A stand-in takes its place, which has the names that are used, and prints its lines.
"""

import json
from dataclasses import replace

import pytest

from tools.benchmark import report, throughput, titan
from tools.benchmark.trainings import Conditions

# {path: source} of what tools/benchmark/titan_model.py imports and titan.py starts.
STAND_IN = {
    "torch/__init__.py": """
import random
def randint(low, high, shape, generator):
    return [generator.randrange(low, high) for _ in range(*shape)]
class Generator:
    def manual_seed(self, seed):
        return random.Random(seed)
""",
    "torch/utils/data.py": "IterableDataset = object",
    "torch/distributed/run.py": """
import os, runpy, sys
count, port, m, module, *arguments = sys.argv[1:]
assert port.startswith("--master_port=") and m == "-m"
for rank in range(int(count.removeprefix("--nproc_per_node="))):
    os.environ["RANK"], sys.argv[1:] = str(rank), arguments
    runpy.run_module(module, run_name="__main__")
""",
    "torchao/__init__.py": "",
    "torchtitan/__init__.py": "",
    "torchtitan/components/dataloader.py": """
class ParallelAwareDataloader:
    def __init__(self, dataset, dp_rank, dp_world_size, batch_size):
        self.dataset, self.batch_size = dataset, batch_size
""",
    "torchtitan/protocols/train_spec.py": """
specs = {}
def register_train_spec(name, spec):
    specs[name] = spec
""",
    "torchtitan/models/llama3.py": """
from dataclasses import dataclass
@dataclass
class TransformerModelArgs:
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    multiple_of: int
    ffn_dim_multiplier: float
    norm_eps: float
    rope_theta: float
@dataclass
class TrainSpec:
    model_args: dict
    build_dataloader_fn: object
    build_tokenizer_fn: object
def get_train_spec():
    return TrainSpec({}, None, print)
""",
    "torchtitan/models/qwen3.py": """
from dataclasses import dataclass
from torchtitan.models.llama3 import TrainSpec, get_train_spec
@dataclass
class Qwen3ModelArgs:
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    head_dim: int
    hidden_dim: int
    norm_eps: float
    rope_theta: float
    enable_weight_tying: bool
""",
    "torchtitan/train.py": """
import importlib, json, os, sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from torchtitan.protocols.train_spec import specs
flags, name = {}, None
for word in sys.argv[1:]:
    if word.startswith("--"):
        name = word[2:]
        flags[name] = ""
    else:
        flags[name] = word
importlib.import_module(flags["experimental.custom_import"])
spec, rank = specs[flags["model.name"]], int(os.environ["RANK"])
training = {name.removeprefix("training."): int(flags[name]) for name in flags if name.startswith("training.")}
config = SimpleNamespace(training=SimpleNamespace(**training))
loader = spec.build_dataloader_fn(dp_world_size=2, dp_rank=rank, tokenizer=None, job_config=config)
inputs, labels = next(iter(loader.dataset))
seen = dict(flags=flags, gpus=os.environ["CUDA_VISIBLE_DEVICES"], model=asdict(spec.model_args[flags["model.flavor"]]))
seen |= dict(tokenizer=spec.build_tokenizer_fn, batch=loader.batch_size, inputs=inputs["input"], labels=labels)
folder = Path(flags["job.dump_folder"])
folder.mkdir(exist_ok=True)
(folder / f"rank{rank}.json").write_text(json.dumps(seen))
if flags["activation_checkpoint.mode"] == "selective":
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
for step in range(1, training["steps"] + 1):
    if step == 1 or step % int(flags["metrics.log_freq"]) == 0:
        print(f"[titan] 2026-11-22 10:00:00,000 - root - INFO - step: {step:2}  loss: {12 - step / 10:8.5f}  "
              f"grad_norm:  1.5000  memory: {90 - step:5.2f}GiB(64.00%)  tps: {0 if step == 1 else 12_800 + step:,}  "
              "tflops: 1,010.10  mfu: 51.07%")
""",
    "torchtitan-0.2.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.2.2\n",
    "torchao-0.16.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchao\nVersion: 0.16.0\n",
}


@pytest.fixture
def stand_in(tmp_path):
    folder = tmp_path / "stand-in"
    for name, source in STAND_IN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
    return folder


@pytest.fixture
def conditions(tmp_path, stand_in):
    return Conditions(tmp_path / "run", ["0", "1"], steps=6, warmup=2, timeout=60, torchtitan=stand_in)


def test_it_is_trained_on_random_tokens_of_the_same_number(conditions, monkeypatch):
    """Both ranks get sequences of their own, the model's sizes and the GPUs that were lent."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    run = replace(throughput.RUNS["titan-8b-l16-x2"].tiny, batch=3)
    row = throughput.execute(run, conditions)
    assert row["status"] == "ok", row
    seen = [json.loads((conditions.folder / f"titan/rank{rank}.json").read_text()) for rank in (0, 1)]
    flags, model = seen[0]["flags"], seen[0]["model"]
    assert seen[0]["gpus"] == "4,6" and seen[0]["batch"] == 3 and seen[0]["tokenizer"] is None
    assert flags["training.global_batch_size"] == "6" and flags["training.seq_len"] == "64"
    assert flags["compile.enable"] == "" and flags["activation_checkpoint.mode"] == "none"
    assert (model["dim"], model["n_layers"], model["vocab_size"]) == (64, 2, 128)
    for rank in seen:
        assert len(rank["inputs"]) == 64 and rank["inputs"][1:] == rank["labels"][:-1]
        assert all(0 <= token < 128 for token in rank["inputs"])
    assert seen[0]["inputs"] != seen[1]["inputs"]


def test_a_qwen3_is_torchtitans_own(conditions):
    """Its MLP is as wide as said, and its heads as wide as Qwen3's are, whatever hidden / heads is."""
    size = throughput.RUNS["titan-qwen3-8b-l12-x1"].tiny.size
    run = titan.TitanRun(replace(size, dims=replace(size.dims, kv_channels=48)))
    row = throughput.execute(run, replace(conditions, devices=["0"]))
    assert row["status"] == "ok", row
    model = json.loads((conditions.folder / "titan/rank0.json").read_text())["model"]
    assert (model["hidden_dim"], model["head_dim"], model["enable_weight_tying"]) == (size.dims.ffn, 48, False)


def test_numbers_of_its_log(conditions):
    """Of 192 tokens a rank and step, at 12,804 and 12,806 tokens/s behind the warm-up."""
    row = throughput.execute(replace(throughput.RUNS["titan-8b-l16-x2"].tiny, batch=3), conditions)
    assert row["step_ms"]["all"] == pytest.approx([192e3 / 12804, 192e3 / 12806], rel=1e-4)
    assert row["tokens_per_second_per_gpu"] == pytest.approx(12805, rel=1e-4)
    assert row["tokens_per_second"] == 2 * row["tokens_per_second_per_gpu"]
    assert row["peak_bytes"] == 89 * 2**30 and row["loss"] == [11.9, 11.4]
    assert row["versions"] == {"torchtitan": "0.2.2", "torchao": "0.16.0", "torch": "unknown"}
    assert row["run"]["framework"] == "torchtitan" and row["run"]["layout"] == "FSDP over 2"


def test_a_result_has_both_and_says_what_differs(tmp_path, stand_in, monkeypatch):
    """Each run keeps its row: one that fails, one that is not profiled."""
    monkeypatch.setattr(throughput, "visible_devices", lambda kind, environ: ["0"])
    monkeypatch.setitem(
        throughput.RUNS, "large", replace(throughput.RUNS["titan-8b-l16-x1-rowwise"], recompute="selective")
    )
    path = tmp_path / "result.json"
    arguments = ["--tiny", "--runs", "large", "titan-8b-l16-x1-rowwise", "--torchtitan", stand_in.name]
    monkeypatch.chdir(stand_in.parent)
    arguments += ["--profile", "1", "--steps", "6", "--warmup", "2", "--output", str(path)]
    assert throughput.main(arguments) == 0
    result = json.loads(path.read_text())
    large = result["runs"]["large"]
    assert large["status"] == "failed" and large["reason"].startswith("CUDA out of memory")
    assert report.OUT_OF_MEMORY.search(large["reason"])  # so that a search for the largest batch goes on
    table = path.with_suffix(".md").read_text()
    assert "| titan-8b-l16-x1-rowwise | torchtitan 0.2.2, fp8 rowwise, 2 layers" in table
    assert "**failed**: CUDA out of memory" in table and "Not like for like" in table
    assert "no timeline, torchtitan's steps are not profiled" in table


def test_what_is_not_there_is_named_before_it_is_started(conditions, stand_in):
    for path in (stand_in / "torchao").iterdir():
        path.unlink()
    (stand_in / "torchao").rmdir()
    row = throughput.execute(throughput.RUNS["titan-8b-l16-x1"], conditions)
    assert row["status"] == "missing" and not conditions.folder.exists()
    assert row["reason"] == "not installed here: torchao; name the folder that has them with --torchtitan"


def test_precisions():
    """On several GPUs FSDP gathers float8, which torchtitan has for one scale a tensor alone."""
    flags = {name: " ".join(run.precision_flags) for name, run in throughput.TITAN_RUNS.items()}
    assert flags["titan-8b-l16-x1-bf16"] == flags["titan-8b-x2-bf16"] == ""
    assert flags["titan-8b-x2-rowwise"].endswith("recipe_name rowwise")
    assert "all_gather" in flags["titan-8b-x2"] and "all_gather" not in flags["titan-8b-l16-x1"]
    for name in ("titan-8b-l16-x1", "titan-8b-x2", "titan-8b-x2-rowwise"):
        assert "--quantize.linear.float8.filter_fqns output" in flags[name]


@pytest.mark.parametrize(
    "size", [*map(throughput.MODELS.get, ("llama-3-8b", "llama-2-7b")), throughput.RUNS["8b-x1-compact"].tiny.size]
)
def test_its_mlp_is_as_wide_as_ours(size):
    """By the rule of torchtitan 0.2.2's FeedForward, which gets 4 · dim."""
    model = titan.TitanRun(size).model_arguments
    width = int(int(2 * 4 * model["dim"] / 3) * model["ffn_dim_multiplier"])
    assert -(-width // model["multiple_of"]) * model["multiple_of"] == size.dims.ffn


def test_its_runs_are_not_started_unless_they_are_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(throughput, "visible_devices", lambda kind, environ: ["0", "1"])
    assert not throughput.TITAN_RUNS.keys() & set(throughput.parse_arguments([]).runs)
    with pytest.raises(SystemExit):
        throughput.parse_arguments(["--torchtitan", str(tmp_path / "nothing")])
    assert "--torchtitan: there is no folder" in capsys.readouterr().err
