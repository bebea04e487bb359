"""Fine-tune a model on questions and answers, with decoder layers of backend none, paddle or transformer_engine.

    python run_finetune.py --model_name_or_path CKPT --dataset_name_or_path DIR --output_dir OUT --do_train true \
        [--lora true --lora_targets attention] [--transformer_engine_backend paddle] [--zero_padding true] …
    python run_finetune.py arguments.json [--flag value …]

DIR holds train.json and dev.json, or files of other forms (`data.records`). The fine-tuned model, or the adapter, is
saved in OUT, beside the checkpoints to resume from. Errors in the arguments or the data end the run with status 2.
"""

import contextlib
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, NamedTuple

from paddlenlp.trainer import set_seed

from paddle_te.configs.rope import longest_sequence
from paddle_te.data.chat_template import ChatTemplate
from paddle_te.data.course import Course
from paddle_te.data.questions import IGNORED
from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.fp8 import stored_scaling
from paddle_te.host import HostArguments, HostConfig, HostModel
from paddle_te.hosts.paddlenlp.families import check_packed, model_class
from paddle_te.hosts.paddlenlp.freezing import check_freeze
from paddle_te.hosts.paddlenlp.loading import (
    check_token_ids,
    from_pretrained,
    load_config,
    load_tokenizer,
)
from paddle_te.hosts.paddlenlp.lora import load_lora, lora_config, lora_model_class
from paddle_te.hosts.paddlenlp.modeling import causal_mask_only
from paddle_te.hosts.paddlenlp.positions import check_positions
from paddle_te.hosts.paddlenlp.training.arguments import data_seed
from paddle_te.hosts.paddlenlp.training.beginning import find_start, parse_arguments, set_run, start_from
from paddle_te.hosts.paddlenlp.training.callbacks import install_callbacks
from paddle_te.hosts.paddlenlp.training.datasets import Datasets
from paddle_te.hosts.paddlenlp.training.ending import refusing_wrong_input, run_to_end
from paddle_te.hosts.paddlenlp.training.finetune_datasets import (
    Collator,
    FinetuneDataArguments,
    chat_template,
    create_datasets,
    data_identity,
    tokens_per_sample,
)
from paddle_te.hosts.paddlenlp.training.finetune_trainer import (
    FinetuneModelArguments,
    FinetuningArguments,
    FinetuningTrainer,
    check_whole_step,
    count_real_tokens,
)
from paddle_te.hosts.paddlenlp.training.merging import check_mergeable, merge
from paddle_te.hosts.paddlenlp.training.out_of_memory import advised
from paddle_te.hosts.paddlenlp.training.packing import needs_mask
from paddle_te.hosts.paddlenlp.training.resuming import check_fits, is_finished
from paddle_te.hosts.paddlenlp.training.samplers import make_course
from paddle_te.job import Job
from paddle_te.models.backend import check_backend
from paddle_te.models.decoder import recipe_of
from paddle_te.runs import screen
from paddle_te.runs.identity import model_values
from paddle_te.training.signals import ExitSignalCallback


def make_config(
    model_args: FinetuneModelArguments,
    data_args: FinetuneDataArguments,
    training_args: HostArguments,
    datasets: Datasets,
) -> HostConfig:
    backend = training_args.transformer_engine_backend
    dtype = training_args.model_dtype
    in_fp8 = training_args.use_fp8 or Job.of(training_args).stores_input_in_fp8
    check_backend(backend, "bfloat16" if training_args.bf16 else dtype, in_fp8)
    config = load_config(model_args.model_name_or_path, backend)
    for dataset in filter(None, datasets):
        check_token_ids((dataset[i]["input_ids"] for i in range(len(dataset))), config)
        _check_length(dataset.longest, data_args, config)
    set_run(config, data_args.max_length, training_args)
    config.ignore_index = IGNORED  # as the data say it
    check_positions(config, config.seq_length)
    if data_args.zero_padding:
        check_packed(config)
    return config


def _check_length(longest: int, data_args: Any, config: HostConfig) -> None:
    """Raise ValueError for samples beyond the model's positions, whose angles its weights have not seen."""
    if longest > (positions := longest_sequence(config)):
        flag = "max_seq_len" if hasattr(data_args, "max_seq_len") else "max_length"  # preferences', or answers'
        raise ValueError(
            f"--{flag} {data_args.max_length}: a sample has {longest} tokens, and the model has {positions} positions "
            f"(max_position_embeddings); give --{flag} {positions}, or raise the positions in its config.json"
        )


