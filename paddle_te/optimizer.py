"""Clipping to a global norm without a pass of its own: AdamW multiplies each gradient as it reads it.

Paddle's ClipGradByGlobalNorm reads and writes all gradients between their norm and AdamW, which reads them again. Here
it computes the factor only, and nvgpu has an AdamW that takes it. Same numbers: the kernel rounds factor and product to
the gradient's type, as Paddle's multiplication does. The same AdamW keeps a state of fewer bytes (compact_states).
"""

from dataclasses import dataclass
from functools import cache
from itertools import groupby

import paddle
from paddle import _C_ops
from paddle.base import core
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import HybridParallelClipGrad
from paddle.nn.clip import _squared_l2_norm

from paddle_te import device


def fuse_clipping(optimizer):
    """Lets Paddle's AdamW with its ClipGradByGlobalNorm clip as it updates, where that is possible: on nvgpu.

    Both remain what they are but for their class: states, their names and checkpoints are the same; so does the
    HybridParallelClipGrad that Paddle puts around the clipping under tensor and pipeline parallelism and sharding. The
    parameters' `grad` stay unclipped. Other optimizers, groups of parameters and kinds of clipping are left alone.
    """
    clip = optimizer._grad_clip
    groups = isinstance(optimizer._parameter_list[0], dict)  # each may have its own clipping
    if type(optimizer) is paddle.optimizer.AdamW and type(clip) is paddle.nn.ClipGradByGlobalNorm and not groups:
        optimizer.__class__, clip.__class__ = FactorAdamW, _ClipGradByGlobalNorm


class _ClipGradByGlobalNorm(paddle.nn.ClipGradByGlobalNorm):
    """Paddle's, or, where FactorAdamW can multiply all the gradients, only the `factor` that clips them."""

    factor = None  # float32 [1] of the last call; None: the gradients that it returned are clipped
    norm = None  # float32 [] of the last call's gradients, where there is a factor

    def _dygraph_clip(self, params_grads):
        clipped = _clipped(params_grads)
        if not clipped or self.auto_skip_clip or not _take_factor(clipped):
            self.factor = self.norm = None
            return super()._dygraph_clip(params_grads)
        self.factor = self._clip_factor([grad for _, grad in clipped])
        return params_grads

    @paddle.no_grad()
    def _clip_factor(self, grads):
        """clip_norm / max(norm, clip_norm), by Paddle's operations in Paddle's order."""
        squares = sorted((_squared_l2_norm(grad) for grad in grads), key=lambda square: str(square.dtype))
        sums = [paddle.stack(list(same)).sum() for _, same in groupby(squares, key=lambda square: square.dtype)]
        self.norm = paddle.sqrt(paddle.stack([total.astype("float32") for total in sums]).sum())
        return clip_factor(self.norm, self.clip_norm)


def clip_factor(norm, greatest):
    """float32 [1] by which gradients of a norm, float32 [], are multiplied so that it is at most `greatest`."""
    largest = paddle.full([1], greatest, "float32")
    return largest / paddle.maximum(norm, largest)


class _HybridParallelClipGrad(HybridParallelClipGrad):
    """Paddle's clipping over several ranks, or likewise only the `factor`."""

    factor = norm = None

    def _comm_and_clip(self, params_grads, squares_of_distributed, squares_of_others):
        """As Paddle's: the sums of squares [1] of this rank's weights that differ between tensor parallel ranks, and of
        its others, become those of all ranks."""
        if not _take_factor(_clipped(params_grads)):
            self.factor = self.norm = None
            return super()._comm_and_clip(params_grads, squares_of_distributed, squares_of_others)
        self._global_norm(squares_of_distributed, squares_of_others)
        self.norm = norm = paddle.sqrt(squares_of_distributed + squares_of_others)
        largest = paddle.full([], self.clip_norm, norm.dtype)
        self.factor = largest / (paddle.maximum(norm, largest) + paddle.full([], 1e-6, norm.dtype))
        return params_grads


def gradient_norm(clip, params_grads):
    """A float32 tensor [] that is finite where all gradients are: the norm that `clip` (the optimizer's, or None) has
    just computed, of all ranks' gradients, else that of `params_grads`, what clipping has left of this rank's alone.

    Clipping to a global norm keeps what is not finite: a factor of NaN spreads, and one of 0 times infinity is NaN.
    """
    if getattr(clip, "norm", None) is not None:
        return clip.norm.reshape([])
    squares = [_squared_l2_norm(grad).astype("float32").reshape([]) for _, grad in params_grads if grad is not None]
    return paddle.sqrt(paddle.stack(squares).sum()) if squares else paddle.zeros([], "float32")


