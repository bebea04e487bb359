"""PaddleFormers as the host of a training that throughput.py and hosts.py start: a recipe, and what its log says."""

import json
import re
import struct
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from paddle_te.launch.paddleformers.start import two_tokens
from paddle_te.options import BACKENDS
from tools.benchmark.trainings import Command, Run

# "… - loss: 9.17572117, …, global_step: 4, …, max_memory_allocated: 0.1359, …, interval_runtime: 0.7298, …"
LINE = re.compile(
    r" loss: (?P<loss>[\d.]+), .*?global_step: (?P<step>\d+),"
    r"(?:.*?max_memory_allocated: (?P<gib>[\d.e-]+),)?.*?interval_runtime: (?P<seconds>[\d.]+)"
)
VERSION = "from importlib import metadata; print(metadata.version('paddleformers'))"
# What recipes of pretraining on indexed data, in the order of the index, have in common
RECIPE = {
    "stage": "PT",
    "fine_tuning": "full",
    "dataset_type": "pretrain",
    "dataloader_shuffle": False,
    "eval_iters": 1,
    "eval_steps": 1_000_000,
    "do_train": True,
    "device": "nvgpu",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}


@dataclass(frozen=True)
class FormersRun(Run):
    """`python -m paddle_te.hosts.paddleformers train`, on one GPU, on random tokens in an indexed corpus.

    flags: further lines of the recipe, name=value.
    """

    framework = "paddle_te in PaddleFormers"
    remedy = "name a Python that has PaddleFormers with --paddleformers"

    def packages(self, conditions):
        return {"paddleformers": version(conditions.paddleformers)}

    def command(self, conditions):
        folder, dims, steps = conditions.folder, self.size.dims, conditions.steps + conditions.profiled
        write_config(folder / "model", self.size)
        write_tokenizer(folder / "model")
        count = self.batch * self.size.micro_batches * steps * dims.sequence + 1
        write_document(
            folder / "random", np.random.default_rng(0).integers(0, self.size.vocabulary, count, dtype=np.int32)
        )
        settings = precision_lines(self.backend, self.precision) | {
            "model_name_or_path": str(folder / "model"),
            "continue_training": False,
            "input_dir": f"1.0 {folder / 'random'}",
            "split": "1,0,0",
            "max_seq_len": dims.sequence,
            "max_steps": steps,
            "warmup_steps": 2,
            "per_device_train_batch_size": self.batch,
            "gradient_accumulation_steps": self.size.micro_batches,
            "autotuner_benchmark": True,  # which saves no weights at the end
            "output_dir": str(folder / "output"),
        }
        return recipe_command(conditions, settings, self.flags.split())

    def records(self, conditions):
        return [record for record in logged(conditions.log) if record["step"] <= conditions.steps]

    def account(self, conditions):
        return {"status": "missing", "reason": "PaddleFormers' steps are not profiled"}


@cache
def version(python):
    """Return the version of an interpreter's PaddleFormers; None without PaddleFormers or interpreter."""
    if python is None:
        return None
    done = subprocess.run([python, "-c", VERSION], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def precision_lines(backend, precision):
    """Return a recipe's lines for the launcher's backend and precision on one GPU."""
    lines = {"transformer_engine_backend": BACKENDS[backend], "amp_master_grad": False}
    if precision != "fp32":
        lines |= {"bf16": True, "fp16_opt_level": "O2"}
    return lines | ({"use_fp8": True, "fp8_recipe": "delayed"} if precision == "fp8" else {})


def recipe_command(conditions, settings, words=()):
    """The Command that trains by a recipe of pretraining on indexed data, in the order of the index.

    settings: its lines, beside those that all have. words: name=value, which override them.
    """
    conditions.folder.mkdir(parents=True, exist_ok=True)
    path = conditions.folder / "recipe.json"
    path.write_text(json.dumps(RECIPE | settings, indent=1))
    train = [str(conditions.paddleformers), "-m", "paddle_te.hosts.paddleformers", "train", str(path), *words]
    return Command(train, {"FLAGS_selected_nvgpus": conditions.devices[0]})


def logged(log):
    """[{"step", "step_time" in seconds, "loss", "peak_memory_bytes"}] of each line that PaddleFormers' Trainer logs
    after a step, if each step has one."""
    return [
        {
            "step": int(line["step"]),
            "step_time": float(line["seconds"]),
            "loss": float(line["loss"]),
            "peak_memory_bytes": int(float(line["gib"] or 0) * 2**30),
        }
        for line in LINE.finditer(Path(log).read_text(errors="replace"))
    ]


def write_config(folder, size):
    """A Llama's config.json as PaddleFormers wants it, which makes a model of the class that it names."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": size.family, "architectures": ["LlamaForCausalLM"], **size.config}
    (folder / "config.json").write_text(json.dumps(config))


def write_tokenizer(folder):
    """A tokenizer of two tokens, for PaddleFormers reads one whatever the data are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in two_tokens().items():
        (folder / name).write_text(text)


def write_document(prefix, tokens):
    """PREFIX.bin and PREFIX.idx, Megatron-LM's indexed data set (MMapIndexedDataset): one document of int32 tokens."""
    tokens.tofile(f"{prefix}.bin")
    int32 = 4  # the format's code
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, int32, 1, 2)
    sizes, starts, documents = np.int32([len(tokens)]), np.int64([0]), np.int64([0, 1])
    Path(f"{prefix}.idx").write_bytes(header + b"".join(array.tobytes() for array in (sizes, starts, documents)))
