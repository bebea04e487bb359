"""Ops that are recorded once and run on other memory, on the emulated library."""

import itertools
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_te.ops import get_ops
from paddle_te.ops.low_rank import LowRankUpdate
from paddle_te.ops.projection import Projection
from paddle_te.ops.te import autograd, packing, program, runtime
from paddle_te.ops.te.packing import Block, pack
from paddle_te.ops.te.recording import Call, Op
from paddle_te.ops.te.steps import Steps
from tests import emulated_te
from tests.poison import poison_allocations

BF16, FLOAT32 = 6, 4


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)
    program.clear()


def bf16(seed, *shape):
    x = (
        paddle.to_tensor(np.random.default_rng(seed).standard_normal(shape).astype("float32"))
        .astype("bfloat16")
        .detach()
    )
    x.stop_gradient = False
    return x


def is_doubled(y, x):
    y, x = (tensor.astype("float32").numpy() for tensor in (y, x))
    return (y == 2 * x).all()


def doubling(recorded):
    """y = 2 x, by x + x into a copy; dx = 2 dy likewise. Notes in `recorded` when its functions run."""

    def twice(rt, x):
        out, shape = rt.empty(x.shape, x.dtype), tuple(x.shape)
        identity = rt.empty([shape[1], shape[1]], x.dtype)
        native, eye = rt.view(out, shape, BF16), rt.view(identity, (shape[1], shape[1]), BF16)
        rt.on_memory(
            lambda memory: memory.set_value(paddle.eye(shape[1], dtype="float32").astype("bfloat16")), identity
        )
        rt.te.memcpy_async(native, rt.view(x, shape, BF16), rt.stream)
        rt.te.gemm(eye, rt.view(x, shape, BF16), native, True, False, rt.stream, True)
        return out

    def forward(rt, inputs, settings):
        (x,) = inputs.tensors
        recorded.append(("forward", inputs.train))
        return twice(rt, x), None

    def backward(rt, saved, dy):
        recorded.append(("backward",))
        return (twice(rt, dy),)

    return Op(forward, backward)


def test_functions_run_once_for_given_sizes(seed):
    recorded = []
    op = doubling(recorded)
    for i, rows in enumerate([4, 4, 6, 4]):
        x, dy = bf16(seed + i, rows, 8), bf16(seed - i, rows, 8)
        y = autograd.apply(op, (x,))
        y.backward(dy)
        assert is_doubled(y, x) and is_doubled(x.grad, dy)
    assert recorded == [("forward", True), ("backward",)] * 2
    with paddle.no_grad():
        autograd.apply(op, (x,))
    assert recorded[4:] == [("forward", False)]


def test_backward_runs_on_the_stream_of_its_time(seed, monkeypatch):
    streams, run = [], emulated_te.Sequence.run

    def noted(self, bases):
        streams.extend(arguments[2].handle for name, arguments in self.calls if name == "memcpy_async")
        run(self, bases)

    monkeypatch.setattr(emulated_te.Sequence, "run", noted)
    monkeypatch.setattr(emulated_te.Stream, "__init__", lambda self, raw, allocate: setattr(self, "handle", raw))
    op = doubling([])
    for forward, backward in (1, 2), (2, 2), (1, 1):
        monkeypatch.setattr(runtime.device, "raw_stream", lambda raw=forward: raw)
        x = bf16(seed, 4, 8)
        y = autograd.apply(op, (x,))
        monkeypatch.setattr(runtime.device, "raw_stream", lambda raw=backward: raw)
        y.backward(x.detach())
        assert is_doubled(x.grad, x)
    assert streams == [1, 2, 2, 2, 1, 1]


def test_memory_comes_before_its_first_use_and_goes_after_the_last(monkeypatch):
    """What is too large to be joined; an input is the caller's, an output stays."""
    monkeypatch.setattr(packing, "JOINED", 0)
    log, seen = [], []
    monkeypatch.setattr(emulated_te.Sequence, "run", lambda self, bases: log.append(self.calls) or seen.append(bases))
    te = SimpleNamespace(Sequence=partial(emulated_te.Sequence, None), Steps=emulated_te.Steps)
    call = lambda name, *slots: Call(name, (), (), {*slots})  # noqa: E731
    calls = [call("a", 1, 2), call("b", 2, 3), call("c", 3), call("d", 3, 4), call("e", 4, 5)]
    allocated = {slot: ([slot], paddle.uint8) for slot in (2, 3, 4, 5)}

    class Memory:
        def __init__(self, slot):
            self.slot = slot
            log.append(("new", slot))

        def data_ptr(self):
            return 1000 * self.slot

        def __del__(self):
            log.append(("gone", self.slot))

    allocate, scratch = lambda shape, dtype, place: Memory(shape[0]), lambda size: None
    rt = SimpleNamespace(te=te, place=None, allocate=allocate, scratch=scratch)
    memories = [None, 1000, *[None] * 4]
    Steps(rt, calls, allocated, {5}).run(rt, memories)
    names = [tuple(name for name, _ in entry) if isinstance(entry[0], tuple) else entry for entry in log]
    assert names == [
        ("new", 2), ("a",), ("new", 3), ("b", "c"), ("gone", 2), ("new", 4), ("d",), ("gone", 3),
        ("new", 5), ("e",), ("gone", 4),
    ]  # fmt: skip
    assert memories[5].slot == 5 and seen[-1] == [0, 1000, 2000, 3000, 4000, 5000] and memories[1:5] == [None] * 4


