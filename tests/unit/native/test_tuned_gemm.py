"""GEMMs by the fastest of cuBLASLt's algorithms. The library is a fake one: each test says which algorithms it has."""

import ctypes
import itertools
import logging

import pytest

from paddle_te.native import DType, ScalingMode, TransformerEngineError

BF16, E4M3 = DType.BFLOAT16, DType.FLOAT8_E4M3
STREAM, WORKSPACE_BYTES = 0x5000, 32 * 2**20 + 1024
CUDA_BF16, CUDA_E4M3, CUDA_FLOAT32, COMPUTE_FLOAT32 = 14, 28, 0, 68
WITH_BIAS, WITHOUT = 4, 1
COUNTER = itertools.count(1)


class Fast:
    """The fake with a Stream whose memory is in different places. tokens: none that an earlier test had, as the choice
    stays in the process."""

    def __init__(self, fake):
        self.fake, self.te = fake, fake.te
        self.allocated, self._next = [], 0xA000000
        self.tokens = 16 * next(COUNTER)
        self.stream = self.te.Stream(STREAM, self.allocate)

    def allocate(self, size):
        address, self._next = self._next, self._next + (size + 0xFFFFFF) // 0x1000000 * 0x1000000
        self.allocated.append((address, size))

        class Memory:
            def data_ptr(self):
                return address

        return Memory()

    def algorithms(self, *of):
        """Of (milliseconds, contents of the result, split-K, reduction scheme, status); TE takes the first."""
        self.fake.library.fake_no_algorithms()
        for ms, *rest in of:
            self.fake.library.fake_algorithm(ctypes.c_float(ms), *(*rest, *[1, 0, 0][len(rest) - 1 :]))

    def operands(self, at=0x100000, outer=48, inner=32, w_in_out=False):
        """A weight, x and y."""
        te, shape = self.te, (inner, outer) if w_in_out else (outer, inner)
        w = te.Tensor(at, shape, E4M3, at + 0x1000, scale_inv=at + 0x2000)
        x = te.Tensor(at + 0x3000, (self.tokens, inner), E4M3, scale_inv=at + 0x4000)
        return w, x, te.Tensor(at + 0x5000, (self.tokens, outer), BF16)

    def calls(self, *names):
        return [call for call in self.fake.calls() if not names or call[0] in names]


@pytest.fixture
def fast(fake):
    fast = Fast(fake)
    yield fast
    fake.library.fake_no_algorithms()
    assert fake.library.fake_live_descriptions() == 0


def launched(call):
    """(D, algorithm) of a cublasLtMatmul."""
    return call[11], call[13]


@pytest.mark.parametrize("transa", [True, False])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("sms", [132, 116])
def test_the_description_is_tes(fast, monkeypatch, transa, accumulate, with_bias, sms):
    """As cublas_gemm of TE 2.20 gives it: attribute number: [bytes, value]. Both operands along k, so that a weight
    [in, out] is read from its transposed copy."""
    monkeypatch.setenv("NVTE_EXT_MARGIN_SM", str(132 - sms))
    stream = fast.te.Stream(STREAM, fast.allocate)
    fast.algorithms((2, 7), (1, 7))
    w, x, y = fast.operands(w_in_out=not transa)
    bias = fast.te.Tensor(0x900000, (48,), BF16) if with_bias else None
    fast.te.tuned_gemm(w, x, y, transa, stream, accumulate, bias)
    *_, first, whole = [call for call in fast.fake.calls() if call[0] == "cublasLtMatmulAlgoGetHeuristic"]
    product = {"created": [COMPUTE_FLOAT32, CUDA_FLOAT32]}
    product |= {"3": [4, 1], "4": [4, 0], "7": [4, WITH_BIAS if with_bias else WITHOUT]}
    product |= {"17": [8, 0x102000], "18": [8, 0x104000], "25": [1, 1]}
    if sms < 132:
        product["15"] = [4, sms]
    if with_bias:
        product |= {"8": [8, 0x900000], "26": [4, CUDA_BF16]}
    of_w, of_x = ({"created": [CUDA_E4M3, 32, n, 32]} for n in (48, fast.tokens))
    of_y = {"created": [CUDA_BF16, 48, fast.tokens, 48]}
    preference = {"created": [], "1": [8, WORKSPACE_BYTES], **{str(i): [4, 256] for i in (5, 6, 7, 8)}}
    assert first == ["cublasLtMatmulAlgoGetHeuristic", product, of_w, of_x, of_y, of_y, preference, 1]
    assert whole == [*first[:-1], 16]

    fast.te.tuned_gemm(w, x, y, transa, stream, accumulate, bias)
    operands = [1.0, 0x100000 if transa else 0x101000, of_w, 0x103000, of_x, float(accumulate), 0x105000, of_y]
    (workspace,) = [address for address, size in fast.allocated if size == WORKSPACE_BYTES]
    expected = ["cublasLtMatmul", 0x9000, product, *operands, 0x105000, of_y, 1, workspace, WORKSPACE_BYTES, STREAM]
    assert fast.calls() == [expected]


