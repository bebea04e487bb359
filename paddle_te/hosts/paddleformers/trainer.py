"""Add to PaddleFormers' Trainer what our decoder layers need of it, and clipping in AdamW's pass.

That is fp8 state, micro-batches, where documents end, and resuming in each layout and from another one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2
from paddle.io import IterableDataset
from paddleformers.cli.train.sft.sft_trainer import SFTTrainer
from paddleformers.peft import LoRAModel

from paddle_te import fp8
from paddle_te.fp8.recipe import Recipe
from paddle_te.host import HostArguments, HostModel
from paddle_te.hosts.paddleformers.batches import Collator, Filled
from paddle_te.hosts.paddleformers.checkpoints import resharding_statements, saved_ranks
from paddle_te.hosts.paddleformers.configuration import decoder_config
from paddle_te.hosts.paddleformers.modeling import PREFIX
from paddle_te.hosts.paddleformers.replaced import replaced
from paddle_te.models.pipeline import stage_layer_names
from paddle_te.optimizer import decay_matrices, fuse_clipping
from paddle_te.training import fp8_state
from paddle_te.training.loader_errors import TellingTrainer
from paddle_te.training.loss_weights import COUNTS, Batch, WeighedTrainer, shares
from paddle_te.training.schedule import tell_long_warm_up
from paddle_te.training.trackers import TRACKERS, tracker_callbacks


class OurTrainer(WeighedTrainer, TellingTrainer, SFTTrainer):
    """PaddleFormers' SFTTrainer, with a loss that is the mean over labels, and able to resume in one process.

    Pretraining, fine-tuning and LoRA use it alike. It reports to SwanLab and MLflow itself: PaddleFormers 1.2.0 asks
    SwanLab 0.10 for its run before it opens one, which raises RuntimeError, and does not know MLflow.
    """

    _counted: list[int] = []  # labels of each batch that the running evaluation has kept for a pipeline

    def __init__(
        self, *, args: HostArguments, eval_dataset: Any = None, callbacks: Iterable[Any] = (), **kwargs: Any
    ) -> None:
        in_pipeline = args.pipeline_model_parallel_size > 1
        if isinstance(eval_dataset, IterableDataset):
            micro_batches = args.gradient_accumulation_steps if in_pipeline else 1
            step = args.per_device_eval_batch_size * args.dataset_world_size * micro_batches
            eval_dataset = Filled(eval_dataset, step)
        callbacks = [*callbacks, *tracker_callbacks(args.report_to)]
        with replaced(args, report_to=[name for name in args.report_to if name not in TRACKERS]):
            super().__init__(args=args, eval_dataset=eval_dataset, callbacks=callbacks, **kwargs)
        if self.data_args.dataset_type != "pretrain":  # where all labels of all samples count
            model = self.model.model if isinstance(self.model, LoRAModel) else self.model
            self.weigh_losses(pipeline=model if in_pipeline else None)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        tell_long_warm_up(self.args, num_training_steps)
        super().create_optimizer_and_scheduler(num_training_steps)

    def training_step(self, model: HostModel, inputs: Batch, step_control: int = 0) -> Tensor:
        """Do one micro-batch; step_control counts them within a step."""
        self.take_weight(inputs, first=step_control == 0)
        return super().training_step(model, inputs, step_control)

    def prediction_step(
        self, model: HostModel, inputs: Batch, *args: Any, step: int = -1, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        """Do PaddleFormers', which in pipelines keeps a step's batches and has no loss before the last of them."""
        kept = [] if step == 0 else self._counted
        self._counted = [*kept, sum(inputs.pop(COUNTS, ()))]
        if self.pipeline_loss:
            self.pipeline_loss.begin(shares(self._counted))
        loss, logits, labels = super().prediction_step(model, inputs, *args, step=step, **kwargs)
        if loss is not None and self.evaluated is not None:
            self.evaluated.add(loss, sum(self._counted))
            self._counted = []
        return loss, logits, labels

    def _load_flex_checkpoint(self, resume_from_checkpoint: str) -> None:
        fleet = nullcontext() if self.args.use_hybrid_parallel else _without_fleet()
        with fleet, _ready_to_load(self.optimizer):
            super()._load_flex_checkpoint(resume_from_checkpoint)


class TETrainer(OurTrainer):
    """In place of PaddleFormers' SFTTrainer."""

    def __init__(self, *, args: HostArguments, data_collator: Callable[..., Any], **kwargs: Any) -> None:
        collator = Collator(data_collator, in_pipeline=args.pipeline_model_parallel_size > 1)
        super().__init__(args=args, data_collator=collator, **kwargs)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        fp8_state.tell_fp8_attention(decoder_config(self.model.config), self.args)
        super().create_optimizer_and_scheduler(num_training_steps)

    def create_optimizer(self, lr_scheduler: Any = None) -> Any:
        """Return PaddleFormers' optimizer, with AdamW and clipping in one pass where that can be.

        It decays the same weights with every backend.
        """
        optimizer = super().create_optimizer(lr_scheduler)
        decay_matrices(optimizer)
        fuse_clipping(optimizer)
        return optimizer

    def training_step(self, model: HostModel, inputs: Batch, step_control: int = 0) -> Tensor:
        """Do one micro-batch; step_control counts them within a step."""
        several = self.args.gradient_accumulation_steps > 1
        with fp8.microbatch(is_first=step_control == 0 if several else None):
            return super().training_step(model, inputs, step_control)

    def _save_flex_model_state(self, output_dir: str) -> None:
        super()._save_flex_model_state(output_dir)
        if recipe := self._scaled_recipe():
            fp8_state.save(output_dir, self.model, recipe, self.args, stage_layer_names(self.model))

    def _load_flex_checkpoint(self, resume_from_checkpoint: str) -> None:
        with self._resharding(resume_from_checkpoint):
            super()._load_flex_checkpoint(resume_from_checkpoint)
        recipe = self._scaled_recipe()
        if recipe:
            _load_fp8_state(Path(resume_from_checkpoint), self.model, recipe)

    @contextmanager
    def _resharding(self, checkpoint: str) -> Iterator[None]:
        """Translate the decoder layers' weights and states from another degree of tensor parallelism while it lasts.

        All else of another layout Paddle does without being told.
        """
        config, saved, load = self.model.config, saved_ranks(checkpoint), dist.load_state_dict
        if saved == max(config.tensor_model_parallel_size, 1):
            yield
            return

        def translated(states: Any, folder: str, aoa_config: Any = None, **others: Any) -> None:
            if aoa_config is not None:  # else PaddleFormers takes these weights from others that it has loaded
                aoa_config = {"aoa_statements": resharding_statements(config, PREFIX, saved, folder)}
            load(states, folder, aoa_config=aoa_config, **others)

        with replaced(self.args, aoa_config={"aoa_statements": []}), replaced(dist, load_state_dict=translated):
            yield

    def _scaled_recipe(self) -> Recipe | None:
        return fp8_state.scaled_recipe(decoder_config(self.model.config))


