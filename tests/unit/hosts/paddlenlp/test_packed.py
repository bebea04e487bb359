"""Packed documents through PaddleNLP's models: numbers and gradients of each document alone, however it is computed."""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet

from paddle_te.hosts.paddlenlp.llama import LlamaForCausalLM
from paddle_te.hosts.paddlenlp.llama.decoder import TELlamaDecoderLayerPipe
from paddle_te.hosts.paddlenlp.lora import TELoRAModel, lora_config
from paddle_te.layers import RotaryPositionEmbedding
from paddle_te.models.pipeline import InPipeline
from paddle_te.ops import documents
from paddle_te.options.lora import Adapter
from tests.packed_cases import random_rows, spans
from tests.te_weights import relative
from tests.unit.hosts.paddlenlp.native import draw_adapters, tiny_config

ROWS, TOKENS = 3, 24


def make(seed, **config):
    paddle.seed(seed)
    model = LlamaForCausalLM(tiny_config(initializer_range=0.1, **config))
    model.train()
    return model


def labels_of(ids, rows):
    """The next token's, and none for a document's last token."""
    labels = np.roll(ids, -1, 1)
    for row, _, end in spans(rows):
        labels[row, end - 1] = -100
    return labels


def batch(generator, how):
    """(rows, tensors of a model's input); the sum of the labels' losses is that of each document alone."""
    rows, ids = random_rows(generator, ROWS, TOKENS), generator.integers(0, 96, [ROWS, TOKENS])
    told = {
        "cu_seqlens": documents.cu_seqlens(rows),
        "attn_mask_startend_row_indices": documents.flash_mask(rows),
    }
    tensors = dict(
        input_ids=ids, labels=labels_of(ids, rows), position_ids=documents.positions(rows), **{how: told[how]}
    )
    return rows, {name: paddle.to_tensor(value) for name, value in tensors.items()}


def gradients(model):
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


CASES = {
    "plain": {},
    "full": dict(recompute=True, recompute_granularity="full"),
    "core_attn": dict(recompute=True, recompute_granularity="core_attn"),
    "loss in chunks": dict(use_fused_linear_cross_entropy=True),
}


@pytest.mark.parametrize("how", ["cu_seqlens", "attn_mask_startend_row_indices"])
@pytest.mark.parametrize("case", CASES)
def test_each_document_is_as_if_it_were_alone(seed, case, how):
    rows, inputs = batch(np.random.default_rng(seed), how)
    model = make(seed, **CASES[case])
    if "recompute" in CASES[case]:
        model.recompute_enable()
    loss, logits, *_ = model(**inputs)
    loss.backward()
    got, alone = gradients(model), make(seed)
    counted = (inputs["labels"] != -100).sum().item()
    total = 0
    for row, start, end in spans(rows):
        ids, labels = (inputs[name][row : row + 1, start:end] for name in ("input_ids", "labels"))
        part = alone(input_ids=ids, labels=labels)
        if logits is not None:
            np.testing.assert_allclose(logits[row : row + 1, start:end], part[1], rtol=1e-5, atol=1e-5)
        if end - start > 1:  # a single token has nothing to learn
            weighted = part[0] * (end - start - 1) / counted
            weighted.backward()
            total += weighted.item()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    for name, value in gradients(alone).items():
        assert relative(got[name], value) < 1e-5, name


def test_an_adapter_learns_from_documents(seed):
    """As from a dense mask that keeps them apart."""
    rows, inputs = batch(np.random.default_rng(seed), "cu_seqlens")
    flash_mask = documents.flash_mask(rows)
    tokens = np.arange(TOKENS)
    dense = (tokens[:, None] >= tokens) & (tokens[:, None] < flash_mask)
    results = []
    for told in dict(cu_seqlens=inputs.pop("cu_seqlens")), dict(attention_mask=paddle.to_tensor(dense[:, None])):
        model = TELoRAModel(make(seed), lora_config(Adapter(rank=4)))
        paddle.seed(seed)
        draw_adapters(model)
        loss = model(**inputs, **told)[0]
        loss.backward()
        results.append((loss.item(), gradients(model)))
    (got, got_gradients), (want, want_gradients) = results
    assert got == pytest.approx(want, rel=1e-6) and got_gradients.keys() == want_gradients.keys()
    for name, value in want_gradients.items():
        # rounding: at most 3e-5 of 61 seeds; with documents that see each other at least 0.2
        assert "lora_" in name and relative(got_gradients[name], value) < 1e-3, name