def test_the_fastest_with_the_bits_of_tes_is_taken(fast, caplog):
    """Not one with other bits, split-K, a reduction or one that cannot be launched. The result is TE's own, once, and
    everything else goes to other memory."""
    fast.algorithms((10, 7), (9, 7), (1, 8), (2, 7, 2), (3, 7, 1, 1), (4, 7, 1, 0, 15), (7, 7), (8, 7))
    w, x, y = fast.operands()
    with caplog.at_level(logging.INFO, logger="paddle_te.native"):
        fast.te.tuned_gemm(w, x, y, True, fast.stream)
    (text,) = caplog.messages
    assert text == (
        f"GEMM autotune: fp8 [{fast.tokens}, 32] x [32, 48], 5 algorithms timed; cuBLASLt's first: 10000 us, "
        "taken: 7000 us; faster ones with other bits: 1"
    )
    calls = fast.calls("nvte_cublas_gemm_v2", "cublasLtMatmul")
    assert calls[0][0] == "nvte_cublas_gemm_v2" and calls[0][10] == {"5": 0}
    ((_, workspace_size), (scratch, size)), products = fast.allocated, [launched(call) for call in calls[1:]]
    assert (workspace_size, size) == (WORKSPACE_BYTES, fast.tokens * 48 * 2)
    assert {d for d, _ in products} == {scratch} and {algorithm for _, algorithm in products} == {0, 1, 2, 5, 6, 7}
    assert fast.fake.library.fake_contents(0x105000) == 7

    # elsewhere, with other scales
    fast.te.tuned_gemm(*fast.operands(0x200000), True, fast.stream)
    (call,) = fast.calls()
    assert launched(call) == (0x205000, 6) and call[2]["17"] == [8, 0x202000]
    assert fast.te.counts()["tuned_gemm", "fp8"] > 0


def test_tes_stays_where_others_are_hardly_faster(fast, caplog):
    fast.algorithms((10, 7), (9.9, 7), (9, 8))
    with caplog.at_level(logging.INFO, logger="paddle_te.native"):
        fast.te.tuned_gemm(*fast.operands(), True, fast.stream)
    assert caplog.messages[0].endswith("first: 10000 us, which stays; faster ones with other bits: 1")
    fast.calls()
    fast.te.tuned_gemm(*fast.operands(), True, fast.stream)
    assert [call[0] for call in fast.calls()] == ["nvte_cublas_gemm_v2"]