def make_model(config: HostConfig, model_args: FinetuneModelArguments, training_args: HostArguments) -> HostModel:
    make = model_class(config, training_args.pipeline_parallel_degree > 1)
    model = from_pretrained(
        make,
        model_args.model_name_or_path,
        config,
        training_args.model_dtype,
        in_fp8=model_args.fp8_base,
        verify=training_args.verify_checkpoint,
        keep_transpose_cache=model_args.keep_fp8_transpose_cache,
    )
    if training_args.recompute:
        model.recompute_enable()
    return add_lora(model, model_args, training_args) if model_args.lora else model


def add_lora(model: HostModel, model_args: FinetuneModelArguments, training_args: HostArguments) -> HostModel:
    backend = training_args.transformer_engine_backend
    if model_args.lora_path:
        verify, plus = training_args.verify_checkpoint, model_args.adapter.plus_scale
        return load_lora(model, model_args.lora_path, backend, verify, plus)
    config: HostConfig = new_adapter(model_args, training_args)
    config.base_model_name_or_path = model_args.model_name_or_path
    return lora_model_class(backend)(model, config)


def new_adapter(model_args: FinetuneModelArguments, training_args: HostArguments) -> HostConfig | None:
    """Return the LoRAConfig that the flags ask for; None where they ask for none, or for one that is there."""
    if not model_args.lora or model_args.lora_path:
        return None
    return lora_config(model_args.adapter, training_args.model_dtype, training_args.tensor_parallel_degree)


class Finetuning:
    """Hold what tuning on answers has of its own; tuning on preferences has the same attributes.

    CLASSES: the dataclasses of its command line. Their objects are model_args, data_args and training_args.
    """

    CLASSES: ClassVar[tuple[type, ...]] = FinetuneModelArguments, FinetuneDataArguments, FinetuningArguments

    def __init__(self, model_args: FinetuneModelArguments, data_args: Any, training_args: HostArguments) -> None:
        self.model_args, self.data_args, self.training_args = model_args, data_args, training_args

    def datasets(self, tokenizer: AnyTokenizer, template: ChatTemplate | None) -> Datasets:
        """Return (train, dev), None for what is not done."""
        args = self.training_args
        return create_datasets(self.data_args, tokenizer, template, args.do_train, args.do_eval)

    def data_identity(self, template: ChatTemplate | None) -> dict[str, object]:
        """Return {name: value} that tells the data from others."""
        return data_identity(self.data_args, template, data_seed(self.training_args))

    def tokens(self, dataset: Any) -> float:
        """Return those of a mean sample."""
        return tokens_per_sample(dataset)

    def check_start(self, checkpoint: str) -> None:
        """Raise ValueError for a checkpoint from which this kind of tuning cannot go on."""

    def make_config(self, datasets: Datasets) -> HostConfig:
        """Return the model's configuration. Raises ValueError for samples that are not for it."""
        return make_config(self.model_args, self.data_args, self.training_args, datasets)

    def make_model(self, config: HostConfig) -> HostModel:
        """Return the model that is trained."""
        return make_model(config, self.model_args, self.training_args)

    def make_trainer(self, model: HostModel, tokenizer: AnyTokenizer, datasets: Datasets) -> FinetuningTrainer:
        """Return the Trainer of (train, dev)."""
        data_args, (train, dev) = self.data_args, datasets
        masked = data_args.zero_padding and needs_mask(self.training_args)
        return FinetuningTrainer(
            model=model,
            args=self.training_args,
            data_collator=Collator(data_args, masked),
            train_dataset=train,
            eval_dataset=dev,
            tokenizer=tokenizer,
        )

    def prepare(self, trainer: FinetuningTrainer, datasets: Datasets) -> None:
        """Do what is to be done with the model before it is trained."""

    def forwards(self) -> int:
        """Return how often the model computes a batch forward, beside training's own."""
        return 0


class Start(NamedTuple):
    """Where a run begins, or goes on.

    checkpoint: its folder; None from scratch. course, identity: the steps and what the manifest says of the data; None
    where nothing is trained. finished: whether no step is left.
    """

    checkpoint: str | None
    course: Course | None
    identity: dict[str, object] | None
    finished: bool


def train_and_save(trainer: FinetuningTrainer, start: Start, exit_signal: ExitSignalCallback) -> bool:
    """Train what is left of the run and save the fine-tuned model.

    Returns: False where a signal has stopped the run before its last step: the model is not saved, the run is to be
    resumed.
    """
    if start.checkpoint and start.finished:
        trainer.load_finished(start.checkpoint)
    else:
        trainer.train(resume_from_checkpoint=start.checkpoint)
    if exit_signal.stopping and trainer.state.global_step < trainer.state.max_steps:
        return False
    trainer.save_model(merge_tensor_parallel=trainer.args.tensor_parallel_degree > 1)
    return True


