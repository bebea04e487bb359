"""Record the calls of te's ops, once for given sizes.

An Op is two functions that allocate memory, make native tensors and call TE's functions. Nothing in them depends on
numbers in memory: for the same sizes, dtypes and settings they make the same calls. So they run once with a Recorder
instead of the Runtime and with Placeholders instead of tensors. `steps` runs the recorded calls on real memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import methodcaller
from typing import Any, NamedTuple, TypeAlias

from paddle import Tensor

from paddle_te.fp8 import BlockScaling, GemmQuantizers, StoredScaling, TensorScaling
from paddle_te.ops.te import runtime
from paddle_te.ops.te.packing import SIZES
from paddle_te.ops.te.runtime import Runtime

OFFSET_BITS = 48  # an address is recorded as index << OFFSET_BITS | offset: see Sequence in native/shim/calls.h

Allocated: TypeAlias = dict[int, tuple[list[int], Any]]  # {index: (shape, dtype)}
Memories: TypeAlias = list[Any]  # tensors or addresses by index, None where there is none at that time
OnMemory: TypeAlias = Callable[[Memories], Tensor | None]
NOWHERE = -1  # the index of a result that there is not


class Op(NamedTuple):
    """Describe an operation with its gradient.

    forward(rt, inputs, settings): (output or outputs, saved); inputs: an OpInputs, settings: the op's own record.
    backward(rt, saved, *grads): the gradients of the tensors, None where there is none.
    weights: which tensors are GEMMs' weights.
    """

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Sequence[Placeholder | None]]
    weights: tuple[int, ...] = ()


class OpInputs(NamedTuple):
    """Hold the inputs of an op's forward.

    tensors: Placeholders, None where the caller gave None. quantizers: RecordedQuantizers of each GEMM, None for a GEMM
    that is not in fp8. tp: RecordedRanks, None for one rank. train: whether a backward may follow.
    """

    tensors: tuple[Any, ...]
    quantizers: tuple[RecordedQuantizers | None, ...]
    tp: RecordedRanks | None
    train: bool


class Placeholder:
    """Stand for memory, or rows of it, that differs in each run.

    index: its number among the memories of a run. first: for `rows` the number of the first row, else None.
    main_grad: the Placeholder that a weight's gradient overwrites, or is added to (accumulate); None: the gradient has
    memory of its own. It stands for the weight's main gradient, float32, or for its grad, of the weight's dtype.
    """

    __slots__ = ("index", "shape", "dtype", "stop_gradient", "first", "main_grad", "accumulate")

    def __init__(
        self,
        index: int,
        shape: Sequence[int] = (),
        dtype: Any = None,
        stop_gradient: bool = True,
        first: int | None = None,
    ) -> None:
        self.index, self.shape, self.dtype, self.stop_gradient = index, list(shape), dtype, stop_gradient
        self.first = first
        self.main_grad: Placeholder | None = None
        self.accumulate: bool | None = None

    def data_ptr(self) -> int:
        """Return the number that stands for the address until a run replaces it."""
        offset = 0 if self.first is None else self.first * self.shape[-1] * SIZES[self.dtype]
        return self.index << OFFSET_BITS | offset

    def reshaped(self, shape: Sequence[int]) -> Placeholder:
        """Stand for the same memory in another shape."""
        return Placeholder(self.index, shape, self.dtype, self.stop_gradient)

    def rows(self, first: int, count: int) -> Placeholder:
        """Stand for `count` rows [count, cols] of the memory [..., cols], from row `first` on."""
        first += self.first or 0
        return Placeholder(self.index, [count, self.shape[-1]], self.dtype, self.stop_gradient, first)

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor that it stands for in a run. memory: the run's memory with this index."""
        if self.first is None:
            return memory
        return runtime.view(memory, [-1, self.shape[-1]])[self.first : self.first + self.shape[0]]


class Call(NamedTuple):
    """Describe a recorded call.

    function: the name of one of TE's functions, or a Python function of the memories, which has no arguments.
    tensors: the native tensors among the arguments. indices: those of all memory that the call reads or writes.
    result: the index of what the Python function returns.
    """

    function: str | OnMemory
    arguments: tuple[Any, ...] | None
    tensors: tuple[Any, ...]
    indices: set[int]
    result: int = NOWHERE

    @property
    def on_memory(self) -> bool:
        """Return whether it is a Python function on Paddle tensors."""
        return self.arguments is None


class Recording(NamedTuple):
    """A function's result, its Calls, and {index: (shape, dtype)} of the memory that it allocated."""

    result: Any
    calls: list[Call]
    allocated: Allocated