def test_evaluation_computes_the_same_loss(seed):
    _, inputs = batch(np.random.default_rng(seed), "cu_seqlens")
    model = make(seed)
    want = model(**inputs)[0].item()
    model.eval()
    with paddle.no_grad():
        assert model(**inputs)[0].item() == pytest.approx(want, rel=1e-6)


def test_two_ways_to_say_what_tokens_see_are_one_too_many(seed):
    _, inputs = batch(np.random.default_rng(seed), "cu_seqlens")
    with pytest.raises(ValueError, match="attention_mask, cu_seqlens, .*: give one"):
        make(seed)(**inputs, attention_mask=paddle.ones([ROWS, TOKENS], "int64"))


@pytest.fixture
def pipeline_layer(monkeypatch):
    strategy = SimpleNamespace(pipeline_configs={"accumulate_steps": 1})
    monkeypatch.setattr(fleet.fleet, "_user_defined_strategy", strategy, raising=False)
    return TELlamaDecoderLayerPipe(tiny_config())


@pytest.mark.parametrize("names", [
    ["attn_mask_startend_row_indices"], ["position_ids"], ["attn_mask_startend_row_indices", "position_ids"]
])  # fmt: skip
def test_what_travels_through_a_pipeline_is_told_by_its_dtype(seed, pipeline_layer, names):
    generator = np.random.default_rng(seed)
    rows, inputs = batch(generator, "attn_mask_startend_row_indices")
    x = paddle.to_tensor(generator.standard_normal([ROWS, TOKENS, 64], "float32"))
    given = {name: inputs[name] for name in names}
    out, *travelling = pipeline_layer((x, *given.values()))
    want = super(InPipeline, pipeline_layer).forward(x, **given)
    np.testing.assert_array_equal(out, want)
    assert len(travelling) == len(names)
    for name, tensor in zip(names, travelling, strict=True):
        assert tensor is not given[name] and tensor.dtype == given[name].dtype and (tensor == given[name]).all()


def test_what_a_batch_tells_all_layers_is_computed_once(monkeypatch, seed, pipeline_layer):
    """In a pipeline's stage, where each layer copies what travels on, and in a model: documents, and angles."""
    read, at, calls = documents.rows_of, RotaryPositionEmbedding.at, []
    monkeypatch.setattr(documents, "rows_of", lambda mask: calls.append("documents") or read(mask))
    monkeypatch.setattr(RotaryPositionEmbedding, "at", lambda *args: calls.append("angles") or at(*args))
    _, inputs = batch(np.random.default_rng(seed), "attn_mask_startend_row_indices")
    args = paddle.randn([ROWS, TOKENS, 64]), inputs["attn_mask_startend_row_indices"], inputs["position_ids"]
    for _ in range(3):
        args = pipeline_layer(args)
    assert sorted(calls) == ["angles", "documents"]
    calls.clear()
    _, inputs = batch(np.random.default_rng(seed), "attn_mask_startend_row_indices")
    make(seed)(**inputs)
    assert sorted(calls) == ["angles", "documents"]


def test_what_else_travels_is_refused(pipeline_layer):
    mask = paddle.zeros([1, 1, 4, 4])
    for others in (mask, mask), (paddle.ones([1, 4], "bool"),):
        with pytest.raises(NotImplementedError, match="pipelines of backends pd and te do not take"):
            pipeline_layer((paddle.randn([1, 4, 64]), *others))
