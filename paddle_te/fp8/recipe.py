"""How fp8 scales are chosen: recipes with Transformer Engine's names, arguments and defaults."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from paddle_te.options import LAYER_OPTIONS

# Largest finite values (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, table 1).
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}


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

    margin: scale = fp8_max / amax / 2**margin, 0 to 18.
    fp8_format: Format.HYBRID or Format.E4M3.
    amax_history_len: steps that the history remembers, 1 or more.
    amax_compute_algo: "max" takes the greatest amax of the history, "most_recent" the last step's.
    reduce_amax: take the greatest amax over `fp8_autocast`'s fp8_group, so that its ranks have the same scales.
    fp8_dpa: attention in fp8 as well: q, k, v, softmax and output, and the gradients of all. What comes in and goes
    out stays as it is. Pays at long sequences.
    fp8_dpa_bwd: with fp8_dpa, its backward too. False is TE's NVTE_FP8_DPA_BWD=0: backward in the inputs' precision.
    first_step: where scales come from until the first update, when no earlier step is known: "current" takes them from
    the tensors at hand, "delayed" is TE's own beginning, with all scales 1. From the second step on both follow the
    same rule.

    Raises ValueError for anything else.
    """

    margin: int = LAYER_OPTIONS["fp8_margin"].default
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = LAYER_OPTIONS["fp8_amax_history_len"].default
    amax_compute_algo: str = LAYER_OPTIONS["fp8_amax_compute_algo"].default
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_dpa_bwd: bool = True
    first_step: str = LAYER_OPTIONS["fp8_first_step"].default

    kind = "delayed"

    def __post_init__(self):
        _check_format(self.fp8_format)
        for name in ("margin", "amax_history_len", "amax_compute_algo", "first_step"):
            kind = LAYER_OPTIONS[f"fp8_{name}"].kind
            if not kind.accepts(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r}; it must be {kind.words}")
        for name in ("reduce_amax", "fp8_dpa", "fp8_dpa_bwd"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}; it must be True or False")


@dataclass(frozen=True)
class Float8CurrentScaling:
    """Scales come from the tensor at hand: scale = fp8_max / amax, at the price of one more pass over it.

    fp8_format: Format.HYBRID or Format.E4M3. fp8_dpa: False; attention in fp8 is delayed scaling's.
    Raises ValueError for anything else.
    """

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False

    kind = "current"

    def __post_init__(self):
        _check_format(self.fp8_format)
        if self.fp8_dpa is not False:
            raise ValueError(
                f"fp8_dpa={self.fp8_dpa!r}: Transformer Engine has no fp8 attention with current scaling on Hopper; "
                "use DelayedScaling(fp8_dpa=True), or leave fp8_dpa out"
            )


RECIPES = (DelayedScaling, Float8CurrentScaling)
