"""No NaN or infinity passes: every step is judged before its update, and all tensors before they are saved.

The loss and the norm of the gradients are known when clipping is done and before AdamW begins. There `Watch` waits for
them, once a step, in place of PaddleNLP's Trainer, which waits for the loss alone a moment earlier, and again behind
AdamW where it logs the loss. All ranks judge the same two numbers. A step that is judged bad is answered as --on_nan
says:

stop      training ends before the update.
skip      the update is left out. The step's number, its batch and the random numbers it has drawn are used up; weights,
          moments, master weights, fp8 scales with their amax histories, and the learning rate's schedule stay as they
          were before it.
rollback  the process ends with runs.rollback.ROLLED_BACK and a record, for the next start to go on from the last good
          checkpoint without the batches in between.
"""

import contextlib
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.nn.clip import _squared_l2_norm
from paddlenlp.trainer import TrainerCallback

from paddle_te import device, fp8
from paddle_te.distributed import gather_objects
from paddle_te.fp8.recipe import Recipe
from paddle_te.host import HostArguments, HostModel, HostTrainer
from paddle_te.models import experts
from paddle_te.optimizer import gradient_norm, guard_updates
from paddle_te.runs import rollback
from paddle_te.runs.rollback import UnsoundStep
from paddle_te.training.callback import Control, State

logger = logging.getLogger(__name__)

RECENT_LOSSES = 100  # whose median a loss is compared with
MOST_SKIPPED = 10  # in a row
FEWEST_LOSSES = 10  # before which no loss is a spike
SLICES = "fw_storage"  # sharding stage 3's attribute for a rank's part of a parameter


class Spikes:
    """Knows a loss that is more than `factor` times the median of the recent good ones. factor None: none is."""

    def __init__(self, factor: float | None) -> None:
        self.factor = factor
        self.recent: deque[float] = deque(maxlen=RECENT_LOSSES)

    def fault(self, loss: float) -> str | None:
        """Return what is wrong with a step's loss, or None; then it is a recent one."""
        if self.factor and len(self.recent) >= FEWEST_LOSSES and loss > self.factor * (usual := median(self.recent)):
            return f"the loss of {loss:.6g} is over {self.factor:g} times {usual:.6g}, the median of those before"
        self.recent.append(loss)
        return None


