"""PaddleNLP's Trainer for pretraining: data in order, complete checkpoints, fp8 state."""

import math
import time
from itertools import product
from pathlib import Path

import paddle.distributed as dist
from paddlenlp.trainer import Trainer, speed_metrics
from paddlenlp.trainer.trainer_utils import PREFIX_CHECKPOINT_DIR
from paddlenlp.utils.batch_sampler import DistributedBatchSampler
from safetensors import SafetensorError

from paddle_te import fp8
from paddle_te.checkpoint.folder import file_name, variant
from paddle_te.llama.decoder import fp8_recipe
from paddle_te.training.checkpoints import (
    CheckpointNotSaved,
    complete_checkpoints,
    flush,
    mark_complete,
    remove_checkpoint,
    rotate_checkpoints,
)


def check_resumable(checkpoint, args):
    """Refuses a checkpoint that PaddleNLP would not find, or would load in part, with these TrainingArguments.

    Raises ValueError for one that was saved in another layout of processes, and for a unified one without
    --unified_checkpoint.
    """
    checkpoint = Path(checkpoint)
    if args.unified_checkpoint:
        return
    if (checkpoint / "optimizer.safetensors.index.json").is_file():
        raise ValueError(f"{checkpoint} is a unified checkpoint: resume it with --unified_checkpoint 1")
    there = {path.name for path in checkpoint.glob("model_state*.pdparams")}
    ranks = product(
        *(range(n) if n > 1 else [None] for n in (args.tensor_parallel_degree, args.pipeline_parallel_degree))
    )
    wanted = {file_name(".pdparams", variant(*rank)) for rank in ranks}
    if there and there != wanted:
        raise ValueError(
            f"{checkpoint} was saved in another layout of processes: it has {', '.join(sorted(there))}, this run needs "
            f"{', '.join(sorted(wanted))}. Convert it with te_llama_ckpt_converter.py --mode reshard --with_optimizer, "
            "and resume the new folder with --unified_checkpoint 1"
        )


class PretrainingTrainer(Trainer):
    """Reads samples in the dataset's order, marks complete checkpoints, keeps fp8 scaling state with the weights."""

    def training_step(self, model, inputs, step_control=0):
        """One micro-batch; step_control counts them within a step."""
        several = self.args.gradient_accumulation_steps > 1
        with fp8.microbatch(is_first=step_control == 0 if several else None):
            return super().training_step(model, inputs, step_control)

    def _save_checkpoint(self, model, metrics=None):
        """Raises CheckpointNotSaved where there is no room, or no right, to write."""
        args = self.args
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            if args.local_process_index == 0:
                remove_checkpoint(folder)  # what an earlier run, killed or of another layout, has left there
            self._wait_for_all()
            super()._save_checkpoint(model, metrics)
            self._save_fp8_state(folder)
            self._wait_for_all()
            if args.local_process_index == 0:
                flush(folder)
            self._wait_for_all()
            if args.process_index == 0:
                mark_complete(folder)
        except (OSError, SafetensorError) as error:
            steps = ", ".join(str(step) for step, _ in complete_checkpoints(args.output_dir)) or "none"
            raise CheckpointNotSaved(
                f"{folder} could not be saved: {error}. Complete checkpoints in {args.output_dir}, untouched: {steps}. "
                "Make room and go on with --resume_from_checkpoint auto"
            ) from error
        if args.process_index == 0:
            rotate_checkpoints(args.output_dir, args.save_total_limit, self.state.best_model_checkpoint)

    def _rotate_checkpoints(self, *args, **kwargs):
        """PaddleNLP's would remove older checkpoints before the new one is complete."""

    def _wait_for_all(self):
        if self.args.world_size > 1:
            dist.barrier()

    def _save_fp8_state(self, folder):
        """One file a pipeline stage: within a stage all ranks share amax, and so have the same scales."""
        recipe = self._scaled_recipe()
        if recipe:
            fp8.reduce_amax(self.model, recipe)
            if self.args.dataset_rank == 0 and self.args.tensor_parallel_rank <= 0:
                stage = max(self.args.pipeline_parallel_rank, 0)
                fp8.save(folder / f"fp8_state.pp{stage:02d}.pdparams", self.model, recipe, self._layer_names())

    def _load_from_checkpoint(self, resume_from_checkpoint=None):
        super()._load_from_checkpoint(resume_from_checkpoint)
        recipe = self._scaled_recipe()
        if recipe and resume_from_checkpoint:
            files = sorted(Path(resume_from_checkpoint).glob("fp8_state.pp*.pdparams"))
            fp8.load(files, self.model, recipe, self._layer_names())

    def _layer_names(self):
        """{a layer's name on this pipeline stage: its name in the whole model}, so that other stages can be resumed."""
        self.model.state_dict()  # makes the mapping
        weights = getattr(self.model, "_pp_to_single_mapping", None) or {}
        return {name: _whole_name(name, weights) for name in (fp8.name_modules(self.model) if weights else ())}

    def _scaled_recipe(self):
        """The fp8 recipe, if it has a state to keep; None otherwise."""
        recipe = fp8_recipe(self.model.config)
        return recipe if recipe and recipe.kind == "delayed" else None

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """The loss over eval_iters batches (PaddleNLP's own would read the whole dataset)."""
        start = time.time()
        # the loader is kept: making one anew each time leaks its workers
        if getattr(self, "_eval_dataloader", None) is None:
            self._eval_dataloader = self.get_eval_dataloader(eval_dataset or self.eval_dataset)
        output = self.evaluation_loop(
            self._eval_dataloader,
            description="Evaluation",
            prediction_loss_only=True,
            ignore_keys=ignore_keys,
            max_eval_iters=self.args.eval_iters,
        )
        batch = self.args.eval_batch_size * self.args.dataset_world_size
        steps = math.ceil(output.num_samples / batch)
        output.metrics.update(speed_metrics(metric_key_prefix, start, num_samples=output.num_samples, num_steps=steps))
        self.log(output.metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, output.metrics)
        return output.metrics

    def _sampler(self, dataset, batch_size):
        return DistributedBatchSampler(
            dataset,
            batch_size=batch_size,
            shuffle=False,
            num_replicas=self.args.dataset_world_size,
            rank=self.args.dataset_rank,
            drop_last=self.args.dataloader_drop_last,
        )

    def _get_train_sampler(self):
        return self._sampler(self.train_dataset, self.args.per_device_train_batch_size)

    def _get_eval_sampler(self, eval_dataset):
        return self._sampler(eval_dataset, self.args.per_device_eval_batch_size)


def _whole_name(name, weights):
    """What the whole model calls a layer, from {its weight's name: the whole model's}; its parents' weights do too."""
    parent = name
    while not (mine := next((weight for weight in weights if weight.startswith(f"{parent}.")), None)):
        parent = parent.rpartition(".")[0]
    return weights[mine].removesuffix(mine.removeprefix(parent)) + name.removeprefix(parent)
