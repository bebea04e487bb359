"""How fp8 scales are chosen: recipes with Transformer Engine's names, arguments and defaults."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# Largest finite values (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, table 1).
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
AMAX_COMPUTE_ALGOS = ("max", "most_recent")


class _Format(NamedTuple):
    forward: str
    backward: str


class Format(Enum):
    """The fp8 types of a training. HYBRID: e4m3 in forward, e5m2 for gradients. E4M3: e4m3 everywhere."""

    HYBRID = _Format("e4m3", "e5m2")
    E4M3 = _Format("e4m3", "e4m3")


def _check_format(fp8_format):
    if not isinstance(fp8_format, Format):
        raise ValueError(f"fp8_format={fp8_format!r}; it may be Format.HYBRID or Format.E4M3")


@dataclass(frozen=True)
class DelayedScaling:
    """Scales come from the amax (the greatest absolute value) of earlier steps.

    margin: scale = fp8_max / amax / 2**margin, 0 or more.
    fp8_format: Format.HYBRID or Format.E4M3.
    amax_history_len: steps that the history remembers, 1 or more.
    amax_compute_algo: "max" takes the greatest amax of the history, "most_recent" the last step's.
    reduce_amax: take the greatest amax over `fp8_autocast`'s fp8_group, so that its ranks have the same scales.

    Raises ValueError for anything else.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True

    kind = "delayed"

    def __post_init__(self):
        _check_format(self.fp8_format)
        for name, least in (("margin", 0), ("amax_history_len", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r}; it must be a whole number, {least} or more")
        if self.amax_compute_algo not in AMAX_COMPUTE_ALGOS:
            allowed = " or ".join(map(repr, AMAX_COMPUTE_ALGOS))
            raise ValueError(f"amax_compute_algo={self.amax_compute_algo!r}; it may be {allowed}")
        if not isinstance(self.reduce_amax, bool):
            raise ValueError(f"reduce_amax={self.reduce_amax!r}; it must be True or False")


@dataclass(frozen=True)
class Float8CurrentScaling:
    """Scales come from the tensor at hand: scale = fp8_max / amax, at the price of one more pass over it.

    fp8_format: Format.HYBRID or Format.E4M3. Raises ValueError for anything else.
    """

    fp8_format: Format = Format.HYBRID

    kind = "current"

    def __post_init__(self):
        _check_format(self.fp8_format)


RECIPES = (DelayedScaling, Float8CurrentScaling)
