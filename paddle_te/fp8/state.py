"""Keep the state of delayed scaling: amax histories and scales of all modules, updated at step boundaries only.

Within a step all forward passes, recomputed ones too, and all micro-batches in flight use the same scales. Each adds
its amax (by maximum) to row 0 of a history; a recomputed forward adds the same values again and changes nothing.

Before the first update no scale is known. As long as a Block is fresh, its quantizers may therefore be of kind
"current" (`DelayedScaling.first_step`): all of a model's are so in all of its first step, recompute included.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.distributed.communication.group import Group

from paddle_te.fp8.recipe import FP8_MAX, DelayedScaling
from paddle_te.fp8.scaling import BlockScaling, TensorScaling

if TYPE_CHECKING:
    from paddle_te.fp8.statistics import Record

FLOAT32_MAX = 3.4028234663852886e38
T = TypeVar("T")


class Update(Protocol):
    """A way to update scales that does what `amax_and_scale_update` does.

    It returns the new tensors, or None when it worked in place. One that works in place is given scale_inv [n, 4] where
    fp8_dpa is on, and writes 1 / scale into its first column.
    """

    def __call__(
        self,
        history: Tensor,
        scale: Tensor,
        fp8_max: float,
        margin: int,
        amax_compute_algo: str,
        scale_inv: Tensor | None = None,
        /,
    ) -> tuple[Tensor, Tensor] | None: ...


class Bound(Protocol):
    """A module's quantizers, which take their place in a BlockPair: see `module.Binding`."""

    num_gemms: int

    def move_to(self, pair: BlockPair, gemm: int) -> None: ...


def divide(a: Tensor | float, b: Tensor) -> Tensor:
    """Return a / b in float32, correctly rounded as CUDA's division is; more than float32 holds becomes its maximum.

    Paddle's float32 division on the CPU is off by one bit now and then. A float64 quotient, rounded to float32, is
    not: 53 bits are more than 2·24 + 1 (Figueroa, "When is double rounding innocuous?", 1995).
    """
    numerator = a.astype("float64") if isinstance(a, Tensor) else a
    return (numerator / b.astype("float64")).clip(max=FLOAT32_MAX).astype("float32")


