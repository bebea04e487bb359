"""Datasets for pretraining: PaddleNLP's causal dataset over a ``.bin``/``.idx`` pair, or random tokens (--mock_data).

`create_pretrained_dataset` counts samples and splits documents as PaddleNLP's ``llm/run_pretrain.py`` does, so that
both see the same batches in the same order. What is wrong with the data is told before any index is built.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle.distributed as dist
from numpy.typing import NDArray
from paddlenlp.data import causal_dataset
from paddlenlp.data.causal_dataset import get_datasets_weights_and_num_samples, get_train_valid_test_split_

from paddle_te.data import corpus, index_cache
from paddle_te.data.index_cache import SPLITS
from paddle_te.data.mock import MockDataset
from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.host import HostArguments
from paddle_te.hosts.paddlenlp.training.arguments import data_seed
from paddle_te.options import check_values
from paddle_te.options.pretraining import PretrainData, proportions
from paddle_te.records import Record, record
from paddle_te.runs.identity import fingerprint

logger = logging.getLogger(__name__)

DO_FLAGS = dict(zip(SPLITS, ("train", "eval", "predict"), strict=True))
# What they change where a sequence has several documents: who sees whom, positions, and what is trained on
DOCUMENT_FLAGS = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")


Datasets = Sequence[Any]  # of the parts of a run; None for a part that it does not have


@record
class DataArguments(Record, PretrainData):
    """What to train on. Names and defaults are PaddleNLP's; mock_data is ours, and DOCUMENT_FLAGS are Megatron's."""

    def __post_init__(self) -> None:
        check_values(self)


def collate_fn(samples: Sequence[Mapping[str, Any]], vocab_size: int | None = None) -> dict[str, NDArray[np.int64]]:
    """Return a batch of ``{"text": [s + 1]}``: ``{"input_ids": int64 [b, s], "labels": int64 [b, s]}``.

    ``labels[:, i]`` is the token after ``input_ids[:, i]``: PaddleNLP's criterion does not shift. Raises ValueError for
    a token id that is not below vocab_size (None: not checked).
    """
    tokens = np.stack([sample["text"] for sample in samples])
    if vocab_size is not None:
        corpus.check_sequences(tokens, vocab_size)
    return {"input_ids": np.ascontiguousarray(tokens[:, :-1]), "labels": np.ascontiguousarray(tokens[:, 1:])}


def create_pretrained_dataset(
    data_args: DataArguments,
    training_args: HostArguments,
    tokenizer: AnyTokenizer | None = None,
    vocab_size: int | None = None,
    train_samples: int | None = None,
) -> Datasets:
    """Return the datasets of a pretraining run.

    Args:
        data_args: `DataArguments`.
        training_args: PaddleNLP's TrainingArguments; max_steps, the batch sizes and dataset_world_size give the number
            of samples, ``eval_iters`` (10 if it has none) and ``test_iters`` (ten times that) those for evaluation.
        tokenizer: gives the vocabulary's size if `vocab_size` is None.
        vocab_size: the model's; token ids of the data must be below it.
        train_samples: how many the run reads, with those before its checkpoint; None: as many as its steps take.

    Returns:
        (train, valid, test datasets). A dataset whose split has no documents is None, and all three are on ranks that
        load no data (``training_args.should_load_dataset``).

    Raises:
        ValueError: a wrong argument or unfit data; the message says which and what to do.
    """
    if vocab_size is None and tokenizer is not None:
        vocab_size = len(tokenizer)
    num_samples = count_samples(training_args)
    num_samples[0] = num_samples[0] and (train_samples or num_samples[0])
    logger.debug(f"samples: {dict(zip(SPLITS, num_samples, strict=True))}, {data_args.max_seq_length} tokens each")

    if data_args.mock_data:
        return _mock_datasets(num_samples, data_args.max_seq_length, vocab_size, data_seed(training_args))
    return _causal_datasets(data_args, training_args, num_samples, vocab_size)


def _causal_datasets(
    data_args: DataArguments, training_args: HostArguments, num_samples: Sequence[int], vocab_size: int | None
) -> Datasets:
    """Return PaddleNLP's datasets, when the data are checked and the orders of their samples lie in files."""
    data, orders = find_data(data_args), []
    counts = [max(count, 1) for count in num_samples]  # PaddleNLP cannot blend nothing
    length, seed = data_args.max_seq_length, data_seed(training_args)
    if training_args.should_load_dataset:
        _check_index_builder()
        _check_splits(corpus.prefixes_of(data), data_args, training_args, vocab_size)
        data = _where_orders_lie(data, data_args, training_args)
        orders = index_cache.orders_of(causal_dataset, data, counts, length, seed, data_args.split)
    _provide_orders(orders, data_args)
    return causal_dataset.build_train_valid_test_datasets(
        data_prefix=data,
        data_impl="mmap",
        splits_string=data_args.split,
        train_val_test_num_samples=counts,
        seq_length=length,
        seed=seed,
        skip_warmup=True,
        share_folder=data_args.share_folder,
        need_data=training_args.should_load_dataset,
    )


