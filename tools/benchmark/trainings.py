"""What throughput.py trains: a Training, of which there is one class for each framework, and how it is carried out."""

import json
import os
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from tools.benchmark import device_trace, step
from tools.benchmark.problem import Dims

ROOT = Path(__file__).resolve().parents[2]
TINY = step.Size(Dims(1, 64, 64, 96, 4, 4), 128, 2)


@dataclass(frozen=True)
class Conditions:
    """How a training is carried out.

    folder: for all that it writes, its own. devices: numbers of its GPUs, as `visible_devices` tells them. steps: how
    many it has, of which `warmup` do not count. timeout: seconds until it is ended. profiled: further steps, under the
    profiler. torchtitan: the folder that torchtitan is imported from; None where Python finds it by itself.
    paddleformers: the interpreter of an environment with PaddleFormers. trl: as torchtitan, of TRL.
    """

    folder: Path
    devices: list
    steps: int
    warmup: int
    timeout: float
    profiled: int = 0
    torchtitan: Path | None = None
    paddleformers: Path | None = None
    trl: Path | None = None

    @property
    def log(self):
        """The file that gets all that the training prints."""
        return self.folder / "output.log"


@dataclass(frozen=True)
class Command:
    """Words of a command line, and the environment variables that differ from this process's."""

    words: list
    environment: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """A model that is trained on random tokens by a framework. Subclasses say how.

    batch: sequences of a rank's micro-batch, of which a step has size.micro_batches. flags: the framework's, behind
    those that `command` gives. base: the training whose tokens/s per GPU are this one's 1.00.
    """

    size: step.Size
    gpus: int = 1
    precision: str = "fp8"
    batch: int = 1
    recompute: str = "none"
    flags: str = ""
    base: str | None = None

    framework: ClassVar[str]
    recomputes: ClassVar[tuple]  # what `recompute` may be, in the order of the memory that it saves
    remedy: ClassVar[str] = ""  # what to do where packages are missing

    @property
    def data_ranks(self):
        """Number of ranks that have sequences of their own."""
        return self.gpus

    @property
    def global_size(self):
        """The Size whose batch is all ranks' together."""
        return replace(self.size, dims=replace(self.size.dims, batch=self.batch * self.data_ranks))

    @property
    def layout(self):
        """How the model lies on the GPUs, in words; "" on one."""
        raise NotImplementedError

    @property
    def tiny(self):
        """The same with two small layers."""
        dims = replace(TINY.dims, variant=self.size.dims.variant, rope_base=self.size.dims.rope_base)
        return replace(self, size=replace(self.size, dims=dims, vocabulary=TINY.vocabulary, layers=TINY.layers))

    @property
    def described(self):
        """What a result's row says of it."""
        return asdict(self) | {"framework": self.framework, "layout": self.layout}

    def packages(self, conditions):
        """{package: version, None where it is missing} of what the training needs besides this project."""
        return {}

    def command(self, conditions):
        """The Command that trains; writes into conditions.folder what the command reads."""
        raise NotImplementedError

    def records(self, conditions):
        """Return a finished training's logged lines, [{"step", "step_time", "loss", "peak_memory_bytes"}].

        step_time: seconds of a step, a mean of those since the line before.
        """
        raise NotImplementedError

    def speeds(self, ms, records):
        """{"tokens_per_second", "samples_per_second", "tflops_per_gpu"} of all GPUs together, the last of one GPU.

        ms: of the median step. records: of the steps that count.
        """
        size = self.global_size
        return {
            "tokens_per_second": size.tokens / ms * 1e3,
            "samples_per_second": size.tokens / size.dims.sequence / ms * 1e3,
            "tflops_per_gpu": size.flops / ms / 1e9 / self.gpus,
        }

    def account(self, conditions):
        """Return {"status": "ok"} and the profiled steps' Profile.account, or another status and "reason"."""
        return {"status": "missing", "reason": f"{self.framework}'s steps are not profiled"}


