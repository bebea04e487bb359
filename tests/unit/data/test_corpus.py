"""A corpus that is read as it was written, and refused where it is damaged."""

import struct
from types import SimpleNamespace

import numpy as np
import pytest
from paddlenlp.data.indexed_dataset import MMapIndexedDataset

from paddle_te.data import corpus
from paddle_te.hosts.paddlenlp.evaluation.tasks import open_corpus, perplexity_of_corpus
from paddle_te.hosts.paddlenlp.training.datasets import (
    DataArguments,
    collate_fn,
    create_pretrained_dataset,
    data_identity,
)
from paddle_te.launch import checks
from tests.small_corpora import write_corpus


@pytest.fixture
def documents(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 900, rng.integers(1, 50)).tolist() for _ in range(40)]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_it_is_read_as_by_paddlenlp(tmp_path, documents, dtype):
    prefix = write_corpus(tmp_path / "corpus", documents, dtype)
    index, theirs = corpus.read_index(prefix), MMapIndexedDataset(str(prefix), skip_warmup=True)
    assert index.dtype == dtype and index.sizes.tolist() == theirs.sizes.tolist()
    assert index.documents.tolist() == theirs.doc_idx.tolist()
    assert [theirs[i].tolist() for i in range(40)] == documents, "what is written here is what PaddleNLP reads"
    corpus.check_vocabulary(prefix, index, 900)
    with pytest.raises(ValueError, match="corpus.bin has token id .* another tokenizer"):
        corpus.check_vocabulary(prefix, index, max(map(max, documents)))


def change(prefix, position, form, *values):
    data = bytearray(prefix.with_suffix(".idx").read_bytes())
    struct.pack_into(form, data, position, *values)
    prefix.with_suffix(".idx").write_bytes(data)


SIZES, POINTERS, DOCUMENTS = 34, 34 + 4 * 40, 34 + 12 * 40
DAMAGES = [  # position, form, values, said
    (0, "<B", [0], "it does not begin as one"),
    (9, "<Q", [2], "version 2"),
    (17, "<B", [7], "type of token ids 7"),
    (18, "<Q", [2**63], "bytes, and"),
    (18, "<Q", [2**64 - 1], "bytes, and"),
    (26, "<Q", [39], "bytes, and"),
    (SIZES, "<i", [-5], "entry 0 has -5 tokens"),
    (SIZES + 4, "<i", [10**6], "entry 1 ends at byte .*, and the next one begins at"),
    (SIZES + 8, "<2i", [10**6, -(10**6)], "entry 3 has -1000000 tokens"),
    (SIZES + 4 * 39, "<i", [10**6], "corpus.bin has .* bytes where its .idx says"),
    (POINTERS, "<q", [2], "entry 0 ends at byte .*, and the next one begins at"),
    (POINTERS + 8, "<q", [1], "entry 0 ends at byte .*, and the next one begins at 1;"),
    (POINTERS + 8 * 39, "<q", [2**60], "corpus.bin has .* bytes where its .idx says"),
    (POINTERS, "<40q", [0] * 40, "corpus.bin has .* bytes where its .idx says"),
    (DOCUMENTS + 8 * 3, "<q", [1000], "document 3 begins at entry 1000, and the next one at 4"),
    (DOCUMENTS, "<q", [3], "its documents lie from entry 3 to 40"),
    (DOCUMENTS + 8 * 40, "<q", [39], "its documents lie from entry 0 to 39"),
]


def readings(prefix):
    """Each way by which a program meets a corpus."""
    data = DataArguments(input_dir=str(prefix.parent), split="1,0,0", max_seq_length=4)
    run = SimpleNamespace(
        do_train=True, do_eval=False, do_predict=False, max_steps=2, eval_steps=None, per_device_train_batch_size=1,
        per_device_eval_batch_size=1, gradient_accumulation_steps=1, dataset_world_size=1, seed=7, data_seed=None,
        should_load_dataset=True, output_dir=str(prefix.parent / "out"),
    )  # fmt: skip
    job = SimpleNamespace(
        MOCK_DATA=False, DATA_PATH=str(prefix.parent), DRY_RUN=True, max_seqlen=4, init_weight="none",
        tokenizer_name="", model_name="tiny-llama-demo",
    )  # fmt: skip
    scorer = SimpleNamespace(max_seq_length=4, model=SimpleNamespace(config=SimpleNamespace(vocab_size=1000)))
    return {
        "read": lambda: corpus.read_index(prefix),
        "launcher": lambda: checks.check_data(job, {"vocab_size": 1000}),
        "identity": lambda: data_identity(data, 7, 100),
        "pretraining": lambda: create_pretrained_dataset(data, run, vocab_size=1000),
        "evaluation": lambda: perplexity_of_corpus(scorer, open_corpus(prefix)),
    }


