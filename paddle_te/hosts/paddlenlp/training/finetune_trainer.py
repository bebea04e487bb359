"""Supervised fine-tuning, of all weights or of a LoRA adapter: arguments and trainer."""

import copy
import math
from dataclasses import dataclass

from paddlenlp.trainer import Trainer
from paddlenlp.transformers.configuration_utils import llmmetaclass

from paddle_te.data.course import shuffled
from paddle_te.data.fillers import WithFillers
from paddle_te.distributed import gather_objects
from paddle_te.hosts.paddlenlp.modeling import counting_accuracy
from paddle_te.hosts.paddlenlp.training.arguments import (
    PreTrainingArguments,
    check_tokens,
    check_weights_folder,
    data_seed,
    fp8_multiple,
)
from paddle_te.hosts.paddlenlp.training.callbacks import ThroughputCallback, model_flops_per_token
from paddle_te.hosts.paddlenlp.training.packing import check_fp8_dpa, check_whole_sequences
from paddle_te.hosts.paddlenlp.training.step_sampler import StepSampler
from paddle_te.hosts.paddlenlp.training.trainer import PretrainingTrainer
from paddle_te.models.context_parallel import sequence_ranks
from paddle_te.options import check_values, with_options
from paddle_te.options.scripts import FINETUNE_MODEL, PRETRAINING
from paddle_te.options.together import FINETUNE


@dataclass
@with_options(*FINETUNE_MODEL)
class FinetuneModelArguments:
    """Which model, and what of it is trained."""

    def __post_init__(self):
        check_values(self)
        check_weights_folder(self)
        self.tokenizer_name_or_path = self.tokenizer_name_or_path or self.model_name_or_path


@dataclass
@llmmetaclass
class FinetuningArguments(PreTrainingArguments):
    """PreTrainingArguments without what belongs to pretraining only."""

    SCRIPT = FINETUNE

    def __post_init__(self):
        for option in PRETRAINING:
            if getattr(self, option.name) != option.default:
                raise ValueError(f"--{option.name} is for pretraining: here PaddleNLP's Trainer makes the schedule")
        if self.do_eval and self.evaluation_strategy == "no":  # where the Trainer's own choice is each logging step
            self.evaluation_strategy = "steps" if self.eval_steps else "epoch"
        super().__post_init__()
        if self.pipeline_parallel_degree > 1:
            raise ValueError("--pipeline_parallel_degree: fine-tuning has tensor, sharding and data parallelism only")


def check_together(model_args, data_args, training_args):
    """Raises ValueError for arguments that do not fit each other."""
    if not (training_args.do_train or training_args.do_eval or model_args.merge_lora):
        raise ValueError("nothing to do: give --do_train, --do_eval or --merge_lora")
    if model_args.quantize_base and not training_args.use_fp8:
        raise ValueError(
            f"--quantize_base {model_args.quantize_base} needs --use_fp8 true: weights that exist in fp8 only are "
            "multiplied in fp8; leave --quantize_base out to compute in the activations' precision"
        )
    if model_args.lora and training_args.freeze:
        raise ValueError("--freeze with --lora true, which trains none of the model's weights; leave one of them out")
    if data_args.zero_padding:
        check_fp8_dpa(training_args, "--zero_padding")
        check_whole_sequences(training_args, "--zero_padding")
    if sequence_ranks(training_args) > 1:
        _check_shared_sequences(data_args, training_args)
    if data_args.pad_to_multiple_of % (multiple := fp8_multiple(training_args)):
        raise ValueError(
            f"--pad_to_multiple_of {data_args.pad_to_multiple_of}: GEMMs with --fp8_recipe {training_args.fp8_recipe} "
            f"need a multiple of {multiple}"
        )
    if training_args.sequence_parallel:
        _check_sequence_parallel(data_args, training_args)
    if training_args.master_weights != "float32" and training_args.unified_checkpoint and model_args.lora:
        raise ValueError(
            f"--master_weights {training_args.master_weights} with --lora true --unified_checkpoint true: PaddleNLP, "
            "which loads such checkpoints, would take the remainders for master weights; leave one of them out"
        )
    if training_args.optim_moments == "int8" and training_args.unified_checkpoint and model_args.lora:
        raise ValueError(
            "--optim_moments int8 with --lora true --unified_checkpoint true: PaddleNLP, which loads such checkpoints, "
            "does not know blocks of 8 bits; leave one of them out"
        )
    if model_args.lora and model_args.lora_dropout:
        _check_dropout(training_args)
    if training_args.mlp_chunk_tokens and model_args.lora:
        raise ValueError(
            f"--mlp_chunk_tokens {training_args.mlp_chunk_tokens} with --lora: layers with LoRA have no chunks; leave "
            "it out, or take --recompute true"
        )
    if model_args.merge_lora and not (training_args.do_train or model_args.lora_path):
        raise ValueError("--merge_lora without --do_train: there is no adapter; give it with --lora_path")