@pytest.mark.parametrize("steps", [1, 2])
def test_temporary_memory_is_scratch_where_one_step_makes_all_calls(monkeypatch, steps):
    """Between two steps another thread may use the scratch memory."""
    seen, taken = [], []
    monkeypatch.setattr(emulated_te.Sequence, "run", lambda self, bases: seen.append(bases[1]))
    te = SimpleNamespace(Sequence=partial(emulated_te.Sequence, None), Steps=emulated_te.Steps)
    scratch, new = SimpleNamespace(data_ptr=lambda: 1000), SimpleNamespace(data_ptr=lambda: 2000)
    take = lambda memory: lambda size, *_: taken.append(size) or memory  # noqa: E731
    rt = SimpleNamespace(te=te, place=None, allocate=None, scratch=take(scratch), empty=take(new))
    between = [Call(lambda memories: None, None, (), set())] * (steps - 1)
    calls = [Call("a", (), (), {1}), *between, *[Call("b", (), (), {1})] * (steps - 1)]
    Steps(rt, calls, {1: ([300], paddle.uint8)}, set()).run(rt, [None, None])
    assert (seen, taken) == (([1000], [512]) if steps == 1 else ([2000, 2000], [[512]]))


def test_scratch_memory_is_allocated_when_more_is_needed(monkeypatch):
    monkeypatch.undo()
    emulated_te.install(monkeypatch.setattr)
    rt = runtime.Runtime(1)
    first = rt.scratch(256)
    assert rt.scratch(100) is first and first.shape == [256]
    assert rt.scratch(512) is not first and rt.scratch(256).shape == [512]


def test_packed_blocks_that_are_in_use_together_do_not_overlap(seed):
    generator = np.random.default_rng(seed)
    for _ in range(50):
        blocks = []
        for slot in range(12):
            first, length = generator.integers(0, 8), generator.integers(0, 4)
            blocks.append(Block(int(generator.integers(1, 2000)), slot, int(first), int(first + length)))
        size, offsets = pack(blocks)
        offsets = dict(offsets)
        assert offsets.keys() == set(range(12)) and all(offset % 256 == 0 for offset in offsets.values())
        for (bytes_, slot, first, last), (other_bytes, other, other_first, other_last) in itertools.combinations(
            blocks, 2
        ):
            together = first <= other_last and other_first <= last
            apart = offsets[slot] + bytes_ <= offsets[other] or offsets[other] + other_bytes <= offsets[slot]
            assert apart or not together
        assert size >= max(offsets[slot] + bytes_ for bytes_, slot, *_ in blocks)
        assert size <= sum(bytes_ + 255 for bytes_, *_ in blocks)
    assert pack([]) == (0, ())
    assert pack([Block(300, 1, 0, 1), Block(200, 2, 2, 3)]) == (512, ((1, 0), (2, 0)))


def fused_linear(x, weight, where=True):
    return get_ops("transformer_engine").linear(x, Projection(weight, fuse_wgrad_accumulation=where))


def test_a_backward_that_fails_leaves_no_main_gradient(seed, monkeypatch):
    """What catches it and goes on would add to numbers that nobody has written."""
    x, weight = bf16(seed, 4, 16), bf16(seed, 32, 16)
    y = fused_linear(x, weight)
    with monkeypatch.context() as patch:
        patch.setattr(Steps, "run", lambda *_: paddle.zeros([1]).reshape([2]))
        with pytest.raises(Exception, match="(?i)reshape"):
            y.sum().backward()
    assert getattr(weight, "main_grad", None) is None
    fused_linear(x, weight).sum().backward()
    fused_linear(x, weight).sum().backward()
    want = 2 * x.astype("float32").numpy().sum(0)
    np.testing.assert_allclose(weight.main_grad.numpy(), np.tile(want, (32, 1)), rtol=1e-5, atol=1e-5)


def test_what_a_main_gradient_held_is_overwritten_once(seed):
    x, weight = bf16(seed, 4, 16), bf16(seed, 32, 16)
    weight.main_grad = held = paddle.ones([32, 16])
    want = np.tile(x.astype("float32").numpy().sum(0), (32, 1))
    fused_linear(x, weight).sum().backward()
    np.testing.assert_allclose(held.numpy(), 1 + want, rtol=1e-5, atol=1e-5)
    assert weight.overwrite_main_grad is False
    held.set_value(np.full([32, 16], np.nan, "float32"))
    weight.overwrite_main_grad = True
    for times in (1, 2):
        fused_linear(x, weight).sum().backward()
        np.testing.assert_allclose(held.numpy(), times * want, rtol=1e-5, atol=1e-5)
    assert weight.main_grad is held and weight.overwrite_main_grad is False


