"""Command-line arguments of pretraining: PaddleNLP's, and those that choose and tune the decoder layers."""

import argparse
import contextlib
import difflib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from paddlenlp.trainer import PdArgumentParser, TrainingArguments
from paddlenlp.trainer.integrations import get_available_reporting_integrations
from paddlenlp.trainer.trainer_utils import OptimizerNames
from paddlenlp.transformers.configuration_utils import llmmetaclass

from paddle_te import configs
from paddle_te.configs.spec import spec_of
from paddle_te.distributed.expert_parallel import experts_share, make_groups
from paddle_te.host import HostArguments
from paddle_te.job import PRETRAIN, Job, check
from paddle_te.models.context_parallel import context_parallel
from paddle_te.options import BOUNDS, check_values, with_options
from paddle_te.options.layers import LAYERS
from paddle_te.options.paddlenlp import without_unsupported
from paddle_te.options.pretraining import PRETRAINING, PretrainModel
from paddle_te.options.removed import check_removed
from paddle_te.options.training import TRAINING
from paddle_te.outputs import check_folder
from paddle_te.records import Record, record
from paddle_te.runs.rollback import Rollback
from paddle_te.training.trackers import TRACKERS, check_logins


@dataclass
@llmmetaclass  # PaddleNLP's flags for fused kernels, parallelism and recompute
@with_options(*PRETRAINING, *LAYERS, *TRAINING)
class PreTrainingArguments(TrainingArguments):
    """PaddleNLP's TrainingArguments and the switch."""

    SCRIPT = PRETRAIN  # whose flags they are
    recompute_use_reentrant: bool = True  # saved-tensor hooks, PaddleNLP's default, do not free what te's layers keep

    @property
    def model_dtype(self) -> str:
        """Return the weights' dtype: 16 bits with fp16_opt_level O2 only, since O1 casts what an operation takes."""
        half = "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"
        return half if self.fp16_opt_level == "O2" else "float32"

    @property
    def sequence_rank(self) -> int:
        """Return this rank's place among those that share sequences."""
        cp = context_parallel(self)
        return cp.rank if cp else 0

    @property
    def expert_parallel_rank(self) -> int:
        """Return this rank's place among those that divide the experts (--expert_parallel_degree)."""
        return experts_share()[1]

    @property
    def weight_name_suffix(self) -> str | None:
        """Return PaddleNLP's, and whose experts are in the file: "pp00_ep01"."""
        suffix: str | None = super().weight_name_suffix
        if self.expert_parallel_degree <= 1:
            return suffix
        return "_".join(filter(None, (suffix, f"ep{self.expert_parallel_rank:02d}")))

    @property
    def should_save_model_state(self) -> bool:
        """Return PaddleNLP's, for one of the ranks that have the same weights, such as those that share sequences."""
        if self.expert_parallel_degree > 1:
            return self.sharding_parallel_rank < self.expert_parallel_degree
        return super().should_save_model_state and self.sequence_rank == 0

    def add_moe_comm_group(self) -> None:
        """Make the groups of --expert_parallel_degree; PaddleNLP calls it."""
        make_groups(self.expert_parallel_degree)

    def __post_init__(self) -> None:
        """Raise ValueError for wrong values and contradictions, before PaddleNLP's initialise fleet."""
        check_values(self, BOUNDS)
        self._check_saving()
        try:
            with asking_for_adamw(self):
                super().__post_init__()
        except AssertionError as error:
            raise ValueError(f"PaddleNLP does not take these arguments together: {error}") from error
        except ValueError as error:  # of several lines, some
            raise ValueError(" ".join(str(error).split())) from error
        if getattr(self, "ddp_find_unused_parameters", None) is None:  # there are none; looking for them costs time
            self.ddp_find_unused_parameters = False
        reports = list(self.report_to)
        self.trackers = [name for name in reports if name in TRACKERS]  # which PaddleNLP's Trainer does not know
        self.report_to: list[str] = [name for name in reports if name not in TRACKERS]
        self.test_iters = 10 * self.eval_iters
        self.rollbacks: list[Rollback] = []  # runs.rollback.leave_out_broken_batches knows them

    def _check_saving(self) -> None:
        for name in ("output_dir", "logging_dir", "output_signal_dir"):
            if getattr(self, name) is not None:
                check_folder(f"--{name}", Path(getattr(self, name)).expanduser())
        if self.staging_dir and not os.access(self.staging_dir, os.W_OK | os.X_OK):
            raise ValueError(f"--staging_dir {self.staging_dir}: it must be a folder that can be written, on each node")


