"""Data of supervised fine-tuning: conversations, and questions with their answers (`data.samples`).

Only what the assistant writes has labels. Batches are padded on the right, where causal attention needs no mask; packed
ones ("zero padding") carry positions and boundaries that keep the samples of a sequence apart.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_te.data.chat_template import ChatTemplate
from paddle_te.data.packs import pack
from paddle_te.data.questions import IGNORED
from paddle_te.data.records import DEV, TRAIN, find_files
from paddle_te.data.samples import Sample, SampleMaker, samples_of
from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.hosts.paddlenlp.training.datasets import Datasets
from paddle_te.hosts.paddlenlp.training.packing import separation
from paddle_te.ops import documents
from paddle_te.options import check_values
from paddle_te.options.tuning import FinetuneData
from paddle_te.records import Record, record
from paddle_te.runs.identity import fingerprint

logger = logging.getLogger(__name__)


@record
class FinetuneDataArguments(Record, FinetuneData):
    """What to fine-tune on. Names are those of PaddleNLP's run_finetune."""

    def __post_init__(self) -> None:
        check_values(self)
        if not 0 < self.src_length < self.max_length:
            raise ValueError(f"--src_length {self.src_length}: it must be between 0 and --max_length {self.max_length}")
        if self.max_length % self.pad_to_multiple_of:
            raise ValueError(
                f"--pad_to_multiple_of {self.pad_to_multiple_of}: it must divide --max_length {self.max_length}"
            )


class Samples(paddle.io.Dataset[dict[str, Any]]):
    """Samples, or packs of several.

    An item is {"input_ids", "labels"}, int32 [n], and of a pack also "lengths", those of its samples.
    """

    def __init__(self, samples: Sequence[Sample], packs: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__()
        self.samples, self.packs = samples, packs

    def __len__(self) -> int:
        return len(self.samples if self.packs is None else self.packs)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sample."""
        return max(len(sample.input_ids) for sample in self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.packs is None:
            return _item([self.samples[index]])
        packed = [self.samples[number] for number in self.packs[index]]
        return _item(packed) | {"lengths": [len(sample.input_ids) for sample in packed]}


def _item(samples: Sequence[Sample]) -> dict[str, Any]:
    return {name: np.concatenate([getattr(sample, name) for sample in samples]) for name in ("input_ids", "labels")}


def chat_template(data_args: FinetuneDataArguments, tokenizer: AnyTokenizer, origin: str | Path) -> ChatTemplate | None:
    """Return the chat template that the flags ask for, or that of the tokenizer, whose folder is `origin`; or None."""
    return ChatTemplate.of(tokenizer, str(origin), data_args.chat_template)


def create_dataset(
    paths: list[Path], tokenizer: AnyTokenizer, template: ChatTemplate | None, data_args: FinetuneDataArguments
) -> Samples:
    """Return samples of the conversations in files, packed with zero_padding. Raise FileNotFoundError or ValueError."""
    maker = SampleMaker(tokenizer, template, data_args.src_length, data_args.max_length)
    samples = samples_of(paths, maker)
    folder = paths[0].parent
    logger.info(f"{folder}: {', '.join(path.name for path in paths)}: {maker.tally.words(data_args.max_length)}")
    if template and maker.tally.reworded:
        logger.warning(
            f"{maker.tally.reworded}: the chat template of {template.origin} writes turns differently when others "
            "follow (without their reasoning, or the system's turn): answers before the last are learned after another "
            "text than the one that they will be asked for with"
        )
    if not data_args.zero_padding:
        return Samples(samples)
    lengths = [len(sample.input_ids) for sample in samples]
    return Samples(samples, pack(lengths, data_args.max_length, data_args.greedy_zero_padding))


def create_datasets(
    data_args: FinetuneDataArguments,
    tokenizer: AnyTokenizer,
    template: ChatTemplate | None,
    do_train: bool,
    do_eval: bool,
) -> Datasets:
    """Return (train, dev) of dataset_name_or_path, None for what is not done."""
    if not do_train and not do_eval:
        return None, None
    if data_args.dataset_name_or_path is None:
        raise ValueError("--dataset_name_or_path is needed: a folder of train.json and dev.json")
    splits = TRAIN if do_train else None, DEV if do_eval else None
    paths = [split and find_files(data_args.dataset_name_or_path, split) for split in splits]
    return [create_dataset(each, tokenizer, template, data_args) if each else None for each in paths]


def data_identity(data_args: FinetuneDataArguments, template: ChatTemplate | None, seed: int) -> dict[str, object]:
    """Return {name: value}: two runs where these are equal train on the same samples in the same order."""
    names = ("src_length", "max_length", "zero_padding", "greedy_zero_padding")
    settings = {name: getattr(data_args, name) for name in names}
    source = fingerprint(find_files(str(data_args.dataset_name_or_path), TRAIN))
    return {"source": source, "chat_template": template.fingerprint if template else "none", "seed": seed} | settings


def tokens_per_sample(dataset: Samples) -> float:
    """Return the mean length, padding not counted."""
    return sum(len(sample.input_ids) for sample in dataset.samples) / len(dataset)


def _padded(rows: Sequence[Sequence[int]], length: int, value: int) -> NDArray[np.int64]:
    """Return the rows, int64 [b, length], with `value` behind their ends."""
    batch = np.full([len(rows), length], value, np.int64)
    for row, tokens in zip(batch, rows, strict=True):
        row[: len(tokens)] = tokens
    return batch


def _lengths(packed: Mapping[str, Any], length: int) -> list[int]:
    """Return the lengths of a packed sample's samples, and of the padding that makes it `length` tokens long."""
    padding = length - len(packed["input_ids"])
    return packed["lengths"] + [padding] * bool(padding)


class Collator:
    """Make a batch of samples: {"input_ids", "labels"}, int64 [b, s].

    A packed one has "position_ids" [b, s], too, and what keeps the samples apart, a mask where `masked`
    (`packing.separation`).
    """

    def __init__(self, data_args: FinetuneDataArguments, masked: bool = False, pad_token_id: int = 0) -> None:
        self.data_args, self.masked, self.pad_token_id = data_args, masked, pad_token_id

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
        args = self.data_args
        longest = max(len(sample["input_ids"]) for sample in samples)
        multiple = args.pad_to_multiple_of
        length = args.max_length if args.pad_to_max_length else -(-longest // multiple) * multiple
        values = {"input_ids": self.pad_token_id, "labels": IGNORED}
        batch = {name: _padded([sample[name] for sample in samples], length, values[name]) for name in values}
        if args.zero_padding:
            rows = [_lengths(sample, length) for sample in samples]
            batch["position_ids"] = documents.positions(rows)
            batch |= separation(rows, self.masked)
        return batch
