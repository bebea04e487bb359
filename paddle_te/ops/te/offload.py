"""Activations in host memory: tensors that wait for backward leave the device after forward and come back in time.

Copies run on a stream of their own, to and from pinned memory, beside computing. The first N of L layers are moved, so
the activations of about d = L - N layers are on the device at a time. A layer's activations are freed when the layer d
places later begins its forward; there the computing stream waits for the copy. They begin to come back when the layer
d - 1 places later begins its backward, which has freed as much memory. So each copy has the longest time possible
without more memory. Computing sees the same bytes.

Megatron-Core's and Transformer Engine's CPU offloading of activations move them layer by layer, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paddle import Tensor

from paddle_te.native.interface import CopyStream, Event, HostMemory, Stream
from paddle_te.ops.te import runtime
from paddle_te.ops.te.runtime import Runtime

LEAST = 2**20  # bytes of a tensor that is moved: starting the copy of a smaller one takes longer than the copy
ON_DEVICE = 2  # layers at least, so that one comes back while another's backward runs
_running: _Layer | None = None  # whose forward runs


def keep(tensors: list[Tensor], movable: Sequence[int]) -> list[Tensor] | _Kept:
    """Return what an op's forward keeps for backward: the list `tensors`, or what `take` makes it of.

    movable: positions in it of tensors that nobody else needs until then.
    """
    return tensors if _running is None else _running.keep(tensors, movable)


def take(kept: list[Tensor] | _Kept) -> list[Tensor]:
    """Return the list of tensors that `keep` was given, when the op's backward begins."""
    return kept if isinstance(kept, list) else kept.take()


class ActivationOffload:
    """Move what the first `count` of a model's `layers` layers keep.

    The forwards of a micro-batch are followed by their backwards before the next one's, as they are without a pipeline.

    Raises ValueError for a count that leaves fewer than ON_DEVICE layers.
    """

    def __init__(self, layers: int, count: int) -> None:
        if count > layers - ON_DEVICE:
            raise ValueError(
                f"offload_activations {count}: of the model's {layers} layers {ON_DEVICE} must keep theirs on the "
                f"device; give at most {max(layers - ON_DEVICE, 0)}"
            )
        self.count, self._distance = count, layers - count
        self._layers = [_Layer(self, number) for number in range(layers)]
        self._copies: CopyStream | None = None

    @property
    def copies(self) -> CopyStream:
        """Return the stream of the copies, made when it is needed first."""
        if self._copies is None:
            self._copies = runtime.current().te.CopyStream()
        return self._copies

    @contextlib.contextmanager
    def forward_of(self, number: int) -> Iterator[None]:
        """Stand around the forward of a layer."""
        global _running
        before, _running = _running, self._layers[number]
        _running.begin_forward()
        if number >= self._distance:
            self._layers[number - self._distance].let_go()
        try:
            yield
        finally:
            _running = before

    def begin_backward(self, number: int) -> None:
        """Begin the backward of a layer; a second call for the same one does nothing more."""
        for layer in reversed(self._layers[max(number - self._distance + 1, 0) : number + 1]):
            layer.copy_back()


class _Layer:
    """Hold what a layer of an ActivationOffload keeps. Its HostMemory serves each step anew."""

    def __init__(self, offload: ActivationOffload, number: int) -> None:
        self.offload, self.number = offload, number
        self._memories: list[HostMemory | None] = []
        self.begin_forward()

    def begin_forward(self) -> None:
        self._kept: list[_Kept] = []
        self._used = 0

    def keep(self, tensors: list[Tensor], movable: Sequence[int]) -> _Kept:
        kept = _Kept(self, tensors)
        if self.number < self.offload.count:
            kept.moved = [self._moved(position, tensors[position]) for position in movable if _large(tensors[position])]
        if kept.moved:
            self._kept.append(kept)
            kept.copy_out(self.offload.copies, runtime.current().stream)
        return kept

    def _moved(self, position: int, tensor: Tensor) -> _Moved:
        number, size = self._used, _bytes(tensor)
        self._used += 1
        self._memories += [None] * (self._used - len(self._memories))
        memory = self._memories[number]
        if memory is None or memory.bytes < size:
            memory = self._memories[number] = runtime.current().te.HostMemory(size)
        return _Moved(position, tensor.shape, tensor.dtype, size, memory)

    def let_go(self) -> None:
        """Let go of the device's memory, when it is copied."""
        for kept in self._kept:
            kept.let_go(runtime.current().stream)

    def copy_back(self) -> None:
        """Begin to bring all back, what backward needs first first; once after each forward."""
        of_ops, self._kept = self._kept, []
        for kept in reversed(of_ops):
            kept.copy_back(self.offload.copies, runtime.current())


@dataclass
class _Moved:
    """Describe a tensor that a _Kept has at a position, and the HostMemory for its bytes."""

    position: int
    shape: list[int]
    dtype: Any
    bytes: int
    memory: HostMemory


class _Kept:
    """Hold what one op keeps. moved: [_Moved]."""

    def __init__(self, layer: _Layer, tensors: list[Tensor]) -> None:
        self.moved: list[_Moved] = []
        self._layer, self._tensors = layer, dict(enumerate(tensors))  # by position, those on the device
        self._copied: Event | None = None  # of the last copies

    def copy_out(self, copies: CopyStream, stream: Stream) -> None:
        """Begin when the Stream has computed the tensors."""
        copies.follow(stream)
        for moved in self.moved:
            copies.copy(moved.memory.data_ptr(), self._tensors[moved.position].data_ptr(), moved.bytes)
        self._copied = copies.mark()

    def let_go(self, stream: Stream) -> None:
        assert self._copied is not None  # `copy_out` has begun
        self._copied.hold(stream)  # what the Stream computes next may be given this memory
        for moved in self.moved:
            del self._tensors[moved.position]

    def copy_back(self, copies: CopyStream, rt: Runtime) -> None:
        for moved in self.moved:
            self._tensors[moved.position] = rt.empty(moved.shape, moved.dtype)
        copies.follow(rt.stream)  # whose earlier work may use this memory
        for moved in self.moved:
            copies.copy(self._tensors[moved.position].data_ptr(), moved.memory.data_ptr(), moved.bytes)
        self._copied = copies.mark()

    def take(self) -> list[Tensor]:
        self._layer.offload.begin_backward(self._layer.number)
        if self._copied is not None:
            self._copied.hold(runtime.current().stream)
        tensors = [self._tensors[position] for position in sorted(self._tensors)]
        self._tensors.clear()
        return tensors


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


def _large(tensor: Tensor) -> bool:
    return _bytes(tensor) >= LEAST
