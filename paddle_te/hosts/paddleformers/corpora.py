"""Indexed corpora of PaddleFormers' recipes: compared before they are read, and their orders of samples made whole.

PaddleFormers believes an index and what lies in index-cache, as PaddleNLP does, and waits without end for an order of
which a death has left only the description.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paddle.distributed as dist
from paddleformers.cli.train.sft import workflow
from paddleformers.data import causal_dataset

from paddle_te.data import corpus, index_cache
from paddle_te.host import HostArguments
from paddle_te.hosts.paddleformers.weights import vocabulary_of

CONTINUED = "::CPT"  # at a prefix' end: PaddleFormers trains it with another loss


def check_corpora(recipe: Mapping[str, Any]) -> None:
    """Refuse a recipe's indexed corpora that are damaged. Raise CorpusError."""
    if recipe.get("dataset_type") == "pretrain" and recipe.get("input_dir"):
        for prefix in _prefixes(recipe["input_dir"]):
            corpus.read_index(prefix)


def _prefixes(input_dir: str) -> list[str]:
    return corpus.prefixes_of(corpus.find_data(" ".join(_words(input_dir))))


def _words(input_dir: str) -> list[str]:
    return [word.removesuffix(CONTINUED) for word in input_dir.split()]


def checked() -> Callable[..., tuple[Any, ...]]:
    """Return PaddleFormers' function that makes data sets of an indexed corpus, with corpora and orders checked."""
    theirs = workflow.create_pretrained_dataset

    def create(training_args: HostArguments, data_args: HostArguments, model_args: HostArguments) -> tuple[Any, ...]:
        vocab_size = vocabulary_of(model_args.model_name_or_path or "")
        if vocab_size:
            for prefix in _prefixes(data_args.input_dir):
                corpus.check_vocabulary(prefix, corpus.read_index(prefix), vocab_size)
        _provide_orders(training_args, data_args)
        *datasets, collate = theirs(training_args, data_args, model_args)

        def ours(samples: Sequence[Any]) -> Any:
            if vocab_size:
                for sample in samples:
                    corpus.check_sequences(sample["text"], vocab_size)
            return collate(samples)

        return *datasets, ours

    return create


def _provide_orders(args: HostArguments, data_args: HostArguments) -> None:
    """Make the orders that PaddleFormers reads for a run. Collective."""
    world, steps = args.dataset_world_size, args.max_steps
    counts = [
        args.per_device_train_batch_size * world * steps * args.gradient_accumulation_steps,
        args.per_device_eval_batch_size * world * args.eval_iters * (steps // args.eval_steps + 1),
        args.per_device_eval_batch_size * world * args.test_iters,
    ]
    length = data_args.max_seq_len + args.num_nextn_predict_layers
    data: list[str | float] = [*_words(data_args.input_dir)]
    orders = index_cache.orders_of(causal_dataset, data, counts, length, args.seed, data_args.split)
    if int(os.environ.get("PADDLE_RANK_IN_NODE", 0)) == 0:
        index_cache.provide(causal_dataset, orders)
    if dist.get_world_size() > 1:
        dist.barrier()
    index_cache.await_orders(orders)