def check_whole_step(samples, args):
    """Raises ValueError where the run would leave out its only step, which so many samples do not fill."""
    sizes = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.dataset_world_size
    if args.dataloader_drop_last and samples < math.prod(sizes):
        raise ValueError(
            f"--dataloader_drop_last true leaves no step: a step takes {math.prod(sizes)} samples "
            f"({' × '.join(map(str, sizes))}: batch, micro-batches, ranks), and there are {samples}; leave it out"
        )


def _check_dropout(training_args):
    parts = sorted({*(training_args.recompute_modules or ())} - {"core_attn"})
    flags = [f"--recompute_modules {' '.join(parts)}"] * bool(parts)
    flags += ["--activation_func_fp8_input_store true"] * training_args.activation_func_fp8_input_store
    if flags:
        raise ValueError(
            f"{flags[0]} with --lora_dropout: norm and activation are operations of their own before dropout, and keep "
            "what they give; leave one of them out"
        )


def _check_sequence_parallel(data_args, training_args):
    if not data_args.pad_to_max_length:
        raise ValueError("--sequence_parallel needs --pad_to_max_length true: all batches must be equally long")
    length, ranks = data_args.max_length, training_args.tensor_parallel_degree * sequence_ranks(training_args)
    tokens = training_args.per_device_train_batch_size * length // ranks
    check_tokens(training_args, f"--max_length {length}", tokens, where=f"each of {ranks} ranks")


def _check_shared_sequences(data_args, training_args):
    ring, multiple = training_args.context_parallel_degree > 1, data_args.pad_to_multiple_of
    degree = sequence_ranks(training_args)
    flag = f"--{'context' if ring else 'sep'}_parallel_degree {degree}"
    of_fp8 = fp8_multiple(training_args)
    least = of_fp8 * degree if training_args.use_fp8 else 2 * degree if ring else degree
    if multiple % least:
        why = f"of {of_fp8} tokens a rank for fp8 GEMMs" if training_args.use_fp8 else "which splits sequences"
        raise ValueError(f"--pad_to_multiple_of {multiple} with {flag}: it must be a multiple of {least}, {why}")
    if training_args.transformer_engine_backend == "none" and not data_args.pad_to_max_length:
        raise ValueError(
            f"{flag} with backend none needs --pad_to_max_length true: PaddleNLP's own layers take all batches for "
            "equally long"
        )


class FinetuningTrainer(PretrainingTrainer):
    """Shuffles, fills up each epoch's last step, and evaluates on the whole of dev.json."""

    evaluate = Trainer.evaluate

    def __init__(self, *args, train_dataset=None, eval_dataset=None, **kwargs):
        kwargs["train_dataset"] = None if train_dataset is None else WithFillers(train_dataset)
        kwargs["eval_dataset"] = None if eval_dataset is None else WithFillers(eval_dataset)
        super().__init__(*args, labels_vary=True, **kwargs)

    def _order(self):
        """Another one in each pass: the same in every layout of ranks, and after a resume."""
        return shuffled(self.course.samples, data_seed(self.args))

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        """With the accuracy: the share of all labels, of all batches and ranks, that the model finds likeliest."""
        with counting_accuracy(self.model) as accuracy:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        everyone = gather_objects((accuracy.right.item(), accuracy.count.item()), self.args.world_size)
        right, count = map(sum, zip(*everyone, strict=True))  # ranks with the same labels count them as often
        if count:  # none is seen where backend none has PaddleNLP's fused loss
            output.metrics[f"{metric_key_prefix}_accuracy"] = right / count
        return output

    def _get_eval_sampler(self, eval_dataset):
        args = self.args
        ranks = dict(ranks=args.dataset_world_size, rank=args.dataset_rank)
        return StepSampler(eval_dataset, args.per_device_eval_batch_size, **ranks)


def count_real_tokens(trainer, config, tokens, lora):
    """Lets ThroughputCallback count the tokens of a mean sample instead of max_length, and LoRA's smaller backward."""
    config = copy.deepcopy(config)
    config.seq_length = tokens
    flops = model_flops_per_token(config)
    if lora:
        config.seq_length = 0
        flops -= model_flops_per_token(config) / 3  # a frozen weight has no gradient: 4 instead of 6 a weight
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ThroughputCallback):
            callback.seq_length, callback.flops_per_token = tokens, flops
