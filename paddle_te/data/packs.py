"""Which samples share a sequence ("zero padding"), in PaddleNLP's order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GREEDY_WINDOW = 500  # samples that a tighter packing orders anew at a time


def pack(lengths: Sequence[int], room: int, greedy: bool = False) -> list[list[int]]:
    """Return lists of samples' numbers, whose lengths sum up to `room` at most. No sample is longer than that.

    greedy: each of a window of samples goes where most room is left, instead of behind the one before.
    """
    if not greedy:
        return _in_order(lengths, room)
    windows = (range(begin, len(lengths))[:GREEDY_WINDOW] for begin in range(0, len(lengths), GREEDY_WINDOW))
    return [packed for window in windows for packed in _greedy(lengths, window, room)]


def _in_order(lengths: Sequence[int], room: int) -> list[list[int]]:
    packs: list[list[int]] = [[]]
    left = room
    for number, length in enumerate(lengths):
        if length > left:
            packs.append([])
            left = room
        packs[-1].append(number)
        left -= length
    return packs


def _greedy(lengths: Sequence[int], window: range, room: int) -> list[list[int]]:
    left = np.full(len(window), -1)
    packs: list[list[int]] = [[] for _ in window]
    left[0], used = room, 1  # a pack that is not begun has no room
    for number in window:
        roomiest = int(left.argmax())
        if lengths[number] > left[roomiest]:
            left[used], roomiest, used = room, used, used + 1
        packs[roomiest].append(number)
        left[roomiest] -= lengths[number]
    return [packed for packed in packs if packed]
