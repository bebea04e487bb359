"""Reads a trace of Paddle's profiler: which of the GPU's kernels belongs to which part of the model, and how long the
parts take.

Every moment counts once: for the part of the model whose kernel computes, else for communication (nothing hides it),
else as a gap. With the traces of several ranks, communication does not count what a rank waits in a collective for the
others, which has a row of its own. A kernel belongs to the part that the host was at when it launched it, by the names
of training's profiling.Ranges. Of several steps the first is left out: CUPTI may take its time to start in it (a step
of 305 ms was seen to wait for 190).
"""

import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

DEVICE = ("Kernel", "Memcpy", "Memset")
COMMUNICATION = re.compile("nccl", re.IGNORECASE)
PARTS = {
    "layers.": "decoder layers",
    "embed_tokens": "embedding",
    "lm_head": "head and loss",
    "criterion": "head and loss",
}
OUTSIDE = "outside of the parts"  # the last norm, gradients' accumulation and scaling, data
BACKWARD = "backward"  # Paddle's own event
EXPOSED, WAITING, GAPS = "communication, exposed", "waiting for other ranks", "gaps"
ROWS = [
    *(f"{part} {way}" for part in dict.fromkeys(PARTS.values()) for way in ("forward", "backward", "recomputed")),
    *("optimizer and clipping", OUTSIDE, EXPOSED, WAITING, GAPS),
]


@dataclass(frozen=True)
class Work:
    """A kernel, copy or memset on the device. Times in µs from the beginning of the profile.

    part: one of ROWS, by where the host was when it launched it, at the time `launched`. waits: this is a collective's
    time until the last rank has come to it (`read_ranks`); the rest of it is a Work of its own.
    """

    name: str
    start: float
    end: float
    part: str
    launched: float = 0.0
    waits: bool = False

    @property
    def communicates(self):
        return bool(COMMUNICATION.search(self.name))

    @property
    def row(self):
        """Which of ROWS a moment counts for in which nothing else runs."""
        if not self.communicates:
            return self.part
        return WAITING if self.waits else EXPOSED


@dataclass(frozen=True)
class Profile:
    """A trace's steps that count: the device's Works in the order of their start, and the start of each step."""

    works: list
    starts: list

    def step(self, index):
        """[Work] that was launched in one of the steps."""
        end = self.starts[index + 1] if index + 1 < len(self.starts) else float("inf")
        return [work for work in self.works if self.starts[index] <= work.launched < end]

    def account(self):
        """{"steps", "ms": {row: a step's}, "total_ms", "communication_ms", "kernels": [(name, ms, calls) of a step]},
        all of the steps that count.
        """
        steps = len(self.starts)
        ms = {row: us / steps / 1e3 for row, us in moments(self.works).items()}
        communicating = moments([work for work in self.works if work.communicates])[EXPOSED]
        durations, calls = Counter(), Counter()
        for work in self.works:
            durations[work.name] += work.end - work.start
            calls[work.name] += not work.waits
        return {
            "steps": steps,
            "ms": {row: ms[row] for row in ROWS if row in ms},
            "total_ms": sum(ms.values()),
            "communication_ms": communicating / steps / 1e3,
            "kernels": [(name, us / steps / 1e3, calls[name] / steps) for name, us in durations.most_common(20)],
        }


def read(path):
    """The Profile of a trace file.

    Raises ValueError for a trace without steps or without the device's side, and for a file that is no trace.
    """
    try:
        recorded = json.loads(Path(path).read_text())["traceEvents"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path}: this is no trace of Paddle's profiler") from None
    events = [event for event in recorded if event.get("ph") == "X"]
    starts = sorted(times_of(event)[0] for event in events if re.match(r"step \d+$", name_of(event)))
    counted = starts[1:] or starts
    works = device_work(events, counted[0]) if counted else []
    if not works:
        missing = "kernels of a device (on nvgpu they need nvidia-cuda-cupti)" if counted else "steps"
        raise ValueError(f"{path}: the trace has no {missing}")
    return Profile(works, counted)


def read_ranks(paths):
    """{path: Profile} of one run's traces, one of each rank, in the order of the ranks. What a rank waits in a
    collective for the others is a Work of its own.

    A collective ends on all ranks at nearly the same time. So the rank that comes to it last has the shortest kernel,
    and another rank has waited for as long as its own takes longer; the ranks' clocks need not agree. The n-th kernel
    of a name is taken for the same collective on all ranks. A name that the ranks have not equally often, as that of
    transfers between stages, stays whole.
    """
    profiles, shortest = {path: read(path) for path in sorted(paths, key=_rank_of)}, {}
    by_rank = [_collectives(profile) for profile in profiles.values()]
    for name in set.intersection(*map(set, by_rank)):
        if len({len(of_rank[name]) for of_rank in by_rank}) == 1:
            of_all = zip(*(of_rank[name] for of_rank in by_rank), strict=True)
            shortest[name] = [min(work.end - work.start for work in of_ranks) for of_ranks in of_all]
    return {path: replace(profile, works=_with_waits(profile.works, shortest)) for path, profile in profiles.items()}


