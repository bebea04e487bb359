"""Checkpoints of PaddleNLP's Trainer: whole or not at all, in the background if asked for, with fp8's state."""

import contextlib
import logging
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddlenlp.trainer import IntervalStrategy, Trainer
from paddlenlp.trainer.trainer import SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from paddlenlp.trainer.utils.helper import broadcast_dataset_rank0_model
from paddlenlp.transformers.model_utils import _add_variant
from paddlenlp.utils.env import PADDLE_WEIGHTS_NAME
from safetensors import SafetensorError

from paddle_te import fp8, manifest
from paddle_te.configs.spec import spec_of
from paddle_te.data.course import Course
from paddle_te.distributed import TensorParallel, gather_objects, gather_weights
from paddle_te.folders import checkpoint_folder
from paddle_te.host import HostModel
from paddle_te.hosts.paddlenlp.loading import layout_of, stage_layer_names
from paddle_te.hosts.paddlenlp.lora import read_lora
from paddle_te.hosts.paddlenlp.training.health import Watch
from paddle_te.hosts.paddlenlp.training.resharding import Share
from paddle_te.hosts.paddlenlp.training.resuming import compared_before, final_weights
from paddle_te.job import PRETRAIN
from paddle_te.manifest import FileRecord, Manifest, file_names, mark_complete, records, share
from paddle_te.models.in_16_bits import compute_in_16_bits
from paddle_te.optimizer.compact_states import number_elements
from paddle_te.optimizer.in_backward import LAST_NORM, OptimizerInBackward
from paddle_te.optimizer.muon import bind_muon
from paddle_te.optimizer.offloaded_states import make_states
from paddle_te.options.training import MASTER_WEIGHTS, MOMENTS
from paddle_te.runs.background import BackgroundSaver, remove_leftovers
from paddle_te.runs.checkpoints import (
    CheckpointNotSaved,
    flush,
    not_saved,
    remove_checkpoint,
    rotate_checkpoints,
)
from paddle_te.runs.identity import layout_values, model_values
from paddle_te.runs.room import Room, check_room
from paddle_te.runs.transfers import Transfer, bytes_of
from paddle_te.training import fp8_state
from paddle_te.training.fp8_state import scaled_recipe
from paddle_te.training.fp8_statistics import IN_16_BITS
from paddle_te.weights import CheckpointError
from paddle_te.weights.contents import read_state
from paddle_te.weights.dims import Dims

logger = logging.getLogger(__name__)


