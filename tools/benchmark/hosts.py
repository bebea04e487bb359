"""Losses of the same training in PaddleNLP and in PaddleFormers: from the same random weights, on the same sequences in
the same order, one process each, one after the other.

    python tools/benchmark/hosts.py DATA --paddleformers PYTHON [--steps 100] [--precision fp8] [--output FILE]

DATA: what `tools/prepare_data.py --demo DATA` makes. PYTHON: the interpreter of an environment with PaddleFormers
(docs/guides/paddleformers.md). Documents are kept apart in both, and the learning rate is constant. Writes
benchmarks/hosts/<date>_<gpu>x1_<what>.json with both curves, and a table of the same name. Exit status: 1 if a run
failed, or if the means over 20 steps differ by more than --tolerance.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout, installed or not

from safetensors.numpy import save_file  # noqa: E402

from paddle_te import configs  # noqa: E402
from paddle_te.launch.devices import visible_devices  # noqa: E402
from tools.benchmark import formers, report  # noqa: E402
from tools.benchmark.throughput import last_error, start  # noqa: E402
from tools.benchmark.trainings import Command, Conditions, quoted  # noqa: E402

WINDOW = 20  # steps of a mean
SEED = 42
WEIGHT_DECAY = 0.01
DEFINITIONS = [
    "Each host's own Trainer with our decoder layers, AdamW with float32 master weights, a constant learning rate. The "
    "weights are random, written once and read by both; both take the same sequences in the same order, with the "
    "documents in them kept apart.",
    f"Difference: of PaddleFormers' losses from PaddleNLP's, as a part of these. In windows: of means over {WINDOW} "
    "steps, the greatest.",
]


@dataclass(frozen=True)
class Problem:
    """What both train: a folder with weights, tokenizer and data, and how."""

    model: Path
    data: Path
    backend: str
    precision: str
    sequence: int
    batch: int
    learning_rate: float


def write_model(folder, name, tokenizer):
    """A Llama's folder with random weights, of Hugging Face's names, and the tokenizer's files."""
    shutil.copytree(tokenizer, folder)
    config = configs.read(name)
    (folder / "config.json").write_text(json.dumps(config))
    generator, arrays = np.random.default_rng(SEED), {}
    for weight, shape in shapes(config).items():
        one = weight.endswith("norm.weight")
        arrays[weight] = np.ones(shape, "float32") if one else 0.02 * generator.standard_normal(shape, "float32")
    save_file(arrays, folder / "model.safetensors")


def shapes(config):
    """{name: shape} of the weights of a Llama in Hugging Face's layout, [out, in]."""
    hidden, ffn, vocabulary = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {"input_layernorm": [hidden], "post_attention_layernorm": [hidden]}
    layer |= {f"self_attn.{name}_proj": [kv if name in "kv" else hidden, hidden] for name in "qkvo"}
    layer |= {"mlp.gate_proj": [ffn, hidden], "mlp.up_proj": [ffn, hidden], "mlp.down_proj": [hidden, ffn]}
    found = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
    for number in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return found | ({} if config.get("tie_word_embeddings") else {"lm_head.weight": [vocabulary, hidden]})


def in_paddlenlp(problem, conditions):
    """The Command that trains in PaddleNLP, by the launcher."""
    flags = (
        "--reset_attention_mask true --reset_position_ids true --split 949,50,1 --save_strategy no --report_to none "
        f"--lr_scheduler_type linear --min_learning_rate {problem.learning_rate} --warmup_steps 0 "
        f"--weight_decay {WEIGHT_DECAY} --seed {SEED} --dataloader_num_workers 0"
    )
    wanted = {
        "model_name": problem.model,
        "tokenizer_name": problem.data / "tokenizer",
        "init_weight": problem.model,
        "batch_size_per_device": problem.batch,
        "FSDP": 1,
        "TP": 1,
        "GA": 1,
        "max_seqlen": problem.sequence,
        "backend": problem.backend,
        "precision": problem.precision,
        "DATA_PATH": problem.data,
        "DEVICE": "nvgpu",
        "DEVICES": conditions.devices[0],
        "MAX_STEPS": conditions.steps,
        "LEARNING_RATE": problem.learning_rate,
        "OUTPUT_DIR": conditions.folder / "run",
        "EXTRA_ARGS": flags,
    }
    words = [sys.executable, "-m", "paddle_te.launch", "pretrain"]
    return Command([*words, *(f"--{name}={value}" for name, value in wanted.items())])


def in_paddleformers(problem, conditions):
    """The Command that trains in PaddleFormers, by a recipe."""
    (index,) = problem.data.glob("*.idx")
    settings = formers.precision_lines(problem.backend, problem.precision) | {
        "model_name_or_path": str(problem.model),
        "input_dir": f"1.0 {index.with_suffix('')}",
        "split": "949,50,1",
        "seed": SEED,
        "max_seq_len": problem.sequence,
        "max_steps": conditions.steps,
        "per_device_train_batch_size": problem.batch,
        "learning_rate": problem.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": WEIGHT_DECAY,
        "output_dir": str(conditions.folder / "output"),
    }
    return formers.recipe_command(conditions, settings)


