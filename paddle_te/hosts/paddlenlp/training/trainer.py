"""PaddleNLP's Trainer for pretraining: data in order, losses by their labels, and the optimizer that flags ask for."""

import contextlib
import logging
import math
import time
from typing import Any

import paddle
from paddle import Tensor
from paddle.distributed import fleet
from paddlenlp.trainer import speed_metrics
from paddlenlp.utils.batch_sampler import DistributedBatchSampler

from paddle_te import fp8
from paddle_te.data.course import Order, in_order
from paddle_te.distributed import gather_weights
from paddle_te.host import HostArguments, HostModel
from paddle_te.hosts.paddlenlp.freezing import freeze
from paddle_te.hosts.paddlenlp.modeling import count_labels, ignore_index, smooth_labels
from paddle_te.hosts.paddlenlp.training.arguments import asking_for_adamw
from paddle_te.hosts.paddlenlp.training.checkpointing import CheckpointingTrainer
from paddle_te.hosts.paddlenlp.training.early_stopping import evaluation_in
from paddle_te.hosts.paddlenlp.training.health import HealthCallback, Watch
from paddle_te.hosts.paddlenlp.training.modes import TrainingModes
from paddle_te.hosts.paddlenlp.training.samplers import StepSampler, make_course, share_of
from paddle_te.models.backend import backend_of_ours, is_native
from paddle_te.models.context_parallel import context_parallel
from paddle_te.models.experts import scaled_auxiliary_loss
from paddle_te.optimizer import decay_matrices, fuse_clipping
from paddle_te.optimizer.compact_states import keep_compact
from paddle_te.optimizer.in_backward import OptimizerInBackward
from paddle_te.optimizer.muon import use_muon
from paddle_te.optimizer.offloaded_states import keep_on_host
from paddle_te.training.fp8_state import tell_fp8_attention
from paddle_te.training.loader_errors import TellingTrainer
from paddle_te.training.loss_weights import COUNTS, Batch, WeighedTrainer, micro_counts, shares
from paddle_te.training.schedule import tell_long_warm_up
from paddle_te.upstream import stage2_averages

logger = logging.getLogger(__name__)

# What of a batch is split over the ranks that share sequences. All else is attention's, which sees them whole.
PER_TOKEN = {"input_ids", "labels"}


def draw_own_numbers(args: HostArguments) -> None:
    """Let each data parallel rank drop other numbers.

    PaddleNLP seeds them apart where fleet knows the layout; under data parallelism alone it seeds all alike.
    """
    if args.world_size > 1 and not args.use_hybrid_parallel:
        paddle.seed(args.seed + args.process_index)


