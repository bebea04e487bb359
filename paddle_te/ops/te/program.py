"""Programs: ops whose calls were recorded once for given sizes and run on the memory of each call.

Afterwards only addresses change, which takes a fraction of the time that the ops' Python takes. `recording` takes the
calls down, `steps` arranges and runs them, `autograd` is what the ops call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import paddle
from paddle import Tensor

from paddle_te import native
from paddle_te.ops.te.recording import (
    Allocated,
    Call,
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
from paddle_te.ops.te.steps import WHOLE, Steps, shown
from paddle_te.options.layers import FuseWgrad

DTYPES = {id(dtype): dtype for dtype in vars(paddle).values() if isinstance(dtype, paddle.dtype)}  # hash takes 1 µs
KEPT_PROGRAMS = 128  # of all streams together, each with 20 to 60 of TE's handles: see runtime.KEPT_TENSORS


# All of a tensor that decides on an op's calls: its shape, the id() of its dtype as in DTYPES, and stop_gradient.
TensorSpec: TypeAlias = tuple[tuple[int, ...], int, bool]


class Signature(NamedTuple):
    """Say what a program is made for.

    tensors: TensorSpecs, None for no tensor. quantizers: QuantizerSpecs of the GEMMs, None for one that is not in fp8.
    tp: a TensorParallel or None. train: whether a backward may follow. fuse: of each GEMM's weight where its
    gradient is added up. settings: the op's own record.
    """

    tensors: tuple[TensorSpec | None, ...]
    quantizers: tuple[QuantizerSpec | None, ...]
    tp: Any
    train: bool
    fuse: tuple[FuseWgrad, ...]
    settings: Any


class _Backward(NamedTuple):
    """A recorded backward. gradients: Placeholders of the tensors' gradients or None."""

    steps: Steps
    gradients: list[Placeholder | None]


class _Sum(NamedTuple):
    """Describe the memory to which a backward may add a weight's gradient.

    weight, memory: Placeholders. in_grad: the memory is the weight's grad, and not its main_grad.
    """

    weight: Placeholder
    memory: Placeholder
    in_grad: bool

    def fuse(self, accumulate: bool) -> None:
        """Let the next recording add to the memory, or write it. A weight's first grad is autograd's to keep."""
        self.weight.main_grad = self.memory if accumulate or not self.in_grad else None
        self.weight.accumulate = accumulate

    def found(self, weight: Any) -> _Found:
        """Return what a run has. Raises TypeError for a main_grad that is not float32."""
        if self.in_grad:
            grad: Tensor | None = weight.grad
            adds = grad is not None and grad.is_dense() and grad.dtype is weight.dtype
            return _Found(self, weight, grad if adds else None, adds)
        main_grad: Tensor | None = getattr(weight, "main_grad", None)
        if main_grad is not None and main_grad.dtype is not paddle.float32:
            raise TypeError(f"main_grad of {weight.name} is {main_grad.dtype}; it must be float32")
        adds = main_grad is not None and not getattr(weight, "overwrite_main_grad", False)
        return _Found(self, weight, main_grad, adds)


class _Found(NamedTuple):
    """A _Sum in a run: the weight, what it has as grad or main_grad, and whether to add to that."""

    sum: _Sum
    weight: Any
    memory: Tensor | None
    adds: bool

    def memory_of_run(self, rt: Runtime) -> Tensor | None:
        """Return the memory, that of a new main gradient where there is none; None for a grad that autograd keeps."""
        if self.memory is None and not self.sum.in_grad:
            return rt.empty(self.weight.shape, paddle.float32)
        return self.memory

    def written(self, memory: Tensor | None) -> None:
        """Note on the weight that `memory` now holds its gradient."""
        weight = self.weight
        if not self.sum.in_grad:
            if self.memory is None:
                weight.main_grad = memory
            weight.overwrite_main_grad = False
        elif self.adds:
            weight._unset_fake_empty()  # else Paddle's next addition replaces what was zeros of clear_grad before


class _Recorded(NamedTuple):
    """Hold a backward before its calls are arranged.

    gradients: as a _Backward's. read: the indices of all memory that it reads or returns.
    """

    gradients: list[Placeholder | None]
    calls: list[Call]
    allocated: Allocated
    read: set[int]


