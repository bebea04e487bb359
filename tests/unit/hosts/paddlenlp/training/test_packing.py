"""Pretraining on sequences of several documents: where they end, and what a batch carries to keep them apart."""

import pickle
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.training.datasets import collate_fn
from paddle_te.hosts.paddlenlp.training.packing import make_collator, separation, split_at
from paddle_te.hosts.paddlenlp.training.pretrain import end_of_document
from paddle_te.ops import documents
from tests import emulated_te
from tests.packed_cases import spans
from tests.te_weights import relative
from tests.unit.hosts.paddlenlp.native import tiny_config

END = 2


def make(end=END, data=(), **training):
    data_args = dict(reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=False) | dict(data)
    training_args = dict(sep_parallel_degree=1, context_parallel_degree=1, pipeline_parallel_degree=1, fp8_dpa=False)
    training_args |= dict(transformer_engine_backend="paddle") | training
    return make_collator(SimpleNamespace(**data_args), SimpleNamespace(**training_args), end)


def samples(generator, count=3, tokens=24):
    """Of which the first is one whole document and the second ends and begins with the end of one."""
    texts = generator.integers(3, 96, [count, tokens + 1])
    texts[1, [0, tokens - 1]] = END
    texts[2, generator.integers(0, tokens, 4)] = END
    return [{"text": text} for text in texts]


def test_a_document_ends_with_its_token_or_the_row():
    tokens = np.array([[5, 6, 2, 7], [5, 6, 7, 8], [2, 5, 6, 2], [2, 2, 2, 2]])
    assert split_at(2, tokens) == [[3, 1], [4], [1, 3], [1, 1, 1, 1]]


@pytest.mark.parametrize("flag", ["reset_attention_mask", "reset_position_ids"])
def test_each_flag_by_itself(seed, flag):
    batch = samples(np.random.default_rng(seed))
    plain = collate_fn(batch)
    other = {"reset_attention_mask": "reset_position_ids", "reset_position_ids": "reset_attention_mask"}[flag]
    got = make(data={other: False})(batch)
    added = {"reset_attention_mask": "cu_seqlens", "reset_position_ids": "position_ids"}[flag]
    assert got.keys() == plain.keys() | {added}
    for name, value in plain.items():
        np.testing.assert_array_equal(got[name], value)
    assert make(data={flag: False, other: False}).func is collate_fn


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_the_loss_of_what_follows_an_end_is_left_out(seed, backend):
    """As Megatron's loss_mask: where the end is the input. The rest of the batch stays, and so does its mean loss."""
    paddle.seed(seed)
    batch, alone = samples(np.random.default_rng(seed)), dict(reset_attention_mask=False, reset_position_ids=False)
    plain, got = collate_fn(batch), make(data=alone | dict(eod_mask_loss=True), sep_parallel_degree=2)(batch)
    assert got.keys() == plain.keys()
    ends = plain["input_ids"] == END
    assert 0 < ends.sum() < ends.size and (got["labels"][ends] == -100).all()
    np.testing.assert_array_equal(got["labels"][~ends], plain["labels"][~ends])
    config = tiny_config(initializer_range=0.2, transformer_engine_backend=backend)
    model = model_class(config)(config)
    ids, labels = paddle.to_tensor(got["input_ids"]), paddle.to_tensor(got["labels"])
    logits, wanted = model(ids)[0].numpy().astype("float64"), plain["labels"][~ends]
    scores = logits[~ends] - logits[~ends].max(-1, keepdims=True)
    losses = np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(wanted)), wanted]
    assert model(ids, labels=labels)[0].item() == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.parametrize("backend, pipeline, name", [
    ("none", 1, "attention_mask"), ("none", 2, "attention_mask"), ("paddle", 1, "cu_seqlens"),
    ("transformer_engine", 2, "attn_mask_startend_row_indices"),
])  # fmt: skip
def test_what_backends_take(seed, monkeypatch, backend, pipeline, name):
    emulated_te.install(monkeypatch.setattr)
    collate = make(transformer_engine_backend=backend, pipeline_parallel_degree=pipeline)
    batch = pickle.loads(pickle.dumps(collate))(samples(np.random.default_rng(seed)))  # for the loader's processes
    assert batch.keys() == {"input_ids", "labels", "position_ids", name}


def test_a_mask_where_te_has_no_attention_over_documents(seed, monkeypatch, caplog):
    emulated_te.install(monkeypatch.setattr)
    monkeypatch.setattr(emulated_te.Stream, "capability", (8, 0))
    batch = make(transformer_engine_backend="transformer_engine")(samples(np.random.default_rng(seed)))
    assert "attention_mask" in batch and "cu_seqlens" not in batch
    assert "needs a GPU of compute capability 9.0 to 11, not 8.0; a mask of sequence × sequence" in caplog.text


def test_a_dense_mask_by_hand():
    (mask,) = separation([[1, 2]], masked=True)["attention_mask"]
    assert mask.dtype == bool and mask.tolist() == [[[True, False, False], [False, True, False], [False, True, True]]]


@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_documents_do_not_see_each_other(seed, backend):
    """Logits are those of each document alone."""
    paddle.seed(seed)
    config = tiny_config(initializer_range=0.2, transformer_engine_backend=backend)
    model = model_class(config)(config)
    batch = make(transformer_engine_backend=backend)(samples(np.random.default_rng(seed)))
    rows = split_at(END, batch["input_ids"])
    np.testing.assert_array_equal(batch["position_ids"], documents.positions(rows))
    tensors = {name: paddle.to_tensor(value) for name, value in batch.items()}
    logits = model(**tensors | dict(labels=None))[0]
    for row, start, end in spans(rows):
        alone = model(tensors["input_ids"][row : row + 1, start:end])[0]
        assert relative(logits[row : row + 1, start:end], alone) < 1e-5


@pytest.mark.parametrize("arguments, message", [
    (dict(end=None), "--reset_attention_mask: neither the tokenizer nor .* has an eos token"),
    (dict(end=None, data=dict(reset_attention_mask=False)), "--reset_position_ids: neither"),
    (dict(end=None, data=dict(reset_attention_mask=False, reset_position_ids=False, eod_mask_loss=True)),
     "--eod_mask_loss: neither"),
])  # fmt: skip
def test_what_does_not_go_together(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_the_token_that_ends_a_document():
    config = SimpleNamespace(eos_token_id=7)
    assert end_of_document(config, None) == 7
    assert end_of_document(config, SimpleNamespace(eos_token_id=5)) == 5
    assert end_of_document(SimpleNamespace(eos_token_id=None), None) is None