class CheckpointingTrainer(Trainer):
    """Marks complete checkpoints, keeps fp8 scaling state with the weights, and resumes in any layout."""

    data_identity: dict[str, object] | None = None  # what says in the manifest which data the run reads
    course: Course = None  # type: ignore[assignment]  # of its steps; `train` makes it where nobody did
    watch: Watch
    transfers: list[Transfer]  # `callbacks.TransfersCallback`'s
    in_16_bits: list[int]  # numbers of the layers that have left fp8: `FP8StatisticsCallback`'s
    _background: BackgroundSaver | None = None  # while training with --staging_dir
    _share: Share | None = None  # of a checkpoint that PaddleNLP does not load itself
    _loading_seconds = 0.0  # of a checkpoint's weights
    _in_backward: OptimizerInBackward | None = None  # with --optimizer_in_backward

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Do PaddleNLP's, of whole weights."""
        gather_weights(self.optimizer)
        super().save_model(*args, **kwargs)

    @contextlib.contextmanager
    def _saving_in_background(self) -> Iterator[None]:
        args = self.args
        try:
            self._check_staging()
            self._background = BackgroundSaver(args.staging_dir, args.process_index, args.world_size)
        except OSError as error:
            raise CheckpointNotSaved(f"--staging_dir {args.staging_dir}: {error}") from error
        try:
            yield
            self._background.wait()
        except Exception:
            if self._background.in_flight():
                traceback.print_exc()  # now: the copying may take minutes
                logger.error("training failed, as above; the checkpoint that is on its way to the disk is awaited")
                self._background.join()
            raise
        finally:
            self._background.close()
            self._background = None

    def _check_staging(self) -> None:
        """Raise OSError on all ranks where one node has no room, or does not see the others' output_dir."""
        args = self.args
        remove_leftovers(args.staging_dir)
        self._wait_for_all()
        descriptor, probe = tempfile.mkstemp(prefix=".shared.", dir=args.output_dir)
        os.close(descriptor)
        room = Room.of(args.staging_dir, self._checkpoint_bytes())
        everyone = gather_objects((room, probe), args.world_size)
        seen = gather_objects(all(os.path.exists(probe) for _, probe in everyone), args.world_size)
        os.unlink(probe)
        check_room(
            [room for room, _ in everyone],
            "Make it larger (of a container: --shm-size), name a folder on a local disk, or leave --staging_dir out",
        )
        if not all(seen):
            raise OSError(
                f"--output_dir {args.output_dir} must be a folder that all nodes share; rank {seen.index(False)} does "
                "not see the others' files there"
            )

    def check_output(self, last_step: int) -> None:
        """Raise CheckpointNotSaved on all ranks where one node has no room for what the run saves until `last_step`."""
        args, checkpoints = self.args, self._will_save(last_step)
        if not checkpoints and args.SCRIPT == PRETRAIN:
            return
        with_states = checkpoints and args.optim != "muon"  # whose states may be half of AdamW's
        size = self._weights_bytes() + (self._states_bytes() if with_states else 0)
        try:
            os.makedirs(args.output_dir, exist_ok=True)  # rank 0, or this one where nodes share nothing
            rooms = gather_objects(Room.of(args.output_dir, size), args.world_size)
            check_room(rooms, "Make room, or choose another folder")
        except OSError as error:
            raise CheckpointNotSaved(f"--output_dir {args.output_dir}: {error}") from error

    def _will_save(self, last_step: int) -> bool:
        """Return whether the run saves a checkpoint behind the step that it goes on from, until `last_step`."""
        args = self.args
        if args.save_strategy == IntervalStrategy.STEPS and args.SCRIPT != PRETRAIN:  # which saves its last step, too
            return last_step // args.save_steps > self.course.first // args.save_steps
        return args.save_strategy != IntervalStrategy.NO

    def _checkpoint_bytes(self) -> int:
        """Return about what this rank writes at most: weights, states, names, scales, RNG states, the tokenizer."""
        return int(1.05 * (self._weights_bytes() + self._states_bytes())) + 2**24

    def _weights_bytes(self) -> int:
        trained = (p for p in self.model.parameters() if not p.stop_gradient)
        return sum(p.size * p.element_size() for p in trained) if self.args.should_save_model_state else 0

    def _states_bytes(self) -> int:
        """Return what AdamW's two moments and master weights take that this rank writes."""
        args = self.args
        writes = self.dp_group.rank <= 0 if args.use_hybrid_parallel else args.should_save
        if not writes or args.ignore_save_lr_and_optim:
            return 0
        trained = [p for p in self.model.parameters() if not p.stop_gradient]
        each = 2 * MOMENTS[args.optim_moments]
        each += MASTER_WEIGHTS[args.master_weights] * any(p.element_size() < 4 for p in trained)
        return int(each * sum(p.size for p in trained) // max(args.sharding_parallel_degree, 1))

    def _save_checkpoint(self, model: HostModel, metrics: Any = None) -> None:
        """Save a checkpoint. Raise CheckpointNotSaved where there is no room, or no right, to write.

        The error may be of the checkpoint before, which was written in the background. Raises UnsoundStep for
        tensors that are not finite.
        """
        args, start = self.args, time.perf_counter()
        folder = checkpoint_folder(args.output_dir, self.state.global_step)
        self._note_place()
        gather_weights(self.optimizer)
        self.watch.check_before_saving(self.model, scaled_recipe(self.model.config))
        if self._background:
            self._background.wait()
        try:
            if args.local_process_index == 0:
                remove_checkpoint(folder)  # what an earlier run, killed or of another layout, has left there
            self._wait_for_all()
            with self._outside_of_the_interval():
                if self._background:
                    size, note = (
                        self._stage(folder, model, metrics, self._background),
                        "this rank's part, which is written meanwhile",
                    )
                else:
                    size, note = self._write(folder, model, metrics), "with a manifest of all checksums"
        except (OSError, SafetensorError) as error:
            raise not_saved(folder, error) from error
        self._tell(Transfer("save", folder, size, time.perf_counter() - start, note, not self._background))
        if not self._background and args.process_index == 0:
            rotate_checkpoints(args.output_dir, args.save_total_limit, folder, self.state.best_model_checkpoint)

    def _tell(self, transfer: Transfer) -> None:
        """Log a Transfer, and keep it for the next line of the curves."""
        self.transfers.append(transfer)
        if self.args.process_index == 0:
            logger.info(transfer.line())

    def _write(self, folder: Path, model: HostModel, metrics: Any) -> int:
        """Write a checkpoint. Return the bytes of its files."""
        super()._save_checkpoint(model, metrics)
        self._save_fp8_state(folder)
        self._wait_for_all()
        files = self._record(folder)
        if self.args.local_process_index == 0:
            flush(folder)
        self._wait_for_all()
        if self.args.process_index == 0:
            mark_complete(folder, Manifest(files, self._run_values()))
            logger.info(f"{folder} is complete")
        return sum(entry.size for entry in files.values())

    def _record(self, folder: Path) -> dict[str, FileRecord]:
        """Return {name: FileRecord} of a checkpoint's files; each rank reads its share: they are still in memory."""
        rank, ranks = self.args.process_index, self.args.world_size
        names = gather_objects(file_names(folder), ranks)[0]
        sizes = {name: (folder / name).stat().st_size for name in names}
        mine = records(folder, share(sizes, rank, ranks), threads=1)
        return {name: entry for part in gather_objects(mine, ranks) for name, entry in part.items()}

    def _run_values(self) -> dict[str, Any]:
        """Return what the manifest says of this run."""
        quantized = getattr(self.model, "base_precision", None)  # a TELoRAModel's
        adapter = getattr(self.model, "lora_config", None)
        model = model_values(self.model.config, adapter, quantized, self.args.freeze)
        values: dict[str, Any] = {"script": self.args.SCRIPT, "model": model, "layout": layout_values(self.args)}
        if norm := self._in_backward and self._in_backward.last_norm():
            values[LAST_NORM] = norm
        values |= {"samples": self.course.samples} if self.course else {}
        values |= {IN_16_BITS: [*self.in_16_bits]} if self.in_16_bits else {}
        return values | {"step": self.state.global_step, "data": self.data_identity}

    def _stage(self, folder: Path, model: HostModel, metrics: Any, background: BackgroundSaver) -> int:
        """Write the same files into the staging folder, from where a thread takes them to `folder`.

        Returns the bytes of this rank's files.
        """
        args, state, output_dir = self.args, self.state, self.args.output_dir
        staged = background.folder / folder.name
        staged.mkdir()
        args.output_dir = str(staged.parent)
        try:
            super()._save_checkpoint(model, metrics)
        finally:
            args.output_dir = output_dir
        self._save_fp8_state(staged)
        if state.best_model_checkpoint == str(staged):
            state.best_model_checkpoint = os.path.join(output_dir, folder.name)
        if args.should_save:  # again, those that name the folder
            state.save_to_json(str(staged / TRAINER_STATE_NAME))
            paddle.save(args, str(staged / TRAINING_ARGS_NAME))
        best, start = state.best_model_checkpoint, time.time()

        def finish() -> None:
            rotate_checkpoints(output_dir, args.save_total_limit, folder, best)
            size, seconds = bytes_of(folder), time.time() - start
            logger.info(f"{folder} is complete, {size / 1e9:,.3f} GB, {seconds:.1f} s in the background")

        mine = bytes_of(staged)
        background.start(staged, folder, finish, self._run_values())
        return mine

    def _rotate_checkpoints(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: PaddleNLP's would remove older checkpoints before the new one is complete."""

    def _wait_for_all(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()

    def _save_fp8_state(self, folder: Path) -> None:
        recipe = scaled_recipe(self.model.config)
        if recipe:
            fp8_state.save(folder, self.model, recipe, self.args, stage_layer_names(self.model))

    def _load_from_checkpoint(self, resume_from_checkpoint: str | None = None) -> None:
        """Raise CheckpointError for a checkpoint that cannot be loaded whole."""
        start = time.perf_counter()
        self._share = Share.find(resume_from_checkpoint, self.model, self.args)
        if self._share:
            self._share.load_weights()
        else:
            super()._load_from_checkpoint(resume_from_checkpoint)
        recipe = scaled_recipe(self.model.config)
        if recipe and resume_from_checkpoint:
            files = sorted(Path(resume_from_checkpoint).glob("fp8_state.pp*.pdparams"))
            try:
                fp8.load(files, self.model, recipe, stage_layer_names(self.model))
            except (FileNotFoundError, ValueError) as error:
                raise CheckpointError(str(error)) from error
        self._loading_seconds = time.perf_counter() - start

    def _load_from_peft_checkpoint(self, checkpoint: str | None = None) -> None:
        """Load an adapter as PaddleNLP does; where ranks divide the experts each reads its own.

        PaddleNLP's reads on one rank, and copies to the others.
        """
        if checkpoint and self.args.expert_parallel_degree > 1:
            read_lora(self.model, checkpoint)
        else:
            super()._load_from_peft_checkpoint(checkpoint)

    def load_finished(self, checkpoint: str) -> None:
        """Load the weights with which the run ended, and its last step, of a checkpoint with which it is finished."""
        self.load_weights(final_weights(checkpoint, self.args))
        self.state.global_step = read_state(checkpoint).global_step  # which evaluation names

    def load_weights(self, checkpoint: str) -> None:
        """Load the weights of a checkpoint from which nothing is trained any more, on all ranks."""
        self._load_from_checkpoint(checkpoint)
        if self.args.dataset_world_size > 1:
            broadcast_dataset_rank0_model(self.model)

    def _load_best(self, folder: str) -> None:
        """Load the weights of the best checkpoint, which a run in another layout may have saved."""
        self._wait_for_all()
        logger.info(f"loading the best weights, of {folder}, whose metric is {self.state.best_metric:.6g}")
        whole = not self.args.unified_checkpoint and not hasattr(self.model, "lora_config")
        own = Path(folder) / _add_variant(PADDLE_WEIGHTS_NAME, self.args.weight_name_suffix)
        if whole and own.is_file():
            self._set_state_dict_in_model(paddle.load(str(own), return_numpy=True))
        else:
            self.load_weights(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Raises CheckpointError as `_load_from_checkpoint`, which comes first.

        The model and the optimizer are wrapped for the run's parallelism by now; checkpoint: None where
        training begins.
        """
        start = time.perf_counter()
        number_elements(self.optimizer, self.model.parameters())
        self._bind_muon()
        goes_on = checkpoint if checkpoint and not self.args.ignore_load_lr_and_optim else None
        if self._share and goes_on:
            self._load_share(self._share, goes_on)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        make_states(self.optimizer, self.model.parameters())
        saved = manifest.read(goes_on) if goes_on else None
        if self._in_backward:
            self._in_backward.attach(saved.run.get(LAST_NORM) if saved else None)
        self.in_16_bits[:] = (saved and saved.run.get(IN_16_BITS)) or []
        compute_in_16_bits(self.model, self.in_16_bits)
        if goes_on:
            # as the schedule is now: the checkpoint's rate is of a run with other --max_steps or --learning_rate
            self.lr_scheduler.last_lr = self.lr_scheduler.get_lr()
            self._load_rng_state(goes_on)  # PaddleNLP leaves it out at the beginning of an epoch
        if checkpoint:
            seconds = self._loading_seconds + time.perf_counter() - start
            words = compared_before(checkpoint, self.args.verify_checkpoint)
            self._tell(Transfer("load", Path(checkpoint), bytes_of(checkpoint), seconds, *words))

    def _bind_muon(self) -> None:
        if self.args.optim == "muon":
            config, tp = self.model.config, TensorParallel.from_fleet()
            bind_muon(self.optimizer, self.model.state_dict(), layout_of(config), Dims(spec_of(config)), tp)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """PaddleNLP's, before the first step only: it would also do it where a later epoch begins."""
        if not self.watch.done:
            super()._load_rng_state(checkpoint)

    def _load_share(self, share: Share, checkpoint: str) -> None:
        self.optimizer.set_state_dict(share.optimizer_state(self.optimizer))
        self.lr_scheduler.set_state_dict(paddle.load(os.path.join(checkpoint, SCHEDULER_NAME)))
        scaler = os.path.join(checkpoint, SCALER_NAME)
        if self.do_grad_scaling and os.path.isfile(scaler):
            self.scaler.load_state_dict(paddle.load(scaler, return_numpy=True))
        if self.args.offload_optim:
            self._offload_optimizer()

    def _note_place(self) -> None:
        """Say in the state, which is saved and logged, how far the data are read.

        PaddleNLP counts all steps with today's batch size.
        """
        if self.course:
            self.state.consumed_samples = self.course.consumed_at(self.state.global_step)
            self.state.epoch = self.course.epoch(self.state.global_step)

    @contextlib.contextmanager
    def _outside_of_the_interval(self) -> Iterator[None]:
        """Leave the seconds that it lasts out of the speeds of the next log line."""
        start = time.time()
        yield
        self._globalstep_last_start_time = getattr(self, "_globalstep_last_start_time", start) + time.time() - start
