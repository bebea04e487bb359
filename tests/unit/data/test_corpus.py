"""A corpus that is read as it was written, and refused where it is damaged."""

import struct

import numpy as np
import pytest
from paddlenlp.data.indexed_dataset import MMapIndexedDataset

from paddle_te.data import corpus
from tests.small_corpora import write_corpus


@pytest.fixture
def documents(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 900, rng.integers(1, 50)).tolist() for _ in range(40)]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_it_is_read_as_by_paddlenlp(tmp_path, documents, dtype):
    prefix = write_corpus(tmp_path / "corpus", documents, dtype)
    index, theirs = corpus.read_index(prefix), MMapIndexedDataset(str(prefix), skip_warmup=True)
    corpus.check_index(prefix, index)
    assert index.dtype == dtype and index.sizes.tolist() == theirs.sizes.tolist()
    assert index.documents.tolist() == theirs.doc_idx.tolist()
    assert [theirs[i].tolist() for i in range(40)] == documents, "what is written here is what PaddleNLP reads"
    corpus.check_vocabulary(prefix, index, 900)
    with pytest.raises(ValueError, match="corpus.bin has token id .* another tokenizer"):
        corpus.check_vocabulary(prefix, index, max(map(max, documents)))


def damaged(prefix, position, form, value):
    data = bytearray(prefix.with_suffix(".idx").read_bytes())
    struct.pack_into(form, data, position, value)
    prefix.with_suffix(".idx").write_bytes(data)


SIZES, POINTERS, DOCUMENTS = 34, 34 + 4 * 40, 34 + 12 * 40


@pytest.mark.parametrize(
    "position, form, value, said",
    [
        (0, "<B", 0, "it does not begin as one"),
        (9, "<Q", 2, "version 2"),
        (17, "<B", 7, "type of token ids 7"),
        (18, "<Q", 2**63, "bytes, and"),
        (26, "<Q", 39, "bytes, and"),
        (SIZES, "<i", -5, "a size below 0"),
        (SIZES + 4, "<i", 10**6, "entries that do not follow each other"),
        (SIZES + 4 * 39, "<i", 10**6, "corpus.bin has .* bytes where its .idx says"),
        (POINTERS + 8, "<q", 1, "entries that do not follow each other"),
        (POINTERS + 8 * 39, "<q", 2**60, "corpus.bin has .* bytes where its .idx says"),
        (DOCUMENTS + 8 * 3, "<q", 1000, "documents out of order"),
        (DOCUMENTS, "<q", 3, "documents out of order"),
        (DOCUMENTS + 8 * 40, "<q", 39, "documents out of order"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, documents, position, form, value, said):
    prefix = write_corpus(tmp_path / "corpus", documents)
    damaged(prefix, position, form, value)
    with pytest.raises(ValueError, match=said) as error:
        corpus.check_index(prefix, corpus.read_index(prefix))
    assert "\n" not in str(error.value)


def test_an_empty_corpus(tmp_path):
    prefix = write_corpus(tmp_path / "corpus", [])
    index = corpus.read_index(prefix)
    corpus.check_index(prefix, index)
    assert index.bytes == 0 and corpus.check_vocabulary(prefix, index, 1) is None
