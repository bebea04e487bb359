"""Pretrain a model with decoder layers of backend none, paddle or transformer_engine.

    python run_pretrain.py --model_name_or_path … --input_dir … --output_dir … [--transformer_engine_backend …]
    python run_pretrain.py arguments.json [--flag value …]

Flags: PaddleNLP's TrainingArguments, and `python run_pretrain.py --help`. Errors in the arguments end the run with
status 2 before any weight is made.
"""

import contextlib
import logging
from contextlib import AbstractContextManager
from pathlib import Path

from paddle.optimizer.lr import LRScheduler
from paddlenlp.trainer import set_seed
from paddlenlp.transformers import (
    CosineAnnealingWithWarmupDecay,
    LinearAnnealingWithWarmupDecay,
)

from paddle_te import device
from paddle_te.configs import resolve
from paddle_te.configs.rope import longest_sequence
from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.host import HostArguments, HostConfig, HostModel
from paddle_te.hosts.paddlenlp.families import check_packed, model_class
from paddle_te.hosts.paddlenlp.freezing import check_freeze
from paddle_te.hosts.paddlenlp.loading import check_same_model, from_pretrained, load_tokenizer, read_config
from paddle_te.hosts.paddlenlp.modeling import causal_mask_only
from paddle_te.hosts.paddlenlp.positions import check_positions
from paddle_te.hosts.paddlenlp.room import check_room
from paddle_te.hosts.paddlenlp.training.arguments import (
    ModelArguments,
    PreTrainingArguments,
    check_weights_folder,
    data_seed,
)
from paddle_te.hosts.paddlenlp.training.beginning import find_start, parse_arguments, set_run, start_from
from paddle_te.hosts.paddlenlp.training.callbacks import install_callbacks
from paddle_te.hosts.paddlenlp.training.datasets import (
    DataArguments,
    Datasets,
    create_pretrained_dataset,
    data_identity,
)
from paddle_te.hosts.paddlenlp.training.ending import refusing_wrong_input, run_to_end
from paddle_te.hosts.paddlenlp.training.out_of_memory import advised
from paddle_te.hosts.paddlenlp.training.packing import Collate, make_collator
from paddle_te.hosts.paddlenlp.training.resuming import check_fits, is_finished
from paddle_te.hosts.paddlenlp.training.samplers import make_single_course
from paddle_te.hosts.paddlenlp.training.trainer import PretrainingTrainer
from paddle_te.models.backend import is_native, ops_of
from paddle_te.runs import screen
from paddle_te.runs.identity import model_values
from paddle_te.training.schedule import annealing
from paddle_te.training.signals import ExitSignalCallback

logger = logging.getLogger(__name__)


def check_device(training_args: HostArguments) -> None:
    """Refuse what this device cannot do. Raise ValueError or native.BackendUnavailable."""
    if (training_args.bf16 or training_args.fp16) and not device.bf16_supported():
        raise ValueError(
            f"--bf16 on {training_args.device}: Paddle has no bf16 kernels to train with there; leave --bf16 out"
        )
    if not is_native(training_args):
        ops_of(training_args).check(fp8=training_args.use_fp8)


def make_config(
    model_args: ModelArguments, data_args: DataArguments, training_args: HostArguments, tokenizer: AnyTokenizer | None
) -> HostConfig:
    backend = training_args.transformer_engine_backend
    config = read_config(resolve(model_args.model_name_or_path), backend)
    set_run(config, data_args.max_seq_length, training_args, model_args)
    if data_args.reset_attention_mask:
        check_packed(config)
    if model_args.continue_training:
        check_positions(config, config.seq_length)
    else:
        _provide_positions(config, data_args.max_seq_length)
        if tokenizer is not None:
            _provide_vocabulary(config, tokenizer.needed_rows)
    check_room(config, training_args.model_dtype)
    return config


def _provide_positions(config: HostConfig, length: int) -> None:
    if length > (longest := longest_sequence(config)):
        logger.info(
            f"the model gets {length} positions, for --max_seq_length {length}: its configuration has {longest}"
        )
        config.max_position_embeddings = length