class Watch:
    """Judges the steps of one training run, and what is saved.

    args: the run's TrainingArguments, of which it reads on_nan, spike_factor, output_dir and the layout.
    done: steps of this process, those left out among them; skipped: steps left out. norm: the gradients' before
    clipping, in the last step that was judged, where clipping tells it. fault: what was wrong with the running step,
    whose update is left out; or None.
    """

    def __init__(self, args: HostArguments) -> None:
        self.args = args
        self.spikes = Spikes(args.spike_factor)
        self.step = self.done = self.skipped = self.in_a_row = 0
        self.norm: float | None = None
        self.fault: str | None = None
        self._optimizer: Any = None
        self._loss: Tensor | None = None  # of the running step on this rank
        self._sum: Tensor | None = (
            None  # of the losses since the last log, on this rank: the Trainer's tensor when the step is judged
        )
        self._good_losses: Tensor | None = None  # that sum after the last good step
        self._known_sum: float | None = None  # the same as a number, the mean over all ranks

    def add_loss(self, loss: Tensor, first: bool) -> None:
        """Add a micro-batch's share of the step's loss, a float32 tensor []; first: of a step."""
        self._loss = loss if first or self._loss is None else self._loss + loss

    def add_sum(self, losses: Tensor) -> None:
        """Take the Trainer's sum of the losses since its last log, a tensor [], which has the running step's loss.

        To be called before the update. The log, which sets the tensor to zero, comes after it.
        """
        self._sum = losses

    def take_sum(self) -> float | None:
        """Return the sum of the good steps' losses since the last log, a number: the mean over all ranks.

        None where there was no good step.

        It does not wait for the device. To be called by the log, with which a new sum begins.
        """
        known, self._known_sum = self._known_sum, None
        return known

    def guard(self, optimizer: Any, model: HostModel) -> None:
        """Let a Paddle optimizer update only where the step is judged good. Its clipping comes before.

        optimizer: without what parallelism puts around it later; its state is what is looked at before a save.
        """
        if self._optimizer is optimizer:  # of a second call of train()
            return
        self._optimizer = optimizer

        def may_update(params_grads: Sequence[tuple[Tensor, Tensor | None]]) -> bool:
            return self._is_good(gradient_norm(optimizer._grad_clip, params_grads), model, optimizer)

        guard_updates(optimizer, may_update)

    @paddle.no_grad()
    def _is_good(self, norm: Tensor, model: HostModel, optimizer: Any) -> bool:
        """Return whether the update may be made. Raise UnsoundStep where training cannot go on. Collective."""
        if self._loss is None or self._sum is None:
            raise RuntimeError("an update before the loss of its step is known")
        loss, size, losses = self._everyones(self._loss, norm, self._sum)
        clip = getattr(optimizer, "_grad_clip", None)
        self.norm = size if getattr(clip, "norm", None) is not None else None  # else it is what clipping left
        named = (("loss", loss), ("gradient norm", size))
        faults = [f"the {name} is {value}" for name, value in named if not math.isfinite(value)]
        fault = " and ".join(faults) or self.spikes.fault(loss)
        if fault is None:
            self.in_a_row, self._known_sum = 0, losses
            return True
        updated = self.args.optimizer_in_backward != "off"
        broken = self._broken(trained(model, optimizer)) if faults and not updated else None
        if updated:
            fault += ", and weights have been updated by it (--optimizer_in_backward)"
        elif broken:
            fault = f"{fault}, and before its update {broken}"
        elif self.args.on_nan == "skip":
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            if self.in_a_row <= MOST_SKIPPED:
                self.fault = fault
                logger.warning(f"step {self.step}: {fault}: left out (--on_nan skip), {self.skipped} so far")
                fp8.drop_step()
                experts.drop_step(model)
                return False
            fault = f"{fault}; {MOST_SKIPPED} steps before it are left out already"
        raise UnsoundStep(self.step, fault)

    def _everyones(self, *numbers: Tensor) -> list[float]:
        """Return the means over all ranks of float32 tensors []: not finite where one is not. The step's one wait."""
        mine = paddle.stack([number.astype("float32").reshape([]) for number in numbers])
        if self.args.world_size > 1:
            mine = mine / self.args.world_size
            dist.all_reduce(mine)
        everyones: Any = mine.tolist()  # whose type depends on the dimensions
        return everyones

    def _broken(self, tensors: Iterable[tuple[str, Tensor | None]]) -> str | None:
        """Return which of all ranks' [(name, tensor)] are not finite, in words; None where all are. Collective."""
        mine = not_finite(tensors)
        (count,) = self._everyones(paddle.to_tensor(float(len(mine))))
        return in_words(gather_objects(mine, self.args.world_size)) if count else None  # names only where there are any

    def mend(self, trainer: HostTrainer, losses: Tensor) -> None:
        """Take a step that was left out from the Trainer's sum of losses since its last log, a tensor []."""
        if self.fault is not None:
            good = self._good_losses
            paddle.assign(paddle.zeros_like(losses) if good is None else good, losses)
            trainer._skip_global_steps += 1
            trainer._skip_steps_since_last_logged += 1
            self.fault = None

    def note(self, losses: Tensor) -> None:
        """Note the same sum, when a step is done and logged."""
        self._good_losses = losses.clone()

    @paddle.no_grad()
    def check_before_saving(self, model: HostModel, recipe: Recipe | None) -> None:
        """Raise UnsoundStep, on all ranks, where a tensor that would be saved is not finite on one of them.

        recipe: of delayed scaling, or None.
        """
        scales = fp8.named_tensors(model, recipe) if recipe else []
        broken = self._broken([*trained(model, self._optimizer), *scales])
        if broken:
            raise UnsoundStep(self.step, f"{broken}, just before saving")

    @contextlib.contextmanager
    def concluding(self) -> Iterator[None]:
        """Turn, around training, an UnsoundStep into the RunEnded that on_nan means, and leave the record for it."""
        try:
            yield
        except UnsoundStep as error:
            args = self.args
            if args.on_nan == "rollback":
                ended, back = rollback.rolled_back(error, args.output_dir, args.rollbacks)
                if back and args.process_index == 0:
                    rollback.write_rollbacks(args.output_dir, [*args.rollbacks, back])
            else:
                ended = rollback.stopped(error, args.output_dir)
            if args.world_size > 1:
                dist.barrier()  # the first rank that ends may take the others with it
            raise ended from error


