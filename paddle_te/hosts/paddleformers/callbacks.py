"""What a launched run tells its launcher and leaves in its folder, by callbacks of PaddleFormers' Trainer."""

import logging
from pathlib import Path
from typing import Any

import paddle.distributed as dist

from paddle_te import manifest
from paddle_te.host import HostArguments, HostModel
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
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            flush(folder)
            names = manifest.file_names(folder)
            manifest.mark_complete(folder, manifest.Manifest(manifest.records(folder, names), {}))
            logger.info(f"{folder} is complete")


def run_callbacks(model: HostModel, args: HostArguments) -> list[Callback]:
    """Return the callbacks of a launched run. They come last, as they read what the others decide."""
    about = run_name(model.config), args.max_seq_len
    return [ThroughputCallback(*about), LinesCallback(*about), CompleteCallback(), HeartbeatCallback()]
