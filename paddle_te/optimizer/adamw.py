"""Update all weights by AdamW in one call, with clipping in the same pass.

Paddle's ClipGradByGlobalNorm reads and writes all gradients between their norm and AdamW, which reads them again. Here
it computes only the factor, and nvgpu has an AdamW that takes it and multiplies each gradient as it reads it. The
numbers are the same: the kernel rounds factor and product to the gradient's type, as Paddle's multiplication does. The
same AdamW keeps a state of fewer bytes (compact_states). Both the norm and the update take all weights at once
(multi_tensor).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import paddle
import paddle.distributed as dist
from paddle import Tensor, _C_ops
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import HybridParallelClipGrad
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_utils import GroupShardedClipGrad
from paddle.nn.clip import _squared_l2_norm

from paddle_te import device
from paddle_te.optimizer import multi_tensor

if TYPE_CHECKING:
    from paddle_te.optimizer.offloaded_states import OptimizerOffload

Pair: TypeAlias = tuple[Tensor, Tensor]  # a parameter and its gradient
MaybePair: TypeAlias = tuple[Tensor, Tensor | None]


def fuse_clipping(optimizer: paddle.optimizer.Optimizer) -> None:
    """Let Paddle's AdamW, without clipping or with ClipGradByGlobalNorm, do so where that is possible: on nvgpu.

    Both remain what they are but for their class: states, their names and checkpoints are the same; so does what Paddle
    puts around the clipping later: HybridParallelClipGrad under tensor and pipeline parallelism and sharding,
    GroupShardedClipGrad in sharding stage 3. The parameters' `grad` stay unclipped. Other optimizers, groups of
    parameters and kinds of clipping are left alone.

    Raises ValueError for a plug-in that is too old for it.
    """
    clip = optimizer._grad_clip
    if type(optimizer) is not paddle.optimizer.AdamW or has_groups(optimizer):
        return
    if type(clip) is paddle.nn.ClipGradByGlobalNorm:
        clip.__class__ = _ClipGradByGlobalNorm
    elif clip is not None:
        return
    device.check_nvgpu("defer")
    optimizer.__class__ = FactorAdamW


def has_groups(optimizer: paddle.optimizer.Optimizer) -> bool:
    """Return whether a Paddle optimizer's parameters are in groups, each of which may have settings of its own."""
    return isinstance(optimizer._parameter_list[0], dict)


def guard_updates(optimizer: paddle.optimizer.Optimizer, may_update: Callable[[Sequence[MaybePair]], bool]) -> None:
    """Let a Paddle optimizer change weights only where may_update is true.

    may_update: called in each step with what is to be updated, [(parameter, its clipped gradient)]. It may wait for the
    device. A FactorAdamW calls it when all else is prepared, since the device has nothing to do from then on.
    """

    def allowed(params_grads: Any) -> bool:  # a group of parameters is a dict to Paddle
        return may_update(params_grads["params"] if isinstance(params_grads, dict) else params_grads)

    if isinstance(optimizer, FactorAdamW):
        optimizer._may_update = allowed  # type: ignore[method-assign, assignment]  # replaced on purpose
        return
    update = optimizer._create_optimization_pass

    def update_if_allowed(params_grads: Any, param_group_idx: int = 0) -> Any:
        return update(params_grads, param_group_idx=param_group_idx) if allowed(params_grads) else []

    optimizer._create_optimization_pass = update_if_allowed


def decay_matrices(optimizer: paddle.optimizer.Optimizer) -> None:
    """Let an AdamW of Paddle's apply its weight decay only to parameters of two axes and more.

    Biases and weights of norms, which have one axis, do not decay.

    PaddleNLP's Trainer asks for "bias" and "norm" in their names. It thereby decays the matrices of its own layers, but
    not the qkv, fc1 and fc2 of Transformer Engine's names, which begin with layernorm_qkv and layernorm_mlp.
    """
    decaying = {param.name for param in optimizer._parameter_list if param.ndim > 1}
    optimizer._apply_decay_param_fun = decaying.__contains__