def _provide_vocabulary(config: HostConfig, needed: int) -> None:
    rows = -(-needed // 128) * 128  # a multiple, for GEMMs
    if rows > config.vocab_size:
        logger.info(
            f"the model gets a vocabulary of {rows}, for a tokenizer with {needed}: its configuration has "
            f"{config.vocab_size}"
        )
        config.vocab_size = rows


def check_trained_length(weights: str, length: int) -> None:
    """Raise ValueError for sequences beyond the positions that a folder's config.json gives its weights."""
    if not (Path(weights) / "config.json").is_file():
        return
    if length > (longest := longest_sequence(read_config(weights))):
        raise ValueError(
            f"--max_seq_length {length}: the weights in {weights} are of a model with {longest} "
            "positions; give shorter sequences, or raise max_position_embeddings in its config.json"
        )


def make_model(config: HostConfig, model_args: ModelArguments, training_args: HostArguments) -> HostModel:
    make = model_class(config, training_args.pipeline_parallel_degree > 1)
    weights = model_args.te_init_weight_path
    if model_args.continue_training:
        weights = weights or model_args.model_name_or_path
    if weights is None:
        model = make.from_config(config, dtype=training_args.model_dtype)
    else:
        logger.info(f"initial weights: {weights}")
        check_same_model(config, weights)
        check_trained_length(weights, config.seq_length)
        model = from_pretrained(
            make, weights, config, training_args.model_dtype, verify=training_args.verify_checkpoint
        )
    if training_args.recompute:
        model.recompute_enable()
    return model


def end_of_document(config: HostConfig, tokenizer: AnyTokenizer | None) -> int | None:
    """Return the token that ends a document; None where there is none.

    It is the tokenizer's end of text, which prepare-data appends; without a tokenizer that of the model's
    configuration.
    """
    return config.eos_token_id if tokenizer is None else tokenizer.eos_token_id


def mask_scope(data_args: DataArguments) -> AbstractContextManager[None]:
    """Return the scope of training, where PaddleNLP's models make no mask of [b, 1, s, s] unless batches bring one."""
    return contextlib.nullcontext() if data_args.reset_attention_mask else causal_mask_only()


def make_scheduler(training_args: HostArguments) -> LRScheduler:
    kinds = {"cosine": CosineAnnealingWithWarmupDecay, "linear": LinearAnnealingWithWarmupDecay}
    return annealing(kinds, training_args, training_args.min_learning_rate)


def check_start(checkpoint: str | None, model_args: ModelArguments, training_args: HostArguments) -> None:
    """Prepare and check the arguments for a start from `checkpoint` (None: from scratch), before data is read.

    Raises ValueError, FileNotFoundError or native.BackendUnavailable.
    """
    initial = model_args.te_init_weight_path
    if checkpoint and initial:
        raise ValueError(f"--te_init_weight_path and a checkpoint to resume ({checkpoint}): give one of them")
    start_from(checkpoint, training_args)
    if initial:
        check_weights_folder(model_args, "te_init_weight_path")
    check_device(training_args)


def make_tokenizer(model_args: ModelArguments) -> AnyTokenizer | None:
    name = model_args.tokenizer
    return None if name == "none" else load_tokenizer(name)


def make_trainer(
    model: HostModel,
    training_args: HostArguments,
    tokenizer: AnyTokenizer | None,
    data: Datasets,
    collate: Collate,
    scheduler: LRScheduler,
) -> PretrainingTrainer:
    """Return the Trainer. collate: what makes batches of the data's samples."""
    train_dataset, eval_dataset, _ = data
    return PretrainingTrainer(
        model=model,
        args=training_args,
        data_collator=collate,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        optimizers=(None, scheduler),
        tokenizer=tokenizer,
        labels_vary=getattr(collate, "eod_mask_loss", False),  # else all labels of all samples count
    )


def pretrain() -> None:
    exit_signal = ExitSignalCallback()
    with refusing_wrong_input():
        model_args, data_args, training_args = parse_arguments(ModelArguments, DataArguments, PreTrainingArguments)
        checkpoint = find_start(training_args)
        check_start(checkpoint, model_args, training_args)
        tokenizer = make_tokenizer(model_args)
        config = make_config(model_args, data_args, training_args, tokenizer)
        check_freeze(config, training_args)
        collate = make_collator(data_args, training_args, end_of_document(config, tokenizer), config.vocab_size)
        course = make_single_course(checkpoint, training_args) if training_args.do_train else None
        samples = course.samples if course else None
        identity = data_identity(data_args, data_seed(training_args), samples)
        if checkpoint:
            check_fits(checkpoint, model_values(config, frozen=training_args.freeze), identity, training_args)
        finished = is_finished(course, training_args)
        if finished and not training_args.do_predict:
            return
        set_seed(training_args.seed)
        data = create_pretrained_dataset(data_args, training_args, tokenizer, config.vocab_size, samples)
        scheduler = make_scheduler(training_args)
        with advised(config, training_args, model_args.model_name_or_path):
            model = make_model(config, model_args, training_args)

    trainer = make_trainer(model, training_args, tokenizer, data, collate, scheduler)
    screen.keep_details(training_args.output_dir, training_args.process_index)
    trainer.data_identity = identity
    if course:
        trainer.course = course
    install_callbacks(trainer, exit_signal)
    with mask_scope(data_args), advised(config, training_args, model_args.model_name_or_path):
        if checkpoint and finished:
            trainer.load_finished(checkpoint)
        elif training_args.do_train:
            trainer.train(resume_from_checkpoint=checkpoint)
        if training_args.do_predict and not exit_signal.stopping:
            *_, test_dataset = data
            metrics = trainer.predict(test_dataset).metrics
            trainer.log_metrics("test", metrics)
            logger.info(f"test: loss {metrics['test_loss']:.5f}")


def main() -> None:
    """Pretrain as the command line says. Exit with 2 for wrong arguments or data, else as `run_to_end` says."""
    run_to_end(pretrain)
