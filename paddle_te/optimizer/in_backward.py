"""Update each weight by the optimizer as soon as its gradient is complete, while backward still runs.

A gradient is let go after its update. So there are gradients of one layer at a time instead of the whole model's: of
bfloat16 weights that saves nearly 2 bytes a parameter. Paddle calls a parameter's backward hooks when all its uses have
added to the gradient, which makes this the same arithmetic, in another order of the weights.

The norm of a step's gradients is known only after the last of them, when the weights are updated already. Hence
gradients are clipped either not at all or by the norm of the step before. A run's first step has none before it: it
measures the norm, and its gradients count as zeros. A checkpoint's manifest keeps the last norm (LAST_NORM).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.base.framework import default_main_program, program_guard
from paddle.distributed.communication.group import Group
from paddle.nn.clip import _squared_l2_norm

from paddle_te.optimizer import FactorAdamW, clip_factor

LAST_NORM = "gradient_norm"  # what the manifest calls it


class OptimizerInBackward:
    """Lets an AdamW of Paddle's update in backward. It replaces the optimizer's clipping.

    Args:
        optimizer: an AdamW without groups of parameters and without amsgrad. Its step(), which finds no gradients any
            more, ends the step.
        max_norm: to which gradients are clipped by the last step's norm; None: they are not clipped.
        group: the tensor parallel ranks, over which a norm is summed; None for one rank.

    factor: float32 [1] that this step's gradients are multiplied by, or None. norm: float32 [] of the last complete
    step's gradients of all ranks, before clipping; None where there is none.
    """

    def __init__(
        self, optimizer: paddle.optimizer.AdamW, max_norm: float | None = None, group: Group | None = None
    ) -> None:
        optimizer.__class__ = FactorAdamW
        optimizer._grad_clip = self  # type: ignore[assignment]  # it replaces Paddle's clipping
        self.factor = None if max_norm is None else paddle.zeros([1])
        self.norm: Tensor | None = None
        self._optimizer, self._max_norm, self._group = optimizer, max_norm, group
        # Paddle's own, which sets the learning rate: FactorAdamW's asks whether the step is good
        self._begin_step = partial(paddle.optimizer.AdamW._create_optimization_pass, optimizer, [])
        # of the running step: {whether tensor parallel ranks have different parts: [float32 []]}
        self._squares: dict[bool, list[Tensor]] = {}
        self._program = default_main_program()  # by which Paddle finds the learning rate
        self._hooked = False

    @paddle.no_grad()
    def attach(self, last_norm: float | None = None) -> None:
        """Make the optimizer's state and begin to update with the next backward.

        Call it after the weights are loaded, and after the optimizer's state where training goes on. Call it also
        after others have registered the hooks that complete a gradient, such as a sum over ranks. A second call only
        sets the norm.

        last_norm: the norm of the step before, a number; None for a run's first step.
        """
        if last_norm is not None:
            self._set_norm(paddle.full([], last_norm, "float32"))
        if self._hooked:
            return
        self._hooked = True
        parameters: Sequence[Any] = self._optimizer._parameter_list
        trained = [param for param in parameters if not param.stop_gradient]
        # now, as memory that is taken in the middle of the first backward would lie scattered
        self._optimizer._create_accumulators(self._program.global_block(), trained)
        for param in trained:
            param._register_backward_hook(partial(self._update, param))

    @paddle.no_grad()
    def _update(self, param: Tensor) -> None:
        with program_guard(self._program):  # recompute's backward has another
            if not self._squares:
                self._begin_step()
            self._optimizer._append_optimize_op(self._program.global_block(), (param, param.grad))
        square = _squared_l2_norm(param.grad).astype("float32").reshape([])
        self._squares.setdefault(bool(param.is_distributed), []).append(square)
        param.clear_gradient(False)  # lets it go; by the argument's name Paddle would not be told, and would keep zeros

    @paddle.no_grad()
    def __call__(self, params_grads: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """End a step. Paddle's optimizer calls this as its clipping. params_grads: [], as all gradients are gone."""
        if params_grads:
            names = ", ".join(param.name for param, _ in params_grads)
            raise RuntimeError(f"gradients were made past the update in backward: {names}")
        squares = {distributed: paddle.stack(each).sum() for distributed, each in self._squares.items()}
        self._squares = {}
        total = squares.get(False, paddle.zeros([]))
        if self._group is not None:
            total = total / self._group.nranks + squares.get(True, paddle.zeros([]))
            dist.all_reduce(total, group=self._group)
        self._set_norm(paddle.sqrt(total))
        return []

    def _set_norm(self, norm: Tensor) -> None:
        self.norm = norm
        if self._max_norm is not None:
            self.factor = clip_factor(norm, self._max_norm)

    def last_norm(self) -> float | None:
        """Return the norm as a number, for a checkpoint; None where clipping needs none. Waits for the device."""
        return None if self._max_norm is None or self.norm is None else float(self.norm)