def _rank_of(path):
    """The number in the name of a rank's trace, as Paddle writes it: rank0_….json."""
    found = re.match(r"rank(\d+)", Path(path).name)
    return int(found[1]) if found else 0


def _collectives(profile):
    """{name: [Work]} of what communicates."""
    found = defaultdict(list)
    for work in profile.works:
        if work.communicates:
            found[work.name].append(work)
    return found


def _with_waits(works, shortest):
    """[Work], of which those named in {name: µs of each that are no waiting} are two where they have waited."""
    left, parts = {name: iter(times) for name, times in shortest.items()}, []
    for work in works:
        waited = work.end - work.start - next(left[work.name]) if work.name in left else 0
        if waited > 0:
            parts.append(replace(work, end=work.start + waited, waits=True))
        parts.append(replace(work, start=work.start + waited))
    return sorted(parts, key=lambda work: work.start)


def name_of(event):
    return event["name"].rpartition("[")[0]  # "name[duration]"


def times_of(event):
    """(start, end) in µs; the event's own `ts` is rounded."""
    return tuple(float(event["args"][key].split()[0]) for key in ("start_time", "end_time"))


def device_work(events, since):
    """[Work] that was launched from the time `since` on, in the order of their start."""
    places = Places(events)
    launched = {e["args"]["correlation id"]: times_of(e)[0] for e in events if e["cat"] == "CudaRuntime"}
    works = []
    for event in events:
        if event["cat"] in DEVICE:
            start, end = times_of(event)
            launch = launched.get(event["args"]["correlation id"], start)
            if launch >= since:
                works.append(Work(name_of(event), start, end, places.at(launch), launch))
    return sorted(works, key=lambda work: work.start)


class Places:
    """Which row the host was at: by the ranges that `Ranges` names, and by the points where a part's backward began,
    which hold until the next one or until Paddle's own event of the whole backward ends."""

    def __init__(self, events):
        marks = []
        for event in events:
            name, (start, end) = name_of(event), times_of(event)
            if event["cat"] == "UserDefined" and name == "backward":
                marks += [(start, "open", BACKWARD), (end, "close", BACKWARD)]
            elif event["cat"] == "PythonUserDefined" and name.endswith(" backward"):
                marks.append((start, "point", name))
            elif event["cat"] == "PythonUserDefined" and (name.endswith(" forward") or name == "optimizer"):
                marks += [(start, "open", name), (end, "close", name)]
        self.times, self.rows, ranges, point = [], [], [], None
        for time, what, name in sorted(marks):
            if what == "open":
                ranges.append(name)
            elif what == "close":
                ranges.remove(name)
            else:
                point = name
            point = point if BACKWARD in ranges else None
            self.times.append(time)
            self.rows.append(_row(ranges, point))

    def at(self, time):
        index = bisect_right(self.times, time) - 1
        return self.rows[index] if index >= 0 else OUTSIDE


def _row(ranges, point):
    for name in reversed(ranges):
        if name == "optimizer":
            return "optimizer and clipping"
        if part := _part(name):
            return f"{part} {'recomputed' if BACKWARD in ranges else 'forward'}"
    return f"{_part(point)} backward" if point and _part(point) else OUTSIDE


def _part(name):
    return next((part for prefix, part in PARTS.items() if name.startswith(prefix)), None)


def moments(works):
    """{row: µs} of all that lies between the first start and the last end."""
    changes = sorted([(w.start, 1, i) for i, w in enumerate(works)] + [(w.end, 0, i) for i, w in enumerate(works)])
    spent, running, last = defaultdict(float), {}, None
    for time, starts, index in changes:
        if last is not None and time > last:
            spent[_row_of([works[i] for i in sorted(running)])] += time - last
        last = time
        if starts:
            running[index] = True
        else:
            running.pop(index, None)
    return spent


def _row_of(running):
    """Return the row of a moment. running: the Works that run then, in the order of their start."""
    rows = [work.row for work in running]
    computing = [row for row in rows if row not in (EXPOSED, WAITING)]
    return next(iter(computing), EXPOSED if EXPOSED in rows else WAITING if rows else GAPS)