class HealthCallback(TrainerCallback):
    """Tells a Watch the step, undoes the schedule's step with an update's, and the logs what was left out.

    It comes before all callbacks that read the logs.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.schedule = None  # before the step
        self.last = self.logged = 0  # number of the last step that was not skipped as data; of the last one logged
        self.good = 0  # steps since then that were updates

    def on_train_begin(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self.last = self.logged = self.watch.step = state.global_step
        for back in args.rollbacks:
            first, last = back.left_out
            logger.info(f"after a rollback at step {back.bad} ({back.reason}): steps {first} to {last} are left out")

    def on_step_begin(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self.watch.step = state.global_step + 1

    def on_optimizer_begin(
        self, args: HostArguments, state: State, control: Control, lr_scheduler: Any = None, **kwargs: Any
    ) -> None:
        self.schedule = lr_scheduler.state_dict()

    def on_optimizer_end(
        self, args: HostArguments, state: State, control: Control, lr_scheduler: Any = None, **kwargs: Any
    ) -> None:
        if self.watch.fault is None:
            self.good += 1
        else:
            lr_scheduler.set_state_dict(self.schedule)

    def on_step_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        self.last = state.global_step
        self.watch.done += 1

    def on_epoch_end(self, args: HostArguments, state: State, control: Control, **kwargs: Any) -> None:
        """Save and end where the last step's data is skipped: PaddleNLP does neither."""
        if self.last < state.global_step >= state.max_steps:
            control.should_save = args.save_strategy != "no"
            control.should_training_stop = True

    def on_log(self, args: HostArguments, state: State, control: Control, logs: dict[str, Any], **kwargs: Any) -> None:
        steps = state.global_step - self.logged
        if "loss" not in logs or not steps:
            return
        if left_out := steps - self.good:
            logs["skipped_steps"] = left_out
        if not self.good:
            del logs["loss"]  # it is 0: of no step
        self.logged, self.good = state.global_step, 0


def trained(model: HostModel, optimizer: Any) -> list[tuple[str, Tensor | None]]:
    """Return [(name, tensor)] of the weights, the moments and the master weights on this rank.

    optimizer: Paddle's own, without what its parallelism puts around it.
    """
    if (host_states := getattr(optimizer, "host_states", None)) is not None:
        host_states.settle()
    weights = [*model.named_parameters(), *model.named_buffers()]
    whole = getattr(model, "_pp_to_single_mapping", None) or {}  # a pipeline stage's names to the whole model's
    weights = [(whole.get(name, name), tensor) for name, tensor in weights]
    names = {tensor.name: name for name, tensor in weights}
    kinds = {**optimizer._accumulators, "master weight": optimizer._master_weights}
    states = [
        (f"{kind} of {names.get(weight, weight)}", tensor)
        for kind, of_each in kinds.items()
        for weight, tensor in of_each.items()
    ]
    here = [(name, tensor if tensor._is_initialized() else getattr(tensor, SLICES, None)) for name, tensor in weights]
    return here + states


def not_finite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Return the names of those floating-point tensors that hold a NaN or an infinity. Waits for the device once.

    Reads each tensor once, as the norm of gradients is computed; where a sum of squares is no number or more than its
    type holds, the elements are looked at.
    """
    squares: dict[str, tuple[Tensor, Tensor]] = {}
    places: dict[str, list[str]] = {}
    for name, tensor in named:
        if tensor is not None and tensor._is_initialized() and tensor.is_floating_point() and tensor.size:
            squares[name] = tensor, _squared_l2_norm(_wide(tensor)).astype("float32").reshape([])
            places.setdefault(str(tensor.place), []).append(name)  # an offloaded state lies in the host's memory
    suspects = []
    for names in places.values():
        finite: Any = paddle.isfinite(paddle.stack([squares[name][1] for name in names])).tolist()
        suspects += [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
    return [name for name in suspects if not paddle.isfinite(squares[name][0]).all()]


def _wide(tensor: Tensor) -> Tensor:
    """Return float32 where a sum of squares needs it: float16 overflows, and Paddle's CPU has no kernel for bf16."""
    narrow = tensor.dtype == paddle.float16 or (tensor.dtype == paddle.bfloat16 and device.kind(tensor.place) == "cpu")
    return tensor.astype("float32") if narrow else tensor


def in_words(everyone: Sequence[Sequence[str]]) -> str | None:
    """["a", "b"] of rank 0, [] of rank 1 …: "a is not finite, nor is another tensor (rank 0)"; None without any."""
    count = sum(map(len, everyone))
    rank = next((rank for rank, names in enumerate(everyone) if names), None)
    if rank is None:
        return None
    others = "" if count == 1 else ", nor is another tensor" if count == 2 else f", nor are {count - 1} other tensors"
    return f"{everyone[rank][0]} is not finite{others}" + (f" (seen by rank {rank})" if len(everyone) > 1 else "")