class _ClipGradByGlobalNorm(paddle.nn.ClipGradByGlobalNorm):
    """Paddle's, or, where FactorAdamW can multiply all the gradients, only the `factor` that clips them."""

    factor: Tensor | None = None  # float32 [1] of the last call; None: the gradients that it returned are clipped
    norm: Tensor | None = None  # float32 [] of the last call's gradients, before clipping

    def _dygraph_clip(self, params_grads: Sequence[MaybePair]) -> Sequence[MaybePair]:
        clipped = _clipped(params_grads)
        if not clipped or self.auto_skip_clip or not _take_factor(clipped):
            self.factor, self.norm = None, _norm([grad for _, grad in clipped])
            return super()._dygraph_clip(params_grads)
        self.factor = self._clip_factor([grad for _, grad in clipped])
        return params_grads

    @paddle.no_grad()
    def _clip_factor(self, grads: Sequence[Tensor]) -> Tensor:
        """Return clip_norm / max(norm, clip_norm), by Paddle's operations in Paddle's order."""
        self.norm = paddle.sqrt(multi_tensor.sum_of_squares(grads))
        return clip_factor(self.norm, self.clip_norm)


def clip_factor(norm: Tensor, greatest: float) -> Tensor:
    """Return the factor, float32 [1], that brings gradients of a norm, float32 [], to a norm of at most `greatest`."""
    largest = paddle.full([1], greatest, "float32")
    return largest / paddle.maximum(norm, largest)


class _ClipOverRanks:
    """Paddle's clipping over several ranks, which the other base class does, or likewise only the `factor`.

    `_set_factor(clipped)` sets factor and norm, for pairs of a parameter and its gradient, of which there may be none:
    all ranks must take part.
    """

    factor: Tensor | None = None
    norm: Tensor | None = None

    @paddle.no_grad()
    def _dygraph_clip(self, params_grads: Sequence[MaybePair]) -> Sequence[MaybePair]:
        clipped = _clipped(params_grads)
        if not _take_factor(clipped):
            self.factor = self.norm = None
            clip = super()._dygraph_clip  # type: ignore[misc]  # the other base class has it
            return clip(params_grads)
        self._set_factor(clipped)
        return params_grads

    def _set_factor(self, clipped: Sequence[Pair]) -> None:
        raise NotImplementedError


class _HybridParallelClipGrad(_ClipOverRanks, HybridParallelClipGrad):
    """Under tensor and pipeline parallelism and sharding."""

    def _set_factor(self, clipped: Sequence[Pair]) -> None:
        once = [(p, grad) for p, grad in clipped if getattr(p, "is_firstly_shared", True)]  # of all pipeline stages
        distributed, others = (
            multi_tensor.sum_of_squares([grad for p, grad in once if bool(p.is_distributed) is differs]).reshape([1])
            for differs in (True, False)  # whether tensor parallel ranks have parts that differ
        )
        self._global_norm(distributed, others)
        self.norm = norm = paddle.sqrt(distributed + others)
        largest = paddle.full([], self.clip_norm, norm.dtype)
        self.factor = largest / (paddle.maximum(norm, largest) + paddle.full([], 1e-6, norm.dtype))


class _GroupShardedClipGrad(_ClipOverRanks, GroupShardedClipGrad):
    """In sharding stage 3, where a rank has a slice of a large weight's gradient, and a small one's whole."""

    def _set_factor(self, clipped: Sequence[Pair]) -> None:
        slices, others = (
            multi_tensor.sum_of_squares([grad for p, grad in clipped if hasattr(p, "unslice") is whole])
            for whole in (False, True)
        )
        dist.all_reduce(slices, group=self._group)
        self.norm = norm = paddle.sqrt(slices + others)
        self.factor = clip_factor(norm, self.clip_norm)


# What Paddle may put around an optimizer's clipping after `fuse_clipping`
_AROUND_CLIPPING = {HybridParallelClipGrad: _HybridParallelClipGrad, GroupShardedClipGrad: _GroupShardedClipGrad}


def gradient_norm(clip: Any, params_grads: Sequence[MaybePair]) -> Tensor:
    """Return a float32 tensor [] that is finite where all gradients are.

    It is the norm of all ranks' gradients that `clip` (the optimizer's, or None) has just computed. Without one it is
    the norm of `params_grads`, what clipping has left of only this rank's.

    Clipping to a global norm keeps what is not finite: a factor of NaN spreads, and one of 0 times infinity is NaN.
    """
    if getattr(clip, "norm", None) is not None:
        return clip.norm.reshape([])
    pairs = [(p, grad) for p, grad in params_grads if grad is not None]
    grads = [grad for _, grad in pairs]
    return _root(multi_tensor.squared_norms(grads)) if _take_factor(pairs) else _norm(grads)


