"""Ops as programs: what they call is recorded once for their sizes, and run on the memory of each call.

An Op is two functions that allocate memory, make native tensors and call TE's functions. Nothing in them depends on
numbers in memory: for the same sizes, dtypes and settings they make the same calls. So they run once for each of those,
with a Recorder in place of the Runtime and Places in place of tensors. Afterwards only addresses change, which takes a
fraction of the time that the functions' Python takes. Memory is allocated before the first call that uses it, and let
go after the last one, whatever the functions hold.
"""

import math
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from operator import methodcaller
from types import SimpleNamespace
from typing import NamedTuple

import paddle
from paddle.autograd import PyLayer

from paddle_te import native
from paddle_te.ops.te import runtime
from paddle_te.ops.te.runtime import dense, view

OFFSET_BITS = 48  # an address is recorded as slot << OFFSET_BITS | offset: see Sequence in native/shim.cpp
DTYPES = {id(dtype): dtype for dtype in vars(paddle).values() if isinstance(dtype, paddle.dtype)}  # hash takes 1 µs
SIZES = {paddle.uint8: 1, paddle.bfloat16: 2, paddle.float16: 2, paddle.float32: 4}
# Memory of at most so many bytes in all is one allocation, which takes as long as ten kernels' worth of Python. More is
# allocated and let go piece by piece: there the GPU is busy longer than Python, and memory is what counts.
JOINED = 2**22
KEPT_PROGRAMS = 128  # of all streams together, each with 20 to 60 of TE's handles: see runtime.KEPT_TENSORS


class Op(NamedTuple):
    """forward(rt, *tensors, *quantizers, tp, train, *settings): (output or outputs, saved).
    backward(rt, saved, *grads): the gradients of the tensors, None where there is none.
    weights: which tensors are GEMMs' weights.
    """

    forward: Callable
    backward: Callable
    weights: tuple = ()


class Place:
    """Memory that is another in each run. An op's functions take it for a contiguous Paddle tensor.

    main_grad: the Place to put a weight's gradient in, or to add it to (accumulate), None for memory of its own.
    """

    __slots__ = ("slot", "shape", "dtype", "stop_gradient", "main_grad", "accumulate")

    def __init__(self, slot, shape=(), dtype=None, stop_gradient=True):
        self.slot, self.shape, self.dtype, self.stop_gradient = slot, list(shape), dtype, stop_gradient
        self.main_grad = self.accumulate = None

    def data_ptr(self):
        """What stands for the address until a run knows it."""
        return self.slot << OFFSET_BITS

    def reshaped(self, shape):
        """The same memory."""
        return Place(self.slot, shape, self.dtype, self.stop_gradient)


class _Call(NamedTuple):
    """function: the name of one of TE's, with its arguments; or what takes (memories, bases) by slot."""

    function: str | Callable
    arguments: tuple | None
    tensors: tuple
    slots: set


class _Calls:
    """In place of the native module: takes down what is called."""

    def __init__(self, record):
        self._record = record

    def __getattr__(self, name):
        return partial(self._record, name)


class Recorder(runtime.Runtime):
    """In place of a Runtime, while an op's function runs on Places."""

    def __init__(self, native):
        self.te, self._native = _Calls(self._record), native
        self.slots = 1
        self._slots_of = {}  # native tensor -> the slots it lies in

    def record(self, rt, function, *arguments):
        """What function(self, *arguments) returns; the calls it makes, and {slot: (shape, dtype)} that it allocates."""
        self.stream, self._calls, self._allocated = rt.stream, [], {}
        return function(self, *arguments), self._calls, self._allocated

    def place(self, *arguments):
        """A new Place(*arguments after the slot), of memory that comes from elsewhere."""
        self.slots += 1
        return Place(self.slots - 1, *arguments)

    def empty(self, shape, dtype):
        """A new Place of memory that each run allocates."""
        place = self.place(shape, dtype)
        self._allocated[place.slot] = list(shape), dtype
        return place

    def tensor(self, data, shape, code, *addresses):
        """A native tensor that each run moves. Not one that is kept: another's would move with it."""
        tensor = self._native.Tensor(data, shape, code, *addresses)
        self._slots_of[tensor] = {address >> OFFSET_BITS for address in (data, *addresses)} - {0}
        return tensor

    def _record(self, name, *arguments):
        tensors = tuple([argument for argument in arguments if argument in self._slots_of])
        slots = {argument >> OFFSET_BITS for argument in arguments if type(argument) is int and argument > 0} - {0}
        slots = slots.union(*[self._slots_of[tensor] for tensor in tensors])
        self._calls.append(_Call(name, arguments, tensors, slots))

    def on_memory(self, function, *places, out=None):
        """Calls function(*tensors) in each run; what it returns is the memory of the new Place `out`, if any."""
        slots = [place.slot for place in places]

        def run(memories, bases):
            result = function(*[memories[slot] for slot in slots])
            if out is not None:
                memories[out.slot], bases[out.slot] = result, result.data_ptr()

        self._calls.append(_Call(run, None, (), {*slots}))
        return out