class _Calls:
    """Record calls instead of the native module."""

    def __init__(self, record: Callable[..., None]) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Callable[..., None]:
        return partial(self._record, name)


class Recorder(runtime.Runtime):
    """Replace the Runtime while an op's functions run on Placeholders. count: the number of indices, from 0 on."""

    def __init__(self, native: Any) -> None:
        self.te: Any = _Calls(self._take_down)
        self._native, self.count = native, 1
        self._indices_of: dict[Any, set[int]] = {}  # native tensor -> the indices of the memory it lies in

    def record(self, rt: Runtime, function: Callable[..., Any], *arguments: Any) -> Recording:
        """Return the Recording of function(self, *arguments) on the stream of a Runtime."""
        self.stream = rt.stream
        self._taken: list[Call] = []
        self._allocated: Allocated = {}
        return Recording(function(self, *arguments), self._taken, self._allocated)

    def placeholder(self, *arguments: Any) -> Placeholder:
        """Make a new Placeholder(*arguments after the index), of memory that comes from elsewhere."""
        self.count += 1
        return Placeholder(self.count - 1, *arguments)

    def empty(self, shape: Sequence[int], dtype: Any) -> Placeholder:  # type: ignore[override]  # for a tensor
        """Make a new Placeholder of memory that each run allocates."""
        placeholder = self.placeholder(shape, dtype)
        self._allocated[placeholder.index] = list(shape), dtype
        return placeholder

    def tensor(self, data: int, shape: tuple[int, ...], code: int, *addresses: int) -> Any:
        """Make a native tensor that each run moves. Kept tensors are shared, so they must not be used here."""
        tensor = self._native.Tensor(data, shape, code, *addresses)
        self._indices_of[tensor] = {address >> OFFSET_BITS for address in (data, *addresses)} - {0}
        return tensor

    def _take_down(self, name: str, *arguments: Any) -> None:
        tensors = tuple([argument for argument in arguments if argument in self._indices_of])
        indices = {argument >> OFFSET_BITS for argument in arguments if type(argument) is int and argument > 0} - {0}
        indices = indices.union(*[self._indices_of[tensor] for tensor in tensors])
        self._taken.append(Call(name, arguments, tensors, indices))

    def on_memory(
        self, function: Callable[..., Any], *placeholders: Placeholder, out: Placeholder | None = None
    ) -> Any:
        """Record function(*tensors) for each run; its result is the memory of the new Placeholder `out`, if given."""

        def run(memories: Memories) -> Tensor | None:
            return function(*[placeholder.of(memories[placeholder.index]) for placeholder in placeholders])

        result = NOWHERE if out is None else out.index
        self._taken.append(Call(run, None, (), {placeholder.index for placeholder in placeholders}, result))
        return out


