"""Fine-tune Llama on questions and answers, with decoder layers of backend none, paddle or transformer_engine.

    python run_finetune.py --model_name_or_path CKPT --dataset_name_or_path DIR --output_dir OUT --do_train true \
        [--lora true --lora_targets attention] [--transformer_engine_backend paddle] [--zero_padding true] …
    python run_finetune.py arguments.json [--flag value …]

DIR holds train.json and dev.json (`paddle_te.training.finetune_datasets`). The fine-tuned model, or the adapter, is
saved in OUT, beside the checkpoints to resume from. Errors in the arguments or the data end the run with status 2.
"""

import contextlib
import sys
from pathlib import Path

import paddle
from paddlenlp.trainer import set_seed
from paddlenlp.transformers.configuration_utils import LlmMetaConfig
from paddlenlp.utils.log import logger

from paddle_te import device, upstream
from paddle_te.models.llama import causal_mask_only, model_class
from paddle_te.models.llama.loading import check_backend, check_token_ids, from_pretrained, load_config, load_tokenizer
from paddle_te.models.llama.lora import load_lora, lora_config, lora_model_class, save_merged
from paddle_te.options import configure
from paddle_te.runs.checkpoints import check_new_run
from paddle_te.runs.manifest import model_values
from paddle_te.runs.rollback import leave_out_broken_batches
from paddle_te.training.arguments import ArgumentParser
from paddle_te.training.callbacks import ExitSignalCallback, install_callbacks
from paddle_te.training.ending import run_to_end
from paddle_te.training.finetune_datasets import (
    Collator,
    FinetuneDataArguments,
    create_datasets,
    data_identity,
    tokens_per_sample,
)
from paddle_te.training.finetune_trainer import (
    FinetuneModelArguments,
    FinetuningArguments,
    FinetuningTrainer,
    check_together,
    count_real_tokens,
)
from paddle_te.training.liveness import keep_folder, show_signs_of_life
from paddle_te.training.resharding import check_resumable
from paddle_te.training.resuming import check_fits, check_fp8_state, find_to_resume, is_finished


def make_config(model_args, data_args, training_args, datasets):
    backend = training_args.transformer_engine_backend
    dtype = training_args.model_dtype
    check_backend(backend, "bfloat16" if training_args.bf16 else dtype, training_args.use_fp8)
    config = load_config(model_args.model_name_or_path, backend)
    for dataset in filter(None, datasets):
        check_token_ids((dataset[i]["input_ids"] for i in range(len(dataset))), config)
    LlmMetaConfig.set_llm_config(config, training_args)
    configure(config, training_args)
    config.use_cache = False
    config.seq_length = data_args.max_length
    return config


def make_model(config, model_args, training_args):
    make = model_class(training_args.transformer_engine_backend)
    model = from_pretrained(make, model_args.model_name_or_path, config, training_args.model_dtype)
    if training_args.recompute:
        model.recompute_enable()
    return add_lora(model, model_args, training_args) if model_args.lora else model


def add_lora(model, model_args, training_args):
    backend = training_args.transformer_engine_backend
    if model_args.lora_path:
        return load_lora(model, model_args.lora_path, backend, merge=False)
    config = new_adapter(model_args, training_args)
    config.base_model_name_or_path = model_args.model_name_or_path
    return lora_model_class(backend)(model, config)


def new_adapter(model_args, training_args):
    """The LoRAConfig that the flags ask for; None where they ask for none, or for one that is there."""
    if not model_args.lora or model_args.lora_path:
        return None
    return lora_config(
        model_args.lora_targets,
        model_args.lora_rank,
        model_args.lora_alpha,
        model_args.lora_dropout,
        training_args.model_dtype,
        training_args.tensor_parallel_degree,
    )


def finetune():
    exit_signal = ExitSignalCallback()
    show_signs_of_life()
    try:
        repairs = upstream.apply()
        model_args, data_args, training_args = ArgumentParser(
            (FinetuneModelArguments, FinetuneDataArguments, FinetuningArguments)
        ).parse()
        check_together(model_args, data_args, training_args)
        logger.info(f"repairs of Paddle {paddle.__version__} in force: {', '.join(repairs)}")
        device.check_name(training_args.device)
        paddle.set_device(training_args.device)
        keep_folder(training_args)
        checkpoint = find_to_resume(training_args)
        if checkpoint:
            check_resumable(checkpoint, training_args)
            check_fp8_state(checkpoint, training_args)
        else:
            check_new_run(training_args)
        leave_out_broken_batches(training_args)
        set_seed(training_args.seed)
        tokenizer = load_tokenizer(model_args.tokenizer_name_or_path)
        train, dev = create_datasets(data_args, tokenizer, training_args.do_train, training_args.do_eval)
        config = make_config(model_args, data_args, training_args, (train, dev))
        identity = data_identity(data_args) if training_args.do_train else None
        if checkpoint:
            values = model_values(config, new_adapter(model_args, training_args))
            check_fits(checkpoint, values, identity, training_args)
        finished = is_finished(checkpoint, training_args)
        model = make_model(config, model_args, training_args)
    except (ValueError, OSError, RuntimeError) as error:
        logger.error(str(error))
        sys.exit(2)

    training_args.resume_from_checkpoint = checkpoint
    trainer = FinetuningTrainer(
        model=model,
        args=training_args,
        data_collator=Collator(data_args),
        train_dataset=train,
        eval_dataset=dev,
        tokenizer=tokenizer,
    )
    trainer.data_identity = identity
    install_callbacks(trainer, exit_signal)
    # right padding needs no mask where attention is causal; packed samples bring theirs
    with contextlib.nullcontext() if data_args.zero_padding else causal_mask_only():
        if train is not None:
            count_real_tokens(trainer, model.config, tokens_per_sample(train), model_args.lora)
            if finished:
                trainer.load_weights(checkpoint)
            else:
                trainer.train(resume_from_checkpoint=checkpoint)
            if exit_signal.stopping and trainer.state.global_step < trainer.state.max_steps:
                return  # to be resumed: what follows is of the finished model
            trainer.save_model(merge_tensor_parallel=training_args.tensor_parallel_degree > 1)
        if dev is not None:
            trainer.log_metrics("eval", trainer.evaluate())
    if model_args.merge_lora:
        folder = str(Path(training_args.output_dir) / "merged")
        save_merged(model, folder)
        tokenizer.save_pretrained(folder)


def main():
    """The command. Ends the process with 2 for wrong arguments or data, else as `run_to_end` says."""
    run_to_end(finetune)