def _load_fp8_state(folder: Path, model: HostModel, recipe: Recipe) -> None:
    """Load the state from a checkpoint of ours, or from one that the converter has made of PaddleNLP's.

    The latter's files call a layer as PaddleNLP's whole model does.
    """
    files = sorted(folder.glob("fp8_state*.pdparams")) or [folder / "fp8_state.pp00.pdparams"]

    def names(saved: Collection[str]) -> Mapping[str, str]:
        whole, theirs = stage_layer_names(model), f"{model.config.model_type}."
        if not any(name.startswith(theirs) for name in saved):
            return whole
        whole = whole or {name: name for name in fp8.name_modules(model)}
        return {mine: theirs + name.removeprefix(PREFIX) for mine, name in whole.items()}

    fp8.load(files, model, recipe, names)


def _without_fleet() -> AbstractContextManager[None]:
    """Let PaddleFormers 1.2.0 load a checkpoint where it has not initialised fleet, while it lasts.

    That is in one process or under only data parallelism: it asks for fleet's groups, which it then does not use.
    """
    return replaced(dist.fleet, get_hybrid_communicate_group=lambda: None)


@contextmanager
def _ready_to_load(optimizer: Any) -> Iterator[None]:
    """Let PaddleFormers 1.2.0 load a checkpoint into an optimizer that is not around another one while it lasts.

    So it is in float32 and in sharding stage 2: PaddleFormers asks which kind the inner one is, and makes stage 2's
    states in the optimizer that only distributes them, where nothing reads them.
    """
    own: dict[str, Any] = {}
    if not hasattr(optimizer, "_inner_opt"):
        own["_inner_opt"] = None
    if isinstance(optimizer, GroupShardedOptimizerStage2):
        own["_create_accumulators"] = optimizer._optim._create_accumulators
    vars(optimizer).update(own)
    try:
        yield
    finally:
        for name in own:
            delattr(optimizer, name)
