"""Keep AdamW's master weights and moments in pinned host memory, updated piece by piece.

A piece is some rows of a weight. Its states are copied into a slot on the device, updated there by the same kernel as
ever, and copied back. Copies in and copies out have a stream each, because the link between host and device carries
both directions at the same time. While one piece is computed the next ones are on their way, as many as there are
slots, in the order in which the step before updated weights. The last pieces of a step are followed by the first of the
next. So with an update in backward the states of a layer come while backward computes the layers behind it.

AdamW computes each element by itself, and random numbers of rounded moments follow from an element's place in its
weight. Therefore pieces have the bits of whole weights. ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840) and
Megatron-Core's --optimizer-cpu-offload compute the update on the CPU instead.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.base import core
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)

from paddle_te import device
from paddle_te.native.interface import Event, HostMemory
from paddle_te.ops.te import runtime
from paddle_te.optimizer import FactorAdamW, Step
from paddle_te.optimizer.adamw import has_groups
from paddle_te.optimizer.holding import held_by, layers_of
from paddle_te.options.training import OFFLOADED_AT_ONCE
from paddle_te.planner.offloaded import LEAST, PIECE, spread
from paddle_te.weights.blocks import row_bytes


def keep_on_host(optimizer: paddle.optimizer.Optimizer, fraction: float) -> None:
    """Let an AdamW of Paddle's, which has no states yet, keep this share of them in host memory.

    Call it after `fuse_clipping`, `keep_compact` and what makes an OptimizerInBackward; nothing happens for 0, and in a
    second call. Raises ValueError for another optimizer, groups of parameters and amsgrad.
    """
    if not fraction or getattr(optimizer, "host_states", None) is not None:
        return
    if not isinstance(optimizer, paddle.optimizer.AdamW) or has_groups(optimizer) or optimizer._amsgrad:
        raise ValueError("states in host memory are AdamW's, without groups of parameters and without amsgrad")
    if not isinstance(optimizer, FactorAdamW):
        optimizer.__class__ = FactorAdamW
    optimizer.host_states = OptimizerOffload(optimizer, fraction)


@paddle.no_grad()
def make_states(optimizer: Any, parameters: Iterable[Tensor]) -> None:
    """Make all states of an optimizer some of which are to be in host memory; do nothing for another one.

    Before the first forward, so that those states are never on the device beside activations. optimizer: the outermost
    one, wrapped for its kind of sharding, with the state of a checkpoint if there is one. parameters: the model's.
    """
    inner = layers_of(optimizer)[-1]
    if getattr(inner, "host_states", None) is None:
        return
    trained = [param for param in parameters if not param.stop_gradient]
    slices = [param.fw_storage for param in trained if hasattr(param, "fw_storage")]  # stage 3's
    by_name = {param.name: param for param in (*trained, *slices, *inner._parameter_list)}
    held = [by_name[each.name] for each in held_by(optimizer, trained).values()]
    _fill_slices(optimizer)
    inner._create_accumulators(paddle.base.framework.default_main_program().global_block(), held)


def _fill_slices(optimizer: Any) -> None:
    """Give memory to the rank's slices of weights, which stage 1 with split_param else makes in the first step."""
    for layer in layers_of(optimizer):
        for bucket in layer._comm_buffer_list if isinstance(layer, DygraphShardingOptimizerV2) else ():
            for name, view in bucket._sharding_param_grad_view.items():
                if view._param_begin < view._param_end:
                    view.fill_slice_param(layer._slice_params[name])