@paddle.no_grad()
def _norm(grads: Sequence[Tensor]) -> Tensor:
    return _root([_squared_l2_norm(grad) for grad in grads])


def _root(squares: Sequence[Tensor]) -> Tensor:
    squares = [square.astype("float32").reshape([-1]) for square in squares]
    return paddle.sqrt(paddle.concat(squares).sum()) if squares else paddle.zeros([], "float32")


def _clipped(params_grads: Sequence[MaybePair]) -> list[Pair]:
    return [(p, grad) for p, grad in params_grads if grad is not None and getattr(p, "need_clip", True)]


def _take_factor(clipped: Sequence[Pair]) -> bool:
    """Return whether nvgpu's operators can take all these gradients, which lie on one device."""
    on_nvgpu = not clipped or device.kind(clipped[0][1].place) == "nvgpu"
    return on_nvgpu and all(_takes_factor(param, grad) for param, grad in clipped)


def _takes_factor(param: Tensor, grad: Tensor) -> bool:
    regularized = getattr(param, "regularizer", None) is not None  # between clipping and AdamW
    return _is_dense(grad) and grad.dtype is not paddle.float64 and not regularized


def _is_dense(grad: Tensor) -> bool:
    return grad.is_dense() and not grad.is_dist()


@dataclass(slots=True)  # not frozen: there is one for each weight, and making a frozen one takes three times as long
class Step:
    """The tensors and numbers that one weight's step of AdamW reads and changes.

    factor: float32 [1] that the gradient is multiplied by, or None. master: the float32 master weight, the int16
    remainder of one, or None. decay: 0 for a weight that does not decay. noise_key, noise_first: which random numbers
    moments are rounded by (compact_states.noise).
    """

    param: paddle.Tensor
    grad: paddle.Tensor
    factor: paddle.Tensor | None
    learning_rate: paddle.Tensor
    moment1: paddle.Tensor
    moment2: paddle.Tensor
    moment2_max: paddle.Tensor | None
    beta1_power: paddle.Tensor
    beta2_power: paddle.Tensor
    master: paddle.Tensor | None
    beta1: float
    beta2: float
    epsilon: float
    rate_ratio: float
    decay: float
    noise_key: int
    noise_first: int


def run_in_paddle(step: Step) -> None:
    """Make a Step by Paddle's operation, which has no factor and no state in fewer bytes."""
    grad, master = multiplied(step.grad, step.factor), step.master
    numbers: tuple[Any, ...] = (step.beta1, step.beta2, step.epsilon, step.rate_ratio, step.decay, step.decay != 0)
    states: tuple[Any, ...] = (step.moment1, step.moment2, step.moment2_max, step.beta1_power, step.beta2_power)
    flags: tuple[Any, ...] = (False, 1000, master is not None, False, step.moment2_max is not None)
    arguments = step.param, grad, step.learning_rate, *states, master, None, *numbers, *flags
    _C_ops.adamw_(*arguments)


def multiplied(grad: Tensor, factor: Tensor | None) -> Tensor:
    """Return a gradient times a Step's factor, by Paddle's operations: both are rounded to the gradient's type."""
    return grad if factor is None else grad * factor.astype(grad.dtype)


