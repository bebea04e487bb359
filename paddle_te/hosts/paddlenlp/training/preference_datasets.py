"""Data of preference tuning: packed rows of pairs of answers (`data.preference_samples`)."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_te.data.chat_template import ChatTemplate
from paddle_te.data.packs import pack
from paddle_te.data.preference_samples import Pair, PairMaker, pairs_of
from paddle_te.data.questions import IGNORED
from paddle_te.data.records import DEV, TRAIN, find_files
from paddle_te.data.samples import SampleMaker
from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.host import HostArguments
from paddle_te.hosts.paddlenlp.training.datasets import Datasets
from paddle_te.hosts.paddlenlp.training.packing import separation
from paddle_te.ops import documents
from paddle_te.options import check_values
from paddle_te.options.tuning import PreferenceData
from paddle_te.records import Record, record
from paddle_te.runs.identity import fingerprint
from paddle_te.training.loss_weights import COUNTS

logger = logging.getLogger(__name__)

# What a batch has of its answers, for `training.preference_loss`
MEMBERS, LENGTHS, PRESENT, GOOD, REFERENCE = "members", "answer_tokens", "present", "good", "reference"
LABELS_MULTIPLE = 128  # their number is rounded up to it, so that allocations repeat


@record
class PreferenceDataArguments(Record, PreferenceData):
    """What to tune on. Names are those of PaddleNLP's run_dpo; `dataset_name_or_path` is run_finetune's."""

    zero_padding: ClassVar[bool] = True  # always

    @property
    def max_length(self) -> int:
        """Return the tokens of a row, under the name that fine-tuning has for it."""
        return self.max_seq_len

    def __post_init__(self) -> None:
        check_values(self)

    def files(self, split: str) -> list[Path]:
        """Return the files of TRAIN or DEV."""
        if file := self.train_dataset_path if split == TRAIN else self.dev_dataset_path:
            return [Path(file).expanduser()]
        if self.dataset_name_or_path is None:
            raise ValueError("--train_dataset_path or --dataset_name_or_path is needed: a file, or a folder of files")
        return find_files(self.dataset_name_or_path, split)


class Rows(paddle.io.Dataset[dict[str, Any]]):
    """Packed rows of pairs.

    An item is {"input_ids", "labels", "answers": the number of each token's answer in the row, int32 [n], "lengths":
    those of the answers with their questions, "good": of each pair, "reference": float32 [pairs, 2], or None}.

    reference: the reference's log-probabilities of each pair's answers, float32 [pairs of the data set, 2], or None.
    """

    def __init__(self, pairs: Sequence[Pair], packs: Sequence[list[int]]) -> None:
        super().__init__()
        self.pairs, self.packs = pairs, packs
        self.reference: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.packs)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest answer with its question."""
        return max(len(sample.input_ids) for pair in self.pairs for sample in pair.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = self.packs[index]
        pairs = [self.pairs[number] for number in numbers]
        samples = [sample for pair in pairs for sample in pair.samples]
        lengths = [len(sample.input_ids) for sample in samples]
        return {
            "input_ids": np.concatenate([sample.input_ids for sample in samples]),
            "labels": np.concatenate([sample.labels for sample in samples]),
            "answers": np.repeat(np.arange(len(samples), dtype=np.int32), lengths),
            "lengths": lengths,
            "good": [pair.good for pair in pairs],
            REFERENCE: None if self.reference is None else self.reference[numbers],
        }


def create_dataset(
    paths: list[Path],
    tokenizer: AnyTokenizer,
    template: ChatTemplate | None,
    data_args: PreferenceDataArguments,
    labelled: bool,
) -> Rows:
    """Return the Rows of the records in files; labelled: for KTO. Raises FileNotFoundError or ValueError."""
    maker = SampleMaker(tokenizer, template, data_args.max_seq_len, data_args.max_seq_len)
    pairs = PairMaker(maker, data_args.max_seq_len, data_args.max_prompt_len)
    found = pairs_of(paths, pairs, labelled)
    longest = f"--max_seq_len {data_args.max_seq_len} or --max_prompt_len {data_args.max_prompt_len}"
    told = pairs.tally.words("answers with a label" if labelled else "pairs", longest)
    tokens = sum(map(len, found))
    again = sum(pair.repeated for pair in found) / tokens
    logger.info(f"{paths[0].parent}: {', '.join(path.name for path in paths)}: {told}; questions twice, {again:.0%}")
    return Rows(found, pack([len(pair) for pair in found], data_args.max_seq_len, data_args.greedy_zero_padding))


def create_datasets(
    data_args: PreferenceDataArguments,
    tokenizer: AnyTokenizer,
    template: ChatTemplate | None,
    training_args: HostArguments,
    labelled: bool,
) -> Datasets:
    """Return (train, dev), None for what is not done."""
    make = lambda split: create_dataset(data_args.files(split), tokenizer, template, data_args, labelled)  # noqa: E731
    return make(TRAIN) if training_args.do_train else None, make(DEV) if training_args.do_eval else None


def data_identity(
    data_args: PreferenceDataArguments, template: ChatTemplate | None, seed: int | None, split: str = TRAIN
) -> dict[str, Any]:
    """Return {name: value}: two runs where these are equal train on the same rows in the same order."""
    settings = {name: getattr(data_args, name) for name in ("max_seq_len", "max_prompt_len", "greedy_zero_padding")}
    source = fingerprint(data_args.files(split))
    return {"source": source, "chat_template": template.fingerprint if template else "none", "seed": seed} | settings


def tokens_per_row(dataset: Rows) -> float:
    """Return the mean length, padding not counted."""
    return sum(map(len, dataset.pairs)) / len(dataset)


class PreferenceCollator:
    """Make batches of Rows' items.

    A batch has "input_ids" and "position_ids", int64 [b, s]; what keeps answers apart (`packing.separation`); "labels",
    int64 [2, n], the places of the labels and the tokens; and of the answers

    MEMBERS: float32 [2, m, n], which labels belong to the first and the second answer of each of the m pairs; LENGTHS:
    float32 [2, m], how many; PRESENT: float32 [m], 0 for a filler's; GOOD: float32 [m], for KTO; REFERENCE: float32
    [2, m], where it is known; COUNTS: for each row its pairs, and the labels of their first answers.

    Of `ranks` that share each sequence, one after the other, "labels" and MEMBERS are of this rank's tokens; the model
    still gets whole rows, of which it takes its own part. LENGTHS and COUNTS are of whole answers.
    """

    def __init__(
        self, length: int, masked: bool, pipeline: bool = False, rank: int = 0, ranks: int = 1, pad_token_id: int = 0
    ) -> None:
        self.length, self.masked, self.pipeline, self.pad_token_id = length, masked, pipeline, pad_token_id
        self.rank, self.ranks = rank, ranks

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        lengths = [[*row["lengths"], self.length - len(row["input_ids"])] for row in rows]
        lengths = [[length for length in row if length] for row in lengths]
        batch: dict[str, Any] = {"input_ids": np.full([len(rows), self.length], self.pad_token_id, np.int64)}
        for tokens, row in zip(batch["input_ids"], rows, strict=True):
            tokens[: len(row["input_ids"])] = row["input_ids"]
        batch |= {"position_ids": documents.positions(lengths), **separation(lengths, self.masked, self.pipeline)}
        return batch | self._of_answers(rows)

    def _of_answers(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        labels = [np.asarray(row["labels"]) for row in rows]
        kept = [np.flatnonzero(each != IGNORED) for each in labels]
        answers, before = [], 0
        for row, places in zip(rows, kept, strict=True):
            answers.append(row["answers"][places] + before)
            before += len(row["lengths"])
        tokens = np.concatenate([each[places] for each, places in zip(labels, kept, strict=True)])
        answers = np.concatenate(answers)
        lengths = np.bincount(answers, minlength=before).astype(np.float32)
        own, places = self._own_places(kept)
        tokens, answers, count = tokens[own], answers[own], len(places)
        members = np.zeros([before, max(-(-count // LABELS_MULTIPLE), 1) * LABELS_MULTIPLE], np.float32)
        members[answers, np.arange(count)] = 1
        padded = np.stack([np.zeros(members.shape[1], np.int64), np.full(members.shape[1], IGNORED, np.int64)])
        padded[:, :count] = places, tokens
        present = [[float(len(each) > 0)] * len(row["good"]) for row, each in zip(rows, kept, strict=True)]
        members = np.ascontiguousarray(members.reshape([-1, 2, members.shape[1]]).transpose([1, 0, 2]))
        batch = {"labels": padded, MEMBERS: members, LENGTHS: np.ascontiguousarray(lengths.reshape([-1, 2]).T)}
        batch[PRESENT] = np.concatenate(present).astype(np.float32)
        batch[GOOD] = np.concatenate([row["good"] for row in rows]).astype(np.float32)
        if rows[0][REFERENCE] is not None:
            batch[REFERENCE] = np.concatenate([row[REFERENCE] for row in rows]).T.astype(np.float32)
        batch[COUNTS] = [self._counts(row, each) for row, each in zip(rows, kept, strict=True)]
        return batch

    def _own_places(self, kept: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return which labels this rank's tokens have, and these tokens' places among its own; kept: those in rows."""
        length = self.length // self.ranks
        inside, rows = np.concatenate(kept), np.repeat(np.arange(len(kept)), [len(places) for places in kept])
        own = inside // length == self.rank
        return own, (inside % length + rows * length)[own]

    @staticmethod
    def _counts(row: dict[str, Any], places: NDArray[np.int64]) -> list[int]:
        """Return [pairs, labels of their first answers]; a filler has none."""
        first = int((row["answers"][places] % 2 == 0).sum())
        return [len(row["good"]) if len(places) else 0, first]
