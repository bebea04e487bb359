"""te's ops without recorded programs: each call runs the op's Python functions on the tensors themselves.

What recording brings in time is measured against this (step.py's peers `…_unrecorded`). It takes more memory, and
training never uses it.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import paddle
from paddle.autograd import PyLayer

from paddle_te.ops.te import autograd, runtime
from paddle_te.ops.te.recording import OpInputs, QuantizerSpec
from paddle_te.ops.te.runtime import dense


class _Memory:
    """A tensor as an op's functions take it: what a Placeholder is while they are recorded."""

    __slots__ = ("tensor", "shape", "dtype", "stop_gradient", "main_grad", "accumulate")

    def __init__(self, tensor, stop_gradient=True):
        self.tensor, self.shape, self.dtype, self.stop_gradient = tensor, tensor.shape, tensor.dtype, stop_gradient
        self.main_grad = self.accumulate = None

    def data_ptr(self):
        return self.tensor.data_ptr()

    def reshaped(self, shape):
        return _Memory(runtime.view(self.tensor, shape), self.stop_gradient)


class _Runtime:
    """A Runtime that allocates `_Memory`, and holds all of it: an op's functions do not, since a recorded program sees
    by itself what backward reads."""

    def __init__(self, rt):
        self.allocated = []
        self._rt, self.te, self.stream, self.tensor = rt, rt.te, rt.stream, rt.te.Tensor

    def empty(self, shape, dtype):
        self.allocated.append(_Memory(self._rt.empty(shape, dtype)))
        return self.allocated[-1]

    matrix, new_matrix, view = runtime.Runtime.matrix, runtime.Runtime.new_matrix, runtime.Runtime.view

    def on_memory(self, function, *memories, out=None):
        function(*[memory.tensor for memory in memories])


class _Ranks:
    """A TensorParallel that takes and gives `_Memory`."""

    def __init__(self, tp):
        self._tp, self.rank, self.sequence_parallel = tp, tp.rank, tp.sequence_parallel

    def all_gather(self, x):
        return _Memory(self._tp.all_gather(x.tensor))

    def start_all_gather(self, x):
        return self._tp.start_all_gather(x.tensor)

    def finish(self, pending):
        return _Memory(pending.wait())

    def output_shape(self, shape):
        return [shape[0] // self._tp.size, *shape[1:]] if self.sequence_parallel else shape

    def reduce_output(self, y):
        return _Memory(self._tp.reduce_output(y.tensor))

    def start_reduce_output(self, y):
        return self._tp.start_reduce_output(y.tensor)


def _quantizers(of_gemm, tp):
    """A GemmQuantizers as an op's functions take it."""
    cached = None if of_gemm.update_weight else of_gemm.cached_weight
    return SimpleNamespace(
        input=of_gemm.input,
        weight=of_gemm.weight,
        grad_output=of_gemm.grad_output,
        update_weight=of_gemm.update_weight,
        keeps_weight=of_gemm.keeps_weight,
        same_scales=QuantizerSpec.of(of_gemm, tp).same_scales,
        cached_weight=None if cached is None else _Memory(cached),
    )


class _Apply(PyLayer):
    @staticmethod
    def forward(ctx, op, quantizers, tp, train, fuse, settings, *tensors):
        rt = _Runtime(runtime.current())
        memories = [tensor if tensor is None else _Memory(tensor, tensor.stop_gradient) for tensor in tensors]
        taken = [of_gemm and _quantizers(of_gemm, tp) for of_gemm in quantizers]
        outputs, saved = op.forward(rt, OpInputs(tuple(memories), tuple(taken), tp and _Ranks(tp), train), settings)
        for of_gemm, of_op in zip(quantizers, taken, strict=True):
            if of_gemm is not None and of_gemm.update_weight:
                of_gemm.cache_weight(None if of_op.cached_weight is None else of_op.cached_weight.tensor)
        if train:
            fused = [(memories[i], tensors[i]) for i in op.weights if fuse and not tensors[i].stop_gradient]
            ctx.saved = op, quantizers, saved, fused, [tensor is not None for tensor in tensors], rt.allocated
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        # detached: an output with its graph, which backward reads too, would keep ctx and itself alive
        results = [runtime.view(y.tensor, y.shape) if y in memories else y.tensor.detach() for y in outputs]
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def backward(ctx, *grads):
        (op, quantizers, saved, fused, given, _held), ctx.saved = ctx.saved, None
        rt = _Runtime(runtime.current())
        for memory, weight in fused:
            main_grad = getattr(weight, "main_grad", None)
            memory.accumulate = main_grad is not None and not getattr(weight, "overwrite_main_grad", False)
            if main_grad is None:
                weight.main_grad = main_grad = rt.empty(weight.shape, paddle.float32).tensor
            memory.main_grad, weight.overwrite_main_grad = _Memory(main_grad), False
        results = op.backward(rt, saved, *[_Memory(dense(grad)) for grad in grads])
        for of_gemm in quantizers:
            if of_gemm is not None:
                of_gemm.forward_pass.backward_done()
        # Paddle counts the gradients of the tensors that are there
        return tuple([grad and grad.tensor for grad, there in zip(results, given, strict=True) if there])


def apply(op, tensors, settings=None, *, quantizers=(), tp=None, fuse_wgrad_accumulation=False):
    """What `autograd.apply` returns."""
    tensors = [None if tensor is None else dense(tensor) for tensor in tensors]
    train = paddle.is_grad_enabled() and not all([tensor is None or tensor.stop_gradient for tensor in tensors])
    return _Apply.apply(op, quantizers, tp, train, fuse_wgrad_accumulation, settings, *tensors)


@contextmanager
def unrecorded():
    """Every op of te runs like this while the context is open."""
    recorded, autograd.apply = autograd.apply, apply
    try:
        yield
    finally:
        autograd.apply = recorded
