"""Choose fp8 scales: recipes with Transformer Engine's names, arguments and defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import ClassVar, NamedTuple, TypeAlias

from paddle_te.fp8.scaling import BlockScaling, GemmScalings, TensorScaling
from paddle_te.options import LAYER_OPTIONS
from paddle_te.options.layers import Layers
from paddle_te.options.option import NOT_NEGATIVE, Kind, choice, whole

# Largest finite values (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, table 1).
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}


class _Format(NamedTuple):
    forward: str
    backward: str


class Format(Enum):
    """The fp8 types of a training. HYBRID: e4m3 in forward, e5m2 for gradients. E4M3: e4m3 everywhere."""

    HYBRID = _Format("e4m3", "e5m2")
    E4M3 = _Format("e4m3", "e4m3")


_BOOLEAN = Kind(bool, "True or False", lambda value: isinstance(value, bool))
_KINDS = {
    "fp8_format": Kind(Format, "Format.HYBRID or Format.E4M3", lambda value: isinstance(value, Format)),
    "margin": whole(0, 18),
    "amax_history_len": LAYER_OPTIONS["fp8_amax_history_len"].kind,
    "amax_compute_algo": choice("max", "most_recent"),
    "first_step": choice("current", "delayed"),
    "amax_epsilon": NOT_NEGATIVE,
}


def _check(recipe: Recipe) -> None:
    """Raise ValueError, in one line that names the argument, for a value that it may not have."""
    for each in fields(recipe):
        value = getattr(recipe, each.name)
        if each.name == "fp8_dpa" and value is not False and recipe.kind != "delayed":
            raise ValueError(
                f"fp8_dpa={value!r}: Transformer Engine has no fp8 attention with {recipe.kind} scaling on "
                "Hopper; use DelayedScaling(fp8_dpa=True), or leave fp8_dpa out"
            )
        if fault := _KINDS.get(each.name, _BOOLEAN).fault(value):
            raise ValueError(f"{each.name}={value!r}; it must be {fault}")


def _one_scale_a_tensor(kind: str, fp8_format: Format) -> GemmScalings:
    forward, backward = (TensorScaling(kind, dtype) for dtype in fp8_format.value)
    return GemmScalings(input=forward, weight=forward, grad_output=backward)


@dataclass(frozen=True)
class DelayedScaling:
    """Scales come from the amax (the greatest absolute value) of earlier steps.

    margin: scale = fp8_max / amax / 2**margin, 0 to 18.
    fp8_format: Format.HYBRID or Format.E4M3.
    amax_history_len: steps that the history remembers, 1 or more.
    amax_compute_algo: "max" takes the greatest amax of the history, "most_recent" the last step's.
    reduce_amax: take the greatest amax over `fp8_autocast`'s fp8_group, so that its ranks have the same scales.
    fp8_dpa: attention also computes in fp8: q, k, v, softmax and output, and the gradients of all. Its inputs and
    outputs keep their dtype. It pays at long sequences.
    fp8_dpa_bwd: with fp8_dpa, backward in fp8. False is TE's NVTE_FP8_DPA_BWD=0: backward in the inputs' precision.
    first_step: the scales until the first update: "delayed" begins as TE does, with all scales 1; "current" takes them
    from the tensors. From the second step on both follow the same rule.

    Raises ValueError for anything else.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = Layers.fp8_amax_history_len
    amax_compute_algo: str = "max"
    reduce_amax: bool = Layers.fp8_reduce_amax
    fp8_dpa: bool = False
    fp8_dpa_bwd: bool = True
    first_step: str = "current"

    kind: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def scalings(self) -> GemmScalings:
        """How the tensors of a GEMM are scaled."""
        return _one_scale_a_tensor("delayed", self.fp8_format)

    @property
    def first_scalings(self) -> GemmScalings:
        """How they are scaled until the first update of the scales."""
        return _one_scale_a_tensor(self.first_step, self.fp8_format)


@dataclass(frozen=True)
class Float8CurrentScaling:
    """Scales come from the tensor at hand: scale = fp8_max / amax, at the price of one more pass over it.

    fp8_format: Format.HYBRID or Format.E4M3. fp8_dpa: False; attention in fp8 is delayed scaling's.
    Raises ValueError for anything else.
    """

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False

    kind: ClassVar[str] = "current"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def scalings(self) -> GemmScalings:
        """How the tensors of a GEMM are scaled."""
        return _one_scale_a_tensor("current", self.fp8_format)

    first_scalings = scalings


@dataclass(frozen=True)
class Float8BlockScaling:
    """Give each block of a tensor a scale of its own, fp8_max / amax of the block at hand.

    Blocks are 1 x 128 numbers of inputs and output gradients, 128 x 128 of weights (DeepSeek-AI, "DeepSeek-V3
    Technical Report", 2024, section 3.3.2).

    fp8_format: Format.E4M3 or Format.HYBRID. fp8_dpa: False; attention in fp8 is delayed scaling's.
    power_2_scale: scales are rounded down to powers of 2. False is TE's NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1.
    amax_epsilon: the least amax, 0 or more, which keeps the scales of blocks of tiny numbers down.

    Raises ValueError for anything else.
    """

    fp8_format: Format = Format.E4M3
    power_2_scale: bool = True
    amax_epsilon: float = 0.0
    fp8_dpa: bool = False

    kind: ClassVar[str] = "block"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def scalings(self) -> GemmScalings:
        """How the tensors of a GEMM are scaled."""

        def of(dtype: str, block_scaling_dim: int) -> BlockScaling:
            return BlockScaling(dtype, block_scaling_dim, self.power_2_scale, self.amax_epsilon)

        forward, backward = self.fp8_format.value
        return GemmScalings(input=of(forward, 1), weight=of(forward, 2), grad_output=of(backward, 1))

    first_scalings = scalings


Recipe: TypeAlias = DelayedScaling | Float8CurrentScaling | Float8BlockScaling
RECIPES: dict[str, type[Recipe]] = {
    recipe.kind: recipe for recipe in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling)
}
