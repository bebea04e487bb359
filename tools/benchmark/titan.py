"""torchtitan as a peer of run_pretrain.py: its own trainer, with torch.compile and torchao's float8 linear layers."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

from tools.benchmark.problem import EPSILON
from tools.benchmark.trainings import Command, Training, python_path

PACKAGES = ("torchtitan", "torchao", "torch")
FLOAT8 = "quantize.linear.float8"
# lm_head ("output") stays in bf16, as torchtitan's own configurations and ours have it.
IN_FLOAT8 = ["--model.converters", FLOAT8, f"--{FLOAT8}.filter_fqns", "output"]
# With one scale for each tensor, FSDP gathers weights in float8 and finds all their scales at once.
GATHERED_IN_FLOAT8 = [
    f"--{FLOAT8}.enable_fsdp_float8_all_gather",
    f"--{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp",
]
LOG_STEPS = 2  # as often as run_pretrain.py logs with overlap
# "[titan] … step:  4  loss: 11.93118  grad_norm:  1.6012  memory: 90.21GiB(64.50%)  tps: 21,900  tflops: …"
LINE = re.compile(
    r"step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)\s.*?memory:\s*(?P<gib>[\d.]+)GiB.*?tps:\s*(?P<tps>[\d,]+)"
)
LIST_PACKAGES = """
import json, sys
from importlib import metadata, util
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return "unknown"
print(json.dumps({name: version(name) if util.find_spec(name) else None for name in sys.argv[1:]}))
"""


@dataclass(frozen=True)
class TitanRun(Training):
    """torchtitan.train, started by torchrun; over several GPUs by FSDP, torchtitan's default.

    precision: "bf16", "fp8 tensorwise" or "fp8 rowwise", by what has a scale of its own.
    """

    precision: str = "fp8 tensorwise"

    framework = "torchtitan"
    recomputes = ("none", "selective", "full")
    remedy = "name the folder that has them with --torchtitan"

    @property
    def layout(self):
        return f"FSDP over {self.gpus}" if self.gpus > 1 else ""

    @property
    def model_arguments(self):
        """Return the arguments of torchtitan's class for the model's sizes, titan_model.ARGUMENTS."""
        dims = self.size.dims
        shared = {
            "dim": dims.hidden,
            "n_layers": self.size.layers,
            "n_heads": dims.heads,
            "n_kv_heads": dims.kv_heads,
            "vocab_size": self.size.vocabulary,
            "norm_eps": EPSILON,
            "rope_theta": dims.rope_base,
        }
        if self.size.family == "qwen3":
            own = {"head_dim": dims.head_dim, "hidden_dim": dims.ffn, "enable_weight_tying": self.size.tied}
            return shared | own
        return shared | {
            # torchtitan rounds 8/3 of dim, times this factor, up to a multiple: two thirds of ffn become ffn
            "ffn_dim_multiplier": dims.ffn / (4 * dims.hidden),
            "multiple_of": dims.ffn,
        }

    @property
    def precision_flags(self):
        if self.precision == "bf16":
            return []
        if self.precision == "fp8 rowwise":
            return [*IN_FLOAT8, f"--{FLOAT8}.recipe_name", "rowwise"]
        return IN_FLOAT8 + GATHERED_IN_FLOAT8 * (self.gpus > 1)

    def packages(self, conditions):
        return installed(conditions.torchtitan)

    def command(self, conditions):
        words = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={self.gpus}"]
        words += [
            f"--master_port={free_port()}",
            "-m",
            "torchtitan.train",
            "--experimental.custom_import",
            "tools.benchmark.titan_model",
        ]
        wanted = {
            "job.dump_folder": conditions.folder / "titan",
            "model.name": "random_tokens",
            "model.flavor": "random",
            "training.seq_len": self.size.dims.sequence,
            "training.local_batch_size": self.batch,
            "training.global_batch_size": self.batch * self.data_ranks * self.size.micro_batches,
            "training.steps": conditions.steps,
            "lr_scheduler.warmup_steps": 2,
            "activation_checkpoint.mode": self.recompute,
            "metrics.log_freq": LOG_STEPS,
        }
        for name, value in wanted.items():
            words += [f"--{name}", str(value)]
        words += ["--metrics.disable_color_printing", "--compile.enable", *self.precision_flags, *self.flags.split()]
        environment = search_path(conditions.torchtitan) | {
            **visible(conditions.devices),
            "TITAN_FAMILY": self.size.family,
            "TITAN_MODEL": json.dumps(self.model_arguments),
        }
        return Command(words, environment)

    def records(self, conditions):
        found, peak, tokens = {}, 0, self.batch * self.size.dims.sequence * self.size.micro_batches
        for line in LINE.finditer(conditions.log.read_text(errors="replace")):
            peak = max(peak, int(float(line["gib"]) * 2**30))
            speed = int(line["tps"].replace(",", "")) or 0.5  # 0 is what torchtitan rounds less than that to
            record = dict(step=int(line["step"]), step_time=tokens / speed, loss=float(line["loss"]))
            found.setdefault(record["step"], record | {"peak_memory_bytes": peak})  # each rank logs the same line
        return [found[number] for number in sorted(found)]


def free_port():
    """A port of this machine that no program listens on at present."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def search_path(folder):
    """The variable that says where torchtitan's processes import from.

    A folder takes PYTHONPATH's place: what lies there is in the versions that PaddleNLP wants.
    """
    return {"PYTHONPATH": python_path(folder, inherited=folder is None)}


def visible(devices):
    """The variable that shows PyTorch only the devices with these numbers, of those that are visible here."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(shown.split(",")[int(each)] for each in devices)
        if shown
        else ",".join(devices)
    }


@cache
def installed(folder, packages=PACKAGES):
    """{package: version, None where it is missing} of packages, in a process that searches as the training's will."""
    command = [sys.executable, "-c", LIST_PACKAGES, *packages]
    done = subprocess.run(command, env=os.environ | search_path(folder), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)
