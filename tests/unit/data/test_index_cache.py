"""Orders of samples beside a corpus: only those of this very corpus are used, and none that is damaged."""

import os
import time

import pytest

from paddle_te.data import index_cache
from paddle_te.hosts.paddlenlp.training.datasets import create_pretrained_dataset
from tests.unit.hosts.paddlenlp.training.test_datasets import (
    VOCAB,
    corpus,
    data_arguments,
    documents,
    run_arguments,
    write_corpus,
)

__all__ = ["corpus", "documents"]  # fixtures


@pytest.fixture
def samples(corpus, tmp_path):
    """samples() reads all training samples of the corpus through PaddleNLP."""

    def read():
        train, *_ = create_pretrained_dataset(data_arguments(corpus), run_arguments(tmp_path), None, VOCAB)
        return [sample["text"].tolist() for sample in train]

    return read


def orders(corpus):
    return sorted(corpus.glob("index-cache/*.npy"))


def older(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def test_orders_of_the_same_corpus_stay(samples, corpus):
    first = samples()
    times = [path.stat().st_mtime_ns for path in orders(corpus)]
    assert samples() == first and times and [path.stat().st_mtime_ns for path in orders(corpus)] == times


@pytest.mark.parametrize("noted", [True, False])
def test_a_smaller_corpus_in_the_old_ones_place(samples, corpus, documents, noted):
    """noted: False for orders from before there was a note of their corpus."""
    samples()
    if not noted:
        (note,) = corpus.glob("index-cache/*.corpus.json")
        note.unlink()
    write_corpus(corpus / "corpus", documents[:60])
    fresh = samples()
    for path in orders(corpus):
        path.unlink()
    assert fresh == samples()


def test_another_corpus_that_is_older_than_the_first(samples, corpus, documents):
    """Moved there, with its own times."""
    first = samples()
    write_corpus(corpus / "corpus", documents[::-1])
    for suffix in ".bin", ".idx":
        older(corpus / f"corpus{suffix}", 3600)
    second = samples()
    for path in orders(corpus):
        path.unlink()
    assert second == samples() != first


def test_a_damaged_order_is_made_anew(samples, corpus):
    first = samples()
    for path in orders(corpus):
        path.write_bytes(path.read_bytes()[:-8])
        older(path, index_cache.BEING_WRITTEN + 1)
    assert samples() == first


def test_another_jobs_order_that_is_being_written_stays(samples, corpus):
    samples()
    path = orders(corpus)[0]
    path.write_bytes(path.read_bytes()[:-8])
    index_cache.refresh(corpus / "corpus")
    assert path.exists()


def test_a_stale_order_that_cannot_be_removed(samples, corpus, documents, monkeypatch):
    samples()
    write_corpus(corpus / "corpus", documents[:60])

    def refuse(path, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(index_cache.Path, "unlink", refuse)
    with pytest.raises(ValueError, match="have changed since; it cannot be removed"):
        samples()
