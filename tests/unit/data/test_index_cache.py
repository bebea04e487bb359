"""Orders of samples beside a corpus: only those of this very corpus are used, and none that is damaged."""

import logging
import os
import time

import numpy as np
import pytest
from paddlenlp.data import causal_dataset

from paddle_te.data import index_cache
from paddle_te.hosts.paddlenlp.training import datasets
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


def test_they_are_named_as_by_the_host(corpus, tmp_path):
    data = datasets.find_data(data_arguments(corpus))
    train, valid, _ = create_pretrained_dataset(data_arguments(corpus), run_arguments(tmp_path), None, VOCAB)
    counts = [max(count, 1) for count in datasets.count_samples(run_arguments(tmp_path))]
    made = index_cache.orders_of(causal_dataset, data, counts, 32, 7, "8,1,1")
    assert [order.stem for order in made[:2]] == [train.desc_hash, valid.desc_hash]
    left = {path.name for path in made[0].folder.iterdir()}
    assert left == {path.name for order in made for path in (*order.files(corpus), order.note(corpus))}


@pytest.mark.parametrize("noted", [True, False])
def test_a_smaller_corpus_in_the_old_ones_place(samples, corpus, documents, noted):
    """noted: False for orders that PaddleNLP made by itself."""
    samples()
    if not noted:
        for note in corpus.glob("index-cache/*.json"):
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


def swap(array):
    array[[0, -1]] = array[[-1, 0]]


def beyond(array):
    array.flat[3] += 10**6


def behind(array):
    array.flat[3] = array.flat[2]


@pytest.mark.parametrize("kind", ["doc_idx", "sample_idx", "shuffle_idx"])
@pytest.mark.parametrize("damage", [swap, beyond, behind])
def test_a_damaged_order_is_made_anew(samples, corpus, caplog, kind, damage):
    """Ranges, permutations, samples of another length: what PaddleNLP would read."""
    caplog.set_level(logging.INFO)
    first = samples()
    assert "made anew" not in caplog.text
    whole = {path: path.read_bytes() for path in orders(corpus)}
    for path in corpus.glob(f"index-cache/*_{kind}.npy"):
        array = np.load(path)
        damage(array)
        np.save(path, array)
    assert {path: path.read_bytes() for path in orders(corpus)} != whole
    assert samples() == first and {path: path.read_bytes() for path in orders(corpus)} == whole
    assert f"_{kind}.npy is damaged" in caplog.text


@pytest.mark.parametrize("file", ["_doc_idx.npy", "_sample_idx.npy", "_shuffle_idx.npy", ".dsc", ".json"])
@pytest.mark.parametrize("content", [None, b"", b"\x93NUM", b"{}", b"[" * 9999])
def test_files_that_are_missing_or_none(samples, corpus, caplog, file, content):
    caplog.set_level(logging.INFO)
    first = samples()
    for path in corpus.glob(f"index-cache/*{file}"):
        path.unlink()
        if content is not None and not (file.endswith(".npy") and content[:1] in b"{["):
            path.write_bytes(content)
    assert samples() == first and "the order of samples" in caplog.text


def test_another_runs_order_under_this_ones_name(samples, corpus, tmp_path):
    """As whole as its own, and in another order."""
    first = samples()
    mine = orders(corpus)
    create_pretrained_dataset(data_arguments(corpus), run_arguments(tmp_path, seed=8), None, VOCAB)
    others = [path for path in orders(corpus) if path not in mine]
    for kind in ("doc_idx", "sample_idx", "shuffle_idx"):
        for path, other in zip(
            *([path for path in paths if kind in path.name] for paths in (mine, others)), strict=True
        ):
            path.write_bytes(other.read_bytes())
    assert samples() == first


def test_an_order_that_cannot_be_written(samples, corpus, monkeypatch):
    """The disk is full: PaddleNLP prints a hint and goes on."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(causal_dataset.np, "save", full)
    with pytest.raises(ValueError, match="index-cache: the order of samples cannot be written: .*_doc_idx.npy"):
        samples()
    assert not orders(corpus) and not list(corpus.glob("index-cache/*"))


def test_processes_that_make_the_same_order(samples, corpus):
    """Two jobs begin with a damaged one, one a moment after the other."""
    first = samples()
    path = orders(corpus)[0]
    path.write_bytes(b"")
    making = index_cache._build

    def twice(*args):
        making(*args)
        index_cache._build = making
        assert samples() == first

    index_cache._build = twice
    try:
        assert samples() == first
    finally:
        index_cache._build = making


def test_an_order_beyond_what_the_host_counts(corpus, tmp_path):
    arguments = run_arguments(tmp_path, max_steps=10**9)
    with pytest.raises(ValueError, match="passes over the 160 documents of train, and an order lists at most"):
        create_pretrained_dataset(data_arguments(corpus), arguments, None, VOCAB)


def test_corpora_of_one_name_keep_their_orders_apart(corpus, documents, tmp_path):
    write_corpus(tmp_path / "other" / "corpus", documents[::-1])
    both = f"1 {corpus / 'corpus'} 1 {tmp_path / 'other' / 'corpus'}"
    read = [
        [sample["text"].tolist() for sample in create_pretrained_dataset(arguments, run_arguments(tmp_path))[0]]
        for arguments in (data_arguments(both, data_cache=str(tmp_path / "cache")), data_arguments(both))
    ]
    assert read[0] == read[1] and len(list((tmp_path / "cache").iterdir())) == 2


def test_a_cache_that_cannot_be_made(corpus, tmp_path):
    (tmp_path / "file").touch()
    arguments = data_arguments(corpus, data_cache=str(tmp_path / "file"))
    with pytest.raises(ValueError, match="cannot be kept in .*file: "):
        create_pretrained_dataset(arguments, run_arguments(tmp_path))


def test_a_stale_order_that_cannot_be_removed(samples, corpus, documents, monkeypatch):
    samples()
    write_corpus(corpus / "corpus", documents[:60])

    def refuse(path, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(index_cache.Path, "unlink", refuse)
    with pytest.raises(ValueError, match="have changed since; it cannot be removed"):
        samples()


def test_an_order_that_another_process_made_elsewhere(corpus, tmp_path):
    order = index_cache.Order(str(corpus / "corpus"), "train", 1, 2, 3, "1,0,0", (0, 9))
    with pytest.raises(ValueError, match="there is no order of samples .* which another process has made"):
        index_cache.await_orders([order], seconds=0)
