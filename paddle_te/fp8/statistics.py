"""Count what becomes of the numbers that a model casts to fp8: how many vanish, how many are cut off, how far all move.

A `Recorder` gives each quantizer a `Record` for the length of a step. A backend adds to it wherever it casts: te by its
kernels, at the Record's address on the device, pd by `Record.add`. Between such steps quantizers have no Record, and
nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed.communication.group import Group

from paddle_te.fp8.module import ModuleScaling
from paddle_te.fp8.recipe import FP8_MAX, Recipe
from paddle_te.fp8.state import Quantizer

Counters: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]

# The fields of a record, int64 each, as in native/kernels/statistics.cuh: SUMS sums, then maxima. Maxima hold the bits
# of float32 numbers that are not negative, which have the order of the numbers.
_FIELDS = NONZERO, UNDERFLOWS, SATURATED, ERROR, AMAX, SCALE, SCALE_INV = range(7)
SUMS = 4
BYTES = 8 * len(_FIELDS)
ERROR_UNIT = 2.0**24
TOLERANCE = 1.000001  # an amax times its own scale may be as much beyond the greatest number
TENSORS = ("input", "weight", "grad_output")


class Place(NamedTuple):
    """Name a tensor of a model's GEMMs: the module's structured name, the GEMM's number in it, and one of TENSORS."""

    module: str
    gemm: int
    tensor: str


@dataclass(frozen=True)
class Statistics:
    """The statistics of one tensor's cast to fp8 in a step.

    amax: the greatest magnitude.
    scale_min, scale_max: the least and the greatest scale of its numbers other than 0.
    underflows: the share of numbers other than 0 that became 0.
    saturated: the share of numbers beyond the greatest number of the format.
    relative_error: the mean of |rounded - x| / |x| over numbers other than 0.
    range: amax · scale over the greatest number of the format; None except under delayed scaling. It is 1 if the scale
        was made for this amax, and 2 if the amax is twice as great.
    """

    amax: float
    scale_min: float
    scale_max: float
    underflows: float
    saturated: float
    relative_error: float
    range: float | None = None


class Record:
    """One quantizer's counts in a step. address: of its fields on the device."""

    __slots__ = ("address", "counts")

    def __init__(self, address: int, counts: Counters) -> None:
        """counts: the fields that the host counts."""
        self.address, self.counts = address, counts

    def add(self, x: Floats, scale: Floats, rounded: Floats, greatest: float) -> None:
        """Count numbers x that became `rounded` once they were multiplied with their scales, one or as many as blocks.

        greatest: of the format.
        """
        merge(self.counts, counted(x, scale, rounded, greatest))


def counted(x: Floats, scale: Floats, rounded: Floats, greatest: float) -> Counters:
    """Return the fields for numbers x, which became `rounded` once they were multiplied with `scale`."""
    size, most = np.abs(x), np.finfo(np.float32).max
    seen = (size > 0) & (size <= most)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scaled = np.minimum(size * scale, most)
        errors = np.where(scaled > 0, np.abs(scaled - np.abs(rounded)) / scaled, 1)
    scales = np.broadcast_to(scale, x.shape)[seen]
    sums = [seen, seen & (rounded == 0), seen & (scaled > greatest * TOLERANCE)]
    error = int(errors[seen].sum(dtype=np.float64) * ERROR_UNIT)
    maxima = [np.nanmax(size, initial=0), scales.max(initial=0), (1 / scales).max(initial=0)]
    bits = np.array(maxima, np.float32).view(np.int32)
    return np.array([*(each.sum() for each in sums), error, *bits], np.int64)


def merge(into: Counters, more: Counters) -> None:
    """Add the fields of other numbers to records [..., fields]."""
    into[..., :SUMS] += more[..., :SUMS]
    np.maximum(into[..., SUMS:], more[..., SUMS:], out=into[..., SUMS:])


class Recorder:
    """Have the quantizers of some modules count in single steps.

    modules: {structured name: ModuleScaling}, as `name_modules` returns them. Places of modules that do not compute in
    fp8 are left out. Nothing waits for the device before `end`.
    """

    def __init__(self, modules: Mapping[str, ModuleScaling]) -> None:
        self._modules = modules
        self._quantizers: dict[Place, Quantizer] = {}
        self._memory: Tensor | None = None
        self._on_host: Counters = np.zeros([0, len(_FIELDS)], np.int64)

    def begin(self, recipe: Recipe) -> None:
        """Begin a step under a recipe. Call it before the step's first forward."""
        self._quantizers = dict(self._places(recipe))
        count = len(self._quantizers)
        self._memory = paddle.zeros([max(count, 1), len(_FIELDS)], "int64")
        self._on_host = np.zeros([count, len(_FIELDS)], np.int64)
        base = self._memory.data_ptr()
        for i, quantizer in enumerate(self._quantizers.values()):
            quantizer.statistics = Record(base + i * BYTES, self._on_host[i])

    def _places(self, recipe: Recipe) -> Iterable[tuple[Place, Quantizer]]:
        for name, module in self._modules.items():
            for number, gemm in enumerate(module.bind(recipe).gemms if module.serves(recipe) else ()):
                for tensor in TENSORS:
                    quantizer = getattr(gemm, tensor)
                    if isinstance(quantizer, Quantizer):  # a weight that exists in fp8 only is not cast
                        yield Place(name, number, tensor), quantizer

    def end(self, group: Group | None = None) -> dict[Place, Statistics]:
        """End the step: return the Statistics of all that was cast in it, over all ranks of a group. Collective.

        Shares and errors are over the numbers of all ranks, so those of a divided weight are the whole weight's. Waits
        for the device.
        """
        assert self._memory is not None  # `begin` has made it
        for quantizer in self._quantizers.values():
            quantizer.statistics = None
        memory, self._memory = self._memory, None
        counts = memory.numpy()[: len(self._quantizers)]
        merge(counts, self._on_host)
        if group is not None and group.nranks > 1:
            counts = _over_ranks(counts, group)
        pairs = zip(self._quantizers.items(), counts, strict=True)
        return {place: _statistics(of, fields) for (place, of), fields in pairs if fields[SCALE] and fields[NONZERO]}


def _over_ranks(counts: Counters, group: Group) -> Counters:
    """Return the counts of all ranks of a group together."""
    sums, maxima = paddle.to_tensor(counts[:, :SUMS].copy()), paddle.to_tensor(counts[:, SUMS:].copy())
    dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    return np.concatenate([sums.numpy(), maxima.numpy()], 1)


def _statistics(quantizer: Quantizer, fields: Counters) -> Statistics:
    amax, scale, scale_inv = fields[SUMS:].astype(np.int32).view(np.float32).tolist()
    nonzero, underflows, saturated, error = fields[:SUMS].tolist()
    errors = error / ERROR_UNIT / nonzero
    spread = amax * scale / FP8_MAX[quantizer.dtype] if quantizer.records else None
    return Statistics(amax, 1 / scale_inv, scale, underflows / nonzero, saturated / nonzero, errors, spread)