def _mock_datasets(counts: Sequence[int], length: int, vocab_size: int | None, seed: int) -> Datasets:
    if vocab_size is None:
        raise ValueError("mock_data needs a tokenizer or a vocab_size")
    return tuple(
        MockDataset(count, length, vocab_size, [seed, split]) if count else None for split, count in enumerate(counts)
    )


def data_identity(data_args: DataArguments, seed: int, train_samples: int | None = None) -> dict[str, object]:
    """Return {name: value}: two runs where these are equal read the same samples in the same order.

    train_samples: how many the run reads; None where it does not train. Raises ValueError where there is no such data.
    """
    identity: dict[str, object] = {"max_seq_length": data_args.max_seq_length, "seed": seed}
    identity |= {name: getattr(data_args, name) for name in DOCUMENT_FLAGS}
    if data_args.mock_data:
        return {"source": "random tokens"} | identity
    data = find_data(data_args)
    weights = data[::2] if data[1::2] else [1.0]
    paths = [prefix + suffix for prefix in corpus.prefixes_of(data) for suffix in (".idx", ".bin")]
    if train_samples:
        identity["shuffled together"] = passes(data, data_args, train_samples)
    return {"source": fingerprint(paths, weights), "split": data_args.split} | identity


def passes(data: list[str | float], data_args: DataArguments, train_samples: int) -> str:
    """Return how PaddleNLP shuffles the training samples, as text.

    "1 pass" over the documents, or "3 passes"; "and the last apart" where less than four fifths of that one are
    read. The order is another one where this differs.

    data: as `find_data` returns it; for several corpora it is a text for each.
    """
    if data[1::2]:
        prefixes, _, counts = get_datasets_weights_and_num_samples(data, [train_samples, 1, 1])
        return ", ".join(
            _passes(prefix, data_args, count) for prefix, (count, *_) in zip(prefixes, counts, strict=True)
        )
    return _passes(str(data[0]), data_args, train_samples)


