"""What a launched run tells its launcher and leaves in its folder, by callbacks of PaddleFormers' Trainer."""

import faulthandler
import json
import logging
import signal
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddleformers.trainer import TrainerCallback

from paddle_te import device, manifest
from paddle_te.runs.checkpoints import STOPPED_MARK, flush
from paddle_te.runs.convergence import TRAIN_LOG
from paddle_te.runs.heartbeat import ENDING, EVALUATING, LOADING, SAVING, STACK_SIGNAL, STARTING, STEPPING, Heartbeat
from paddle_te.runs.lines import samples_of_step, step_values, training_begins

logger = logging.getLogger(__name__)


class RunCallback(TrainerCallback):
    """Signs of life; `output_dir`/train_log.jsonl, a line for each logging interval, from the first process:
    `{"step", "loss", "lr", "tokens_per_second", "step_time", "peak_memory_bytes"}` as PaddleNLP's runs have it; and the
    manifest and mark of each complete checkpoint. Comes last, as it reads what the others decide."""

    def __init__(self):
        faulthandler.register(STACK_SIGNAL, all_threads=True)
        self._heartbeat = Heartbeat()
        self._heartbeat.beat(STARTING)
        self._logged = 0  # the step of the last line
        self._mark, self._busy = None, 0.0  # perf_counter up to which the seconds since the last line are counted
        self._rate = None  # of the last update; the scheduler has the next one's when the Trainer logs

    def on_train_begin(self, args, state, control, **kwargs):
        self._logged = state.global_step
        if state.is_world_process_zero:
            path = Path(args.output_dir) / TRAIN_LOG
            lines = path.read_text().splitlines() if path.is_file() and self._logged else []
            kept = [line for line in lines if json.loads(line)["step"] <= self._logged]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in kept))
            logger.info(training_begins(state, args, args.max_seq_len))

    def on_step_begin(self, args, state, control, **kwargs):
        self._heartbeat.beat(STEPPING, state.global_step + 1)
        if self._mark is None:
            self._mark = time.perf_counter()

    def _count_time(self):
        now = time.perf_counter()
        self._busy, self._mark = self._busy + now - self._mark, now

    def on_step_end(self, args, state, control, **kwargs):
        self._count_time()
        phase = EVALUATING if control.should_evaluate else SAVING if control.should_save else LOADING
        self._heartbeat.beat(phase, state.global_step)

    def on_optimizer_begin(self, args, state, control, optimizer=None, **kwargs):
        self._rate = optimizer.get_lr()

    def on_log(self, args, state, control, logs=None, **kwargs):
        steps = state.global_step - self._logged
        if "loss" not in logs or not steps or self._mark is None:
            return
        self._count_time()  # the Trainer has read the loss, so the device has finished these steps
        seconds, self._busy, self._logged = self._busy / steps, 0.0, state.global_step
        loss = logs["loss"]
        record = {
            "step": state.global_step,
            "loss": float(np.float32(loss)) if steps == 1 else loss,  # the Trainer has rounded it to 8 decimals
            "lr": self._rate,
            "tokens_per_second": samples_of_step(args) * args.max_seq_len / seconds,
            "step_time": seconds,
            "peak_memory_bytes": device.peak_memory(),
        }
        if state.is_world_process_zero:
            with open(Path(args.output_dir) / TRAIN_LOG, "a") as log:
                log.write(json.dumps(record) + "\n")
            said = step_values(record | {"learning_rate": record["lr"]})
            logger.info(f"step {state.global_step}/{state.max_steps}: {said}")

    def on_evaluate(self, args, state, control, **kwargs):
        self._heartbeat.beat(SAVING if control.should_save else LOADING, state.global_step)
        self._pause()

    def on_save(self, args, state, control, **kwargs):
        if args.world_size > 1:
            dist.barrier()  # all ranks have written their files
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            flush(folder)
            names = manifest.file_names(folder)
            manifest.mark_complete(folder, manifest.Manifest(manifest.records(folder, names), {}))
            logger.info(f"{folder} is complete")
        self._heartbeat.beat(LOADING, state.global_step)
        self._pause()

    def _pause(self):
        """Saving and evaluating belong to no step."""
        self._mark = time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        self._heartbeat.beat(ENDING, state.global_step)
        if state.is_world_process_zero:
            logger.info(f"training ended after step {state.global_step}; its files are in {args.output_dir}")


class ExitSignalCallback(TrainerCallback):
    """On SIGUSR1, to any one rank: every rank ends its step, saves a checkpoint and stops training, and
    `output_dir`/stopped holds the step if steps are left to train. The launcher sends it, also where it gets SIGTERM
    itself. The ranks agree by an all-reduce of one flag a step."""

    def __init__(self):
        self._received = self._stopping = False
        signal.signal(signal.SIGUSR1, self._receive)

    def _receive(self, signum, frame):
        self._received = True

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            (Path(args.output_dir) / STOPPED_MARK).unlink(missing_ok=True)

    def on_step_end(self, args, state, control, **kwargs):
        self._stopping = self._received
        if args.world_size > 1:
            flag = paddle.to_tensor([float(self._stopping)])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self._stopping = bool(flag.item())
        if self._stopping:
            control.should_log = control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        if self._stopping and state.global_step < state.max_steps and state.is_world_process_zero:
            (Path(args.output_dir) / STOPPED_MARK).write_text(f"{state.global_step}\n")