@dataclass(frozen=True)
class Run(Training):
    """llm/llama/run_pretrain.py, started by its launcher.

    sharding, tp, pp, sep, cp: degrees; what they leave of `gpus` is data parallel. vp: virtual stages of a rank of pp.
    ep: how many ranks of sharding divide the experts.
    """

    sharding: int = 1
    stage: str = "stage1"
    tp: int = 1
    pp: int = 1
    vp: int = 1
    sep: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    backend: str = "te"

    framework = "paddle_te"
    recomputes = ("none", "core_attn", "full")
    job: ClassVar[str] = "pretrain"

    @property
    def data_ranks(self):
        return self.gpus // (self.tp * self.pp * self.sep * self.cp)

    @property
    def layout(self):
        parts = {"tp": self.tp, "pp": self.pp, "vp": self.vp, "sep": self.sep, "cp": self.cp}
        parts |= {f"{self.stage} over ": self.sharding, "ep": self.ep, "dp": self.data_ranks // self.sharding}
        words = [f"{name}{degree}" for name, degree in parts.items() if degree > 1]
        return " × ".join(words) + (", sequence parallel" if self.sequence_parallel else "")

    @property
    def tiny(self):
        """The same training with pd in bf16, which nvgpu's host runtime can run."""
        return replace(super().tiny, precision="bf16", backend="pd")

    @property
    def described(self):
        return super().described | {"job": self.job}

    @property
    def all_flags(self):
        """The script's flags, after those that the launcher sets."""
        return f"--save_strategy no --report_to none --warmup_steps 2 {self.flags}"

    def command(self, conditions):
        return Command([sys.executable, "-m", "paddle_te.launch", self.job, *self.launch_arguments(conditions)])

    def launch_arguments(self, conditions):
        """Return the arguments of `paddle_te.launch`, and write the files that they name. Profiled steps come last."""
        steps, profiled = conditions.steps, conditions.profiled
        wanted = {
            "batch_size_per_device": self.batch,
            "FSDP": self.sharding,
            "TP": self.tp,
            "SEP": self.sep,
            "CP": self.cp,
            "GA": self.size.micro_batches,
            "SP": str(self.sequence_parallel).lower(),
            "max_seqlen": self.size.dims.sequence,
            "sharding_stage": self.stage,
            "backend": self.backend,
            "precision": self.precision,
            "recompute": self.recompute,
            "DEVICES": ",".join(conditions.devices),
            "MAX_STEPS": steps + profiled,
            "EXTRA_ARGS": self.all_flags,
        }
        # those that fine-tuning does not have
        others = {"PP": self.pp, "VP": self.vp, "EP": self.ep}
        wanted |= {name: degree for name, degree in others.items() if degree > 1}
        if profiled:
            wanted |= dict(PROFILER="paddle", PROFILE_START_STEP=steps, PROFILE_STOP_STEP=steps + profiled - 1)
        return [f"--{name}={value}" for name, value in (self.inputs(conditions) | wanted).items()]

    def inputs(self, conditions):
        """The launcher's arguments that say what is trained, on what, and where to. Writes the model's config.json."""
        self.write_config(conditions.folder / "model")
        return {
            "model_name": conditions.folder / "model",
            "tokenizer_name": "none",
            "MOCK_DATA": 1,
            "OVERLAP": 0,  # a run's own flags say it
            "OUTPUT_BASE": conditions.folder,
            "EXP_NAME": "run",
        }

    def write_config(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": self.size.family, **self.size.config}))

    @staticmethod
    def output(conditions):
        """The folder that the training writes its checkpoints and logs to."""
        return conditions.folder / "run/output"

    def records(self, conditions):
        return [record for record in read_log(self.output(conditions)) if record["step"] <= conditions.steps]

    def account(self, conditions):
        """Return the account of the first rank's trace; the other traces say how long it waited for them."""
        traces = (self.output(conditions) / "profile").glob("rank*.json")
        try:
            first, *_ = device_trace.read_ranks(traces).values()
            return {"status": "ok"} | first.account()
        except ValueError as error:
            return {"status": "failed", "reason": str(error)}


def read_log(output):
    """[{"step", "step_time", "loss", "peak_memory_bytes", …}] of each line that a training in `output` logged."""
    return [json.loads(line) for line in (output / "train_log.jsonl").read_text().splitlines()]


def step_times(records):
    """{"median", "min", "max", "all"} of the steps that records tell of, in ms."""
    times = [record["step_time"] * 1e3 for record in records]
    every = [round(time, 3) for time in times]
    return {"median": statistics.median(times), "min": min(times), "max": max(times), "all": every}


def python_path(*folders, inherited=True):
    """PYTHONPATH with this checkout, the folders and, if it is to be inherited, this process's own."""
    folders = [ROOT, *folders] + [os.getenv("PYTHONPATH")] * inherited
    return os.pathsep.join(str(folder) for folder in folders if folder)


def quoted(words):
    """A command line for a result's row, which names no folder of Python's."""
    return shlex.join(words[1:])
