"""Packed documents in te's layers, on cuDNN's kernels, against pd in float32 on the CPU."""

import numpy as np
import paddle
import pytest

from paddle_te import device
from paddle_te.ops import get_ops
from paddle_te.ops.te import program
from tests.layer_cases import RECIPES
from tests.packed_cases import HIDDEN, TOKENS, draw, random_rows, run, spans, transformer
from tests.te_weights import relative

TE = "transformer_engine", "bfloat16"


@pytest.fixture
def generator(seed):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("how", ["plain", "recomputed", "flat"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_documents_are_computed_as_pd_computes_them(gpu, poisoned, seed, generator, kv_heads, how):
    rows, (x, dy) = random_rows(generator), draw(generator)
    length = TOKENS if how == "flat" else None
    results = []
    for place, backend in (("cpu", ("paddle", "float32")), (gpu, TE)):
        paddle.set_device(place)
        layer = transformer(np.random.default_rng(seed), *backend, kv_heads, max_sequence_length=length)
        results.append(run(layer, x, dy, rows, recompute_core_attention=how == "recomputed"))
    for name, want in results[0].items():
        assert relative(results[1][name], want) < 2e-2, name


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_in_fp8_layers_attention_is_that_of_a_dense_mask(gpu, poisoned, seed, generator, recipe):
    rows, (x, dy) = random_rows(generator), draw(generator)
    got, want = (
        run(transformer(np.random.default_rng(seed), *TE), x, dy, rows, RECIPES[recipe], masked)
        for masked in (False, True)
    )
    for name, value in want.items():
        assert relative(got[name], value) < 5e-2, name


def test_a_document_does_not_move_a_bit_with_its_neighbours(gpu, monkeypatch, seed, generator):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    rows, (x, dy), (others, _) = random_rows(generator), draw(generator), draw(generator)
    layer = transformer(np.random.default_rng(seed), *TE)
    row, start, end = max(spans(rows), key=lambda span: span[2] - span[1])
    others[row, start:end] = x[row, start:end]
    got, again = (run(layer, values, dy, rows) for values in (x, others))
    for name in "y", "dx":
        assert (got[name][row, start:end] == again[name][row, start:end]).all()
        assert (got[name] != again[name]).any()


def test_programs_serve_all_batches_of_as_many_documents(gpu, seed, generator):
    layer = transformer(np.random.default_rng(seed), *TE)
    program.clear()
    run(layer, *draw(generator), random_rows(generator))
    recorded = program.program_of.cache_info().misses
    for _ in range(3):
        while len([*spans(rows := random_rows(generator))]) > 8:
            pass
        run(layer, *draw(generator), rows)
    assert program.program_of.cache_info().misses <= recorded + 1  # the first batch may have more than 8 documents


def test_no_memory_grows_with_the_square_of_a_sequence(gpu, seed, generator):
    tokens = 16384
    layer = transformer(np.random.default_rng(seed), *TE)
    x, dy = draw(generator, 1, tokens)
    device.reset_peak_memory()
    before = device.peak_memory()
    run(layer, x, dy, [[tokens // 8] * 8])
    assert device.peak_memory() - before < tokens**2 // 2  # bytes; a mask in bf16 has four times as many
    assert tokens * HIDDEN * 2 * 20 < tokens**2 // 2  # which is room for what the layer needs


def test_this_gpu_has_it(gpu):
    get_ops("transformer_engine").check_packed_attention()