def losses_of_paddlenlp(conditions):
    lines = (conditions.folder / "run/train_log.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines)]


def losses_of_paddleformers(conditions):
    return [record["loss"] for record in formers.logged(conditions.log)]


HOSTS = {
    "paddlenlp": (in_paddlenlp, losses_of_paddlenlp),
    "paddleformers": (in_paddleformers, losses_of_paddleformers),
}


def train(host, problem, conditions):
    """A host's row: {"command", "losses"}. Raises RuntimeError with the reason where it failed."""
    command_in, losses_of = HOSTS[host]
    conditions.folder.mkdir(parents=True, exist_ok=True)
    command = command_in(problem, conditions)
    status = start(command, conditions.log, conditions.timeout)
    if status != 0:
        raise RuntimeError(f"{host}: {last_error(conditions.log.read_text(errors='replace'))} (exit status {status})")
    losses = losses_of(conditions)
    if len(losses) != conditions.steps:
        raise RuntimeError(f"{host}: its log has {len(losses)} losses, not {conditions.steps}")
    return {"command": quoted(command.words), "losses": losses}


def compared(ours, theirs):
    """How the second curve differs from the first: {"first", "greatest", "windows"}, each as a part of the first's."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    parts = np.abs(theirs - ours) / ours
    count = max(1, len(ours) // WINDOW)
    means = [np.mean(curve[-count * (len(curve) // count) :].reshape(count, -1), 1) for curve in (ours, theirs)]
    windows = np.abs(means[1] - means[0]) / means[0]
    return {"first": float(parts[0]), "greatest": float(parts.max()), "windows": float(windows.max())}


def markdown(result):
    one, other = (result["hosts"][host]["losses"] for host in HOSTS)
    steps = sorted({1, *range(10, len(one) + 1, 10), len(one)})
    lines = [*report.heading("Losses in two hosts", result), "| step | PaddleNLP | PaddleFormers |", "|---|---|---|"]
    lines += [f"| {step} | {one[step - 1]:.5f} | {other[step - 1]:.5f} |" for step in steps]
    found = result["difference"]
    shown = ", ".join(f"{name} {found[name]:.2e}" for name in ("first", "greatest", "windows"))
    return "\n".join([*lines, "", f"Difference: {shown}", ""])


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder with one .bin/.idx pair, and its tokenizer in `tokenizer`")
    parser.add_argument("--paddleformers", type=Path, required=True, metavar="PYTHON", help="with PaddleFormers")
    parser.add_argument("--model", default="llama-125m", help="a Llama: name or folder; default %(default)s")
    parser.add_argument("--backend", choices=("te", "pd", "none"), default="te")
    parser.add_argument("--precision", choices=("bf16", "fp8", "fp32"), default="fp8")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sequence", type=int, default=1024, help="tokens; default %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step; default %(default)s")
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--tolerance", type=float, default=0.01, help="of windows; default %(default)s")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a run; default %(default)s")
    parser.add_argument("--logs", type=Path, help="folder to keep the runs' outputs and logs in (default: not kept)")
    report.add_destination(parser, "hosts")
    return parser.parse_args(argv)


def train_all(arguments, folder, device):
    """{host: what `train` returns}. Raises RuntimeError for a run that fails."""
    data = arguments.data.absolute()
    write_model(folder / "model", arguments.model, data / "tokenizer")
    numbers = arguments.sequence, arguments.batch, arguments.learning_rate
    problem = Problem(folder / "model", data, arguments.backend, arguments.precision, *numbers)
    paddleformers, found = arguments.paddleformers.absolute(), {}
    for host in HOSTS:
        told = dict(warmup=0, timeout=arguments.timeout, paddleformers=paddleformers)
        found[host] = train(host, problem, Conditions(folder / host, [device], arguments.steps, **told))
    return found


def main(argv=None):
    arguments = parse_arguments(argv)
    device = visible_devices("nvgpu", os.environ)[0]
    result = report.header("hosts", argv, DEFINITIONS) | {
        "libraries": {},
        "paddleformers": formers.version(arguments.paddleformers.absolute()),
        "settings": {
            name: str(getattr(arguments, name))
            for name in ("model", "backend", "precision", "sequence", "batch", "learning_rate")
        },
    }
    path = report.destination(result, arguments, f"{arguments.precision}-losses")
    kept = nullcontext(arguments.logs) if arguments.logs else tempfile.TemporaryDirectory()
    with kept as folder:
        try:
            result["hosts"] = train_all(arguments, Path(folder).absolute(), device)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    result["difference"] = compared(*(result["hosts"][host]["losses"] for host in HOSTS))
    report.write(result, path, markdown(result))
    print(markdown(result))
    print(f"{path} and {path.with_suffix('.md')}")
    return 0 if result["difference"]["windows"] <= arguments.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
