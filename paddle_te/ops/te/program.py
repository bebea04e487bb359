"""Programs: ops whose calls were recorded once for given sizes and run on the memory of each call.

Afterwards only addresses change, which takes a fraction of the time that the ops' Python takes. `recording` takes the
calls down, `steps` arranges and runs them, `autograd` is what the ops call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import paddle
from paddle import Tensor

from paddle_te import native
from paddle_te.fp8 import GemmQuantizers
from paddle_te.ops.te.recording import (
    Bases,
    Memories,
    Op,
    OpInputs,
    Placeholder,
    QuantizerSpec,
    RecordedQuantizers,
    RecordedRanks,
    Recorder,
    factor_pointers,
)
from paddle_te.ops.te.runtime import Runtime, view
from paddle_te.ops.te.steps import WHOLE, Steps

DTYPES = {id(dtype): dtype for dtype in vars(paddle).values() if isinstance(dtype, paddle.dtype)}  # hash takes 1 µs
KEPT_PROGRAMS = 128  # of all streams together, each with 20 to 60 of TE's handles: see runtime.KEPT_TENSORS


class TensorSpec(NamedTuple):
    """Hold all of a tensor that decides on an op's calls. dtype_id: id() of its dtype, as in DTYPES."""

    shape: tuple[int, ...]
    dtype_id: int
    stop_gradient: bool


class Signature(NamedTuple):
    """Say what a program is made for.

    tensors: TensorSpecs, None for no tensor. quantizers: QuantizerSpecs of the GEMMs, None for one that is not in fp8.
    tp: a TensorParallel or None. train: whether a backward may follow. fuse: whether weights' gradients go to their
    main_grad. settings: the op's own record.
    """

    tensors: tuple[TensorSpec | None, ...]
    quantizers: tuple[QuantizerSpec | None, ...]
    tp: Any
    train: bool
    fuse: bool
    settings: Any


class _Backward(NamedTuple):
    """A recorded backward.

    gradients: Placeholders of the tensors' gradients or None. used: indices of all memory that it reads or returns.
    """

    steps: Steps
    gradients: list[Placeholder | None]
    used: set[int]


