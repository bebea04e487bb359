"""The nvgpu plug-in with its CUDA runtime (CUSTOM_DEVICE_ROOT): kernels against the CPU, streams, memory, a Llama step
that stays on the device, and NCCL."""

import ctypes
import json
import os

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from tests import embedding_cases, nvgpu_processes
from tests.nvgpu_cases import CASES, FLOATS, check
from tests.nvgpu_processes import PLUGIN_TESTS, ROOT, check_on_device, run, run_ranks
from tests.te_weights import relative
from tools.benchmark import device_trace

PLUGIN = os.environ.get("CUSTOM_DEVICE_ROOT", "")


@pytest.fixture(autouse=True)
def nvgpu(gpu):
    if not gpu.startswith("nvgpu"):
        pytest.skip("Paddle has its own GPU device here: the plug-in is not used")
    return gpu


@pytest.fixture
def generator(seed):
    return np.random.default_rng(seed)


def cudart():
    """The copy of CUDA's runtime that the process has already."""
    return ctypes.CDLL("libcudart.so.13")


# ---- kernels


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CASES)
def test_kernel_agrees_with_the_cpu(name, dtype, generator):
    check(name, dtype, generator)


# A running sum of n terms of one size rounds n times: in all sqrt(n) / 3 · 2**-24 of the result (root mean square).
# 4800 terms one after another, more than any thread adds here: 1.4e-6. The bound is four times that; bfloat16 rounds
# once.
@pytest.mark.parametrize("dtype, bound", [("float32", 6e-6), ("bfloat16", 4e-3)])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, (0, 2)])
def test_large_sums(dtype, bound, axis, generator):
    x = generator.standard_normal((64, 300, 257)).astype("float32") + 0.5
    t = paddle.to_tensor(x).astype(dtype)
    rounded = t.astype("float32").numpy().astype("float64")
    got = t.sum(axis).astype("float32").numpy()
    assert relative(got, rounded.sum(axis)) < bound
    assert (t.sum(axis).astype("float32").numpy() == got).all()  # the same in every run


@pytest.mark.parametrize("dtype, bound", [("float32", 2e-6), ("bfloat16", 4e-3)])
def test_large_matmul(dtype, bound, generator):
    a, b = (paddle.to_tensor(generator.standard_normal((512, 1024)).astype("float32")).astype(dtype) for _ in "ab")
    wide = [t.astype("float32").numpy().astype("float64") for t in (a, b)]
    got = paddle.matmul(a, b, transpose_y=True).astype("float32").numpy()
    assert relative(got, wide[0] @ wide[1].T) < bound