class OptimizerOffload:
    """Keeps states of a FactorAdamW in host memory. fraction: of all its states."""

    def __init__(self, optimizer: FactorAdamW, fraction: float) -> None:
        self._optimizer, self._fraction = optimizer, fraction
        self._weights: dict[str, _Weight] = {}  # those that are offloaded, by name
        self._free: deque[_Slot] = deque()
        # pieces whose states are on the device or on their way, in the order of their updates
        self._ahead: deque[_Piece] = deque()
        self._last: _Piece | None = None  # the piece that was updated last
        self._copied: Event | None = None  # the last copies to the host
        te = runtime.current().te
        self._copies_in, self._copies_out = te.CopyStream(), te.CopyStream()

    def create(self, parameters: Iterable[Tensor], create: Callable[[list[Tensor]], object]) -> None:
        """Make the states of those parameters that have none, one parameter's after another's.

        create: makes those of a list, on the device.
        """
        new = [param for param in parameters if param.name not in self._optimizer._already_create_accumulator]
        sizes = [math.prod(param.shape) for param in new]
        for param, moved in zip(new, spread(sizes, self._fraction, LEAST), strict=True):
            create([param])
            if moved:
                self._weights[param.name] = self._move(param)
            else:
                self._stay(param)
        if new:
            self._make_slots()

    def has(self, param: Tensor) -> bool:
        """Return whether the parameter's states are on the host."""
        return param.name in self._weights

    def update(self, step: Step, run: Callable[[Step], object]) -> None:
        """Make the Step of a parameter whose states are on the host. run: makes a Step on the device."""
        stream = runtime.current().stream
        weight = self._weights[step.param.name]
        for piece in weight.pieces:
            slot = self._take(piece)
            assert slot.copied is not None  # `_begin` has set it
            slot.copied.hold(stream)
            run(weight.part(step, piece, slot))
            self._copies_out.follow(stream)
            for copy in piece.copies(slot):
                self._copies_out.copy(copy.host, copy.on_device, copy.bytes)
            self._copied = slot.copied = piece.copied = self._copies_out.mark()
            self._free.append(slot)
            self._copy_ahead()

    def settle(self) -> None:
        """Wait until host memory has what the last update has left. Call it before that memory is read or written."""
        if self._copied is not None:
            self._copied.wait()

    def restore(self) -> None:
        """Take states that replaced the optimizer's own into host memory, after `settle`."""
        self._forget()
        for weight in self._weights.values():
            places = self._places(weight.param)
            for state, (_, there, key) in zip(weight.states, places, strict=True):
                if there[key].data_ptr() != state.memory.data_ptr():
                    there[key] = self._filled(state.memory, there[key])
            self._mark(weight)

    def _places(self, param: Tensor) -> list[tuple[str, dict[str, Tensor], str]]:
        """Return [(field of a Step, dictionary of the optimizer's, key there)] of a parameter's states."""
        optimizer, name = self._optimizer, param.name
        has_master = optimizer.has_master(param)
        places = [("master", optimizer._master_weights, name)] if has_master else []
        key = optimizer._master_weights[name].name if has_master else name
        moments = dict(moment1=optimizer._moment1_acc_str, moment2=optimizer._moment2_acc_str)
        return places + [(moment, optimizer._accumulators[kind], key) for moment, kind in moments.items()]

    def _move(self, param: Tensor) -> _Weight:
        te = runtime.current().te
        states = []
        for name, there, key in self._places(param):
            tensor = there[key]
            memory = te.HostMemory(math.prod(tensor.shape) * tensor.element_size())
            there[key] = self._filled(memory, tensor)
            states.append(_State(name, tensor.dtype, tensor.element_size(), memory))
        weight = _Weight(param, states)
        self._mark(weight)
        return weight

    def _mark(self, weight: _Weight) -> None:
        """Let copies of the weight's states wait for what is under way to host memory now."""
        self._copied = self._copies_out.mark()
        for piece in weight.pieces:
            piece.copied = self._copied

    def _stay(self, param: Tensor) -> None:
        """Bring to the device what a checkpoint has left on the host."""
        for _, there, key in self._places(param):
            if there[key].place != param.place:
                name = there[key].name
                there[key] = there[key]._copy_to(param.place, True)
                there[key].name = name

    def _filled(self, memory: HostMemory, tensor: Tensor) -> Tensor:
        """Return a Paddle tensor on the HostMemory, with the name, the shape and the values of a tensor."""
        if device.kind(tensor.place) == "cpu":
            ctypes.memmove(memory.data_ptr(), tensor.data_ptr(), memory.bytes)
        else:
            stream = runtime.current().stream
            self._copies_out.follow(stream)
            self._copies_out.copy(memory.data_ptr(), tensor.data_ptr(), memory.bytes)
            self._copies_out.mark().hold(stream)  # what the stream computes next may be given the tensor's memory
        return tensor_on(memory, tensor.dtype, tensor.shape, tensor.name)

    def _make_slots(self) -> None:
        pieces = [piece for weight in self._weights.values() for piece in weight.pieces]
        self._forget()
        if not pieces:
            return
        rt = runtime.current()
        for slot in self._free:
            if slot.copied is not None:
                slot.copied.hold(rt.stream)  # what is given its memory next
        every = zip_longest(*(piece.spans for piece in pieces), fillvalue=(0, 0))
        sizes = [max(size for _, size in of_a_state) for of_a_state in every]
        slots = min(OFFLOADED_AT_ONCE // PIECE, len(pieces))
        self._free = deque(_Slot([rt.empty([size], paddle.uint8) for size in sizes]) for _ in range(slots))
        self._copies_in.follow(rt.stream)  # whose earlier work may use this memory

    def _take(self, piece: _Piece) -> _Slot:
        """Return the _Slot with a piece's states, or into which they are being copied."""
        if not self._ahead or self._ahead[0] is not piece:  # the order is not the last step's
            self._forget()
            self._begin(piece)
        if self._last is not None:
            self._last.next = piece
        self._last = self._ahead.popleft()
        slot, piece.slot = piece.slot, None
        assert slot is not None  # pieces that are ahead have one
        return slot

    def _copy_ahead(self) -> None:
        last = self._ahead[-1] if self._ahead else self._last
        piece = last and last.next
        while self._free and piece is not None and piece.slot is None:
            self._begin(piece)
            piece = piece.next

    def _begin(self, piece: _Piece) -> None:
        """Begin to copy a piece's states to the device."""
        slot = piece.slot = self._free.popleft()
        for event in filter(None, (slot.copied, piece.copied)):  # its slot's last piece, and its own last update
            self._copies_in.follow(event)
        for copy in piece.copies(slot):
            self._copies_in.copy(copy.on_device, copy.host, copy.bytes)
        slot.copied = self._copies_in.mark()
        self._ahead.append(piece)

    def _forget(self) -> None:
        """Let go of the pieces that are ahead. What is copied meanwhile is copied in vain."""
        for piece in self._ahead:
            if piece.slot is not None:
                self._free.append(piece.slot)
            piece.slot = None
        self._ahead.clear()


def tensor_on(memory: HostMemory, dtype: Any, shape: Sequence[int], name: str) -> Tensor:
    """Return a Paddle tensor on the host in the bytes of a HostMemory, which lives as long as the tensor does."""
    held = (ctypes.c_uint8 * memory.bytes).from_address(memory.data_ptr())
    held.memory = memory  # type: ignore[attr-defined]  # lives as long as this
    values = np.frombuffer(held, np.uint8)  # type: ignore[call-overload]  # a ctypes array is a buffer
    tensor = core.eager.Tensor(
        value=values, place=core.CPUPlace(), persistable=True, zero_copy=True, stop_gradient=True
    )
    tensor = runtime.view(tensor.view(dtype), list(shape))
    tensor.name = name
    return tensor


@dataclass
class _State:
    """A state of a weight: its place in a Step, and the HostMemory that it lies in."""

    name: str
    dtype: Any  # Paddle's
    itemsize: int
    memory: HostMemory

    def shape_of(self, shape: list[int]) -> list[int]:
        """Return its shape for rows of a weight; shape: theirs."""
        return [*shape[:-1], row_bytes(shape[-1])] if self.dtype == paddle.int8 else shape

    def bytes_of(self, shape: list[int]) -> int:
        """Return its bytes for such rows."""
        return math.prod(self.shape_of(shape)) * self.itemsize


class _Weight:
    """A parameter with its [_State], and its [_Piece]s, which follow each other.

    shape: all its rows, those of several experts one after another, or a flat weight's elements.
    """

    def __init__(self, param: Tensor, states: list[_State]) -> None:
        self.param, self.states = param, states
        self.shape = [math.prod(param.shape[:-1]), param.shape[-1]] if len(param.shape) > 1 else param.shape
        rows, *rest = self.shape
        cuts = [*range(0, rows, max(PIECE // math.prod(rest), 1)), rows]
        self.pieces = [_Piece(self, first, [last - first, *rest]) for first, last in pairwise(cuts)]
        for piece, following in pairwise(self.pieces):
            piece.next = following

    def part(self, step: Step, piece: _Piece, slot: _Slot) -> Step:
        """Return the Step of a piece, whose states are in a _Slot. The powers of beta change with the last one."""
        if piece is self.pieces[-1]:
            changed: dict[str, Any] = {}
        else:
            changed = dict(beta1_power=step.beta1_power.clone(), beta2_power=step.beta2_power.clone())
        last = piece.first + piece.shape[0]
        return replace(
            step,
            param=runtime.view(step.param, self.shape)._slice(piece.first, last),
            grad=runtime.view(step.grad, self.shape)._slice(piece.first, last),
            noise_first=step.noise_first + piece.first * math.prod(piece.shape[1:]),
            **changed | slot.states(piece),
        )


@dataclass(eq=False)
class _Piece:
    """Rows of a weight from `first` on, with their shape.

    spans: (first byte, bytes) of each state. copied: Event of the last copies to the host. slot: where the states are,
    while it is ahead. next: the piece that was updated after it last time.
    """

    weight: _Weight
    first: int
    shape: list[int]
    spans: list[tuple[int, int]] = field(init=False)
    copied: Event | None = None
    slot: _Slot | None = None
    next: _Piece | None = None

    def __post_init__(self) -> None:
        before = [self.first, *self.shape[1:]]
        self.spans = [(state.bytes_of(before), state.bytes_of(self.shape)) for state in self.weight.states]

    def copies(self, slot: _Slot) -> Iterator[_Copy]:
        """Yield what is copied between host memory and a _Slot."""
        for state, memory, (first, size) in zip(self.weight.states, slot.memories, self.spans, strict=False):
            yield _Copy(state.memory.data_ptr() + first, memory.data_ptr(), size)


@dataclass
class _Copy:
    """Two addresses, and how many bytes are copied between them."""

    host: int
    on_device: int
    bytes: int


@dataclass
class _Slot:
    """Device memory for a piece: an uint8 tensor for each state. copied: Event of the last copies into it or out."""

    memories: list[Tensor]
    copied: Event | None = None

    def states(self, piece: _Piece) -> dict[str, Tensor]:
        """Return {field of a Step: tensor} of a piece's states."""
        return {
            state.name: runtime.view(memory._slice(0, size).view(state.dtype), state.shape_of(piece.shape))
            for state, memory, (_, size) in zip(piece.weight.states, self.memories, piece.spans, strict=False)
        }