def _check_fits(checkpoint: str, task: Finetuning, config: Any, identity: Any) -> None:
    """Refuse a checkpoint of another model, adapter or data."""
    recipe = recipe_of(config) if task.model_args.fp8_base else None
    quantized = stored_scaling(recipe).words if recipe else None
    adapter = new_adapter(task.model_args, task.training_args)
    values = model_values(config, adapter, quantized, task.training_args.freeze)
    check_fits(checkpoint, values, identity, task.training_args)


def _find_start(task: Finetuning) -> str | None:
    """Return the checkpoint folder from which the task goes on, or None, when it has been checked."""
    checkpoint = find_start(task.training_args)
    start_from(checkpoint, task.training_args)
    if checkpoint:
        task.check_start(checkpoint)
    return checkpoint


def _checked_start(
    checkpoint: str | None, task: Finetuning, config: HostConfig, train: Any, template: ChatTemplate | None
) -> Start:
    """Return the Start from a checkpoint. Refuse one of another model, adapter or data."""
    course = make_course(len(train), checkpoint, task.training_args) if train else None
    identity = task.data_identity(template) if train else None
    if checkpoint:
        _check_fits(checkpoint, task, config, identity)
    return Start(checkpoint, course, identity, is_finished(course, task.training_args))


def _make_trainer(
    task: Finetuning, model: HostModel, tokenizer: AnyTokenizer, datasets: Datasets, start: Start
) -> FinetuningTrainer:
    """Return the task's Trainer, which knows its course and its data's identity."""
    trainer, args = task.make_trainer(model, tokenizer, datasets), task.training_args
    screen.keep_details(args.output_dir, args.process_index)
    trainer.data_identity = start.identity
    if start.course:
        trainer.course = start.course
    return trainer


def _train_and_evaluate(
    task: Finetuning, trainer: FinetuningTrainer, datasets: Datasets, start: Start, exit_signal: ExitSignalCallback
) -> bool:
    """Do what the flags ask for. Return False where a signal has stopped training, so that nothing may follow."""
    task.prepare(trainer, datasets)
    if task.training_args.do_train:
        lora, tokens = task.model_args.lora, task.tokens(datasets[0])
        count_real_tokens(trainer, trainer.model.config, tokens, lora, task.forwards())
        if not train_and_save(trainer, start, exit_signal):
            return False
    if task.training_args.do_eval:
        trainer.log_metrics("eval", trainer.final_metrics())
    return True


def _mask_scope(data_args: HostArguments) -> AbstractContextManager[None]:
    """Return the scope of training: right padding needs no mask, and packed samples bring one where they need it."""
    return contextlib.nullcontext() if data_args.zero_padding else causal_mask_only()


def tune(kind: type[Finetuning]) -> None:
    """Tune a model. kind: Finetuning, or a class with its attributes."""
    exit_signal = ExitSignalCallback()
    with refusing_wrong_input():
        task = kind(*parse_arguments(*kind.CLASSES))
        model_args, training_args = task.model_args, task.training_args
        checkpoint = _find_start(task)
        set_seed(training_args.seed)
        tokenizer = load_tokenizer(model_args.tokenizer)
        template = chat_template(task.data_args, tokenizer, model_args.tokenizer)
        datasets = task.datasets(tokenizer, template)
        if training_args.do_train:
            check_whole_step(len(datasets[0]), training_args)
        config = task.make_config(datasets)
        check_freeze(config, training_args)
        start = _checked_start(checkpoint, task, config, datasets[0], template)
        if model_args.merge_lora:
            check_mergeable(training_args)
        model = task.make_model(config)

    trainer = _make_trainer(task, model, tokenizer, datasets, start)
    install_callbacks(trainer, exit_signal)
    advice = advised(config, training_args, model_args.model_name_or_path, model if model_args.lora else None)
    with _mask_scope(task.data_args), advice:
        ended = _train_and_evaluate(task, trainer, datasets, start, exit_signal)
    if ended and model_args.merge_lora:
        trainer._wait_for_all()  # until all have saved their part of the adapter
        if training_args.process_index == 0:
            merge(training_args, model_args, tokenizer)


def main() -> None:
    """Fine-tune as the command line says. Exit with 2 for wrong arguments or data, else as `run_to_end` says."""
    run_to_end(partial(tune, Finetuning))
