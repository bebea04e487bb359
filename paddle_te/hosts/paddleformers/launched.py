"""What the launcher's recipes say beside PaddleFormers' lines and those of our layers, and what its runs leave.

With these a job means in PaddleFormers what it means in PaddleNLP, with each backend: whether the documents of a
sequence see each other, random tokens instead of data, the learning rate of each step, what a sample of fine-tuning
consists of, which projections LoRA is for.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
from paddleformers.cli.train.sft import workflow
from paddleformers.datasets.SFTDataset import IteratorSFTDataset, Sequence
from paddleformers.transformers.optimization import CosineAnnealingWithWarmupDecay, LinearAnnealingWithWarmupDecay

from paddle_te.data.mock import MockDataset
from paddle_te.data.questions import encode
from paddle_te.host import HostArguments, HostModel, HostTrainer
from paddle_te.hosts.paddleformers.batches import FLASH_MASK
from paddle_te.hosts.paddleformers.callbacks import install_callbacks
from paddle_te.hosts.paddleformers.replaced import replaced
from paddle_te.hosts.paddleformers.weights import vocabulary_of
from paddle_te.job.words import options
from paddle_te.models.lora import TARGETS
from paddle_te.options.option import HOSTED
from paddle_te.runs.heartbeat import has_launcher
from paddle_te.training.liveness import show_signs_of_life
from paddle_te.training.schedule import annealing
from paddle_te.training.signals import ExitSignalCallback

OPTIONS = {name: option for name, option in options().items() if option.line == HOSTED}


@contextmanager
def launched(**said: Any) -> Iterator[None]:
    """Let PaddleFormers' recipes do as said, {name of OPTIONS: value}, while it lasts.

    Where a launcher watches, they tell it how they get on and leave what its runs leave.
    """
    lines = SimpleNamespace(**dict.fromkeys(OPTIONS) | said)  # None: as PaddleFormers does it by itself
    ours: dict[str, Any] = {}
    if lines.mock_data:
        ours["create_pretrained_dataset"] = _random_tokens
    elif lines.reset_attention_mask is not None:
        ours["create_pretrained_dataset"] = _indexed(lines.reset_attention_mask, lines.reset_position_ids)
    if lines.lora_targets:
        ours["get_lora_target_modules"] = lambda model: [f".*{part}.*" for part in TARGETS[lines.lora_targets]]
    if has_launcher() or lines.min_learning_rate is not None:
        ours["SFTTrainer"] = _trainer(workflow.SFTTrainer, lines.min_learning_rate)
    if lines.pad_to_multiple_of:
        ours["collate_fn"] = _padded(lines.pad_to_multiple_of)
    with ExitStack() as stack:
        stack.enter_context(replaced(workflow, **ours))
        if lines.src_length:
            samples = _questions(lines.src_length)
            stack.enter_context(replaced(IteratorSFTDataset, _process_sft_sequence=samples))
        yield


_SCHEDULES = {"cosine": CosineAnnealingWithWarmupDecay, "linear": LinearAnnealingWithWarmupDecay}


def _trainer(trainer_class: Callable[..., HostTrainer], least: float | None) -> Callable[..., HostTrainer]:
    """Return what makes a Trainer with our callbacks and, with a least learning rate, PaddleNLP's schedule."""
    early: list[Any] = []
    if has_launcher():
        show_signs_of_life()
        early.append(ExitSignalCallback())

    def make(*, args: HostArguments, model: HostModel, callbacks: list[Any], **kwargs: Any) -> HostTrainer:
        schedule = {} if least is None else {"optimizers": (None, annealing(_SCHEDULES, args, least))}
        trainer = trainer_class(args=args, model=model, callbacks=[*callbacks, *early], **schedule, **kwargs)
        if early:
            install_callbacks(trainer)
        return trainer

    return make


def _questions(src_length: int) -> Callable[..., Any]:
    """Return what stands for PaddleFormers' method that makes a sample of an example.

    It makes what PaddleNLP's fine-tuning has, and leaves conversations of several turns to PaddleFormers.
    """
    theirs = IteratorSFTDataset._process_sft_sequence

    def sample(self: Any, example: Mapping[str, Any], count: int) -> Any:
        turns = [(message["role"], message["content"]) for message in example["messages"]]
        if example.get("system") or [role for role, _ in turns] != ["user", "assistant"]:
            return theirs(self, example, count)
        (_, src), (_, tgt) = turns
        made = encode(self.tokenizer, src, tgt, src_length, self.max_seq_len)
        positions = list(range(len(made["input_ids"])))
        return Sequence(made["input_ids"], positions, made["labels"], count)

    return sample


def _padded(multiple: int) -> Callable[..., Any]:
    """Return PaddleFormers' function that makes batches, which are as long as their longest sample, rounded up."""
    theirs = workflow.collate_fn

    def collate(batch: list[Any], *args: Any, max_seq_len: int | None, **kwargs: Any) -> Any:
        longest = max(sum(len(sample.token_ids) for sample in samples) for samples in batch)
        return theirs(batch, *args, max_seq_len=max_seq_len or -(-longest // multiple) * multiple, **kwargs)

    return collate


def _indexed(apart: bool, anew: bool | None) -> Callable[..., tuple[Any, ...]]:
    """PaddleFormers' function that makes data sets of an indexed corpus.

    apart: documents do not see each other, else a sequence is causal as a whole; anew: positions begin at 0 in each
    document, else in each sequence.
    """
    theirs = workflow.create_pretrained_dataset

    def create(training_args: HostArguments, data_args: HostArguments, model_args: HostArguments) -> tuple[Any, ...]:
        *datasets, collate = theirs(training_args, data_args, model_args)

        def ours(samples: list[Any]) -> dict[str, Any]:
            batch = collate(samples)
            whole = _as_one(batch)
            return (
                batch
                | ({} if apart else {FLASH_MASK: whole[FLASH_MASK]})
                | ({} if anew else {"position_ids": whole["position_ids"]})
            )

        return *datasets, ours

    return create


class _RandomTokens(MockDataset, paddle.io.Dataset[Any]):
    """PaddleFormers' Trainer tokenizes what is of another class than Paddle's."""


def _random_tokens(
    training_args: HostArguments, data_args: HostArguments, model_args: HostArguments
) -> tuple[Any, ...]:
    """Return, as PaddleFormers' create_pretrained_dataset, the samples of PaddleNLP's run with --mock_data."""
    if (vocabulary := vocabulary_of(model_args.model_name_or_path)) is None:
        raise ValueError(f"mock_data: the config.json of {model_args.model_name_or_path} says no vocab_size")
    samples = training_args.per_device_train_batch_size * training_args.gradient_accumulation_steps
    count = samples * training_args.dataset_world_size * training_args.max_steps
    train = _RandomTokens(count, data_args.max_seq_len, vocabulary, [training_args.seed, 0])

    def collate(samples: list[Any]) -> dict[str, Any]:
        tokens = np.stack([sample["text"] for sample in samples])
        batch = {"input_ids": np.ascontiguousarray(tokens[:, :-1]), "labels": np.ascontiguousarray(tokens[:, 1:])}
        return batch | _as_one(batch)

    return train, None, None, collate


def _as_one(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return positions, int64 [b, s], and FlashMask's rows, int32 [b, 1, s, 1], of sequences of one document."""
    size, length = batch["input_ids"].shape
    positions = np.broadcast_to(np.arange(length, dtype=np.int64), (size, length))
    return {"position_ids": positions.copy(), FLASH_MASK: np.full([size, 1, length, 1], length, np.int32)}
