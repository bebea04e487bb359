"""Packed documents: pd computes each as if it were alone, te what pd computes and what a dense mask would give."""

import numpy as np
import paddle
import pytest

from paddle_te import fp8
from paddle_te.layers import DotProductAttention, MultiHeadAttention, RotaryPositionEmbedding
from paddle_te.ops import documents, get_ops
from paddle_te.ops.heads import Attention, Heads, Scores
from paddle_te.ops.te import program
from tests import emulated_te
from tests.layer_cases import ATTENTION, RECIPES
from tests.packed_cases import ROWS, TOKENS, dense_mask, draw, random_rows, run, spans
from tests.packed_cases import transformer as transformer_of
from tests.poison import poison_allocations
from tests.te_weights import relative

DTYPES = {"paddle": "float32", "transformer_engine": "float16"}  # the CPU lacks kernels for bfloat16


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulated_te.install(monkeypatch.setattr)
    poison_allocations(monkeypatch)


@pytest.fixture
def generator(seed):
    return np.random.default_rng(seed)


def transformer(generator, backend, *args, **options):
    return transformer_of(generator, backend, DTYPES[backend], *args, **options)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("how", ["plain", "recomputed", "flat"])
def test_pd_computes_each_document_as_if_it_were_alone(generator, how, kv_heads):
    layer = transformer(generator, "paddle", kv_heads, max_sequence_length=TOKENS if how == "flat" else None)
    rows, (x, dy) = random_rows(generator), draw(generator)
    got = run(layer, x, dy, rows, recompute_core_attention=how == "recomputed")
    layer.self_attention.max_sequence_length = None
    sums = {}
    for row, start, end in spans(rows):
        part = slice(row, row + 1), slice(start, end)
        alone = run(layer, x[part], dy[part], [[end - start]])
        for name in ("y", "dx"):
            np.testing.assert_allclose(got[name][part], alone.pop(name), rtol=1e-5, atol=1e-5)
        for name, value in alone.items():
            sums[name] = sums.get(name, 0) + value
    for name, value in sums.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize("how", ["plain", "recomputed", "flat"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_te_computes_what_pd_computes(seed, generator, how, kv_heads):
    rows, (x, dy) = random_rows(generator), draw(generator)
    got, want = (
        run(
            transformer(
                np.random.default_rng(seed), backend, kv_heads, max_sequence_length=TOKENS if how == "flat" else None
            ),
            x,
            dy,
            rows,
            recompute_core_attention=how == "recomputed",
        )
        for backend in ("transformer_engine", "paddle")
    )
    for name, value in want.items():
        assert relative(got[name], value) < 2e-2, name


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("backend", DTYPES)
def test_in_fp8_layers_attention_is_that_of_a_dense_mask(seed, generator, backend, recipe):
    rows, (x, dy) = random_rows(generator), draw(generator)
    got, want = (
        run(transformer(np.random.default_rng(seed), backend), x, dy, rows, RECIPES[recipe], masked)
        for masked in (False, True)
    )
    for name, value in want.items():
        # what differs in the last bit may become another number of fp8: see check_hidden in tests/dropout_cases.py
        assert relative(got[name], value) < 15e-2, name


def test_dot_product_attention_takes_documents(generator):
    rows = random_rows(generator)
    q, k, v = (paddle.to_tensor(generator.standard_normal([ROWS, TOKENS, 2, 16], "float32")) for _ in range(3))
    layer = DotProductAttention(16, backend="paddle")
    got = layer(q, k, v, cu_seqlens=paddle.to_tensor(documents.cu_seqlens(rows))).numpy()
    np.testing.assert_allclose(got, layer(q, k, v, dense_mask(rows)).numpy(), rtol=1e-5, atol=1e-5)


def test_programs_serve_all_batches_of_as_many_documents(generator):
    layer = transformer(generator, "transformer_engine")
    fewest, many = [[TOKENS]] * ROWS, [[4] * 8, [TOKENS], [16, 16]]  # up to 8 documents, and up to 16
    program.clear()
    recorded = []
    for rows in [fewest, many, *(random_rows(generator) for _ in range(4))]:
        run(layer, *draw(generator), rows)
        recorded.append(program.program_of.cache_info().misses)
    assert recorded[1] == recorded[0] + 1, "the attention half, not the MLP"
    assert set(recorded[1:]) == {recorded[1]}


@pytest.mark.parametrize("backend", DTYPES)
def test_what_documents_do_not_go_with_is_refused_before_anything_runs(monkeypatch, backend):
    dtype = DTYPES[backend]
    layer = MultiHeadAttention(256, 2, params_dtype=dtype, backend=backend)
    x, freqs = paddle.ones([1, 16, 256]).astype(dtype), RotaryPositionEmbedding(128)(16)
    packed = dict(cu_seqlens=paddle.to_tensor(documents.cu_seqlens([[7, 9]])))
    layer(x, freqs, **packed)
    monkeypatch.setattr(layer.layernorm_qkv, "forward", lambda *_: pytest.fail("a kernel ran"))
    with pytest.raises(ValueError, match="packed documents have no attention mask"):
        layer(x, freqs, paddle.zeros([1, 1, 16, 16]), **packed)
    with pytest.raises(ValueError, match="packed documents have no key-value cache"):
        layer(x, freqs, use_cache=True, **packed)
    with fp8.fp8_autocast(True, ATTENTION["dpa"]), pytest.raises(ValueError, match="fp8_dpa: .* no packed documents"):
        layer(x, freqs, **packed)


def test_pd_reads_the_boundaries():
    qkv, freqs = paddle.ones([2, 8, 96]), RotaryPositionEmbedding(16)(8)
    for wrong in ([0, 8], [1, 16], [0, 9, 8, 16]):
        with pytest.raises(ValueError, match="must rise from 0 to 16, the number of tokens"):
            cu_seqlens = paddle.to_tensor(wrong, "int32")
            get_ops("paddle").rotary_attention(qkv, freqs, Heads(2, 2), Attention(Scores(0.25), cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_gpus_without_attention_over_documents(monkeypatch, capability):
    get_ops("paddle").check_packed_attention()
    get_ops("transformer_engine").check_packed_attention()
    monkeypatch.setattr(emulated_te.Stream, "capability", capability)
    with pytest.raises(ValueError, match="needs a GPU of compute capability 9.0 to 11, not {}.{}".format(*capability)):
        get_ops("transformer_engine").check_packed_attention()
