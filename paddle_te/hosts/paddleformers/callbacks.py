"""What a launched run tells its launcher and leaves in its folder, by callbacks of PaddleFormers' Trainer."""

import logging
from typing import Any

import paddle.distributed as dist
from paddleformers.peft import LoRAModel

from paddle_te import manifest
from paddle_te.configs.families import LLAMA
from paddle_te.folders import checkpoint_folder
from paddle_te.host import HostArguments, HostConfig, HostTrainer
from paddle_te.hosts.paddleformers.configuration import decoder_config
from paddle_te.runs.checkpoints import flush
from paddle_te.training.callback import Callback, Control, State
from paddle_te.training.lines import LinesCallback
from paddle_te.training.liveness import HeartbeatCallback
from paddle_te.training.throughput import ThroughputCallback, run_name

logger = logging.getLogger(__name__)


class CompleteCallback(Callback):
    """Gives each complete checkpoint its manifest and its mark."""

    def on_save(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        if args.world_size > 1:
            dist.barrier()  # all ranks have written their files
        if state.is_world_process_zero:
            folder = checkpoint_folder(args.output_dir, state.global_step)
            flush(folder)
            names = manifest.file_names(folder)
            manifest.mark_complete(folder, manifest.Manifest(manifest.records(folder, names), {}))
            logger.info(f"{folder} is complete")


def install_callbacks(trainer: HostTrainer) -> None:
    """Give the Trainer of a launched run its callbacks.

    The one that measures comes before the trackers', which pass on what it adds to the logs. Before it comes the one
    that completes a checkpoint, whose seconds are not those of a step. The others read what all before them decide.
    """
    config, length = trainer.model.config, trainer.args.max_seq_len
    callbacks, lora = trainer.callback_handler.callbacks, isinstance(trainer.model, LoRAModel)
    callbacks[:0] = [CompleteCallback(), _throughput(config, length, lora)]
    callbacks += [LinesCallback(run_name(config), length), HeartbeatCallback()]


def _throughput(config: HostConfig, length: int, lora: bool) -> ThroughputCallback:
    """Return the callback that measures, without TFLOP/s for a family whose configuration is not read here."""
    if config.model_type != LLAMA.model_type:
        return ThroughputCallback(run_name(config), length)
    ours = decoder_config(config)
    ours.seq_length = length
    return ThroughputCallback.of(ours, lora)
