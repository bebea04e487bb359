"""The runs of throughput.py that tune on preferences (DPO, KTO), and those of Hugging Face's TRL on the same pairs."""

import json
import statistics
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tools.benchmark import titan
from tools.benchmark.finetuning import Finetuning
from tools.benchmark.trainings import Command, Conditions, Training, read_log

PAIRS, MEDIAN_QUESTION, MEDIAN_ANSWER, SPREAD = 1000, 150, 300, 0.7
SPECIAL = 3  # tokens of the tokenizer that no text has
DEFINITION = (
    "Tuning on preferences is DPO with a LoRA adapter of rank 32, the base as reference, on pairs of random words. "
    f"Lengths are log-normal (sigma {SPREAD:g}; median {MEDIAN_QUESTION} tokens for questions, {MEDIAN_ANSWER} for "
    "answers) and at most an eighth of a row. Ours pack pairs into rows of the sequence's length, and each answer "
    "stands behind its question. tokens/s count the tokens of both answers and their questions, padding left out. "
    "KTO has the same pairs taken apart: a sample is an answer and, for the KL, its question with the answer before. "
    "TRL pads a batch's answers to the longest; its runs have `batch` pairs in a micro-batch, about as many in a step "
    "as ours, PyTorch's SDPA, and gradient checkpointing where `recompute` says full. TRL 1.16 has its padding-free "
    "batches switched off."
)


def lengths_of_pairs(row: int) -> NDArray[np.int64]:
    """Return the tokens of the question and of both answers, [PAIRS, 3], for rows of so many tokens."""
    medians = np.log([MEDIAN_QUESTION, MEDIAN_ANSWER, MEDIAN_ANSWER])
    drawn = np.random.default_rng(0).lognormal(medians, SPREAD, (PAIRS, 3))
    return drawn.clip(4, row // 8).astype(np.int64)


@dataclass(frozen=True)
class Preferences(Finetuning):
    """llm/llama/run_dpo.py, started by its launcher, from random weights that are made on the device."""

    method: str = "lora"
    on_device: bool = True

    job: ClassVar[str] = "dpo"
    script: ClassVar[Path] = Path(__file__).with_name("random_preferences.py")
    kind: ClassVar[str] = "preferences"
    packing: ClassVar[str] = "--greedy_zero_padding true"

    @property
    def tiny(self) -> "Preferences":
        return replace(super().tiny, backend="none" if self.backend == "none" else "pd")

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each pair and 1, as `speeds` wants it: the ends of both answers count."""
        return lengths_of_pairs(self.size.dims.sequence) @ [2, 1, 1] + 3

    def _write_samples(self, folder: Path) -> None:
        """train.json: the pairs of words."""
        folder.mkdir()
        write_pairs(folder / "train.json", self.size.dims.sequence, self.size.vocabulary)


@dataclass(frozen=True)
class SingleAnswers(Preferences):
    """llm/llama/run_kto.py on the same pairs, taken apart: the better answers are wanted, the worse ones are not."""

    job: ClassVar[str] = "kto"
    script: ClassVar[Path] = Path(__file__).with_name("random_answers.py")

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each answer, of the one before behind the same question, and 1."""
        lengths = lengths_of_pairs(self.size.dims.sequence)
        answers = lengths[:, 1:].ravel()
        return 2 * np.repeat(lengths[:, 0], 2) + answers + np.roll(answers, 1) + 3


def write_pairs(path: Path, row: int, vocabulary: int) -> None:
    """Write lines of "prompt", "chosen" and "rejected"; the prompt ends with a space, with which TRL joins them."""
    generator = np.random.default_rng(1)
    with path.open("w") as file:
        for lengths in lengths_of_pairs(row):
            words = [" ".join(f"w{n}" for n in generator.integers(SPECIAL, vocabulary, length)) for length in lengths]
            record = {"prompt": f"{words[0]} ", "chosen": words[1], "rejected": words[2]}
            file.write(json.dumps(record) + "\n")


@dataclass(frozen=True)
class TrlRun(Training):
    """TRL's DPOTrainer with PEFT's LoRA, in bf16, from random weights on one GPU; size.micro_batches of `batch` pairs.

    lora_rank: the adapter's.
    """

    precision: str = "bf16"
    lora_rank: int = 32

    framework = "TRL"
    recomputes = ("none", "full")
    remedy = "name the folder that has them with --trl"

    @property
    def layout(self) -> str:
        return "lora, a pair a row"

    def packages(self, conditions: Conditions) -> dict[str, str | None]:
        return titan.installed(conditions.trl, ("trl", "peft", "transformers", "datasets", "torch"))

    def command(self, conditions: Conditions) -> Command:
        twin = Preferences(self.size)  # whose files say the same of model, tokenizer and pairs
        said = twin.inputs(conditions)
        script = Path(__file__).with_name("trl_training.py")
        settings = {
            "model": str(said["model_name"]),
            "pairs": str(said["dataset"] / "train.json"),
            "output": str(conditions.folder / "output"),
            "batch": self.batch,
            "micro_batches": self.size.micro_batches,
            "steps": conditions.steps,
            "checkpointing": self.recompute == "full",
            "lora_rank": self.lora_rank,
        }
        environment = titan.search_path(conditions.trl) | titan.visible(conditions.devices)
        return Command([sys.executable, str(script), json.dumps(settings)], environment)

    def records(self, conditions: Conditions) -> list[dict[str, Any]]:
        return read_log(conditions.folder / "output")

    def speeds(self, ms: float, records: list[dict[str, Any]]) -> dict[str, float | None]:
        """Return the speeds over the tokens that the run has counted, without padding."""
        tokens = statistics.median(record["tokens_per_second"] for record in records)
        mean = float(np.mean(Preferences(self.size).lengths - 1))
        return {"tokens_per_second": tokens, "samples_per_second": tokens / mean, "tflops_per_gpu": None}
