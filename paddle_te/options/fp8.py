"""Read the small grammars of fp8's options: which layers leave it out, and what makes one leave it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from paddle_te.options.option import Kind

_ENDS = ("first", "last")
WARN, SWITCH = "warn", "bf16"


def skipped_ends(text: str) -> tuple[int, int]:
    """Return (first, last), the numbers of layers at either end, from "first:1,last:1". Raise ValueError for others."""
    counts = dict.fromkeys(_ENDS, 0)
    for part in text.split(",") if text else ():
        end, _, count = part.strip().partition(":")
        if end not in counts or counts[end] or not count.isdecimal() or int(count) < 1:
            raise ValueError(text)
        counts[end] = int(count)
    return counts["first"], counts["last"]


def skipped_layers(text: str, layers: int) -> frozenset[int]:
    """Return the numbers of the layers, of so many, that "first:1,last:1" keeps out of fp8."""
    first, last = skipped_ends(text)
    return frozenset(number for number in range(layers) if number < first or number >= layers - last)


def _is_skipping(text: str) -> bool:
    try:
        skipped_ends(text)
    except ValueError:
        return False
    return True


SKIP_LAYERS = Kind(str, "first:N, last:N or both, such as first:1,last:1", _is_skipping)


@dataclass(frozen=True)
class Limits:
    """How much of a tensor's numbers may go wrong in fp8: shares from 0 to 1, named as in fp8.Statistics."""

    underflows: float = math.inf
    saturated: float = math.inf
    relative_error: float = math.inf


LIMITED = tuple(each.name for each in fields(Limits))


@dataclass(frozen=True)
class Fallback:
    """What happens beyond Limits: the log says so (WARN), or the layer also leaves fp8 from then on (SWITCH)."""

    action: str
    limits: Limits

    @classmethod
    def of(cls, text: str) -> Fallback | None:
        """Read "bf16:underflows=0.3,saturated=0.01"; "" is None. Raise ValueError for others."""
        if not text:
            return None
        action, _, rest = text.partition(":")
        pairs = [part.strip().partition("=") for part in rest.split(",")]
        limits = {name: float(value) for name, _, value in pairs}
        known = len(limits) == len(pairs) and limits.keys() <= {*LIMITED}
        if action not in (WARN, SWITCH) or not known or not all(0 <= limit <= 1 for limit in limits.values()):
            raise ValueError(text)
        return cls(action, Limits(**limits))


def _is_fallback(text: str) -> bool:
    try:
        Fallback.of(text)
    except ValueError:
        return False
    return True


FALLBACK = Kind(
    str,
    f"{WARN} or {SWITCH}, a colon, and one or more of {', '.join(LIMITED)} with a share from 0 to 1, such as "
    f"{SWITCH}:underflows=0.3,saturated=0.01",
    _is_fallback,
)
