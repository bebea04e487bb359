"""Activations in host memory: what layers keep for backward leaves the device after forward and comes back in time.

Copies run on a stream of their own, to and from pinned memory, beside computing. Of L layers the first N are moved, and
no more than about d = L - N layers' activations are on the device at a time. A layer's are let go when the layer d
places further on begins its forward, where the computing stream waits for the copy. They begin to come back when the
layer d - 1 places further on begins its backward, by when as much memory is free again. So each copy has as long as it
can have without more memory. What is computed sees the same bytes.

Megatron-Core's and Transformer Engine's CPU offloading of activations move them layer by layer, too.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

from paddle_te.ops.te import runtime

LEAST = 2**20  # bytes of a tensor that is moved: starting the copy of a smaller one takes longer than the copy
ON_DEVICE = 2  # layers at least, so that one comes back while another's backward runs
_running = None  # the _Layer whose forward runs


def keep(tensors, movable):
    """What an op's forward keeps for backward: the list `tensors`, or what `take` makes it of.

    movable: positions in it of tensors that nobody else needs until then.
    """
    return tensors if _running is None else _running.keep(tensors, movable)


def take(kept):
    """The list of tensors that `keep` was given, when the op's backward begins."""
    return kept if isinstance(kept, list) else kept.take()


class ActivationOffload:
    """Moves what the first `count` of a model's `layers` layers keep.

    The forwards of a micro-batch are followed by their backwards before the next one's, as they are without a pipeline.

    Raises ValueError for a count that leaves fewer than ON_DEVICE layers.
    """

    def __init__(self, layers, count):
        if count > layers - ON_DEVICE:
            raise ValueError(
                f"offload_activations {count}: of the model's {layers} layers {ON_DEVICE} must keep theirs on the "
                f"device; give at most {max(layers - ON_DEVICE, 0)}"
            )
        self.count, self._distance = count, layers - count
        self._layers = [_Layer(self, number) for number in range(layers)]
        self._copies = None

    @property
    def copies(self):
        """The stream of the copies, made when it is needed first."""
        if self._copies is None:
            self._copies = runtime.current().te.CopyStream()
        return self._copies

    @contextlib.contextmanager
    def forward_of(self, number):
        """Around the forward of a layer."""
        global _running
        before, _running = _running, self._layers[number]
        _running.begin_forward()
        if number >= self._distance:
            self._layers[number - self._distance].let_go()
        try:
            yield
        finally:
            _running = before

    def begin_backward(self, number):
        """Of a layer; a second call for the same one does nothing more."""
        for layer in reversed(self._layers[max(number - self._distance + 1, 0) : number + 1]):
            layer.copy_back()


class _Layer:
    """A layer of an ActivationOffload. Its HostMemory serves each step anew."""

    def __init__(self, offload, number):
        self.offload, self.number = offload, number
        self._memories = []
        self.begin_forward()

    def begin_forward(self):
        self._kept, self._used = [], 0

    def keep(self, tensors, movable):
        kept = _Kept(self, tensors)
        if self.number < self.offload.count:
            kept.moved = [self._moved(position, tensors[position]) for position in movable if _large(tensors[position])]
        if kept.moved:
            self._kept.append(kept)
            kept.copy_out(self.offload.copies, runtime.current().stream)
        return kept

    def _moved(self, position, tensor):
        number, size = self._used, _bytes(tensor)
        self._used += 1
        self._memories += [None] * (self._used - len(self._memories))
        memory = self._memories[number]
        if memory is None or memory.bytes < size:
            memory = self._memories[number] = runtime.current().te.HostMemory(size)
        return _Moved(position, tensor.shape, tensor.dtype, size, memory)

    def let_go(self):
        """Lets go of the device's memory, when it is copied."""
        for kept in self._kept:
            kept.let_go(runtime.current().stream)

    def copy_back(self):
        """Begins to bring all back, what backward needs first first; once after each forward."""
        of_ops, self._kept = self._kept, []
        for kept in reversed(of_ops):
            kept.copy_back(self.offload.copies, runtime.current())


@dataclass
class _Moved:
    """A tensor that a _Kept has at a position, and the HostMemory for its bytes."""

    position: int
    shape: list
    dtype: Any
    bytes: int
    memory: Any


class _Kept:
    """What one op keeps. moved: [_Moved]."""

    def __init__(self, layer, tensors):
        self.moved = []
        self._layer, self._tensors = layer, tensors
        self._copied = None  # Event of the last copies

    def copy_out(self, copies, stream):
        """Begins when the Stream has computed the tensors."""
        copies.follow(stream)
        for moved in self.moved:
            copies.copy(moved.memory.data_ptr(), self._tensors[moved.position].data_ptr(), moved.bytes)
        self._copied = copies.mark()

    def let_go(self, stream):
        self._copied.hold(stream)  # what the Stream computes next may be given this memory
        for moved in self.moved:
            self._tensors[moved.position] = None

    def copy_back(self, copies, rt):
        for moved in self.moved:
            self._tensors[moved.position] = rt.empty(moved.shape, moved.dtype)
        copies.follow(rt.stream)  # whose earlier work may use this memory
        for moved in self.moved:
            copies.copy(self._tensors[moved.position].data_ptr(), moved.memory.data_ptr(), moved.bytes)
        self._copied = copies.mark()

    def take(self):
        self._layer.offload.begin_backward(self._layer.number)
        if self._copied is not None:
            self._copied.hold(runtime.current().stream)
        tensors, self._tensors = self._tensors, None
        return tensors


def _bytes(tensor):
    return math.prod(tensor.shape) * tensor.element_size()


def _large(tensor):
    return _bytes(tensor) >= LEAST