def test_large_cross_entropy(generator):
    logits = generator.standard_normal((300, 32000)).astype("float32") * 3
    labels = generator.integers(0, 32000, 300)
    labels[::7] = -100
    x = paddle.to_tensor(logits)
    x.stop_gradient = False
    loss = F.cross_entropy(x, paddle.to_tensor(labels), reduction="none", ignore_index=-100)
    loss.sum().backward()
    wide = logits.astype("float64")
    p = np.exp(wide - wide.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    counts = labels != -100
    picked = np.where(counts, labels, 0)
    want = np.where(counts, -np.log(p[np.arange(300), picked]), 0)
    np.testing.assert_allclose(loss.numpy().ravel(), want, atol=1e-4)
    p[np.arange(300), picked] -= 1
    assert relative(x.grad.numpy(), p * counts[:, None]) < 1e-5


# a warp for a row, 256 threads, and rows whose sums do not fit into shared memory, or just not beside a reduction
@pytest.mark.parametrize("rows, columns", [(60000, 128), (4100, 4096), (9, 13000), (9, 12288)])
@pytest.mark.parametrize("dtype, bound", [("float32", 3e-6), ("bfloat16", 5e-3)])
def test_large_rms_norm(dtype, bound, rows, columns, generator):
    x, weight, grad = (
        paddle.to_tensor(generator.standard_normal(shape).astype("float32")).astype(dtype)
        for shape in ([rows, columns], [columns], [rows, columns])
    )
    x.stop_gradient = weight.stop_gradient = False
    y = paddle.incubate.nn.functional.fused_rms_norm_ext(x, weight, 1e-5)[0]
    y.backward(grad)
    wide_x, wide_weight, wide_grad = (t.astype("float32").numpy().astype("float64") for t in (x, weight, grad))
    rstd = 1 / np.sqrt((wide_x**2).mean(1, keepdims=True) + 1e-5)
    normed, scaled = wide_x * rstd, wide_grad * wide_weight
    wanted = {
        "y": (y, normed * wide_weight),
        "x": (x.grad, rstd * (scaled - normed * (scaled * normed).mean(1, keepdims=True))),
        "weight": (weight.grad, (wide_grad * normed).sum(0)),
    }
    for name, (got, want) in wanted.items():
        assert relative(got.astype("float32").numpy(), want) < bound, name


@pytest.mark.parametrize("dtype, bound", [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_attention_in_several_stretches_of_queries(dtype, bound, generator):
    attention_of_some_queries(dtype, bound, generator, 16384)


def attention_of_some_queries(dtype, bound, generator, tokens):
    """Two heads with one key-value head; two documents. Only some queries have a gradient, and are compared."""
    heads, width, documents = 2, 64, np.array([tokens // 3, tokens])
    sizes = dict(q=[1, tokens, heads, width], k=[1, tokens, 1, width], v=[1, tokens, 1, width])
    tensors = {
        name: paddle.to_tensor(generator.standard_normal(size).astype("float32")).astype(dtype)
        for name, size in sizes.items()
    }
    for tensor in tensors.values():
        tensor.stop_gradient = False
    ends = np.where(np.arange(tokens) < documents[0], *documents).astype("int32").reshape([1, 1, tokens, 1])
    rows = paddle.to_tensor(ends)
    settings = (None, 0.0, True, False, False, "")  # seed, dropout, causal, return_softmax, is_test, rng_name
    out = paddle._C_ops.flashmask_attention(*tensors.values(), rows, *settings)[0]
    some = np.sort(generator.choice(tokens, 16, replace=False))
    grad = np.zeros(out.shape, "float32")
    grad[0, some] = generator.integers(-2, 3, [16, heads, width])
    out.backward(paddle.to_tensor(grad).astype(dtype))
    q, k, v = (t.astype("float32").numpy().astype("float64")[0] for t in tensors.values())
    key, wanted = np.arange(tokens), {"k": np.zeros([tokens, width]), "v": np.zeros([tokens, width])}
    seen = (key <= some[:, None]) & (some[:, None] < ends.ravel())
    for head in range(heads):
        scores = np.where(seen, q[some, head] @ k[:, 0].T / width**0.5, -np.inf)
        p = np.exp(scores - scores.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        assert relative(out.astype("float32").numpy()[0, some, head], p @ v[:, 0]) < bound
        d_out = grad[0, some, head].astype("float64")
        d_p = d_out @ v[:, 0].T
        d_scores = p * (d_p - (p * d_p).sum(1, keepdims=True)) / width**0.5
        q_grad = tensors["q"].grad.astype("float32").numpy()[0, some, head]
        assert relative(q_grad, d_scores @ k[:, 0]) < bound
        wanted["k"] += d_scores.T @ q[some, head]
        wanted["v"] += p.T @ d_out
    for name, want in wanted.items():
        assert relative(tensors[name].grad.astype("float32").numpy()[0, :, 0], want) < bound, name


def test_large_embedding_gradient_is_exact_and_repeatable(generator):
    index = generator.integers(0, 50, 4096)
    gradient = generator.integers(-2, 3, (4096, 2050)).astype("float32")
    grads = []
    for _ in range(2):
        weight = paddle.zeros([64, 2050], "bfloat16")
        weight.stop_gradient = False
        out = F.embedding(paddle.to_tensor(index), weight)
        out.backward(paddle.to_tensor(gradient).astype("bfloat16"))
        grads.append(weight.grad.astype("float32").numpy())
    want = np.zeros((64, 2050))
    np.add.at(want, index, gradient)
    np.testing.assert_allclose(grads[0], want, rtol=2**-8)
    assert (grads[0] == grads[1]).all()


def test_the_embeddings_main_gradient_is_a_sum_in_float32(seed):
    embedding_cases.check(seed)


def test_adamw_has_the_same_bits(seed):
    """With its clipping those of clipping before it, with states of fewer bytes those of Paddle's operations, and of
    many weights in one call those of a call for each; Muon's passes have those of Paddle's operations."""
    result = run(PLUGIN, ROOT / "tests/multiprocess/optimizer_steps.py", "nvgpu:0", seed)
    assert result.returncode == 0 and result.stdout.count("EQUAL") == 10, result.stderr[-3000:]


# ---- addresses, streams, memory


def test_data_ptr_is_a_device_address():
    attributes = (ctypes.c_char * 256)()  # CUDA 13's cudaPointerAttributes has 88 bytes, CUDA 12's had 24
    pointer = ctypes.c_void_p(paddle.ones([4]).data_ptr())
    assert cudart().cudaPointerGetAttributes(attributes, pointer) == 0
    kind, device = np.frombuffer(attributes, "int32")[:2]
    assert (kind, device) == (2, 0)  # cudaMemoryTypeDevice


def test_raw_stream_follows_stream_guard_and_orders_work():
    def raw():
        return paddle.device.current_stream().stream_base.raw_stream

    def memset(tensor, stream):
        size = ctypes.c_size_t(tensor.size * 4)
        assert cudart().cudaMemsetAsync(ctypes.c_void_p(tensor.data_ptr()), 0, size, ctypes.c_void_p(stream)) == 0

    main, side = raw(), paddle.device.Stream()
    assert main
    for _ in range(20):
        x = paddle.ones([1 << 20])
        memset(x, main)
        y = x + 1  # behind the memset on the same stream
        assert float(y.sum()) == 1 << 20
        with paddle.device.stream_guard(side):
            assert raw() == side.stream_base.raw_stream != main
            z = paddle.full([1 << 20], 3.0)
        paddle.device.current_stream().wait_stream(side)
        assert float(z.sum()) == 3 * (1 << 20)
    assert raw() == main


def test_copies_without_a_stream_come_after_what_was_launched_before():
    """Tensor.set must not overwrite what waiting kernels still read."""
    factor, x = paddle.rand([4096, 4096]), paddle.ones([1 << 20])
    product = factor
    for _ in range(50):  # some 100 ms of work, behind which the sum's kernel waits
        product = paddle.matmul(product, factor)
    y = x + 1
    x.get_tensor().set(np.zeros(1 << 20, "float32"), paddle.CustomPlace("nvgpu", 0))
    assert float(x.max()) == 0
    assert float(y.min()) == float(y.max()) == 2


def test_one_copy_of_each_cuda_library():
    paddle.matmul(paddle.ones([4, 4]), paddle.ones([4, 4]))
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/" in line}
    for library in ("libcudart.so", "libcublas.so", "libcublasLt.so"):
        copies = {os.path.realpath(path) for path in paths if os.path.basename(path).startswith(library)}
        assert len(copies) == 1, copies


def test_memory_is_given_back_and_used_again():
    x = paddle.empty([1 << 30], dtype="uint8")
    address = x.data_ptr()
    del x
    y = paddle.empty([1 << 30], dtype="uint8")
    assert y.data_ptr() == address


# ---- a training step


@pytest.fixture(scope="module")
def llama_runs():
    return nvgpu_processes.llama_runs(PLUGIN)


def test_llama_float32_equals_the_cpu(llama_runs):
    np.testing.assert_allclose(llama_runs[1], llama_runs[0], rtol=2e-5)


def test_llama_bfloat16_follows_float32(llama_runs):
    cpu, _, half, _ = llama_runs
    np.testing.assert_allclose(half, cpu, rtol=1e-2)
    assert half[-1] < half[0] - 0.3


def test_a_llama_step_stays_on_the_device(llama_runs):
    check_on_device(llama_runs[3])


# ---- Paddle's profiler

PROFILED = """
import sys, paddle
paddle.set_device("nvgpu:0")
x = paddle.randn([4096, 4096]).astype("bfloat16")
(x @ x).numpy()
profiler = paddle.profiler.Profiler(on_trace_ready=paddle.profiler.export_chrome_tracing(sys.argv[1]))
profiler.start()
with paddle.profiler.RecordEvent("three products"):
    for _ in range(3):
        y = x @ x
y.numpy()
profiler.stop()
"""


def test_paddles_profiler_shows_the_gpus_kernels(tmp_path):
    """Three products of 137 GFLOP each, launched within the range, and the copy that reads the last."""
    done = run(PLUGIN, "-c", PROFILED, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "dropped" not in done.stderr
    (trace,) = tmp_path.glob("*.json")
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    (outer,) = [device_trace.times_of(event) for event in events if device_trace.name_of(event) == "three products"]
    launches = {e["args"]["correlation id"]: device_trace.times_of(e)[0] for e in events if e["cat"] == "CudaRuntime"}
    kernels = [event for event in events if event["cat"] == "Kernel"]
    long = [event for event in kernels if event["dur"] > 50]  # µs; at 1 PFLOP/s it would be 137
    assert len(long) == 3 and all(event["dur"] < 5000 for event in long)
    assert all(outer[0] < launches[event["args"]["correlation id"]] < outer[1] for event in long)
    starts = [device_trace.times_of(event) for event in long]
    assert all(after[0] >= before[1] for before, after in zip(starts, starts[1:], strict=False))  # one stream
    assert any(event["args"]["bytes"] == 2 * 4096**2 for event in events if event["cat"] == "Memcpy")


# ---- NCCL


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mode", ["collectives", "ring"])
def test_nccl(mode, size):
    if paddle.base.core.get_custom_device_count("nvgpu") < size:
        pytest.skip(f"needs {size} GPUs")
    codes, outputs = run_ranks(PLUGIN, size, PLUGIN_TESTS / "ranks.py", mode, timeout=90)
    assert codes == [0] * size, "\n".join(output[-2000:] for output in outputs)
