"""Recorded calls and the memory they need, in as few steps as possible.

Memory is allocated before the first call that uses it and let go after the last one, whatever the op's functions hold.
One native Sequence runs all calls between two allocations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import paddle

from paddle_te.ops.te import packing
from paddle_te.ops.te.packing import Block, byte_count, pack
from paddle_te.ops.te.recording import Allocated, Bases, Call, Memories
from paddle_te.ops.te.runtime import Runtime

WHOLE = 0  # the index of the one allocation that joined memory lies in; Placeholders count from 1
New = tuple[int, list[int], Any]  # (index, shape, dtype) of what is to be allocated


class _Group(NamedTuple):
    """Hold calls without an allocation between them.

    new: [(index, shape, dtype)] to allocate before. ends: indices of memory that nobody uses afterwards.
    """

    new: list[New]
    calls: list[Call]
    ends: list[int]


class _Step(NamedTuple):
    """Run a _Group: `run` takes (memories, bases) if on_memory, (bases) otherwise."""

    new: list[New]
    on_memory: bool
    run: Callable[..., None]
    ends: list[int]

    @classmethod
    def of(cls, native: Any, group: _Group, moved: set[Any]) -> _Step:
        """Make the step of a _Group.

        moved: the native tensors that earlier steps have moved; this one's join them.
        """
        calls = group.calls
        if not isinstance(function := calls[0].function, str):
            return cls(group.new, True, function, group.ends)
        tensors = dict.fromkeys(t for call in calls for t in call.tensors if t not in moved)
        moved.update(tensors)
        sequence = native.Sequence(tuple(tensors), tuple([(call.function, call.arguments) for call in calls]))
        return cls(group.new, False, sequence.run, group.ends)


class Steps:
    """Run a list of calls.

    Args:
        native: the native module.
        calls: [Call] in their order.
        allocated: {index: (shape, dtype)} of the memory that a run allocates.
        stay: indices of memory that is wanted after the last call as tensors of their own.
        keep: indices of memory that another list's calls want.

    What is neither in stay or keep nor shown to Python is temporary. If it is small, all that is temporary is one
    allocation, and all to keep is another.

    shown: the indices that are shown to calls on memory. joined: those kept in the one allocation WHOLE.
    groups, temporary, kept: what `listing` prints: the calls between allocations, and the two Packings.
    """

    def __init__(
        self,
        native: Any,
        calls: Sequence[Call],
        allocated: Allocated,
        stay: set[int],
        keep: set[int] | frozenset[int] = frozenset(),
    ) -> None:
        first, last = _uses(calls)
        self.shown = set().union(*[call.indices for call in calls if call.on_memory])
        joinable = first.keys() & allocated.keys() - self.shown - stay
        sizes = {index: byte_count(*allocated[index]) for index in joinable}
        self.temporary = pack([Block(sizes[i], i, first[i], last[i]) for i in joinable - keep])
        self.kept = pack([Block(sizes[i], i, 0, 0) for i in joinable & keep])
        self.joined = {index for index, _ in self.kept.offsets}
        elsewhere = self.joined.union([index for index, _ in self.temporary.offsets])
        own = sorted(first.keys() & allocated.keys() - elsewhere)
        if sum([byte_count(*allocated[index]) for index in own]) <= packing.JOINED:
            first = dict.fromkeys(first, 0)  # one step for all calls
        self.groups: list[_Group] = []
        groups = self.groups
        for i, call in enumerate(calls):
            new = [(index, *allocated[index]) for index in own if first[index] == i]
            if not groups or new or call.on_memory or groups[-1].calls[-1].on_memory:
                groups.append(_Group(new, [], []))
            groups[-1].calls.append(call)
            used = sorted(call.indices - elsewhere - stay - keep)
            groups[-1].ends.extend([index for index in used if last[index] == i])
        moved = set[Any]()
        self._steps = [_Step.of(native, group, moved) for group in groups]

    def locate_joined(self, bases: Bases) -> None:
        """Put in where the joined memory is, for that of the whole in bases[WHOLE]."""
        for index, offset in self.kept.offsets:
            bases[index] = bases[WHOLE] + offset

    def run(self, rt: Runtime, memories: Memories, bases: Bases) -> None:
        """Run the calls on a Runtime. memories, bases: tensors and addresses by index, completed here."""
        if self.kept.size:
            memories[WHOLE] = rt.empty([self.kept.size], paddle.uint8)
            bases[WHOLE] = memories[WHOLE].data_ptr()
            self.locate_joined(bases)
        if self.temporary.size:
            temporary = rt.empty([self.temporary.size], paddle.uint8)
            base = temporary.data_ptr()
            for index, offset in self.temporary.offsets:
                bases[index] = base + offset
        for new, on_memory, run, ends in self._steps:
            for index, shape, dtype in new:
                memory = memories[index] = rt.empty(shape, dtype)
                bases[index] = memory.data_ptr()
            if on_memory:
                run(memories, bases)
            else:
                run(bases)
            for index in ends:
                memories[index] = None


def _uses(calls: Sequence[Call]) -> tuple[dict[int, int], dict[int, int]]:
    """Return ({index: number of the first call that uses the memory}, {index: that of the last one})."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, call in enumerate(calls):
        for index in call.indices:
            first.setdefault(index, i)
            last[index] = i
    return first, last