class Program:
    """Run an op for a Signature. Its runs share native tensors: one thread at a time.

    inputs, outputs: what stands for them, OpInputs and Placeholders. steps: of the forward. activations: which of the
    tensors that a run keeps for its backward are needed by nobody else.
    """

    def __init__(self, rt: Runtime, op: Op, signature: Signature) -> None:
        if any(spec is not None and 0 in spec.shape for spec in signature.tensors):
            raise ValueError("backend transformer_engine: a tensor has no elements; each rank needs tokens to compute")
        if any(signature.quantizers):
            native.load(fp8=True)  # or BackendUnavailable, before the first kernel
        self.train, self._op, self._lock = signature.train, op, threading.Lock()
        self._recorder = Recorder(rt.te)
        self.inputs = inputs = self._placeholders(signature)
        (outputs, self._saved), calls, allocated = self._recorder.record(rt, op.forward, inputs, signature.settings)
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self._fused: list[Placeholder] = []
        self._backwards: dict[tuple[Runtime, tuple[bool, ...]], _Backward] = {}
        self._read: set[int] = set()  # the indices of what the backward reads or returns
        wanted, shown = self._record_backward(rt, signature.fuse) if self.train else (set(), set())
        given = [(i, self.inputs.tensors[i]) for i in op.weights if self.train]
        self._weights_read = [(i, place.index in self._read) for i, place in given if place is not None]
        returned = {place.index for place in self.outputs}
        returned.update([q.cached_weight.index for q in self.inputs.quantizers if q and q.cached_weight])
        self.steps = Steps(rt.te, calls, allocated, returned | (wanted & shown), wanted - returned - shown)
        factors = {index for q in self.inputs.quantizers if q for index in q.factors}
        # what a run keeps for its backward, by index
        self._kept = sorted(wanted - factors - self.steps.joined) + [WHOLE] * bool(self.steps.joined)
        shared = self._shared()
        self.activations = [position for position, index in enumerate(self._kept) if index not in shared]

    def _shared(self) -> set[int]:
        """Return the indices of weights, of fp8 copies of them that are kept, and of what all layers are given."""
        tensors = [
            place
            for i, place in enumerate(self.inputs.tensors)
            if place and (place.stop_gradient or i in self._op.weights)
        ]
        return {place.index for place in tensors}.union(
            [q.cached_weight.index for q in self.inputs.quantizers if q and q.cached_weight]
        )

    def _placeholders(self, signature: Signature) -> OpInputs:
        """Make the OpInputs that stand for what the signature describes."""
        recorder = self._recorder
        tensors = [
            spec and recorder.placeholder(spec.shape, DTYPES[spec.dtype_id], spec.stop_gradient)
            for spec in signature.tensors
        ]
        quantizers = [spec and RecordedQuantizers(recorder, spec) for spec in signature.quantizers]
        ranks = signature.tp and RecordedRanks(recorder, signature.tp)
        return OpInputs(tuple(tensors), tuple(quantizers), ranks, signature.train)

    def _record_backward(self, rt: Runtime, fuse: bool) -> tuple[set[int], set[int]]:
        """Return (indices of the forward's memory that the backward wants, those that it shows to calls on memory)."""
        recorder = self._recorder
        self._grads = [recorder.placeholder(place.shape, place.dtype) for place in self.outputs]
        self._fused = [
            self.inputs.tensors[i] for i in self._op.weights if fuse and not self.inputs.tensors[i].stop_gradient
        ]
        for weight in self._fused:
            weight.main_grad = recorder.placeholder(weight.shape, paddle.float32)
        first_of_backward = self._grads[0].index
        backward = self._backward(rt, (True,) * len(self._fused))
        self._read = backward.used
        used = backward.used.union([weight.index for weight in self._fused])
        return {index for index in used if index < first_of_backward}, backward.steps.shown

    def _backward(self, rt: Runtime, accumulate: tuple[bool, ...]) -> _Backward:
        """Return the _Backward on a stream; accumulate: whether to add to each of the main gradients."""
        found = self._backwards.get((rt, accumulate))
        if found is None:
            for weight, add in zip(self._fused, accumulate, strict=True):
                weight.accumulate = add
            gradients, calls, allocated = self._recorder.record(rt, self._op.backward, self._saved, *self._grads)
            pairs = zip(self.inputs.tensors, gradients, strict=True)
            gradients = [gradient for tensor, gradient in pairs if tensor is not None]  # as Paddle counts them
            results = {gradient.index for gradient in gradients if gradient is not None}
            used = results.union(*[call.indices for call in calls])
            found = self._backwards[rt, accumulate] = _Backward(
                Steps(rt.te, calls, allocated, results), gradients, used
            )
        return found

    def recorded_backward(self, rt: Runtime) -> tuple[Steps, list[Placeholder | None]]:
        """Return the backward's (steps, Placeholders of the gradients), where there is one."""
        return self._backward(rt, (True,) * len(self._fused))[:2]

    def forward(
        self, rt: Runtime, quantizers: Sequence[GemmQuantizers | None], tensors: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward: (outputs, kept); `backward` wants what was kept.

        Sets read_in_backward of the weights: whether the backward reads them. In fp8 it does not, but their copies in
        fp8. Sharding stage 3 then gathers no weights for it (upstream/stage3_prefetch.py).
        """
        places = zip(self.inputs.tensors, tensors, strict=True)
        given = [(place.index, tensor) for place, tensor in places if tensor is not None]
        both = zip(self.inputs.quantizers, quantizers, strict=True)
        pairs = [(place, q) for place, q in both if place is not None and q is not None]
        kept = [(place.cached_weight, q.cached_weight) for place, q in pairs if not place.update_weight]
        given += [(place.index, weight) for place, weight in kept if place is not None and weight is not None]
        memories, bases = self._start(quantizers, given)
        with self._lock:
            self.steps.run(rt, memories, bases)
        for place, q in pairs:
            if place.update_weight:
                q.cache_weight(place.cached_weight and memories[place.cached_weight.index])
        for i, is_read in self._weights_read:
            weight = tensors[i]
            assert weight is not None  # as when it was recorded
            weight.read_in_backward = is_read
        outputs = [memories[place.index] for place in self.outputs]
        for i, place in enumerate(self.outputs):
            if place in self.inputs.tensors:
                outputs[i] = view(outputs[i], place.shape)  # itself would be taken for an in-place result
            elif place.index in self._kept:
                # with its graph the output would keep ctx, and itself, alive
                memories[place.index] = outputs[i].detach()
        return outputs, [memories[index] for index in self._kept]

    def backward(
        self, rt: Runtime, quantizers: Sequence[GemmQuantizers | None], kept: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of the tensors.

        Removes tensors from the lists `kept` and `grads`, to free them early.

        This sets overwrite_main_grad to False on a weight whose main gradient it has written. Set it to True to make
        the next gradient overwrite the main gradient, as in TE's PyTorch modules.
        """
        weights = dict(zip(self._kept, kept, strict=True)) if self._fused else {}
        # not a weight that only its main gradient is wanted of: it may have no memory now
        given = [pair for pair in zip(self._kept, kept, strict=True) if pair[0] in self._read or pair[0] == WHOLE]
        accumulate, new, fused = [], [], []
        for place in self._fused:
            weight = weights[place.index]
            fused.append(weight)
            main_grad = getattr(weight, "main_grad", None)
            accumulate.append(main_grad is not None and not getattr(weight, "overwrite_main_grad", False))
            if main_grad is None:
                main_grad = rt.empty(weight.shape, paddle.float32)
                new.append((weight, main_grad))
            elif main_grad.dtype is not paddle.float32:
                raise TypeError(f"main_grad of {weight.name} is {main_grad.dtype}; it must be float32")
            assert place.main_grad is not None  # `_record_backward` has made it
            given.append((place.main_grad.index, main_grad))
        given += [(place.index, grad) for place, grad in zip(self._grads, grads, strict=True)]
        with self._lock:
            recorded = self._backward(rt, tuple(accumulate))
        memories, bases = self._start(quantizers, given)
        self.steps.locate_joined(bases)
        for holder in (weights, given, kept, grads):
            holder.clear()
        with self._lock:
            recorded.steps.run(rt, memories, bases)
        for weight, main_grad in new:  # only now: what fails before leaves no numbers that nobody has written
            weight.main_grad = main_grad
        for weight in fused:
            weight.overwrite_main_grad = False
        return [None if place is None else memories[place.index] for place in recorded.gradients]

    def _start(
        self, quantizers: Sequence[GemmQuantizers | None], given: Sequence[tuple[int, Tensor]]
    ) -> tuple[Memories, Bases]:
        """Return (memories, bases) by index, with what is `given` as (index, tensor)."""
        memories: Memories = [None] * self._recorder.count
        bases = [0] * self._recorder.count
        for index, tensor in given:
            memories[index], bases[index] = tensor, tensor.data_ptr()
        for place, of_call in zip(self.inputs.quantizers, quantizers, strict=True):
            if place is not None and of_call is not None and place.factors:
                bases[place.factors.start : place.factors.stop] = factor_pointers(of_call, place.statistics)
        return memories, bases


# program_of(rt, op, signature): the Program, kept for the next call alike.
program_of = lru_cache(KEPT_PROGRAMS)(Program)
clear = program_of.cache_clear
