"""Data of supervised fine-tuning, in PaddleNLP's format: JSON lines {"src": question, "tgt": answer}.

A sample is src, tgt and end-of-text, as PaddleNLP's llm/run_finetune.py makes it without a chat template; only the
answer has labels. Batches are padded on the right, where causal attention needs no mask; packed ones ("zero padding")
carry positions and boundaries that keep the samples of a sequence apart.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle
from paddlenlp.datasets.zero_padding_dataset import ZeroPaddingMapDataset

from paddle_te.data import jsonl
from paddle_te.data.questions import IGNORED, encode
from paddle_te.hosts.paddlenlp.training.packing import separation
from paddle_te.ops import documents
from paddle_te.options import check_values, with_options
from paddle_te.options.scripts import FINETUNE_DATA
from paddle_te.runs.identity import fingerprint


@dataclass
@with_options(*FINETUNE_DATA)
class FinetuneDataArguments:
    """What to fine-tune on. Names are those of PaddleNLP's run_finetune."""

    def __post_init__(self):
        check_values(self)
        if not 0 < self.src_length < self.max_length:
            raise ValueError(f"--src_length {self.src_length}: it must be between 0 and --max_length {self.max_length}")
        if self.max_length % self.pad_to_multiple_of:
            raise ValueError(
                f"--pad_to_multiple_of {self.pad_to_multiple_of}: it must divide --max_length {self.max_length}"
            )


def tokenize(tokenizer, where, record, src_length, max_length):
    """The sample of a record, as `encode` makes it of its src and tgt, texts or lists of one.

    Raises ValueError, with `where`, for another record.
    """
    src, tgt = (_text(where, record, name) for name in ("src", "tgt"))
    return encode(tokenizer, src, tgt, src_length, max_length)


def _text(where, record, name):
    value = jsonl.field(where, record, name, str, list)
    if isinstance(value, list):
        if len(value) != 1 or not isinstance(value[0], str):
            raise ValueError(
                f'{where}: "{name}" has {len(value)} turns; conversations are not supported, give one text'
            )
        value = value[0]
    if not value.strip():
        raise ValueError(f'{where}: "{name}" is empty')
    return value


class Samples(paddle.io.Dataset):
    """A list of samples."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def create_dataset(path, tokenizer, data_args):
    """Samples of a file of JSON lines, packed with zero_padding. Raises FileNotFoundError or ValueError."""
    records = jsonl.read_json_lines(path)
    samples = [tokenize(tokenizer, *record, data_args.src_length, data_args.max_length) for record in records]
    if not data_args.zero_padding:
        return Samples(samples)
    for sample in samples:
        # where the tokens' sample ends: PaddleNLP's packing adds what lies before; without it makes a mask of [n, n]
        sample["attn_mask_startend_row_indices"] = [len(sample["input_ids"])] * len(sample["input_ids"])
    return ZeroPaddingMapDataset(samples, tokenizer, data_args.max_length, data_args.greedy_zero_padding)


def create_datasets(data_args, tokenizer, do_train, do_eval):
    """(train, dev) of dataset_name_or_path, None for what is not done."""
    if not do_train and not do_eval:
        return None, None
    if data_args.dataset_name_or_path is None:
        raise ValueError("--dataset_name_or_path is needed: a folder of train.json and dev.json")
    folder = Path(data_args.dataset_name_or_path)
    make = lambda name: create_dataset(folder / name, tokenizer, data_args)  # noqa: E731
    return make("train.json") if do_train else None, make("dev.json") if do_eval else None


def data_identity(data_args, seed):
    """{name: value}: two runs where these are equal train on the same samples in the same order."""
    names = ("src_length", "max_length", "zero_padding", "greedy_zero_padding")
    settings = {name: getattr(data_args, name) for name in names}
    return {"source": fingerprint([Path(data_args.dataset_name_or_path) / "train.json"]), "seed": seed} | settings


def tokens_per_sample(dataset):
    """Mean length, padding not counted."""
    return float(np.mean([len(dataset[i]["input_ids"]) for i in range(len(dataset))]))


def lengths_of(packed, length):
    """The samples' lengths in a packed one, which padding makes `length` tokens long, with that of the padding."""
    ends = np.unique([*packed["attn_mask_startend_row_indices"], length])
    return np.diff(ends, prepend=0).tolist()


class Collator:
    """Samples to a batch: {"input_ids", "labels"}, int64 [b, s]; packed also "position_ids" [b, s] and what keeps the
    samples apart, a mask where `masked` (`packing.separation`)."""

    def __init__(self, data_args, masked=False, pad_token_id=0):
        self.data_args, self.masked, self.pad_token_id = data_args, masked, pad_token_id

    def __call__(self, samples):
        args = self.data_args
        longest = max(len(sample["input_ids"]) for sample in samples)
        multiple = args.pad_to_multiple_of
        length = args.max_length if args.pad_to_max_length else -(-longest // multiple) * multiple
        pad = lambda name, value: np.array(  # noqa: E731
            [list(sample[name]) + [value] * (length - len(sample[name])) for sample in samples], "int64"
        )
        batch = {"input_ids": pad("input_ids", self.pad_token_id), "labels": pad("labels", IGNORED)}
        if args.zero_padding:
            rows = [lengths_of(sample, length) for sample in samples]
            batch["position_ids"] = documents.positions(rows)
            batch |= separation(rows, self.masked)
        return batch
