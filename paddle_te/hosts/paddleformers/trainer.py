"""PaddleFormers' Trainer with what our decoder layers need of it: fp8 state, micro-batches, where documents end,
resuming in one process; and with clipping in AdamW's pass."""

from contextlib import contextmanager, nullcontext
from pathlib import Path

import paddle.distributed as dist
from paddleformers.cli.train.sft.sft_trainer import SFTTrainer

from paddle_te import fp8
from paddle_te.hosts.paddleformers.batches import Collator
from paddle_te.hosts.paddleformers.configuration import decoder_config
from paddle_te.hosts.paddleformers.replaced import replaced
from paddle_te.models.decoder import fp8_recipe
from paddle_te.optimizer import decay_matrices, fuse_clipping

FP8_STATE = "fp8_state.pdparams"


class ResumingTrainer(SFTTrainer):
    """PaddleFormers' SFTTrainer, which pretraining, fine-tuning and LoRA use alike, that can resume in one process."""

    def _load_flex_checkpoint(self, resume_from_checkpoint):
        with nullcontext() if self.args.use_hybrid_parallel else _without_fleet(self.optimizer):
            super()._load_flex_checkpoint(resume_from_checkpoint)


class TETrainer(ResumingTrainer):
    """In place of PaddleFormers' SFTTrainer."""

    def __init__(self, *args, data_collator, **kwargs):
        super().__init__(*args, data_collator=Collator(data_collator), **kwargs)

    def create_optimizer(self, lr_scheduler=None):
        """PaddleFormers', which decays the same weights with every backend, with AdamW and clipping in one pass where
        that can be."""
        optimizer = super().create_optimizer(lr_scheduler)
        decay_matrices(optimizer)
        fuse_clipping(optimizer)
        return optimizer

    def training_step(self, model, inputs, step_control=0):
        """One micro-batch; step_control counts them within a step."""
        several = self.args.gradient_accumulation_steps > 1
        with fp8.microbatch(is_first=step_control == 0 if several else None):
            return super().training_step(model, inputs, step_control)

    def _save_flex_model_state(self, output_dir):
        super()._save_flex_model_state(output_dir)
        recipe = self._scaled_recipe()
        if recipe:
            fp8.reduce_amax(self.model, recipe)  # then all ranks have the same state
            if dist.get_rank() == 0:
                fp8.save(Path(output_dir) / FP8_STATE, self.model, recipe)

    def _load_flex_checkpoint(self, resume_from_checkpoint):
        super()._load_flex_checkpoint(resume_from_checkpoint)
        recipe = self._scaled_recipe()
        if recipe:
            _load_fp8_state(Path(resume_from_checkpoint), self.model, recipe)

    def _scaled_recipe(self):
        """The fp8 recipe, if it has a state to keep; None otherwise."""
        recipe = fp8_recipe(decoder_config(self.model.config))
        return recipe if recipe and recipe.kind == "delayed" else None


def _load_fp8_state(folder, model, recipe):
    """From a checkpoint of ours, or from one that the converter has made of PaddleNLP's: its files, one a pipeline
    stage, call a layer as PaddleNLP's whole model does."""
    path, stages = folder / FP8_STATE, sorted(folder.glob("fp8_state.pp*.pdparams"))
    if path.is_file() or not stages:
        return fp8.load(path, model, recipe)
    ours, theirs = f"{model.base_model_prefix}.", f"{model.config.model_type}."
    names = {name: theirs + name.removeprefix(ours) for name, _ in model.named_sublayers() if name.startswith(ours)}
    fp8.load(stages, model, recipe, names)


@contextmanager
def _without_fleet(optimizer):
    """While it lasts, PaddleFormers 1.2.0 can load a checkpoint where it has not initialised fleet, in one process or
    under data parallelism alone: it asks for fleet's groups, which it then does not use, and for the optimizer inside
    of another one, which in float32 is not there."""
    alone = not hasattr(optimizer, "_inner_opt")
    if alone:
        optimizer._inner_opt = None
    try:
        with replaced(dist.fleet, get_hybrid_communicate_group=lambda: None):
            yield
    finally:
        if alone:
            del optimizer._inner_opt
