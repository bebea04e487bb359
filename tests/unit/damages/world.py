"""A folder with everything that runs read, small, and the commands that read it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_te.data import prepare
from paddle_te.hosts.paddlenlp.evaluation import evaluate
from paddle_te.hosts.paddlenlp.training import finetune, pretrain
from paddle_te.launch import __main__ as launch
from paddle_te.runs import verify
from paddle_te.weights import command, convert
from tests import chats, pretraining, small_tokenizers
from tests.damaged_readers import Answer, ask
from tests.pretraining import words
from tests.small_checkpoints import random_words, save_models, write_lines
from tests.small_corpora import write_corpus

LENGTH = 32
QUIET = dict(disable_tqdm="true", report_to="none", device="cpu", logging_steps=1)
TRAINING = QUIET | dict(
    transformer_engine_backend="paddle",
    do_train="true",
    learning_rate=1e-3,
    save_steps=1,
    per_device_train_batch_size=2,
)


@dataclass(frozen=True)
class Reader:
    """A command that reads part of the world.

    main, line: the command, and its words for a world's folder. files: globs of what it reads, which are damaged.
    result: what is compared of a world's folder and the command's output. covered: whether a manifest holds the
    checksums of the file of this name, so that nothing but equal numbers or a refusal is right.
    """

    name: str
    main: Callable[..., Any]
    line: Callable[[Path], list[Any]]
    files: tuple[str, ...]
    result: Callable[[Path, str], Any] = lambda place, text: text
    argv: bool = True

    def ask(self, place: Path) -> Answer:
        shutil.rmtree(place / "out", ignore_errors=True)
        with paddle.utils.unique_name.guard():  # parameters are named as in a new process
            return ask(self.main, self.line(place), lambda text: self.result(place, text), self.argv)

    def found(self, place: Path) -> list[Path]:
        return sorted({path for pattern in self.files for path in place.glob(pattern) if path.is_file()})


def make(place: Path) -> Path:
    """A world in a new folder."""
    paddle.seed(5)
    models = save_models(place, seed=5, initializer_range=0.05)
    shutil.rmtree(models["hf"])
    convert(models["paddle"], models["hf"], "te2hf", max_shard_size=60_000, progress=False)
    generator = np.random.default_rng(5)
    for name, files in small_tokenizers.folders().items():
        small_tokenizers.write(place / "tokenizers" / name, files)
    shutil.copytree(place / "tokenizers/llama3", models["hf"], dirs_exist_ok=True)
    texts = [random_words(generator, n) for n in (4, 30, 12)]
    write_lines(place / "texts.jsonl", [{"text": text} for text in texts])
    (place / "questions").mkdir()
    records = [{"src": random_words(generator, n % 5 + 1), "tgt": random_words(generator, 2)} for n in range(8)]
    write_lines(place / "questions/train.json", records)
    (place / "chats").mkdir()
    write_lines(place / "chats/train.jsonl", list(chats.CONVERSATIONS.values())[:3])
    chats.save_tokenizer(place / "chats", chats.PLAIN["chatml"])
    (place / "data").mkdir()
    documents = [generator.integers(3, 250, generator.integers(1, 50)).tolist() for _ in range(60)]
    write_corpus(place / "data/corpus", documents)
    with pytest.MonkeyPatch.context() as patch:
        for kind, flags in {"run": {}, "unified": dict(unified_checkpoint=1)}.items():
            for steps in (2, 2):  # the second finds the caches, and finishes
                _start(patch, pretrain, pretraining_words(place, output=kind, max_steps=steps, **flags))
        _start(
            patch, finetune, finetuning_words(place, lora="true", lora_rank=4, max_steps=2, output_dir=place / "lora")
        )
    return place


def _start(patch: pytest.MonkeyPatch, module: Any, line: list[Any]) -> None:
    patch.setattr("sys.argv", ["command", *line])
    with paddle.utils.unique_name.guard():
        module.main()


def pretraining_words(place: Path, output: str = "out", **flags: Any) -> list[Any]:
    where = dict(model_name_or_path=place / "paddle", input_dir=place / "data", output_dir=place / output)
    numbers = dict(tokenizer_name_or_path="none", max_seq_length=LENGTH, split="8,1,1", seed=7)
    # one rate, whatever --max_steps: a run that resumes from an older checkpoint ends with the same numbers
    numbers |= dict(min_learning_rate=TRAINING["learning_rate"])
    return words(TRAINING | where | numbers | dict(resume_from_checkpoint="auto") | flags)


def finetuning_words(place: Path, **flags: Any) -> list[Any]:
    where = dict(model_name_or_path=place / "paddle", tokenizer_name_or_path=place / "tokenizers/llama_older")
    where |= dict(dataset_name_or_path=place / "questions", output_dir=place / "out")
    return words(TRAINING | where | dict(src_length=40, max_length=64) | flags)


def evaluation_words(place: Path, **flags: Any) -> list[Any]:
    where = dict(tokenizer_name_or_path=place / "hf", perplexity=place / "texts.jsonl")
    return words(dict(model_name_or_path=place / "paddle", transformer_engine_backend="paddle") | where | flags)


def first_loss(place: Path, text: str) -> Any:
    return pretraining.losses(place / "out")


def numbers_of(output: str) -> Callable[[Path, str], Any]:
    return lambda place, text: pretraining.numbers(place / output)


def converted(place: Path, text: str) -> dict[str, bytes]:
    return contents(place / "out")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def prepared(place: Path, text: str) -> dict[str, bytes]:
    return {suffix: (place / f"out/corpus{suffix}").read_bytes() for suffix in (".bin", ".idx")}


def _resuming(output: str, **flags: Any) -> Callable[[Path], list[Any]]:
    return lambda place: pretraining_words(place, output=output, **dict(max_steps=3) | flags)


def _beginning(weights: str, **flags: Any) -> Callable[[Path], list[Any]]:
    return lambda place: pretraining_words(
        place, te_init_weight_path=place / weights, max_steps=1, save_steps=9, **flags
    )


def _converting(weights: str, mode: str, *more: str) -> Callable[[Path], list[Any]]:
    paths = lambda place: ("--input_ckpt_path", place / weights, "--output_ckpt_path", place / "out")  # noqa: E731
    return lambda place: ["--mode", mode, *paths(place), *more]


def _launching(job: str) -> Callable[[Path], list[Any]]:
    def line(place: Path) -> list[Any]:
        folders = {"model_name": "paddle", "tokenizer_name": "tokenizers/llama3"}
        if job == "pretrain":
            folders |= {"DATA_PATH": "data", "init_weight": "hf", "OUTPUT_DIR": "out"}
        values = {name: place / folder for name, folder in folders.items()}
        values |= dict(DEVICE="cpu", DRY_RUN=1, backend="pd", precision="fp32", max_seqlen=LENGTH, TP=1)
        return [job, *(f"--{name}={value}" for name, value in values.items())]

    return line


def _preparing(tokenizer: str) -> Callable[[Path], list[Any]]:
    return lambda place: [
        *("--input_path", place / "texts.jsonl", "--output_prefix", place / "out/corpus", "--workers", 1),
        *("--tokenizer_name", place / "tokenizers" / tokenizer),
    ]


CHECKPOINT, UNIFIED, ADAPTER = "run/checkpoint-2", "unified/checkpoint-2", "lora/checkpoint-2"
OF_CHECKPOINT = (f"{CHECKPOINT}/*", f"{CHECKPOINT}/.*")
OF_UNIFIED = (f"{UNIFIED}/*", f"{UNIFIED}/.*")
OF_DATA = ("data/*", "data/index-cache/*")
_READERS = [
    *(
        Reader(f"resume {output}", pretrain.main, _resuming(output, **flags), files, numbers_of(output))
        for output, files, flags in (
            ("run", (*OF_CHECKPOINT, *OF_DATA, "paddle/config.json"), {}),
            ("unified", OF_UNIFIED, dict(unified_checkpoint=1)),
        )
    ),
    Reader(
        "resume a step", pretrain.main, _resuming("run", resume_from_checkpoint=2), OF_CHECKPOINT, numbers_of("run")
    ),
    Reader("init from a checkpoint", pretrain.main, _beginning(CHECKPOINT), OF_CHECKPOINT, first_loss),
    Reader("init from Hugging Face", pretrain.main, _beginning("hf"), ("hf/*",), first_loss),
    Reader("corpus", pretrain.main, _beginning("paddle"), OF_DATA, first_loss),
    *(
        Reader(f"convert {weights} {mode}", command.main, _converting(weights, mode, *more), files, converted)
        for weights, mode, files, more in (
            (CHECKPOINT, "te2hf", OF_CHECKPOINT, ()),
            (UNIFIED, "te2pd", OF_UNIFIED, ("--with_optimizer",)),
            ("hf", "hf2te", ("hf/*",), ()),
        )
    ),
    *(
        Reader(
            f"evaluate {weights}",
            evaluate.main,
            lambda place, weights=weights: evaluation_words(place, model_name_or_path=place / weights),
            files,
        )
        for weights, files in ((CHECKPOINT, OF_CHECKPOINT), ("hf", ("hf/*", "texts.jsonl")))
    ),
    *(
        Reader(
            f"evaluate with {adapter}",
            evaluate.main,
            lambda place, adapter=adapter: evaluation_words(place, lora_path=place / adapter),
            files,
        )
        for adapter, files in ((ADAPTER, (f"{ADAPTER}/*", f"{ADAPTER}/.*")), ("lora", ("lora/*",)))
    ),
    Reader(
        "tune an adapter",
        finetune.main,
        lambda place: finetuning_words(place, lora="true", lora_path=place / "lora", max_steps=1, save_steps=9),
        ("lora/*", "paddle/*", "questions/*"),
        first_loss,
    ),
    Reader(
        "tune on chats",
        finetune.main,
        lambda place: finetuning_words(
            place,
            tokenizer_name_or_path=place / "chats",
            dataset_name_or_path=place / "chats",
            per_device_train_batch_size=1,
            max_steps=1,
            save_steps=9,
        ),
        ("chats/*",),
        first_loss,
    ),
    Reader(
        "verify",
        verify.main,
        lambda place: [place / "run", place / "unified", place / "lora"],
        (*OF_CHECKPOINT, *OF_UNIFIED, f"{ADAPTER}/*", f"{ADAPTER}/.*"),
        lambda place, text: [line.split()[1] for line in text.splitlines()],
        argv=False,
    ),
    *(
        Reader(f"launch {job}", launch.main, _launching(job), files, argv=False)
        for job, files in (("pretrain", (*OF_DATA, "tokenizers/llama3/*", "hf/*", "paddle/*")),)
    ),
    *(
        Reader(
            f"prepare with {name}",
            prepare.main,
            _preparing(name),
            (f"tokenizers/{name}/*", "texts.jsonl"),
            prepared,
            argv=False,
        )
        for name in ("llama", "llama_older", "qwen2", "qwen2_json", "gpt2", "llama3", "deepseek")
    ),
]
READERS = {reader.name: reader for reader in _READERS}