@pytest.mark.parametrize("taken, contents", [(1, 7), (2, 9)])
def test_what_is_added_to_is_the_same_for_all(fast, taken, contents):
    """All bytes of results of more than 64 MiB are compared."""
    fast.tokens = 8192 + taken * 16
    fast.algorithms((10, 7), (3, contents), (5, 7))
    w, x, y = fast.operands(0x10000000, outer=4112)
    y = fast.te.Tensor(0x80000000, (fast.tokens, 4112), BF16)
    fast.fake.library.fake_put(ctypes.c_void_p(0x80000000), 20)
    fast.te.tuned_gemm(w, x, y, True, fast.stream, True)
    assert fast.fake.library.fake_contents(ctypes.c_void_p(0x80000000)) == 3 * 20 + 7
    size = fast.tokens * 4112 * 2
    assert size > 64 * 2**20 and [bytes for _, bytes in fast.allocated].count(size) == 2
    copied = [call[3] for call in fast.calls("cudaMemcpyAsync") if call[4] == 2 and call[2] >= 0x80000000]
    assert sum(copied) == (size if taken == 1 else 64 * 2**20 + size)
    fast.te.tuned_gemm(w, x, y, True, fast.stream, True)
    assert [launched(call) for call in fast.calls()] == [(0x80000000, taken)]


def test_graphs_launch_what_was_taken_and_nothing_is_timed_in_a_capture(fast):
    """Where a capture comes upon other alignments, it has TE's."""
    fast.algorithms((10, 7), (5, 7))
    slot = lambda number: number << 48  # noqa: E731
    w = fast.te.Tensor(slot(1), (48, 32), E4M3, scale_inv=slot(2))
    x = fast.te.Tensor(slot(3), (fast.tokens, 32), E4M3, scale_inv=slot(4))
    y = fast.te.Tensor(slot(5), (fast.tokens, 48), BF16)
    sequence = fast.te.Sequence((w, x, y), (("tuned_gemm", (w, x, y, True, fast.stream)),), 4)
    runs = [[0, *(base + 0x1000 * i for i in range(5))] for base in (0x100000, 0x200000, 0x300010, 0x300010)]
    sequence.run(runs[0])
    assert fast.calls("cudaEventElapsedTime", "cudaEventRecord")
    for bases, name in ((runs[1], "cublasLtMatmul"), (runs[2], "nvte_cublas_gemm_v2")):
        sequence.run(bases)
        names = [call[0] for call in fast.calls()]
        assert names[-1] == name and "cudaEventRecord" not in names and "cudaMemcpyAsync" not in names


def test_a_failure_names_the_tensors(fast):
    fast.algorithms((10, 7), (5, 7))
    w, x, y = fast.operands()
    fast.te.tuned_gemm(w, x, y, True, fast.stream)
    fast.algorithms((10, 7), (5, 7, 1, 0, 13))
    with pytest.raises(TransformerEngineError, match=r"(?s)cublasLtMatmul failed: a status.*A: fp8_e4m3 \[48, 32\]"):
        fast.te.tuned_gemm(w, x, y, True, fast.stream)


def test_what_it_does_not_take(fast):
    (w, x, y), te = fast.operands(), fast.te
    blocks = dict(scaling_mode=ScalingMode.BLOCK_SCALING_1D)
    for operands, match in (
        ((te.Tensor(0x1000, (48, 32), BF16), x, y), "must be fp8 with one scale_inv each"),
        ((w, te.Tensor(0x1000, (fast.tokens, 32), E4M3, scale_inv=0x2000, **blocks), y), "must be fp8 with one scale"),
        ((w, x, te.Tensor(0x1000, (fast.tokens, 48), E4M3, scale_inv=0x2000)), "D not fp8"),
        ((w, x, te.Tensor(0x1000, (fast.tokens, 64), BF16)), "shapes do not fit"),
        ((te.Tensor(0, (48, 32), E4M3, 0x1000, scale_inv=0x2000), x, y), "lacks the copy that this GEMM reads"),
    ):
        with pytest.raises(TransformerEngineError, match=match):
            te.tuned_gemm(*operands, True, fast.stream)
    assert fast.calls() == []