def _clipped(params_grads):
    return [(p, grad) for p, grad in params_grads if grad is not None and getattr(p, "need_clip", True)]


def _take_factor(clipped):
    """Whether FactorAdamW can multiply all these gradients."""
    return all(_takes_factor(param, grad) for param, grad in clipped)


def _takes_factor(param, grad):
    dense = grad.is_dense() and not grad.is_dist() and grad.dtype != paddle.float64
    regularized = getattr(param, "regularizer", None) is not None  # between clipping and AdamW
    return dense and not regularized and device.kind(grad.place) == "nvgpu"


@cache
def _operator():
    """The name of nvgpu's AdamW with a factor (its kernels/training.cc), which Paddle knows afterwards."""
    name, path = "nvgpu_adamw", device.nvgpu_library()
    if name not in core.load_op_meta_info_and_register_op(path):
        raise RuntimeError(f"{path} is of another version and lacks the operator {name}: pip install ./nvgpu")
    return name


@dataclass(frozen=True)
class Step:
    """What one step of AdamW reads and changes: the inputs and attributes of nvgpu's operator, in its order.

    factor: float32 [1] that the gradient is multiplied by, or None. master: the float32 master weight, the int16
    remainder of one, or None. decay: 0 for a weight that does not decay. noise_key, noise_first: which random numbers
    bfloat16 moments are rounded by (compact_states.noise).
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


def run_on_nvgpu(step):
    """Makes a Step by nvgpu's operator."""
    _C_ops._run_custom_op(_operator(), *vars(step).values())


def multiplied(grad, factor):
    """A gradient times a Step's factor, by Paddle's operations: both are rounded to the gradient's type."""
    return grad if factor is None else grad * factor.astype(grad.dtype)


class FactorAdamW(paddle.optimizer.AdamW):
    """Paddle's, with the factor of its clipping."""

    def _apply_optimize(self, *args, **kwargs):
        if type(self._grad_clip) is HybridParallelClipGrad:  # put there after this optimizer was made
            self._grad_clip.__class__ = _HybridParallelClipGrad
        return super()._apply_optimize(*args, **kwargs)

    def _append_optimize_op(self, block, param_and_grad):
        param, grad = param_and_grad
        factor = self._factor_of(param)
        if factor is not None and device.kind(param.place) == "nvgpu":
            run_on_nvgpu(self.step_of(param_and_grad))
        else:
            super()._append_optimize_op(block, (param, multiplied(grad, factor)))

    def _factor_of(self, param):
        """What clips the parameter's gradient as it is read; None: nothing."""
        return getattr(self._grad_clip, "factor", None) if getattr(param, "need_clip", True) else None

    def noise_of(self, param):
        """(key, number of the first element) of random numbers; what is kept in float32 needs none."""
        return 0, 0

    def step_of(self, param_and_grad):
        """The Step of a parameter, whose state is there, and its gradient."""
        param, grad = param_and_grad

        def state(name):
            return self._get_accumulator_master(name, param)

        has_master = self._multi_precision and self._is_dtype_fp16_or_bf16(param.dtype)
        decays = self._apply_decay_param_fun is None or self._apply_decay_param_fun(param.name)
        noise_key, noise_first = self.noise_of(param)
        return Step(
            param=param,
            grad=grad,
            factor=self._factor_of(param),
            learning_rate=self._create_param_lr(param_and_grad),
            moment1=state(self._moment1_acc_str),
            moment2=state(self._moment2_acc_str),
            moment2_max=state(self._moment2_acc_max_str) if self._amsgrad else None,
            beta1_power=state(self._beta1_pow_acc_str),
            beta2_power=state(self._beta2_pow_acc_str),
            master=self._master_weights[param.name] if has_master else None,
            beta1=float(self._beta1),
            beta2=float(self._beta2),
            epsilon=float(self._epsilon),
            rate_ratio=1.0 if self._lr_ratio is None else self._lr_ratio(param),
            decay=self._weight_decay if decays else 0.0,
            noise_key=noise_key,
            noise_first=noise_first,
        )