class Program:
    """Run an op for a Signature. Its runs share native tensors: one thread at a time.

    inputs, outputs: what stands for them, OpInputs and Placeholders. steps: of the forward. activations: which of the
    tensors that a run keeps for its backward are needed by nobody else.
    """

    def __init__(self, rt: Runtime, op: Op, signature: Signature) -> None:
        if any(spec is not None and 0 in spec[0] for spec in signature.tensors):
            raise ValueError("backend transformer_engine: a tensor has no elements; each rank needs tokens to compute")
        if any(signature.quantizers):
            native.load(fp8=True)  # or BackendUnavailable, before the first kernel
        self.train, self._op, self._lock = signature.train, op, threading.Lock()
        self._recorder = Recorder(rt.te)
        self.inputs = inputs = self._placeholders(signature)
        (outputs, self._saved), calls, allocated = self._recorder.record(rt, op.forward, inputs, signature.settings)
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        before = self._recorder.count  # what has a smaller index is the forward's
        self._grads: list[Placeholder] = []
        self._sums: list[_Sum] = []
        backward = self._first_backward(rt, signature.fuse) if self.train else _Recorded([], [], {}, set())
        wanted = {i for i in backward.read.union([total.weight.index for total in self._sums]) if i < before}
        cached = {q.cached_weight.index for q in self.inputs.quantizers if q and q.cached_weight}
        seen, returned = shown(backward.calls), cached.union([place.index for place in self.outputs])
        self.steps = Steps(rt, calls, allocated, returned | (wanted & seen), wanted - returned - seen)
        factors = {index for q in self.inputs.quantizers if q for index in q.factors}
        # what a run keeps for its backward, by index
        self._kept = sorted(wanted - factors - self.steps.joined) + [WHOLE] * bool(self.steps.joined)
        shared = self._shared()
        self.activations = [position for position, index in enumerate(self._kept) if index not in shared]
        self._note_places(backward.read)
        self._backwards: dict[tuple[Runtime, tuple[bool, ...]], _Backward] = {}
        if self.train:
            self._backwards[rt, (True,) * len(self._sums)] = self._arranged(rt, backward)

    def _note_places(self, read: set[int]) -> None:
        """Note where each run finds and puts what. read: indices of what the backward reads or returns."""
        places, outputs = self.inputs.tensors, list(enumerate(self.outputs))
        quantizers = [(i, q) for i, q in enumerate(self.inputs.quantizers) if q is not None]
        self._given = slice(1, 1 + sum([place is not None for place in places]))
        self._factors = [(i, q.factors.start, q.factors.stop, q.statistics) for i, q in quantizers if q.factors]
        self._new_weights = [(i, q.cached_weight) for i, q in quantizers if q.update_weight]
        self._old_weights = [
            (i, q.cached_weight.index) for i, q in quantizers if not q.update_weight and q.cached_weight
        ]
        weights = [(i, places[i]) for i in self._op.weights if self.train]
        self._weights_read = [(i, place.index in read) for i, place in weights if place is not None]
        self._passed_on = [(i, place.shape) for i, place in outputs if place in places]
        self._kept_outputs = [
            (i, place.index) for i, place in outputs if place not in places and place.index in self._kept
        ]
        # not a weight that only its main gradient is wanted of: it may have no memory now
        self._read = [(i, index) for i, index in enumerate(self._kept) if index in read or index == WHOLE]

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

        def tensor(shape: tuple[int, ...], dtype_id: int, stop_gradient: bool) -> Placeholder:
            return recorder.placeholder(shape, DTYPES[dtype_id], stop_gradient)

        tensors = [spec and tensor(*spec) for spec in signature.tensors]
        quantizers = [spec and RecordedQuantizers(recorder, spec) for spec in signature.quantizers]
        ranks = signature.tp and RecordedRanks(recorder, signature.tp)
        return OpInputs(tuple(tensors), tuple(quantizers), ranks, signature.train)

    def _first_backward(self, rt: Runtime, fuse: tuple[FuseWgrad, ...]) -> _Recorded:
        """Record the backward that adds to all gradients that there may be."""
        recorder = self._recorder
        self._grads = [recorder.placeholder(place.shape, place.dtype) for place in self.outputs]
        for i, where in zip(self._op.weights, fuse, strict=False):
            weight = self.inputs.tensors[i]
            if where and not weight.stop_gradient:
                memory = recorder.placeholder(weight.shape, weight.dtype if where == "grad" else paddle.float32)
                self._sums.append(_Sum(weight, memory, where == "grad"))
        return self._recorded(rt, (True,) * len(self._sums))

    def _recorded(self, rt: Runtime, accumulate: tuple[bool, ...]) -> _Recorded:
        """Record a backward; accumulate: whether to add to each of the gradients that there may be."""
        for total, add in zip(self._sums, accumulate, strict=True):
            total.fuse(add)
        gradients, calls, allocated = self._recorder.record(rt, self._op.backward, self._saved, *self._grads)
        pairs = zip(self.inputs.tensors, gradients, strict=True)
        gradients = [gradient for tensor, gradient in pairs if tensor is not None]  # as Paddle counts them
        read = _indices(gradients).union(*[call.indices for call in calls])
        return _Recorded(gradients, calls, allocated, read)

    def _arranged(self, rt: Runtime, recorded: _Recorded) -> _Backward:
        gradients, calls, allocated, _ = recorded
        steps = Steps(rt, calls, allocated, _indices(gradients), given=self.steps.kept)
        return _Backward(steps, gradients)

    def _backward(self, rt: Runtime, accumulate: tuple[bool, ...]) -> _Backward:
        """Return the _Backward on a stream; accumulate: as `_recorded` takes it."""
        found = self._backwards.get((rt, accumulate))
        if found is None:
            found = self._backwards[rt, accumulate] = self._arranged(rt, self._recorded(rt, accumulate))
        return found

    def recorded_backward(self, rt: Runtime) -> _Backward:
        """Return the backward that adds to all gradients that there may be, where there is one."""
        return self._backward(rt, (True,) * len(self._sums))

    def forward(
        self, rt: Runtime, quantizers: Sequence[Any], tensors: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run the forward: (outputs, kept); `backward` wants what was kept.

        quantizers: GemmQuantizers or None, as in the Signature; of `backward` the same.

        Sets read_in_backward of the weights: whether the backward reads them. In fp8 it does not, but their copies in
        fp8. Sharding stage 3 then gathers no weights for it (upstream/stage3_prefetch.py).
        """
        memories = self._memories(quantizers)
        memories[self._given] = [tensor for tensor in tensors if tensor is not None]
        for i, index in self._old_weights:
            memories[index] = quantizers[i].cached_weight
        with self._lock:
            self.steps.run(rt, memories)
        for i, place in self._new_weights:
            quantizers[i].cache_weight(None if place is None else memories[place.index])
        for i, is_read in self._weights_read:
            weight: Any = tensors[i]
            if getattr(weight, "read_in_backward", None) is not is_read:  # to set it takes ten times as long
                weight.read_in_backward = is_read
        outputs = [memories[place.index] for place in self.outputs]
        for i, shape in self._passed_on:
            outputs[i] = view(outputs[i], shape)  # itself would be taken for an in-place result
        for i, index in self._kept_outputs:
            memories[index] = outputs[i].detach()  # with its graph the output would keep ctx, and itself, alive
        return outputs, [memories[index] for index in self._kept]

    def backward(
        self, rt: Runtime, quantizers: Sequence[Any], kept: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of the tensors.

        Removes tensors from the lists `kept` and `grads`, to free them early.

        This sets overwrite_main_grad to False on a weight whose main gradient it has written. Set it to True to make
        the next gradient overwrite the main gradient, as in TE's PyTorch modules.
        """
        sums = self._sums_of_run(kept)
        with self._lock:
            steps, gradients = self._backward(rt, tuple([found.adds for found in sums]))
        memories = self._memories(quantizers)
        for i, index in self._read:
            memories[index] = kept[i]
        first = self._grads[0].index
        memories[first : first + len(grads)] = grads
        written = [found.memory_of_run(rt) for found in sums]
        for found, memory in zip(sums, written, strict=True):
            memories[found.sum.memory.index] = memory
        kept.clear()
        grads.clear()
        with self._lock:
            steps.run(rt, memories)
        for found, memory in zip(sums, written, strict=True):  # only now: what fails before has written nothing
            found.written(memory)
        return [None if place is None else memories[place.index] for place in gradients]

    def _sums_of_run(self, kept: Sequence[Tensor]) -> list[_Found]:
        """Return what this run's weights have of `_sums`. kept: as `backward` is given it."""
        if not self._sums:
            return []
        tensors = dict(zip(self._kept, kept, strict=True))
        return [total.found(tensors[total.weight.index]) for total in self._sums]

    def _memories(self, quantizers: Sequence[Any]) -> Memories:
        """Return a run's memories by index, of which only the quantizers' numbers are there."""
        memories: Memories = [None] * self._recorder.count
        for i, start, stop, statistics in self._factors:
            memories[start:stop] = factor_pointers(quantizers[i], statistics)
        return memories


def _indices(places: Iterable[Placeholder | None]) -> set[int]:
    return {place.index for place in places if place is not None}


# program_of(rt, op, signature): the Program, kept for the next call alike.
program_of = lru_cache(KEPT_PROGRAMS)(Program)
clear = program_of.cache_clear