class PretrainingTrainer(WeighedTrainer, TellingTrainer, CheckpointingTrainer):
    """Reads samples in the dataset's order, weighs and watches losses, and evaluates a number of batches.

    labels_vary: micro-batches may have different numbers of labels that count; `loss_weights` then weighs their losses.
    """

    _evaluated_batches = 0  # of the latest evaluation, on this rank

    def __init__(self, *args: Any, model: HostModel = None, labels_vary: bool = False, **kwargs: Any) -> None:
        freeze(model, kwargs["args"].freeze)  # before anything hooks the weights that have gradients
        smooth_labels(model, kwargs["args"].label_smoothing_factor)
        super().__init__(*args, model=model, **kwargs)
        draw_own_numbers(self.args)
        if labels_vary:
            self._weigh_losses()
        self.cp = context_parallel(self.args)
        if self.cp:
            self._share_sequences()
        self.transfers = list(filter(None, [getattr(self.model, "loaded", None)]))
        self.in_16_bits = []
        self.watch = Watch(self.args)
        self._modes = TrainingModes()
        self.callback_handler.callbacks.insert(0, HealthCallback(self.watch))

    def _share_sequences(self) -> None:
        """Do what PaddleNLP's Trainer leaves undone where ranks share sequences (PaddleNLP 3.0.0b4)."""
        # it splits in training only, and would split position ids and refuse documents, which attention wants whole
        self.args.split_inputs_sequence_dim = False
        # its data parallel ranks of place 0 write the optimizer's state; those that share sequences have the same
        self.dp_group = fleet.get_hybrid_communicate_group().get_dp_sep_parallel_group()

    def _weigh_losses(self) -> None:
        if is_native(self.model.config):
            count_labels(self.model)
        pipeline = self.model if self.args.pipeline_parallel_degree > 1 else None
        self.weigh_losses(ignore_index(self.model.config), pipeline)

    def _own_tokens(self, batch: Batch) -> Batch:
        """Return a batch with this rank's tokens where there are other ranks with the same sequences."""
        if self.cp is None:
            return batch
        return batch | {name: self.cp.own_tokens(batch[name]) for name in PER_TOKEN & batch.keys()}

    def prediction_step(self, model: HostModel, inputs: Batch, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Do PaddleNLP's, of this rank's tokens."""
        self._evaluated_batches += 1
        counts = inputs.pop(COUNTS, None)
        if counts and self.pipeline_loss:
            self.pipeline_loss.begin(shares(micro_counts(counts, self.args.gradient_accumulation_steps)))
        loss, logits, labels = super().prediction_step(model, self._own_tokens(inputs), *args, **kwargs)
        if counts and self.evaluated is not None:
            self.evaluated.add(loss, sum(counts))
        return loss, logits, labels

    def evaluation_loop(  # type: ignore[override]  # a mixin passes on what it does not read
        self, loader: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Do PaddleNLP's. The number of samples is at most what was there; PaddleNLP's is what was asked for."""
        self._evaluated_batches = 0
        with self._outside_of_the_interval():
            output = super().evaluation_loop(loader, *args, **kwargs)
        read = self._evaluated_batches * loader.batch_sampler.batch_size * self.args.dataset_world_size
        return output._replace(num_samples=min(output.num_samples, read))

    def training_step(self, model: HostModel, inputs: Batch, step_control: int = 0) -> Tensor:
        """Do one micro-batch; step_control counts them within a step."""
        self.take_weight(inputs, first=step_control == 0)
        inputs = self._own_tokens(inputs)
        several = self.args.gradient_accumulation_steps > 1
        stage2_averages.tell_last(model, (step_control + 1) % self.args.gradient_accumulation_steps == 0)
        first = step_control == 0 if several else None
        with fp8.microbatch(is_first=first), self._modes.kept(model), self._scaled_auxiliary_loss():
            loss = super().training_step(model, inputs, step_control)
        self.watch.add_loss(loss, first=step_control == 0)
        return loss

    def _scaled_auxiliary_loss(self) -> contextlib.AbstractContextManager[None]:
        scaler = self.scaler if self.do_grad_scaling else None
        later = self._enable_delay_scale_loss()  # the Trainer divides all gradients in the end
        micro_batches = 1 if later else self.args.gradient_accumulation_steps
        return scaled_auxiliary_loss(micro_batches, scaler)

    def _check_loss_valid(self, losses: Tensor) -> None:
        """Tell the watch, which waits a moment later for the gradients' norm as well; PaddleNLP would wait here."""
        self.watch.add_sum(losses)

    def _get_item_from_loss(self, losses: Tensor) -> float:
        """Return what is logged: PaddleNLP would wait here until the device has updated all weights."""
        known = self.watch.take_sum()
        return super()._get_item_from_loss(losses) if known is None else known

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Do PaddleNLP's, for the steps of the course."""
        tell_long_warm_up(self.args, self._last_step())
        tell_fp8_attention(self.model.config, self.args)
        super().create_optimizer_and_scheduler(self._last_step())

    def create_optimizer(self, lr_scheduler: Any = None) -> Any:
        """Return PaddleNLP's optimizer with the same weights decayed in all backends, and a state as the flags say.

        AdamW and clipping are one pass where that can be.
        """
        args = self.args
        with asking_for_adamw(args):
            optimizer = super().create_optimizer(lr_scheduler)
        if "split_param" in args.sharding_parallel_config:  # whose buffers take no weights without gradients
            trained = [weight for weight in optimizer._parameter_list if not weight.stop_gradient]
            optimizer._parameter_list = optimizer._param_groups = trained
        decay_matrices(optimizer)
        if args.optimizer_in_backward == "off":
            fuse_clipping(optimizer)
        elif self._in_backward is None:  # train() may be called again
            group = None
            if args.tensor_parallel_degree > 1:
                group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
            self._in_backward = OptimizerInBackward(optimizer, args.max_grad_norm or None, group)
        keep_compact(optimizer, args.optim_moments, args.master_weights, args.seed)
        if args.optim == "muon":
            use_muon(optimizer, backend_of_ours(args))
        keep_on_host(optimizer, args.offload_optimizer)
        self.watch.guard(optimizer, self.model)
        return optimizer

    def _last_step(self) -> int:
        args = self.args
        return args.max_steps if args.max_steps > 0 else self.course.last_step(args.num_train_epochs)

    def _inner_training_loop(
        self,
        args: HostArguments,
        model: HostModel,
        loader: Any,
        length: int,
        max_steps: int,
        passes: int,
        steps_a_pass: int,
        *rest: Any,
    ) -> Any:
        """Run PaddleNLP's loop for the steps of the course.

        PaddleNLP counts passes by steps of today's batch size; here it gets as many of its passes as are left.
        """
        max_steps = self._last_step()
        left = self.course.place(max_steps)[0] - self.course.place(self.course.first)[0] + 1
        passes = self.course.first // steps_a_pass + left
        best, args.load_best_model_at_end = (
            args.load_best_model_at_end,
            False,
        )  # PaddleNLP's only warns of files it lacks
        try:
            result = super()._inner_training_loop(args, model, loader, length, max_steps, passes, steps_a_pass, *rest)
        finally:
            args.load_best_model_at_end = best
        if best and self.state.best_model_checkpoint:
            self._load_best(self.state.best_model_checkpoint)
        return result

    def log(self, logs: dict[str, Any], **kwargs: Any) -> None:
        """Log as PaddleNLP does, with the epoch of the course and the gradients' norm.

        The state, which checkpoints hold, keeps what evaluations gave: PaddleNLP's forgets it with each line.
        """
        self._note_place()
        if "train_runtime" in logs:
            logs.update(self._closing_values(logs["train_runtime"]))
        if "loss" in logs and self.watch.norm is not None:
            logs["grad_norm"] = self.watch.norm
        kept = list(self.state.log_history or ())
        super().log(logs, **kwargs)
        self.state.log_history = kept + evaluation_in(logs, self.state.global_step)

    def _closing_values(self, seconds: float) -> dict[str, float]:
        """Return the mean loss and speeds of the steps that this process has computed.

        PaddleNLP divides their losses by all steps of the run, also those before a resume, and all steps of the
        run by this process's seconds.
        """
        done, first = self.state.global_step, self.course.first
        samples = self.course.consumed_at(done) - self.course.consumed_at(first)
        learned = done - first - self._skip_global_steps - self.watch.skipped
        return {
            "train_loss": self._total_loss_scalar / max(learned, 1),
            "train_samples_per_second": round(samples / seconds, 4),
            "train_steps_per_second": round((done - first) / seconds, 4),
        }

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train. Raise CheckpointNotSaved, before the first step, where --output_dir or --staging_dir has no room.

        Raises RunEnded where numbers are not finite (`health`).
        """
        background = self._saving_in_background() if self.args.staging_dir else contextlib.nullcontext()
        self.course = self.course or make_course(len(self.train_dataset), None, self.args)
        self.check_output(self._last_step())
        with self.watch.concluding(), background:
            result = super().train(*args, **kwargs)
        gather_weights(self.optimizer)
        return result

    def _maybe_log_save_evaluate(self, losses: Tensor, *args: Any, **kwargs: Any) -> None:
        """After each step; losses: their sum since the last log.

        When training ends, what is on its way is awaited: the best checkpoint may be loaded next, and callbacks
        say that all is done.
        """
        self.watch.mend(self, losses)
        super()._maybe_log_save_evaluate(losses, *args, **kwargs)
        self.watch.note(losses)
        if not self._background:
            return
        if self.control.should_training_stop:
            self._background.wait()
            self._wait_for_all()
        self._background.check()

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Return the loss over eval_iters batches (PaddleNLP's own would read the whole dataset)."""
        start = time.time()
        output = self.evaluation_loop(
            self.get_eval_dataloader(eval_dataset or self.eval_dataset),
            description="Evaluation",
            prediction_loss_only=True,
            ignore_keys=ignore_keys,
            max_eval_iters=self.args.eval_iters,
        )
        batch = self.args.eval_batch_size * self.args.dataset_world_size
        steps = math.ceil(output.num_samples / batch)
        output.metrics.update(speed_metrics(metric_key_prefix, start, num_samples=output.num_samples, num_steps=steps))
        self.log(output.metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, output.metrics)
        return output.metrics

    def _get_train_sampler(self) -> StepSampler:
        return StepSampler(self.course, share_of(self.args), self._order())

    def _order(self) -> Order:
        """Return the order of the samples in each pass."""
        return in_order(self.course.samples)

    def _get_eval_sampler(self, eval_dataset: Any) -> DistributedBatchSampler:
        return DistributedBatchSampler(
            eval_dataset,
            batch_size=self.args.per_device_eval_batch_size,
            shuffle=False,
            num_replicas=self.args.dataset_world_size,
            rank=self.args.dataset_rank,
            drop_last=self.args.dataloader_drop_last,
        )