class RecordedRanks:
    """Replace a TensorParallel; record its collectives as calls on memory."""

    def __init__(self, recorder: Recorder, tp: Any) -> None:
        self._recorder, self._tp = recorder, tp
        self.rank, self.size = tp.rank, tp.size
        self.sequence_parallel = tp.sequence_parallel

    def all_gather(self, x: Placeholder) -> Placeholder:
        return self._call(self._tp.all_gather, x, self.gathered_shape(x.shape))

    def start_all_gather(self, x: Placeholder) -> Placeholder:
        """Start an `all_gather`, whose result `finish` returns."""
        return self._call(self._tp.start_all_gather, x, self.gathered_shape(x.shape))

    def gathered_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of `all_gather`'s result."""
        return [shape[0] * self._tp.size, *shape[1:]]

    def _call(self, function: Callable[..., Any], x: Placeholder, shape: Sequence[int]) -> Placeholder:
        return self._recorder.on_memory(function, x, out=self._recorder.placeholder(shape, x.dtype))

    def start_exchange(self, x: Placeholder) -> Placeholder:
        """Start to send each other rank its rows of x; `finish` returns theirs for this rank, in the ranks' order."""
        return self._call(self._tp.start_exchange, x, x.shape)

    def all_reduce(self, x: Placeholder) -> Placeholder:
        """Sum in place."""
        self._recorder.on_memory(self._tp.all_reduce, x)
        return x

    def finish(self, pending: Placeholder) -> Placeholder:
        return self._call(methodcaller("wait"), pending, pending.shape)

    def output_shape(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the shape of `reduce_output`'s result."""
        return self._tp.scattered_shape(shape) if self.sequence_parallel else shape

    def reduce_output(self, y: Placeholder) -> Placeholder:
        if not self.sequence_parallel:
            self._recorder.on_memory(self._tp.reduce_output, y)  # in place
            return y
        return self._call(self._tp.reduce_output, y, self.output_shape(y.shape))

    def start_reduce_output(self, y: Placeholder) -> Placeholder:
        """Start a `reduce_output`, whose result `finish` returns."""
        return self._call(self._tp.start_reduce_output, y, self.output_shape(y.shape))


class QuantizerSpec(NamedTuple):
    """Hold the part of a GemmQuantizers on which an op's calls depend.

    input, weight, grad_output: its quantizers' scalings. same_scales: whether all tensor parallel ranks have the same
    scales, so that their fp8 bytes fit together. update_weight, keeps_weight: as in GemmQuantizers. records: whether
    there are amax histories; these exist under delayed scaling, whose first step may be of kind "current". statistics:
    whether casts add to records of fp8/statistics.py.
    """

    input: TensorScaling | BlockScaling
    weight: TensorScaling | BlockScaling | StoredScaling
    grad_output: TensorScaling | BlockScaling
    update_weight: bool
    keeps_weight: bool
    same_scales: bool
    records: bool
    statistics: bool

    @classmethod
    def of(cls, quantizers: GemmQuantizers, tp: Any) -> QuantizerSpec:
        """Describe a GemmQuantizers, for the ranks of a TensorParallel or None."""
        of_input = quantizers.input.scaling
        scalings = of_input, quantizers.weight.scaling, quantizers.grad_output.scaling
        group = quantizers.amax_group
        same_scales = group is not None and of_input.kind == "delayed" and _share_amaxes(tp, group)
        update, keeps, records = quantizers.update_weight, quantizers.keeps_weight, quantizers.input.amax_ptr != 0
        return cls(*scalings, update, keeps, same_scales, records, quantizers.input.statistics is not None)


@lru_cache
def _share_amaxes(tp: Any, amax_group: Any) -> bool:
    """Return whether all tensor parallel ranks are in the group. tp: None for one rank."""
    return tp is None or {*tp.group.ranks} <= {*amax_group.ranks}


@dataclass(slots=True)
class RecordedQuantizer:
    """Replace a Quantizer or a StoredWeight. Its addresses are indices, for which each run gives addresses."""

    scaling: TensorScaling | BlockScaling | StoredScaling
    kind: str
    dtype: str
    scale_ptr: int = 0
    amax_ptr: int = 0
    scale_inv_ptr: int = 0
    statistics_ptr: int = 0


class RecordedQuantizers:
    """Replace a GemmQuantizers.

    factors: indices of numbers with other addresses in each call (`factor_pointers`): delayed scaling's factors, the
    scale_inv of a weight that exists in fp8 only, and the records of a step with statistics.
    cached_weight: the Placeholder of the kept fp8 weight, or of the kept transposed copy of one that exists in fp8
    only; None without one.
    """

    def __init__(self, recorder: Recorder, spec: QuantizerSpec) -> None:
        self.update_weight, self.keeps_weight, self.same_scales = (
            spec.update_weight, spec.keeps_weight, spec.same_scales
        )  # fmt: skip
        first = recorder.count
        self.input, self.weight, self.grad_output = quantizers = [
            RecordedQuantizer(scaling, scaling.kind, scaling.dtype)
            for scaling in (spec.input, spec.weight, spec.grad_output)
        ]
        stored = self.weight.kind == "stored"
        self.statistics = spec.statistics
        for quantizer in quantizers if spec.records or stored or spec.statistics else ():
            for name in ("scale_ptr", "amax_ptr", "scale_inv_ptr"):
                address = recorder.placeholder().data_ptr()
                if spec.records or quantizer.kind == "stored":
                    setattr(quantizer, name, address)
        for quantizer in quantizers if spec.statistics else ():
            address = recorder.placeholder().data_ptr()
            quantizer.statistics_ptr = 0 if quantizer.kind == "stored" else address
        self.factors = range(first, recorder.count)
        kept = spec.weight.keeps_transpose if isinstance(spec.weight, StoredScaling) else not spec.update_weight
        self.cached_weight: Placeholder | None = recorder.placeholder() if kept else None


def factor_pointers(quantizers: GemmQuantizers, statistics: bool = False) -> tuple[int, ...]:
    """Return the addresses of a GemmQuantizers' numbers, in the order of `RecordedQuantizers.factors`.

    statistics: whether those of the records are among them.
    """
    i, w, g = quantizers.input, quantizers.weight, quantizers.grad_output
    return (
        i.scale_ptr, i.amax_ptr, i.scale_inv_ptr,
        w.scale_ptr, w.amax_ptr, w.scale_inv_ptr,
        g.scale_ptr, g.amax_ptr, g.scale_inv_ptr,
        *((i.statistics_ptr, w.statistics_ptr, g.statistics_ptr) if statistics else ()),
    )  # fmt: skip
