"""Run ops as Programs between Paddle's tensors and its autograd."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_te.fp8 import GemmQuantizers
from paddle_te.ops.interface import Ranks
from paddle_te.ops.te import offload, runtime
from paddle_te.ops.te.program import Program, Signature, program_of
from paddle_te.ops.te.recording import Op, QuantizerSpec
from paddle_te.ops.te.runtime import Runtime, dense
from paddle_te.options.layers import FuseWgrad


class _Apply(PyLayer):
    @staticmethod
    def forward(
        ctx: Any, program: Program, rt: Runtime, quantizers: Sequence[GemmQuantizers | None], *tensors: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        outputs, kept = program.forward(rt, quantizers, tensors)
        if program.train:
            ctx.saved = program, quantizers, offload.keep(kept, program.activations)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # Paddle takes None, too
        (program, quantizers, kept), ctx.saved = ctx.saved, None
        kept = offload.take(kept)
        results = program.backward(runtime.current(), quantizers, kept, [dense(grad) for grad in grads])
        for of_gemm in quantizers:
            if of_gemm is not None:
                of_gemm.forward_pass.backward_done()
        return tuple(results)


def apply(
    op: Op,
    tensors: Sequence[Tensor | None],
    settings: Hashable = None,
    *,
    quantizers: Sequence[GemmQuantizers | None] = (),
    tp: Ranks | None = None,
    fuse_wgrad_accumulation: tuple[FuseWgrad, ...] = (),
) -> Any:
    """Return the op's outputs; the arguments are those of `prepare`."""
    rt = runtime.current()
    tensors = [t if t is None or t.is_contiguous() else dense(t) for t in tensors]
    program = prepare(rt, op, tensors, settings, quantizers, tp, fuse_wgrad_accumulation)
    return _Apply.apply(program, rt, quantizers, *tensors)


def prepare(
    rt: Runtime,
    op: Op,
    tensors: Sequence[Tensor | None],
    settings: Hashable = None,
    quantizers: Sequence[GemmQuantizers | None] = (),
    tp: Ranks | None = None,
    fuse_wgrad_accumulation: tuple[FuseWgrad, ...] = (),
) -> Program:
    """Return the Program of an op for such arguments on a Runtime, recorded if there is none yet.

    op: an Op. tensors: contiguous, as its forward takes them, None where it takes that. settings: the op's own record,
    hashable. quantizers: of each GEMM a GemmQuantizers, or None. tp: a TensorParallel, or None for one rank.
    fuse_wgrad_accumulation: of each of the op's weights; (): of none.
    """
    specs = tuple([t if t is None else (tuple(t.shape), id(t.dtype), t.stop_gradient) for t in tensors])
    train = paddle.is_grad_enabled() and not all([spec is None or spec[2] for spec in specs])
    of_gemms = tuple([q if q is None else QuantizerSpec.of(q, tp) for q in quantizers])
    return program_of(rt, op, Signature(specs, of_gemms, tp, train, fuse_wgrad_accumulation, settings))
