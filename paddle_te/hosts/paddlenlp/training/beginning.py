"""How a training command begins: its arguments, its device and its folder, and the checkpoint that it goes on from."""

import logging
from typing import Any

import paddle
from paddlenlp.transformers.configuration_utils import LlmMetaConfig

from paddle_te import device, upstream
from paddle_te.host import HostArguments, HostConfig
from paddle_te.hosts.paddlenlp.training.arguments import ArgumentParser
from paddle_te.hosts.paddlenlp.training.resharding import check_resumable
from paddle_te.hosts.paddlenlp.training.resuming import check_fp8_state, find_to_resume
from paddle_te.job import Job
from paddle_te.options import configure
from paddle_te.runs.checkpoints import check_new_run
from paddle_te.runs.rollback import leave_out_broken_batches
from paddle_te.training.liveness import keep_folder, show_signs_of_life

logger = logging.getLogger(__name__)


def parse_arguments(*classes: type) -> tuple[Any, ...]:
    """Return the command line as objects of these dataclasses, with Paddle's code repaired before they are made.

    The launcher learns that this rank is there. Raises ValueError for wrong arguments, and for a version of Paddle or
    PaddleNLP that the repairs were not made for.
    """
    show_signs_of_life()
    repairs = upstream.apply()  # first: the arguments initialise fleet
    arguments = ArgumentParser(classes).parse()
    logger.debug(f"repairs of Paddle {paddle.__version__} in force: {', '.join(repairs)}")
    return arguments


def find_start(args: HostArguments) -> str | None:
    """Return the checkpoint folder from which the run goes on, as str, or None for a start from scratch.

    From here on Paddle computes on the device of the TrainingArguments `args`, and no other run may write into their
    output_dir. Raises as `device.check_name`, `liveness.keep_folder` and `resuming.find_to_resume`.
    """
    device.check_name(args.device)
    paddle.set_device(args.device)
    keep_folder(args)
    return find_to_resume(args)


def set_run(config: HostConfig, length: int, args: HostArguments, *others: Any) -> None:
    """Give a model's configuration what the TrainingArguments say of it.

    length: tokens of a sequence. others: further dataclasses of options.
    """
    LlmMetaConfig.set_llm_config(config, args)
    configure(config, args, *others)
    config.fuse_wgrad_accumulation = Job.of(args, world=args.world_size).fuses_wgrad
    config.register_unsavable_keys("fuse_wgrad_accumulation")  # else a program without main gradients would read it
    config.use_cache = False
    config.seq_length = length


def start_from(checkpoint: str | None, args: HostArguments) -> None:
    """Prepare the TrainingArguments `args` for a start from `checkpoint`, or from scratch where it is None.

    They leave out the batches that have broken the run before. Raises ValueError for a checkpoint from which this run
    cannot go on, checkpoints that a new run would overwrite, and a damaged record of rollbacks.
    """
    if checkpoint:
        check_resumable(checkpoint, args)
        check_fp8_state(checkpoint, args)
    else:
        check_new_run(args)
    leave_out_broken_batches(args)
    args.resume_from_checkpoint = checkpoint
