"""Recorded calls and the memory they need, in as few steps as possible.

Memory is allocated before the first call that uses it and let go after the last one, whatever the op's functions hold.
One native Sequence runs all calls between two allocations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle

from paddle_te.ops.te import packing
from paddle_te.ops.te.packing import NOTHING, Block, Packing, byte_count, pack
from paddle_te.ops.te.recording import NOWHERE, Allocated, Call, Memories
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


def _native_step(native: Any, group: _Group, place: Any, moved: set[Any]) -> tuple[Any, ...]:
    """Return what native.Steps takes for a _Group.

    place: where to allocate. moved: the native tensors that earlier steps have moved; this one's join them.
    """
    calls = group.calls
    new = [(index, (shape, dtype, place)) for index, shape, dtype in group.new]
    if calls[0].on_memory:
        return new, calls[0].function, calls[0].result, group.ends
    tensors = dict.fromkeys(t for call in calls for t in call.tensors if t not in moved)
    moved.update(tensors)
    sequence = native.Sequence(tuple(tensors), tuple([(call.function, call.arguments) for call in calls]))
    return new, sequence, NOWHERE, group.ends


class Steps:
    """Run a list of calls.

    Args:
        rt: the Runtime that they run on.
        calls: [Call] in their order.
        allocated: {index: (shape, dtype)} of the memory that a run allocates.
        stay: indices of memory that is wanted after the last call as tensors of their own.
        keep: indices of memory that another list's calls want.
        given: the Packing of what another list's calls have kept in the allocation WHOLE.

    What is neither in stay or keep nor shown to Python is temporary. If it is small, all that is temporary is one
    allocation, and all to keep is another. Where one Sequence makes all calls, no other thread can come between
    them, and what is temporary lies in the Runtime's scratch memory instead (in_scratch).

    shown: the indices that are shown to calls on memory. joined: those kept in the one allocation WHOLE.
    groups, temporary, kept: what `listing` prints: the calls between allocations, and the two Packings.
    """

    def __init__(
        self,
        rt: Runtime,
        calls: Sequence[Call],
        allocated: Allocated,
        stay: set[int],
        keep: set[int] | frozenset[int] = frozenset(),
        given: Packing = NOTHING,
    ) -> None:
        first, last = _uses(calls)
        self.shown = shown(calls)
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
        self.in_scratch = len(groups) == 1
        moved = set[Any]()
        steps = [_native_step(rt.te, group, rt.place, moved) for group in groups]
        kept = ([self.kept.size], paddle.uint8, rt.place) if self.kept.size else None
        self._native = rt.te.Steps((kept, self.kept.offsets or given.offsets), self.temporary.offsets, steps)

    def run(self, rt: Runtime, memories: Memories) -> None:
        """Run the calls on their Runtime. memories: by index, completed here."""
        size = self.temporary.size
        temporary = rt.scratch(size) if self.in_scratch else rt.empty([size], paddle.uint8) if size else None
        self._native.run(memories, rt.allocate, temporary)


def shown(calls: Sequence[Call]) -> set[int]:
    """Return the indices that are shown to calls on memory."""
    return set[int]().union(*[call.indices for call in calls if call.on_memory])


def _uses(calls: Sequence[Call]) -> tuple[dict[int, int], dict[int, int]]:
    """Return ({index: number of the first call that uses the memory}, {index: that of the last one})."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, call in enumerate(calls):
        for index in call.indices:
            first.setdefault(index, i)
            last[index] = i
    return first, last