def test_a_main_gradient_of_another_dtype_is_refused(seed):
    weight = bf16(seed, 32, 16)
    weight.main_grad = paddle.zeros([32, 16], "bfloat16")
    with pytest.raises(Exception, match="main_grad of .* must be float32"):
        fused_linear(bf16(seed, 4, 16), weight).sum().backward()


def parameter(seed):
    weight = paddle.create_parameter([32, 16], "bfloat16", default_initializer=paddle.nn.initializer.Constant(0.0))
    weight.set_value(bf16(seed, 32, 16))
    return weight


def test_a_gemm_adds_to_the_grad_that_is_there(seed):
    """In the grad's memory, and with one rounding, of the sum of what it held and the float32 product."""
    weight, want, places = parameter(seed), np.zeros([32, 16], "float32"), set()
    for i in range(3):
        x, dy = bf16([seed, i, 0], 8, 16), bf16([seed, i, 1], 8, 32)
        fused_linear(x, weight, "grad").backward(dy)
        want = want + dy.astype("float32").numpy().T @ x.astype("float32").numpy()
        want = paddle.to_tensor(want).astype("bfloat16").astype("float32").numpy()
        np.testing.assert_array_equal(weight.grad.astype("float32").numpy(), want)
        places.add(weight.grad.data_ptr())
    assert len(places) == 1 and getattr(weight, "main_grad", None) is None


@pytest.mark.parametrize("zeros", [False, True])
def test_paddle_adds_to_what_a_gemm_has_added(seed, zeros):
    """As to a tied weight's; also after clear_grad, whose zeros Paddle's next addition replaces."""
    weight = parameter(seed)
    for step in (1, 2):
        x = paddle.full([1, 16], step, "bfloat16")
        for also in (True, False, False):
            paddle.autograd.backward([fused_linear(x, weight, where) for where in ("grad", False)[: 1 + also]])
        np.testing.assert_array_equal(weight.grad.astype("float32").numpy(), np.full([32, 16], 4.0 * step))
        weight.clear_gradient(zeros)


@pytest.mark.parametrize("adapted", [False, True], ids=["", "low_rank"])
@pytest.mark.parametrize("fused", [(True, True), (True, False), (False, True)])
def test_main_gradients_are_of_the_projections_that_ask_for_them(seed, fused, adapted):
    def weights_after(fused):
        weights, shapes = [], [(64, 32), (32, 32)]
        for i, (shape, fuse) in enumerate(zip(shapes, fused, strict=True)):
            factors = ((bf16([seed, i, j], *factor),) for j, factor in enumerate([(32, 4), (4, shape[0])]))
            low_rank = LowRankUpdate(*factors, (shape[0],), 0.5) if adapted else None
            weights.append(Projection(bf16([seed, i], *shape), fuse_wgrad_accumulation=fuse, low_rank=low_rank))
        get_ops("transformer_engine").layernorm_mlp(bf16(seed, 16, 32), None, *weights).sum().backward()
        return [projection.weight for projection in weights]

    for weight, plain, fuse in zip(weights_after(fused), weights_after((False, False)), fused, strict=True):
        want = plain.grad.astype("float32").numpy()
        if fuse:
            assert weight.grad is None
            np.testing.assert_allclose(weight.main_grad.numpy(), want, rtol=2**-8)
        else:
            assert getattr(weight, "main_grad", None) is None
            assert (weight.grad.astype("float32").numpy() == want).all()


def test_threads_do_not_move_each_others_tensors(seed, monkeypatch):
    """A second thread comes in the middle of the first one's run, between two of its allocations."""
    monkeypatch.setattr(packing, "JOINED", 0)

    def twice_copied(rt, inputs, settings):
        (x,) = inputs.tensors
        shape = tuple(x.shape)
        source = rt.view(x, shape, BF16)  # for both copies
        for _ in range(2):
            out = rt.empty(x.shape, x.dtype)
            rt.te.memcpy_async(rt.view(out, shape, BF16), source, rt.stream)
        return out, None

    op = Op(twice_copied, lambda rt, saved, dy: (None,))
    inputs = [bf16(seed + i, 4, 8).detach() for i in range(2)]
    want, results, allocations = [x.astype("float32").numpy() for x in inputs], {}, []
    allocate = runtime.Runtime.allocate

    def run(i):
        results[i] = autograd.apply(op, (inputs[i],)).astype("float32").numpy()

    second = threading.Thread(target=run, args=(1,))

    def interrupted(shape, dtype, place):
        allocations.append(threading.current_thread())
        if len(allocations) == 2:
            second.start()
            second.join(timeout=0.5)
        return allocate(shape, dtype, place)

    run(0)
    monkeypatch.setattr(runtime.Runtime, "allocate", staticmethod(interrupted))
    run(0)
    second.join()
    assert len(set(allocations)) == 2
    for i in range(2):
        np.testing.assert_array_equal(results[i], want[i])