class _Ranks:
    """In place of a TensorParallel."""

    def __init__(self, recorder, tp):
        self._recorder, self._tp = recorder, tp
        self.rank, self.sequence_parallel = tp.rank, tp.sequence_parallel

    def all_gather(self, x):
        return self._call(self._tp.all_gather, x, self._gathered_shape(x))

    def start_all_gather(self, x):
        """What `finish` makes `all_gather`'s result of."""
        return self._call(self._tp.start_all_gather, x, self._gathered_shape(x))

    def _gathered_shape(self, x):
        return [x.shape[0] * self._tp.size, *x.shape[1:]]

    def _call(self, function, x, shape):
        return self._recorder.on_memory(function, x, out=self._recorder.place(shape, x.dtype))

    def finish(self, pending):
        return self._call(methodcaller("wait"), pending, pending.shape)

    def output_shape(self, shape):
        """What `reduce_output` makes of a shape."""
        return [shape[0] // self._tp.size, *shape[1:]] if self.sequence_parallel else shape

    def reduce_output(self, y):
        if not self.sequence_parallel:
            self._recorder.on_memory(self._tp.reduce_output, y)  # in place
            return y
        return self._call(self._tp.reduce_output, y, self.output_shape(y.shape))

    def start_reduce_output(self, y):
        """What `finish` makes `reduce_output`'s result of."""
        return self._call(self._tp.start_reduce_output, y, self.output_shape(y.shape))


def _factors(quantizers):
    """Addresses of delayed scaling's numbers: all that is another in each step."""
    i, w, g = quantizers.input, quantizers.weight, quantizers.grad_output
    return (
        i.scale_ptr, i.amax_ptr, i.scale_inv_ptr,
        w.scale_ptr, w.amax_ptr, w.scale_inv_ptr,
        g.scale_ptr, g.amax_ptr, g.scale_inv_ptr,
    )  # fmt: skip


@lru_cache
def _share_amaxes(tp, amax_group):
    """Whether all tensor parallel ranks are in the group. tp: None for one rank."""
    return amax_group is not None and (tp is None or {*tp.group.ranks} <= {*amax_group.ranks})


class _Quantizers:
    """In place of a GemmQuantizers.

    same_scales: whether all tensor parallel ranks quantize alike, so that their fp8 bytes fit together.
    cached_weight: the Place of the tensor that the kept fp8 weight lies in.
    """

    def __init__(self, recorder, kind, forward, backward, update_weight, keeps_weight, same_scales):
        self.update_weight, self.keeps_weight, self.same_scales = update_weight, keeps_weight, same_scales
        first = recorder.slots
        self.input, self.weight, self.grad_output = quantizers = [
            SimpleNamespace(kind=kind, dtype=dtype, scale_ptr=0, amax_ptr=0, scale_inv_ptr=0)
            for dtype in (forward, forward, backward)
        ]
        for quantizer in quantizers if kind == "delayed" else ():
            for name in ("scale_ptr", "amax_ptr", "scale_inv_ptr"):
                setattr(quantizer, name, recorder.place().data_ptr())
        self.factors = range(first, recorder.slots)
        self.cached_weight = None if update_weight else recorder.place()

    @staticmethod
    def spec(quantizers, tp):
        """This class's arguments from a GemmQuantizers."""
        kind, forward, backward = quantizers.input.kind, quantizers.input.dtype, quantizers.grad_output.dtype
        same_scales = kind == "delayed" and _share_amaxes(tp, quantizers.amax_group)
        return kind, forward, backward, quantizers.update_weight, quantizers.keeps_weight, same_scales


class Program:
    """An op for certain sizes. Its runs share native tensors: one thread at a time.

    specs: of each tensor (shape, id of dtype, stop_gradient) or None. quantizers: of each GEMM _Quantizers.spec or
    None. train: whether a backward may follow. fuse: whether weights' gradients go to their main_grad.
    """

    def __init__(self, rt, op, specs, quantizers, tp, train, fuse, settings):
        if any(spec is not None and 0 in spec[0] for spec in specs):
            raise ValueError("backend transformer_engine: a tensor has no elements; each rank needs tokens to compute")
        if any(quantizers):
            native.load(fp8=True)  # or BackendUnavailable, before the first kernel
        self.train, self._op, self._recorder, self._lock = train, op, Recorder(rt.te), threading.Lock()
        recorder = self._recorder
        self._inputs = inputs = [spec and recorder.place(spec[0], DTYPES[spec[1]], spec[2]) for spec in specs]
        self._quantizers = [spec and _Quantizers(recorder, *spec) for spec in quantizers]
        arguments = *inputs, *self._quantizers, tp and _Ranks(recorder, tp), train, *settings
        (outputs, self._saved), calls, allocated = recorder.record(rt, op.forward, *arguments)
        self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self._kept, self._fused, self._backwards, used, shown = [], [], {}, set(), set()
        if train:
            self._grads = [recorder.place(place.shape, place.dtype) for place in self._outputs]
            self._fused = [inputs[i] for i in op.weights if fuse and not inputs[i].stop_gradient]
            for weight in self._fused:
                weight.main_grad = recorder.place(weight.shape, paddle.float32)
            first_of_backward = self._grads[0].slot
            *_, used, shown = self._backward(rt, (True,) * len(self._fused))
            used = {slot for slot in used.union([weight.slot for weight in self._fused]) if slot < first_of_backward}
        seen = {place.slot for place in self._outputs}
        seen.update([q.cached_weight.slot for q in self._quantizers if q and q.cached_weight])
        self._steps = _Steps(rt.te, calls, allocated, seen | (used & shown), used - seen - shown)
        factors = {slot for q in self._quantizers if q for slot in q.factors}
        self._kept = sorted(used - factors - self._steps.joined) + [0] * bool(self._steps.joined)

    def _backward(self, rt, accumulate):
        """(steps, gradients, slots used, those shown to `on_memory`) on a stream; accumulate: whether to add to each of
        the main gradients."""
        found = self._backwards.get((rt, accumulate))
        if found is None:
            for weight, add in zip(self._fused, accumulate, strict=True):
                weight.accumulate = add
            grads, calls, allocated = self._recorder.record(rt, self._op.backward, self._saved, *self._grads)
            results = {grad.slot for grad in grads if grad is not None}
            used = results.union(*[call.slots for call in calls])
            steps = _Steps(rt.te, calls, allocated, results)
            found = self._backwards[rt, accumulate] = steps, grads, used, steps.shown
        return found

    def forward(self, rt, quantizers, tensors):
        """(outputs, kept): `backward` wants what was kept."""
        inputs = [(i, tensor) for i, tensor in enumerate(tensors, 1) if tensor is not None]
        pairs = [pair for pair in zip(self._quantizers, quantizers, strict=True) if pair[0] is not None]
        inputs += [(place.cached_weight.slot, q.cached_weight) for place, q in pairs if not place.update_weight]
        memories, bases = self._start(quantizers, inputs)
        with self._lock:
            self._steps.run(rt, memories, bases)
        for place, q in pairs:
            if place.update_weight:
                q.cache_weight(place.cached_weight and memories[place.cached_weight.slot])
        outputs = [memories[place.slot] for place in self._outputs]
        for i, place in enumerate(self._outputs):
            if place in self._inputs:
                outputs[i] = view(outputs[i], place.shape)  # itself would be taken for an in-place result
            elif place.slot in self._kept:
                # with its graph the output would keep ctx, and itself, alive
                memories[place.slot] = outputs[i].detach()
        return outputs, [memories[slot] for slot in self._kept]

    def backward(self, rt, quantizers, kept, grads):
        """The gradients of the tensors. Takes what it needs off the lists `kept` and `grads`, to let it go early.

        A weight whose main gradient this has written has overwrite_main_grad, False; who sets it gets the next gradient
        in place of what the main gradient holds (TE's PyTorch modules know the same name).
        """
        weights = dict(zip(self._kept, kept, strict=True)) if self._fused else {}
        given = [*zip(self._kept, kept, strict=True)]
        accumulate, new, fused = [], [], []
        for place in self._fused:
            weight = weights[place.slot]
            fused.append(weight)
            main_grad = getattr(weight, "main_grad", None)
            accumulate.append(main_grad is not None and not getattr(weight, "overwrite_main_grad", False))
            if main_grad is None:
                main_grad = rt.empty(weight.shape, paddle.float32)
                new.append((weight, main_grad))
            elif main_grad.dtype is not paddle.float32:
                raise TypeError(f"main_grad of {weight.name} is {main_grad.dtype}; it must be float32")
            given.append((place.main_grad.slot, main_grad))
        given += [(place.slot, grad) for place, grad in zip(self._grads, grads, strict=True)]
        with self._lock:
            steps, results, *_ = self._backward(rt, tuple(accumulate))
        memories, bases = self._start(quantizers, given)
        self._steps.locate_joined(bases)
        for holder in (weights, given, kept, grads):
            holder.clear()
        with self._lock:
            steps.run(rt, memories, bases)
        for weight, main_grad in new:  # only now: what fails before leaves no numbers that nobody has written
            weight.main_grad = main_grad
        for weight in fused:
            weight.overwrite_main_grad = False
        return [None if place is None else memories[place.slot] for place in results]

    def _start(self, quantizers, given):
        """(memories, bases) by slot, with what is `given` as (slot, tensor)."""
        memories, bases = [None] * self._recorder.slots, [0] * self._recorder.slots
        for slot, tensor in given:
            memories[slot], bases[slot] = tensor, tensor.data_ptr()
        for place, of_call in zip(self._quantizers, quantizers, strict=True):
            if place is not None and place.factors:
                bases[place.factors.start : place.factors.stop] = _factors(of_call)
        return memories, bases


class _Steps:
    """Calls and what they allocate, in few steps: one Sequence.run serves all between two allocations.

    allocated: {slot: (shape, dtype)}. stay, keep: slots whose memory is wanted after the last call, as tensors of their
    own, or for another's calls. What is neither that nor shown to `on_memory` is temporary. If small, all that is
    temporary is one allocation, in which what is used one after the other overlaps, and all to keep is another.
    shown: the slots shown to `on_memory`. joined: those kept in one allocation, whose slot is 0.
    """

    def __init__(self, native, calls, allocated, stay, keep=frozenset()):
        first, last = {}, {}
        for i, call in enumerate(calls):
            for slot in call.slots:
                first.setdefault(slot, i)
                last[slot] = i
        self.shown = set().union(*[call.slots for call in calls if call.arguments is None])
        joinable = {slot: _bytes(*allocated[slot]) for slot in first.keys() & allocated.keys() - self.shown - stay}
        temporary = [(size, slot, first[slot], last[slot]) for slot, size in joinable.items() if slot not in keep]
        kept = [(size, slot, 0, 0) for slot, size in joinable.items() if slot in keep]
        self._temporary, self._joined = _packed(temporary), _packed(kept)
        self.joined = {slot for slot, _ in self._joined[1]}
        elsewhere = self.joined.union([slot for slot, _ in self._temporary[1]])
        own = sorted(first.keys() & allocated.keys() - elsewhere)
        if sum([_bytes(*allocated[slot]) for slot in own]) <= JOINED:
            first = dict.fromkeys(first, 0)  # one step for all calls
        stay = stay | keep
        steps = []
        for i, call in enumerate(calls):
            mine, on_memory = sorted(call.slots - elsewhere), call.arguments is None
            new = [(slot, *allocated[slot]) for slot in own if first[slot] == i]
            if not steps or new or on_memory or steps[-1].on_memory:
                steps.append(SimpleNamespace(new=new, on_memory=on_memory, calls=[], ends=[]))
            steps[-1].calls.append(call)
            steps[-1].ends += [slot for slot in mine if last[slot] == i and slot not in stay]
        moved = set()
        self._steps = [(step.new, step.on_memory, _function(native, step, moved), step.ends) for step in steps]

    def locate_joined(self, bases):
        """Puts in where the joined slots are, for those of the whole in bases[0]."""
        for slot, offset in self._joined[1]:
            bases[slot] = bases[0] + offset

    def run(self, rt, memories, bases):
        te = rt.te
        if self._joined[0]:
            memories[0] = rt.empty([self._joined[0]], paddle.uint8)
            bases[0] = memories[0].data_ptr()
            self.locate_joined(bases)
        if self._temporary[0]:
            temporary = rt.empty([self._temporary[0]], paddle.uint8)
            base = temporary.data_ptr()
            for slot, offset in self._temporary[1]:
                bases[slot] = base + offset
        for new, on_memory, function, ends in self._steps:
            for slot, shape, dtype in new:
                memory = memories[slot] = rt.empty(shape, dtype)
                bases[slot] = memory.data_ptr()
            function(memories if on_memory else te, bases)
            for slot in ends:
                memories[slot] = None


def _function(native, step, moved):
    """What a step calls. moved: the tensors that have been moved by then."""
    if step.on_memory:
        return step.calls[0].function
    tensors = dict.fromkeys(tensor for call in step.calls for tensor in call.tensors if tensor not in moved)
    moved.update(tensors)
    return native.Sequence(tuple(tensors), tuple([(call.function, call.arguments) for call in step.calls])).run


def _bytes(shape, dtype):
    return math.prod(shape) * SIZES[dtype]


def _packed(blocks):
    """(size, [(slot, offset)]) of one allocation for blocks (bytes, slot, first call, last call), the largest placed
    first, each as low as what is in use at the same time lets it. (0, []) where that is more than JOINED."""
    placed = []
    for size, slot, first, last in sorted(blocks, reverse=True):
        size, offset = -(-size // 256) * 256, 0
        for begin, end, _, other_first, other_last in sorted(placed):
            if first <= other_last and other_first <= last and begin < offset + size and offset < end:
                offset = end
        placed.append((offset, offset + size, slot, first, last))
    size = max([end for _, end, *_ in placed], default=0)
    return (size, [(slot, offset) for offset, _, slot, *_ in placed]) if size <= JOINED else (0, [])


_program = lru_cache(KEPT_PROGRAMS)(Program)
clear = _program.cache_clear


class _Apply(PyLayer):
    @staticmethod
    def forward(ctx, program, rt, quantizers, *tensors):
        outputs, kept = program.forward(rt, quantizers, tensors)
        if program.train:
            ctx.saved = program, quantizers, kept
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        (program, quantizers, kept), ctx.saved = ctx.saved, None
        results = program.backward(runtime.current(), quantizers, kept, [dense(grad) for grad in grads])
        for of_gemm in quantizers:
            if of_gemm is not None:
                of_gemm.module.backward_done()
        return tuple(results)


def apply(op, tensors, quantizers=(), tp=None, fuse_wgrad_accumulation=False, settings=()):
    """The op's outputs. tensors: as its forward takes them, None where it takes that; quantizers: of each GEMM a
    GemmQuantizers, or None."""
    rt = runtime.current()
    tensors = [None if tensor is None else dense(tensor) for tensor in tensors]
    specs = tuple([t if t is None else (tuple(t.shape), id(t.dtype), t.stop_gradient) for t in tensors])
    train = paddle.is_grad_enabled() and not all([spec is None or spec[2] for spec in specs])
    of_gemms = tuple([q if q is None else _Quantizers.spec(q, tp) for q in quantizers])
    program = _program(rt, op, specs, of_gemms, tp, train, fuse_wgrad_accumulation, settings)
    return _Apply.apply(program, rt, quantizers, *tensors)