class FactorAdamW(paddle.optimizer.AdamW):
    """Paddle's, with the factor of its clipping, which on nvgpu updates all weights in one call.

    host_states: an OptimizerOffload (`offloaded_states`), which has put itself there, for the weights whose states lie
    in host memory; None: all states are on the device.
    """

    host_states: OptimizerOffload | None = None
    # the functions that were asked for `_ratio_and_decay`, and {name: their answer}
    _asked_for: tuple[Any, ...] | None = None
    _answers: dict[str, tuple[float, float]] = {}

    def _apply_optimize(self, *args: Any, **kwargs: Any) -> Any:
        if around := _AROUND_CLIPPING.get(type(self._grad_clip)):
            self._grad_clip.__class__ = around
        return super()._apply_optimize(*args, **kwargs)

    def _create_optimization_pass(self, parameters_and_grads: Any, param_group_idx: int = 0) -> Any:
        """Do as Paddle's; on nvgpu pairs of a parameter and its gradient are updated many by a call."""
        together: list[Pair] | None = None
        others = parameters_and_grads
        if isinstance(others, list):
            there = [
                (p, grad) for p, grad in others if grad is not None and p._is_initialized() and not p.stop_gradient
            ]
            if self._goes_together(there):
                together = [(p, grad) for p, grad in there if _is_dense(grad)]
                others = [(p, grad) for p, grad in there if not _is_dense(grad)]
        asked_first = bool(others) or not together  # Paddle's operations prepare and update in one
        if asked_first and not self._may_update(parameters_and_grads):
            return []
        operations = super()._create_optimization_pass(others, param_group_idx)  # sets the learning rate, too
        # where a loss is scaled and a gradient is not finite, Paddle leaves the step out, too
        if together is not None and not self._get_auxiliary_var("found_inf"):
            update = self._prepared(together)
            if asked_first or self._may_update(parameters_and_grads):
                update()
        return operations

    def _goes_together(self, pairs: Sequence[Pair]) -> bool:
        """Return whether `_prepared` updates these pairs, and not Paddle one after another."""
        return bool(pairs) and device.kind(pairs[0][0].place) == "nvgpu"

    def _may_update(self, parameters_and_grads: Any) -> bool:
        """Return whether weights may be changed; `guard_updates` replaces this function."""
        return True

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Do as Paddle's; in one process gradients are let go.

        Paddle would fill them with zeros, which the next backward replaces without reading them, and hold their memory
        until then.
        """
        super().clear_grad(set_to_zero and dist.get_world_size() > 1)

    def _create_accumulators(self, block: Any, parameters: Sequence[Tensor]) -> None:
        create = partial(super()._create_accumulators, block)
        if self.host_states is None:
            create(parameters)
        else:
            self.host_states.create(parameters, create)

    def _append_optimize_op(self, block: Any, param_and_grad: Pair) -> None:
        param, grad = param_and_grad
        if _is_dense(grad) and device.kind(param.place) == "nvgpu":
            self._prepared([param_and_grad])()
        elif (host := self._host_of(param)) is not None:
            host.update(self.step_of(param_and_grad), self._run)
        else:
            self._update_elsewhere(block, param_and_grad)

    def _update_elsewhere(self, block: Any, param_and_grad: Pair) -> None:
        param, grad = param_and_grad
        super()._append_optimize_op(block, (param, multiplied(grad, self._factor_of(param))))

    def _run(self, step: Step) -> None:
        """Make a Step whose tensors are on the device."""
        if device.kind(step.param.place) == "nvgpu":
            multi_tensor.adamw([step])
        else:
            self._run_elsewhere(step)

    def _run_elsewhere(self, step: Step) -> None:
        run_in_paddle(step)

    def _host_of(self, param: Tensor) -> OptimizerOffload | None:
        """Return what holds the parameter's states in host memory; None where they are on the device."""
        host = self.host_states
        return host if host is not None and host.has(param) else None

    def state_dict(self) -> dict[str, Tensor]:
        """Return Paddle's."""
        if self.host_states is not None:
            self.host_states.settle()
        return super().state_dict()

    def set_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Do as Paddle's."""
        if self.host_states is not None:
            self.host_states.settle()
        super().set_state_dict(state_dict)
        if self.host_states is not None:
            self.host_states.restore()

    load_state_dict = set_state_dict

    def _factor_of(self, param: Tensor) -> Tensor | None:
        """Return what clips the parameter's gradient as it is read; None: nothing."""
        return getattr(self._grad_clip, "factor", None) if getattr(param, "need_clip", True) else None

    def _noise_key(self) -> int:
        """Return which random numbers a step's moments are rounded by; those in float32 need none."""
        return 0

    def _first_element(self, name: str) -> int:
        """Return the place of a parameter's first element in its whole weight, for the random numbers."""
        return 0

    def _prepared(self, pairs: Sequence[Pair]) -> Callable[[], None]:
        """Return a function that updates parameters on nvgpu.

        It makes one call for all that have the same learning rate and factor; parameters whose states are in host
        memory follow one another. For hundreds of weights its arguments take the host milliseconds, in which the device
        may still compute their gradients.

        Each step looks its states up anew, and reads their addresses, so that it does not matter who has replaced or
        moved them since the last one.
        """
        new = [param for param, _ in pairs if param.name not in self._already_create_accumulator]
        if new:
            self._create_accumulators(paddle.static.default_main_program().global_block(), new)
            self._maybe_refuse()  # Paddle's, which may want the states in one piece of memory
        on_host, alike = [], defaultdict(list)
        for pair in pairs:
            if (host := self._host_of(pair[0])) is not None:
                on_host.append((host, pair))
            else:
                alike[self._call_of(pair[0])].append(pair)
        update_others = multi_tensor.deferred_adamw([self._steps_of(of_call) for of_call in alike.values()])

        def update() -> None:
            for host, pair in on_host:
                host.update(self.step_of(pair), self._run)
            update_others()

        return update

    def _call_of(self, param: Tensor) -> Hashable:
        """Return what parameters must have alike to be updated by one call."""
        attributes = getattr(param, "optimize_attr", None) or {}
        rate = attributes.get("learning_rate", 1.0)
        rate = rate if isinstance(rate, (int, float)) else id(rate)  # a tensor
        return rate, getattr(param, "need_clip", True), self.has_master(param)

    def has_master(self, param: Tensor) -> bool:
        """Return whether a parameter has a master weight beside it."""
        return self._multi_precision and (param.dtype is paddle.bfloat16 or param.dtype is paddle.float16)

    def step_of(self, param_and_grad: Pair) -> Step:
        """Return the Step of a parameter, whose state is there, and its gradient."""
        (step,) = self._steps_of([param_and_grad])
        return step

    def _steps_of(self, pairs: Sequence[Pair]) -> list[Step]:
        """Return the Steps of parameters that one call updates (`_call_of`), whose states are there; and gradients.

        A model has hundreds of weights. Therefore what they share is asked for once.
        """
        one = pairs[0][0]
        shared = dict(
            factor=self._factor_of(one),
            learning_rate=self._create_param_lr(pairs[0]),
            beta1=float(self._beta1),
            beta2=float(self._beta2),
            epsilon=float(self._epsilon),
            noise_key=self._noise_key(),
        )
        moments1, moments2 = self._states(self._moment1_acc_str), self._states(self._moment2_acc_str)
        powers1, powers2 = self._states(self._beta1_pow_acc_str), self._states(self._beta2_pow_acc_str)
        greatest = self._states(self._moment2_acc_max_str) if self._amsgrad else None
        has_master, steps = self.has_master(one), []
        for param, grad in pairs:
            name = param.name
            master = self._master_weights[name] if has_master else None
            key = name if master is None else master.name
            rate_ratio, decay = self._ratio_and_decay(param, name)
            step = Step(
                param=param,
                grad=grad,
                moment1=moments1[key],
                moment2=moments2[key],
                moment2_max=None if greatest is None else greatest[key],
                beta1_power=powers1[key],
                beta2_power=powers2[key],
                master=master,
                rate_ratio=rate_ratio,
                decay=decay,
                noise_first=self._first_element(name),
                **shared,
            )
            steps.append(step)
        return steps

    def _states(self, kind: str) -> Mapping[str, Tensor]:
        """Return {name of a parameter, or of its master weight: tensor} of Paddle's states of a kind."""
        return self._accumulators[kind if self._name is None else f"{self._name}_{kind}"]

    def _ratio_and_decay(self, param: Tensor, name: str) -> tuple[float, float]:
        """Return (ratio of the learning rate, decay) of a parameter, and ask the functions that say so only once."""
        functions = self._lr_ratio, self._apply_decay_param_fun, self._weight_decay
        if self._asked_for != functions:
            self._asked_for, self._answers = functions, {}
        if name not in self._answers:
            decays = self._apply_decay_param_fun is None or self._apply_decay_param_fun(name)
            ratio = 1.0 if self._lr_ratio is None else self._lr_ratio(param)
            self._answers[name] = ratio, self._weight_decay if decays else 0.0
        return self._answers[name]