def amax_and_scale_update(
    history: Tensor,
    scale: Tensor,
    fp8_max: float,
    margin: int,
    amax_compute_algo: str,
    scale_inv: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Roll the amax history and compute the next scales: (history, scale) after the step, as new tensors.

    history: [amax_history_len, n] float32, row 0 the amax of the step that ends, then the oldest to the newest one
    before. scale: [n] float32. scale_inv: not used.
    Bit for bit `kernel` in TE 2.20's common/recipe/delayed_scaling.cu, which is
    nvte_delayed_scaling_recipe_amax_and_scale_update: scale = fp8_max · 2^-margin / amax, the float32 maximum where
    that overflows, the scale before where amax is 0, infinite or not a number; row 0 moves to the end and becomes 0.
    """
    last = history[:1]
    if amax_compute_algo == "most_recent":
        amax = last[0]
    else:
        amax = paddle.where(history.isnan(), paddle.zeros_like(history), history).max(0)  # fmaxf passes over NaN
    usable = amax.isfinite() & (amax > 0)
    new = divide(fp8_max * 2.0**-margin, paddle.where(usable, amax, paddle.ones_like(amax)))
    scale = paddle.where(usable, new, scale.clip(max=FLOAT32_MAX))
    zeros = paddle.zeros_like(last)
    return paddle.concat([zeros, history[2:], last] if len(history) > 1 else [zeros]), scale


class Quantizer:
    """How one tensor of one GEMM becomes fp8: attributes only, for backends to read anew at each call.

    scaling: a TensorScaling or BlockScaling, with its kind and dtype; fp8_max: the dtype's largest value.
    Of kind "delayed" the scale is the one at scale_ptr. Delayed scaling may begin with "current": then the scale comes
    from the tensor itself, and its amax is recorded all the same.
    Under delayed scaling only (else 0): addresses of float32 numbers on the device:
    scale_ptr: read. amax_ptr: accumulates the maximum. scale_inv_ptr: 16-byte aligned, written with 1 / scale.
    statistics: the Record that the casts of this step add to, None for most steps.
    """

    __slots__ = (
        "scaling",
        "scale_ptr",
        "amax_ptr",
        "scale_inv_ptr",
        "statistics",
        "_later_scaling",
        "_first_scaling",
        "_block",
        "_column",
        "_records",
        "__weakref__",
    )

    def __init__(
        self, scaling: TensorScaling | BlockScaling, first_scaling: TensorScaling | BlockScaling, records: bool = True
    ) -> None:
        """first_scaling: as long as its block is fresh. records: False for evaluation, whose amax is lost."""
        self.scaling, self._later_scaling, self._first_scaling = scaling, scaling, first_scaling
        self.scale_ptr = self.amax_ptr = self.scale_inv_ptr = 0
        self.statistics: Record | None = None
        self._block: Block | None = None
        self._column = 0
        self._records = records

    @property
    def kind(self) -> str:
        return self.scaling.kind

    @property
    def dtype(self) -> str:
        return self.scaling.dtype

    @property
    def statistics_ptr(self) -> int:
        """The address of the Record's fields, 0 for none."""
        return 0 if self.statistics is None else self.statistics.address

    @property
    def records(self) -> bool:
        """Whether its scale comes from a history, at the latest after the first step."""
        return self._block is not None

    @property
    def fp8_max(self) -> float:
        return FP8_MAX[self.scaling.dtype]

    def move_to(self, block: Block, column: int) -> None:
        """Keep the numbers of delayed scaling in that column of a block."""
        self._block, self._column = block, column
        block.quantizers.add(self)
        self.bind()

    def bind(self) -> None:
        """Take the addresses of the block's tensors, and the scaling that holds now."""
        block, column = self._block, self._column
        assert block is not None  # `move_to` has set it
        self.scaling = self._first_scaling if block.fresh else self._later_scaling
        self.scale_ptr = block.scale.data_ptr() + 4 * column
        self.scale_inv_ptr = block.scale_inv.data_ptr() + 16 * column
        self.amax_ptr = block.history.data_ptr() + 4 * column if self._records else block.scratch.data_ptr()

    @property
    def scale(self) -> Tensor:
        """The scale as a float32 tensor of shape []; only for kind "delayed"."""
        assert self._block is not None  # of kind "delayed"
        return self._block.scale[self._column]

    def record_amax(self, amax: Tensor) -> None:
        """Add a float32 tensor of shape [] to the step's amax, where the recipe has a history."""
        if self._records and self._block is not None:
            seen = self._block.amaxes[self._column]
            self._block.amaxes[self._column] = amax if seen is None else paddle.maximum(seen, amax)
            self._block.recorded = True


def check_aligned(scale_inv: Tensor) -> None:
    """Raise RuntimeError for a tensor whose address is no multiple of 16 bytes, as fp8 GEMMs want a scale's inverse."""
    if scale_inv.data_ptr() % 16:
        raise RuntimeError("scale_inv is not 16-byte aligned: this device's allocator cannot serve fp8 GEMMs")


class Block:
    """The numbers of n tensors of one fp8 dtype, side by side, so that one kernel updates them all.

    history [amax_history_len, n], scale [n], scale_inv [n, 4] (the first of 4 counts: fp8 GEMMs want 16-byte aligned
    addresses): float32 tensors on one device. fresh: the scales have never been updated.
    """

    def __init__(self, dtype: str, history: Tensor, scale: Tensor, scale_inv: Tensor) -> None:
        self.dtype = dtype
        self.fresh = True
        self.history, self.scale, self.scale_inv = history, scale, scale_inv
        self.scratch = paddle.zeros([4], dtype="float32")
        # recorded as tensors, not through pointers; `flush` brings them into row 0
        self.amaxes: list[Tensor | None] = [None] * history.shape[1]
        self.recorded = False
        # weak: without cycles states die with their modules
        self.quantizers: weakref.WeakSet[Quantizer] = weakref.WeakSet()
        check_aligned(scale_inv)

    @classmethod
    def new(cls, dtype: str, amax_history_len: int, n: int) -> Block:
        """Make a Block of n tensors without a history, on the present device."""
        zeros, ones = (lambda *shape: paddle.zeros(shape, "float32")), (lambda *shape: paddle.ones(shape, "float32"))
        return cls(dtype, zeros(amax_history_len, n), ones(n), ones(n, 4))

    def flush(self) -> None:
        """Bring recorded amax tensors into row 0."""
        if self.recorded:
            zero = paddle.zeros([], dtype="float32")
            row = paddle.stack([zero if amax is None else amax for amax in self.amaxes])
            self.set(paddle.concat([paddle.maximum(self.history[:1], row.unsqueeze(0)), self.history[1:]]), self.scale)
            self.amaxes, self.recorded = [None] * len(self.amaxes), False

    def set(self, history: Tensor, scale: Tensor) -> None:
        """Replace history and scale by other tensors."""
        moved = history.data_ptr() != self.history.data_ptr() or scale.data_ptr() != self.scale.data_ptr()
        self.history, self.scale = history, scale
        if moved:
            self._bind_quantizers()

    def _bind_quantizers(self) -> None:
        for quantizer in self.quantizers:
            quantizer.bind()

    def set_fresh(self, fresh: bool) -> None:
        """Say whether the scales have never been updated: all quantizers take the kind that follows from it."""
        if fresh != self.fresh:
            self.fresh = fresh
            self._bind_quantizers()

    def drop(self) -> None:
        """Forget the amaxes of the step."""
        self.amaxes, self.recorded = [None] * len(self.amaxes), False
        self.set(paddle.concat([paddle.zeros_like(self.history[:1]), self.history[1:]]), self.scale)

    def restore(self, history: npt.NDArray[np.float32], scale: npt.NDArray[np.float32]) -> None:
        """Do as `set`, with arrays; bring scale_inv along, which the next update's kernel would."""
        inverse = paddle.to_tensor((1 / scale).repeat(4).reshape([-1, 4]))
        self.scale_inv = inverse
        self.set(paddle.to_tensor(history), paddle.to_tensor(scale))

    def reduce(self, group: Group) -> None:
        """Take the greatest of each amax of the step over the group's ranks."""
        self.flush()
        row = self.history[0]
        dist.all_reduce(row, op=dist.ReduceOp.MAX, group=group)
        if row.data_ptr() != self.history.data_ptr():  # a device where slices are copies
            self.set(paddle.concat([row.unsqueeze(0), self.history[1:]]), self.scale)

    def roll(self, recipe: DelayedScaling, update: Update, group: Group | None) -> None:
        """End a step: the next scales, from the greatest amaxes over the group's ranks (None: this rank's)."""
        self.flush()
        if group is not None:
            self.reduce(group)
        # attention's kernels read the scale_inv of what nobody quantizes
        more = (self.scale_inv,) if recipe.fp8_dpa else ()
        updated = update(self.history, self.scale, FP8_MAX[self.dtype], recipe.margin, recipe.amax_compute_algo, *more)
        if updated is not None:
            self.set(*updated)


class BlockPair:
    """The blocks of some modules: per GEMM two columns in `forward` (input, weight) and one in `backward`.

    active: a module of theirs had a training forward since the last update of the scales.
    generation: counts the steps that were ended, by an update or by forgetting them.
    done: the generation in which a module of theirs last completed a backward.
    in_flight: forward passes whose backward has not been.
    """

    def __init__(self, forward: Block, backward: Block) -> None:
        self.forward, self.backward = forward, backward
        self.active, self.generation, self.in_flight = False, 0, 0
        self.done: int | None = None
        self.warned = False  # that the scales stay as they are

    @property
    def fresh(self) -> bool:
        """Whether the scales have never been updated: the model's first step has not ended yet."""
        return self.forward.fresh

    def set_fresh(self, fresh: bool) -> None:
        """Say so of both blocks."""
        for block in (self.forward, self.backward):
            block.set_fresh(fresh)

    def roll(self, recipe: DelayedScaling, update: Update, group: Group | None) -> None:
        """Update the scales, if they were used since the last update."""
        if self.active:
            self.forward.roll(recipe, update, group)
            self.backward.roll(recipe, update, group)
            self.set_fresh(False)
            self.active = False
            self.generation += 1

    def drop(self) -> None:
        """Discard the amax of the step that ends: the next step uses the same scales."""
        if self.active:
            for block in (self.forward, self.backward):
                block.drop()
            self.active = False
            self.generation += 1  # no module has completed a backward that an update could end


class ScalingState:
    """Delayed scaling of all modules with one way to update scales, on one device, for one recipe.

    It lives as long as one of them does.

    The modules of one model share a BlockPair and are updated together. Models are updated each by itself: another one
    that is no longer used may be gone on one rank and not yet collected on another, and must not take part in this
    one's reductions.
    """

    def __init__(self, update: Update, recipe: DelayedScaling) -> None:
        self.update = update
        self.recipe = recipe
        self.group: Group | None = None
        # in the order of first use, which is the same on all ranks of a group
        self._pairs: list[weakref.ref[BlockPair]] = []

    def add(self, bindings: Sequence[Bound]) -> None:
        """Give modules' Bindings columns, all in one pair of blocks."""
        num_gemms = sum(binding.num_gemms for binding in bindings)
        dtypes, length = self.recipe.fp8_format.value, self.recipe.amax_history_len
        pair = BlockPair(
            Block.new(dtypes.forward, length, 2 * num_gemms),
            Block.new(dtypes.backward, length, num_gemms),
        )
        gemm = 0
        for binding in bindings:
            binding.move_to(pair, gemm)
            gemm += binding.num_gemms
        self._pairs = [ref for ref in self._pairs if ref() is not None] + [weakref.ref(pair)]

    def begin_step(self, pair: BlockPair) -> None:
        """Update the scales of a model's pair, unless forward passes that used them still wait for their backward.

        These are a pipeline's micro-batches, or a graph that somebody keeps.
        """
        if not pair.in_flight:
            self._roll(pair)
        elif not pair.warned:
            pair.warned = True
            warnings.warn(
                f"fp8 scales stay as they are: {pair.in_flight} forward passes of the step before have had no "
                "backward. Drop the tensors that keep their graphs alive, or run their backward first. Where these are "
                "micro-batches of one step, say so with is_first_microbatch.",
                stacklevel=4,
            )

    def reduction_group(self) -> Group | None:
        """Return the group over which amaxes are reduced, None for none."""
        shared = self.recipe.reduce_amax and self.group is not None and self.group.nranks > 1
        return self.group if shared else None

    def _roll(self, pair: BlockPair) -> None:
        pair.roll(self.recipe, self.update, self.reduction_group())

    def roll(self) -> None:
        """Update the scales of all modules used since their last update, over the group where there is one."""
        for pair in _alive(self._pairs):
            self._roll(pair)

    def drop_step(self) -> None:
        """Forget the amaxes of all modules' running step."""
        for pair in _alive(self._pairs):
            pair.drop()


def _alive(references: Iterable[weakref.ref[T]]) -> list[T]:
    return [thing for ref in references if (thing := ref()) is not None]


_states: weakref.WeakValueDictionary[tuple[Update, str, DelayedScaling], ScalingState] = weakref.WeakValueDictionary()


def scaling_state(update: Update, recipe: DelayedScaling) -> ScalingState:
    """Return the ScalingState of an update and recipe on the present device, made where there is none."""
    key = update, paddle.device.get_device(), recipe
    state = _states.get(key)
    if state is None:
        state = _states[key] = ScalingState(update, recipe)
    return state


def new_step() -> None:
    """Update the scales of all states now. Only for loops where no module can see a step begin by itself.

    A forward pass before it may not run its backward after it: that raises RuntimeError.
    """
    for state in list(_states.values()):
        state.roll()


@paddle.no_grad()
def drop_step() -> None:
    """Leave the running step out of all states: scales and amax histories are as if it had not been.

    For a training loop that does not use a step's gradients. Call it after its last backward and before the next
    forward.
    """
    for state in list(_states.values()):
        state.drop_step()