@contextlib.contextmanager
def asking_for_adamw(arguments: Any) -> Iterator[None]:
    """Let PaddleNLP, which does not know Muon, read adamw in its place: ours is built on that."""
    asked = arguments.optim
    if asked == "muon":
        arguments.optim = OptimizerNames.ADAMW
    yield
    if asked == "muon":
        arguments.optim = asked


def data_seed(arguments: HostArguments) -> int:
    """Return the seed of the order of the samples."""
    return arguments.seed if arguments.data_seed is None else arguments.data_seed


def check_weights_folder(arguments: object, flag: str = "model_name_or_path") -> None:
    """Raise FileNotFoundError where the flag names no folder; before the tokenizer, which may be downloaded."""
    folder = getattr(arguments, flag)
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"--{flag} {folder}: there is no such folder; weights are not downloaded")


@record
class ModelArguments(Record, PretrainModel):
    """Which model, and how PaddleNLP builds it."""

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def tokenizer(self) -> str:
        """The tokenizer's name or folder, by default the model's."""
        return self.tokenizer_name_or_path or self.model_name_or_path


class ScriptParser(PdArgumentParser):
    """PaddleNLP's, with one line for what is missing, malformed or no flag. Raises ValueError."""

    def parse(self) -> tuple[Any, ...]:
        """Return the dataclasses, from the command line, of which the first word may be a JSON file."""
        if len(sys.argv) >= 2 and sys.argv[1].endswith(".json"):
            return self.parse_json_file_and_cmd_lines()
        return self.parse_args_into_dataclasses()

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the flags)")

    def read_json(self, json_file: str) -> list[str]:
        """Return the flags that a JSON file gives. Raise ValueError for one that gives none, FileNotFoundError."""
        try:
            content = json.loads(Path(json_file).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{json_file}: is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{json_file}: must be an object of flags and their values, {{...}}")
        words = super().read_json(json_file)
        kept = without_unsupported(content)
        for name in content.keys() - kept.keys():
            start = words.index(f"--{name}")
            del words[start : start + 2]
        changed = {name: value for name, value in kept.items() if name not in content or content[name] != value}
        return words + [word for name, value in changed.items() for word in (f"--{name}", str(value))]

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        check_removed(sys.argv[1:] if args is None else args)
        flags, rest = super().parse_known_args(args, namespace)
        if rest:
            word = next((word for word in rest if word.startswith("--")), None)
            if word is None:
                self.error(f"{rest[0]}: no flag before it takes this value")
            near = difflib.get_close_matches(word.partition("=")[0], self._option_string_actions, 1)
            self.error(f"{word}: there is no such flag" + (f"; did you mean {near[0]}?" if near else ""))
        for each in self.dataclass_types:
            check_values(flags, BOUNDS, each.__options__)
        return flags, rest


class ArgumentParser(ScriptParser):
    """For the dataclasses of training.

    Refuses what the launcher refuses too, before TrainingArguments initialises fleet. Raises JobError, a
    ValueError.
    """

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        flags, rest = super().parse_known_args(args, namespace)
        script = next(record.SCRIPT for record in self.dataclass_types if hasattr(record, "SCRIPT"))
        said = configs.read_model(flags.model_name_or_path)
        configs.check_computed(said, flags.transformer_engine_backend)
        model, world = spec_of(configs.words_of_model(said)), int(os.environ.get("PADDLE_TRAINERS_NUM", 1))
        check(Job.of(flags, script=script, world=world, model=model))
        check_logins(flags.report_to or (), get_available_reporting_integrations(), flags.wandb_api_key)
        return flags, rest