def _passes(prefix: str, data_args: DataArguments, count: int) -> str:
    index, length = corpus.read_index(prefix), data_args.max_seq_length
    end = get_train_valid_test_split_(data_args.split, len(index.sizes))[1]
    tokens = int(index.sizes[:end].sum(dtype=np.int64))
    number = index_cache.passes(count, length, tokens)
    last = count - ((number - 1) * tokens - 1) // length
    apart = number > 1 and last < int(0.8 * ((tokens - 1) // length))
    return f"{number} pass{'es' * (number > 1)}" + " and the last apart" * apart


def count_samples(training_args: HostArguments) -> list[int]:
    """Return the samples of the train, valid and test datasets, over all data-parallel ranks; 0 for what is not done.

    Raises:
        ValueError: do_train without a positive max_steps.
    """
    args, world = training_args, training_args.dataset_world_size
    if args.do_train and args.max_steps <= 0:
        raise ValueError(f"max_steps is {args.max_steps}: give the number of training steps with --max_steps")
    eval_iters = getattr(args, "eval_iters", 10)
    test_iters = getattr(args, "test_iters", 10 * eval_iters)
    # One evaluation each eval_steps and one at the end.
    evaluations = args.max_steps // args.eval_steps + 1 if args.eval_steps and args.max_steps > 0 else 1
    train = args.per_device_train_batch_size * world * args.max_steps * args.gradient_accumulation_steps
    return [
        train if args.do_train else 0,
        args.per_device_eval_batch_size * world * eval_iters * evaluations if args.do_eval else 0,
        args.per_device_eval_batch_size * world * test_iters if args.do_predict else 0,
    ]


def find_data(data_args: DataArguments) -> list[str | float]:
    """Return `corpus.find_data` of the run's arguments."""
    return corpus.find_data(data_args.input_dir)


def _check_splits(
    prefixes: Sequence[str], data_args: DataArguments, training_args: HostArguments, vocab_size: int | None
) -> None:
    """Refuse data that leaves nothing for something the run does, or that PaddleNLP cannot blend."""
    split = data_args.split
    needed = {name: f"do_{flag}" for name, flag in DO_FLAGS.items() if getattr(training_args, f"do_{flag}")}
    for name, proportion in zip(SPLITS, proportions(split), strict=True):
        if name in needed and proportion == 0:
            raise ValueError(f"split {split!r} leaves nothing for {name}, which {needed[name]} needs")
    counts = [check_data(prefix, data_args, needed, vocab_size) for prefix in prefixes]
    for name, of_each in zip(SPLITS, zip(*counts, strict=True), strict=True):
        if any(of_each) and not all(of_each):  # PaddleNLP blends a split of all or of none
            empty = prefixes[of_each.index(0)]
            raise ValueError(f"split {split!r} leaves {name} no document of {empty}: give {name} a larger share, or 0")


def check_data(
    prefix: str, data_args: DataArguments, needed: Mapping[str, str], vocab_size: int | None = None
) -> list[int]:
    """Refuse a .bin/.idx pair that is damaged, or cannot give one sequence for each split of `needed` ({name: flag}).

    Returns:
        The numbers of documents in train, valid and test.

    Raises:
        ValueError: the index is no index, .bin is cut short, a split has too few tokens, or a token id is not below
            `vocab_size` (None: not checked).
    """
    index = corpus.read_index(prefix)
    bounds = get_train_valid_test_split_(data_args.split, len(index.sizes))
    for name, start, end in zip(SPLITS, bounds, bounds[1:], strict=False):
        available = int(index.sizes[start:end].sum(dtype=np.int64))
        if name in needed and available < data_args.max_seq_length + 1:
            raise ValueError(
                f"{prefix}: too few tokens for one sequence: split {data_args.split!r} gives {name} "
                f"{end - start} of {len(index.sizes)} documents with {available} tokens, and max_seq_length "
                f"{data_args.max_seq_length} needs {data_args.max_seq_length + 1}; use more data, another split, "
                f"shorter sequences, or leave out {needed[name]}"
            )
        if end > start and available == 0:  # PaddleNLP would count epochs for ever
            raise ValueError(f"{prefix}: all {end - start} documents of {name} are empty: prepare the data again")
    if vocab_size is not None:
        corpus.check_vocabulary(prefix, index, vocab_size)
    return [end - start for start, end in zip(bounds, bounds[1:], strict=False)]


def _check_index_builder() -> None:
    """Refuse a missing package, which PaddleNLP meets on the first rank only, while the others wait for it."""
    try:
        from fast_dataindex import helpers  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"PaddleNLP builds its indices with fast_dataindex: pip install fast_dataindex ({error})"
        ) from error


def _provide_orders(orders: list[index_cache.Order], data_args: DataArguments) -> None:
    """Make the orders' files on the rank that does, and await them on all."""
    if _makes_orders(data_args):
        index_cache.provide(causal_dataset, orders, data_args.share_folder)
    if dist.get_world_size() > 1:
        dist.barrier()
    index_cache.await_orders(orders)


def _makes_orders(data_args: DataArguments) -> bool:
    """Return whether this process makes what others of the folder read, as PaddleNLP chooses it."""
    local_rank = int(os.environ.get("PADDLE_RANK_IN_NODE", 0))
    return (dist.get_rank() if data_args.share_folder else local_rank) == 0


def _where_orders_lie(
    data: list[str | float], data_args: DataArguments, training_args: HostArguments
) -> list[str | float]:
    """Return the data with prefixes beside which PaddleNLP's orders of samples can be written.

    They are the data's own, or links to them. data: as `find_data` returns it.
    """
    prefixes, cache = corpus.prefixes_of(data), data_args.data_cache
    if cache is None:
        if all(_writable(os.path.dirname(prefix) or ".") for prefix in prefixes):
            return data
        cache = os.path.join(training_args.output_dir, index_cache.FOLDER)
        logger.info(f"{data_args.input_dir} cannot be written: the indices of samples go to {cache}")
    links = [index_cache.linked(prefix, cache) for prefix in prefixes]
    return [item for pair in zip(data[::2], links, strict=True) for item in pair] if data[1::2] else [*links]


def _writable(folder: str) -> bool:
    cache = os.path.join(folder, index_cache.FOLDER)
    return os.access(cache if os.path.isdir(cache) else folder, os.W_OK)