@pytest.mark.parametrize("position, form, values, said", DAMAGES)
def test_every_reader_refuses_a_damaged_index(tmp_path, documents, position, form, values, said):
    prefix = write_corpus(tmp_path / "corpus", documents)
    change(prefix, position, form, *values)
    for reader, read in readings(prefix).items():
        with pytest.raises(ValueError, match=said) as error:
            read()
        assert "\n" not in str(error.value) and "corpus." in str(error.value), reader


def test_places_and_lengths_that_cancel_out(tmp_path, documents):
    """Their last one ends where PREFIX.bin does."""
    prefix = write_corpus(tmp_path / "corpus", documents)
    sizes, pointers, _ = (part.copy() for part in np.split(np.fromfile(f"{prefix}.idx", "u1")[34:], [160, 480]))
    sizes, pointers = sizes.view("<i4"), pointers.view("<i8")
    good = prefix.with_suffix(".idx").read_bytes()
    change(prefix, POINTERS, "<39q", *(pointers[:39] + 10))
    with pytest.raises(ValueError, match="entry 38 ends at byte"):
        corpus.read_index(prefix)
    prefix.with_suffix(".idx").write_bytes(good)
    change(prefix, SIZES, "<2i", sizes[0] + 1, sizes[1] - 1)
    with pytest.raises(ValueError, match="entry 0 ends at byte"):
        corpus.read_index(prefix)


def test_entries_beyond_what_is_compared_at_a_time(tmp_path, monkeypatch, documents):
    monkeypatch.setattr(corpus, "CHUNK", 16)
    prefix = write_corpus(tmp_path / "corpus", documents)
    assert len(corpus.read_index(prefix).sizes) == 40
    good = prefix.with_suffix(".idx").read_bytes()
    for place in range(40):
        for at, form, value in ((SIZES + 4 * place, "<i", 99), (POINTERS + 8 * place, "<q", 99999)):
            prefix.with_suffix(".idx").write_bytes(good)
            change(prefix, at, form, value)
            with pytest.raises(ValueError, match=f"entry ({place}|{place - 1}) |corpus.bin has"):
                corpus.read_index(prefix)
        prefix.with_suffix(".idx").write_bytes(good)
        change(prefix, DOCUMENTS + 8 * place, "<q", 41)
        with pytest.raises(ValueError, match=f"document {place} begins at entry 41|its documents lie from entry 41"):
            corpus.read_index(prefix)


@pytest.mark.parametrize(
    "summary", ["[]", "1", "{", '{"tokens": 1}', '{"tokens": %d, "max_token_id": 1e400}', "[" * 9999]
)
def test_a_summary_that_is_none(tmp_path, summary):
    prefix = write_corpus(tmp_path / "corpus", [[1, 2, 800]])
    prefix.with_suffix(".json").write_text(summary.replace("%d", "3"))
    with pytest.raises(ValueError, match="token id 800, but the model's vocab_size is 500"):
        corpus.check_vocabulary(str(prefix), corpus.read_index(prefix), 500)


def test_token_ids_that_no_model_has(tmp_path):
    prefix = write_corpus(tmp_path / "corpus", [[1, -7, 8]], "int32")
    with pytest.raises(ValueError, match="token id -7, but"):
        corpus.check_vocabulary(str(prefix), corpus.read_index(prefix), 500)
    with pytest.raises(ValueError, match="token id 500, but"):
        collate_fn([{"text": np.array([3, 500, 2])}], vocab_size=500)


def test_an_empty_corpus(tmp_path):
    prefix = write_corpus(tmp_path / "corpus", [])
    index = corpus.read_index(prefix)
    assert index.bytes == 0 and corpus.check_vocabulary(prefix, index, 1) is None
