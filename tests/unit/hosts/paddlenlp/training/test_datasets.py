"""training.datasets: PaddleNLP's own samples in the form its criterion takes; the mock; every error."""

import io
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from paddlenlp.data.indexed_dataset import make_builder
from paddlenlp.trainer import PdArgumentParser

from paddle_te.hosts.paddlenlp.training import datasets
from paddle_te.hosts.paddlenlp.training.datasets import (
    DataArguments,
    MockDataset,
    collate_fn,
    create_pretrained_dataset,
)
from tests.unit.runs.hostile import assert_it_works, hostile_pickle

VOCAB = 1000


def write_corpus(prefix, documents, dtype=np.uint16):
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = make_builder(f"{prefix}.bin", "mmap", dtype)
    for document in documents:
        builder.add_item(document)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def run_arguments(output_dir, **changes):
    """As PaddleNLP's TrainingArguments, of which only these are read."""
    arguments = dict(
        do_train=True, do_eval=True, do_predict=False, max_steps=6, eval_steps=3, eval_iters=2,
        per_device_train_batch_size=3, per_device_eval_batch_size=2, gradient_accumulation_steps=2,
        dataset_world_size=2, seed=7, data_seed=None, should_load_dataset=True, output_dir=str(output_dir),
    )  # fmt: skip
    return SimpleNamespace(**arguments | changes)


@pytest.fixture
def documents(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB - 1, rng.integers(1, 120)).tolist() + [2] for _ in range(200)]


@pytest.fixture
def corpus(tmp_path, documents):
    write_corpus(tmp_path / "data" / "corpus", documents)
    return tmp_path / "data"


def data_arguments(corpus, **changes):
    return DataArguments(**dict(input_dir=str(corpus), split="8,1,1", max_seq_length=32) | changes)


def test_passes_are_those_that_paddlenlp_shuffles_together(corpus, tmp_path, seed):
    """The same text, the same order of the samples that both have; another text, another order."""
    arguments, found = data_arguments(corpus), {}
    for samples in (1, 30, 250, 400, 410, 420, 500, 640, 700, 900):
        text = datasets.passes(datasets.find_data(arguments), arguments, samples)
        train, *_ = create_pretrained_dataset(arguments, run_arguments(tmp_path), None, VOCAB, samples)
        epochs = sum(np.bincount(train.doc_idx)) // len(np.unique(train.doc_idx))
        assert text.startswith(f"{epochs} pass"), (samples, text)
        first = train.shuffle_idx[: len(train)].tolist()
        assert found.setdefault(text, (first, train.doc_idx.tolist())) == (first, train.doc_idx.tolist())
    assert len(found) > 3 and len({repr(order) for order in found.values()}) == len(found)


def test_samples_are_the_corpus(corpus, documents, tmp_path):
    """One epoch holds each token of the split's documents once; labels are the tokens that follow."""
    stream_of = {tuple(document): i for i, document in enumerate(documents)}
    arguments = run_arguments(tmp_path, max_steps=1)
    train, valid, test = create_pretrained_dataset(data_arguments(corpus), arguments, vocab_size=VOCAB)
    for dataset, part in ((train, documents[:160]), (valid, documents[160:180])):
        order = [documents[i] for i in dataset.doc_idx[: len(part)]]
        assert sorted(stream_of[tuple(d)] for d in order) == sorted(stream_of[tuple(d)] for d in part)
        stream = sum(order, [])
        for place, source in list(enumerate(dataset.shuffle_idx))[: (len(stream) - 1) // 32]:
            batch = collate_fn([dataset[place]])
            expected = stream[32 * source : 32 * source + 33] if 32 * source + 33 <= len(stream) else None
            if expected:
                assert batch["input_ids"][0].tolist() == expected[:-1] and batch["labels"][0].tolist() == expected[1:]


def test_hostile_indices_are_refused_and_not_run(corpus, tmp_path):
    """PaddleNLP loads its indices, which lie beside the data, with allow_pickle."""
    assert_it_works(tmp_path)
    make = lambda: create_pretrained_dataset(data_arguments(corpus), run_arguments(tmp_path), vocab_size=VOCAB)  # noqa: E731
    make()
    indices = sorted((corpus / "index-cache").glob("*.npy"))
    kinds = {path.name.rpartition("_")[0].rpartition("_")[2]: path for path in indices}
    assert {"doc", "sample", "shuffle"} == kinds.keys()
    objects = io.BytesIO()
    np.save(objects, np.array([SimpleNamespace()]), allow_pickle=True)
    payload = hostile_pickle(tmp_path / "ran")
    hostile = {"sample": payload, "shuffle": objects.getvalue().partition(b"\n")[0] + b"\n" + payload}
    for kind, content in hostile.items():
        good = kinds[kind].read_bytes()
        kinds[kind].write_bytes(content)
        with pytest.raises(ValueError, match=f"{kinds[kind].name} is no array of numbers, and was not loaded"):
            make()
        kinds[kind].write_bytes(good)
    assert not (tmp_path / "ran").exists()


def test_an_older_form_of_data_beside_the_corpus_is_not_taken_instead(corpus, tmp_path):
    (corpus / "corpus_ids.npy").write_bytes(hostile_pickle(tmp_path / "ran"))
    with pytest.raises(ValueError, match="corpus_ids.npy is data of an older form"):
        create_pretrained_dataset(data_arguments(corpus), run_arguments(tmp_path), vocab_size=VOCAB)


def test_what_tells_data_from_other_data(corpus, tmp_path, documents):
    arguments = data_arguments(corpus)
    identity = datasets.data_identity(arguments, 7)
    assert datasets.data_identity(arguments, 7) == identity
    others = [datasets.data_identity(arguments, 8)]
    for changes in (
        dict(split="7,2,1"),
        dict(reset_attention_mask=True),
        dict(reset_position_ids=True),
        dict(eod_mask_loss=True),
    ):
        others.append(datasets.data_identity(data_arguments(corpus, **changes), 7))
    documents[5][0] += 1
    write_corpus(corpus / "corpus", documents)
    others += [datasets.data_identity(arguments, 7)]
    assert all(other != identity for other in others)


def test_collate(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (5, 9))
    batch = collate_fn([{"text": row} for row in tokens])
    assert {key: (value.shape, value.dtype) for key, value in batch.items()} == {
        "input_ids": ((5, 8), np.int64),
        "labels": ((5, 8), np.int64),
    }
    np.testing.assert_array_equal(batch["input_ids"], tokens[:, :-1])
    np.testing.assert_array_equal(batch["labels"], tokens[:, 1:])


def test_criterion_takes_labels_as_they_are(tiny_config):
    """PaddleNLP's criterion does not shift: a model that predicts labels[i] at place i has no loss."""
    import paddle
    from paddlenlp.transformers.llama.modeling import LlamaPretrainingCriterion

    config = tiny_config()
    batch = collate_fn([MockDataset(1, 16, config.vocab_size, 1)[0]])
    labels = paddle.to_tensor(batch["labels"])
    logits = 50.0 * paddle.nn.functional.one_hot(labels, config.vocab_size)
    assert float(LlamaPretrainingCriterion(config)(logits, labels)) < 1e-6


@pytest.mark.parametrize("mock", [False, True])
def test_sample_counts(mock, corpus, tmp_path):
    """PaddleNLP's: train = batch x ranks x steps x accumulation; evaluation each eval_steps and once at the end."""
    arguments = run_arguments(tmp_path, do_predict=True, test_iters=5)
    counts = [3 * 2 * 6 * 2, 2 * 2 * 2 * (6 // 3 + 1), 2 * 2 * 5]
    assert datasets.count_samples(arguments) == counts
    assert datasets.count_samples(run_arguments(tmp_path, do_eval=False, eval_steps=None)) == [counts[0], 0, 0]
    built = create_pretrained_dataset(data_arguments(corpus, mock_data=mock), arguments, vocab_size=VOCAB)
    for dataset, count in zip(built, counts, strict=True):
        assert len(dataset) == count if mock else len(dataset) >= count
        assert dataset[count - 1]["text"].shape == (33,)


def test_same_data_every_time(corpus, tmp_path):
    """With the index built anew, from its cache, and in another folder: the same samples; another seed: others."""

    def samples(**changes):
        extra = {key: changes.pop(key) for key in ("data_cache",) if key in changes}
        built = create_pretrained_dataset(data_arguments(corpus, **extra), run_arguments(tmp_path, **changes))
        return [built[0][i]["text"].tolist() for i in range(20)]

    first = samples()
    assert (corpus / "index-cache").is_dir()
    assert samples() == first
    (corpus / "index-cache").rename(tmp_path / "moved")
    assert samples(data_cache=str(tmp_path / "cache")) == first
    assert not (corpus / "index-cache").exists() and list((tmp_path / "cache").rglob("*.npy"))
    assert samples(seed=8) != first


def test_cache_elsewhere_knows_the_data(corpus, documents, tmp_path):
    """Data that was prepared anew does not meet the older index."""
    arguments = data_arguments(corpus, data_cache=str(tmp_path / "cache"))
    create_pretrained_dataset(arguments, run_arguments(tmp_path))
    write_corpus(corpus / "corpus", documents[:50])
    train, *_ = create_pretrained_dataset(arguments, run_arguments(tmp_path))
    assert max(train.doc_idx) < 50


def test_read_only_data(corpus, tmp_path, monkeypatch):
    """The index goes to the output folder (root may write anywhere, hence the patch)."""
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(corpus)))
    train, *_ = create_pretrained_dataset(data_arguments(corpus), run_arguments(tmp_path / "out"))
    assert len(train[0]["text"]) == 33
    assert list((tmp_path / "out" / "index-cache").rglob("*.npy")) and not (corpus / "index-cache").exists()


def test_blend(corpus, documents, tmp_path):
    """All pairs of a folder with equal weights, in the order of their names; or weights and prefixes."""
    write_corpus(corpus / "a", [[1] * 50] * 100)
    data = data_arguments(corpus)
    assert datasets.find_data(data) == [1.0, str(corpus / "a"), 1.0, str(corpus / "corpus")]
    data = data_arguments(f"3 {corpus / 'a'} 1 {corpus / 'corpus'}")
    train, *_ = create_pretrained_dataset(data, run_arguments(tmp_path), vocab_size=VOCAB)
    from_a = [max(train[i]["text"]) == 1 for i in range(72)]
    assert sum(from_a) == 54


def test_blend_without_documents_of_one(corpus, tmp_path):
    write_corpus(corpus / "few", [[1] * 99] * 9)
    with pytest.raises(ValueError, match="leaves test no document of .*few: give test a larger share, or 0"):
        create_pretrained_dataset(data_arguments(corpus, split="95,0,5"), run_arguments(tmp_path, do_eval=False))
    arguments = run_arguments(tmp_path, do_eval=False)
    train, valid, test = create_pretrained_dataset(data_arguments(corpus, split="1,0,0"), arguments)
    assert len(train) == 72 and valid is None and test is None


def test_rank_that_loads_nothing(tmp_path):
    """Data that only other ranks see is not looked at here."""
    (tmp_path / "data").mkdir()
    for name in ("a.idx", "a.bin"):
        (tmp_path / "data" / name).touch()
    arguments = run_arguments(tmp_path, should_load_dataset=False)
    assert create_pretrained_dataset(data_arguments(tmp_path / "data"), arguments) == (None, None, None)


def test_flags():
    (data,) = PdArgumentParser(DataArguments).parse_args_into_dataclasses(["--mock_data", "true", "--split", "1,1,0"])
    assert (data.mock_data, data.split, data.max_seq_length) == (True, "1,1,0", 1024)


# ------------------------------------------------------------------------------------------------------- mock


def test_mock_depends_on_seed_and_index_only(seed):
    one, two = (MockDataset(10, 16, VOCAB, seed) for _ in range(2))
    backwards = [two[i]["text"] for i in reversed(range(10))][::-1]
    for i in range(10):
        np.testing.assert_array_equal(one[i]["text"], backwards[i])
    assert len({tuple(one[i]["text"]) for i in range(10)}) == 10
    assert (MockDataset(10, 16, VOCAB, seed + 1)[0]["text"] != one[0]["text"]).any()
    with pytest.raises(IndexError):
        one[10]


def test_mock_tokens_fill_the_vocabulary(seed):
    tokens = np.concatenate([MockDataset(50, 99, 7, seed)[i]["text"] for i in range(50)])
    assert tokens.dtype == np.int64 and set(tokens) == set(range(7))


def test_mock_needs_no_data(tmp_path):
    data = DataArguments(mock_data=True, max_seq_length=8)
    train, valid, test = create_pretrained_dataset(data, run_arguments(tmp_path), tokenizer=range(50))
    assert train.vocab_size == 50 and test is None
    assert (train[0]["text"] != valid[0]["text"]).any()
    assert collate_fn([train[0], train[1]])["labels"].shape == (2, 8)
    with pytest.raises(ValueError, match="tokenizer or a vocab_size"):
        create_pretrained_dataset(data, run_arguments(tmp_path))


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(input_dir=None), "input_dir is missing.*prepare-data.*mock_data"),
        (dict(input_dir="nowhere"), "nowhere is no folder"),
        (dict(input_dir="nowhere/a 1 b"), "neither a folder nor positive weights"),
        (dict(input_dir="1 nowhere/a 2"), "neither a folder nor positive weights"),
        (dict(input_dir="1 nowhere/a 2 nowhere/b"), "nowhere/a.bin is missing"),
        (dict(split="9,1"), "--split 9,1: it must be three numbers"),
        (dict(split="9,1,x"), "it must be three numbers"),
        (dict(split="9,-1,1"), "it must be three numbers"),
        (dict(split="0,0,0"), "it must be three numbers"),
        (dict(split="9,nan,1"), "it must be three numbers"),
        (dict(split="9,0,1"), "leaves nothing for valid, which do_eval needs"),
        (dict(max_seq_length=10**6), "too few tokens for one sequence.*train.*needs 1000001"),
        (dict(split="997,2,1", max_seq_length=200), "gives valid .* of 200 documents.*leave out do_eval"),
    ],
)
def test_wrong_arguments(changes, message, corpus, tmp_path):
    with pytest.raises(ValueError, match=message):
        create_pretrained_dataset(data_arguments(corpus, **changes), run_arguments(tmp_path), vocab_size=VOCAB)
    assert not (corpus / "index-cache").exists()


def test_steps_missing(corpus, tmp_path):
    with pytest.raises(ValueError, match="max_steps is -1"):
        create_pretrained_dataset(data_arguments(corpus), run_arguments(tmp_path, max_steps=-1))


def test_empty_folder_and_half_a_pair(tmp_path, corpus):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no .idx file in the folder"):
        create_pretrained_dataset(data_arguments(tmp_path / "empty"), run_arguments(tmp_path))
    (corpus / "corpus.bin").unlink()
    with pytest.raises(ValueError, match="corpus.bin is missing"):
        create_pretrained_dataset(data_arguments(corpus), run_arguments(tmp_path))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # PaddleNLP closes what it never opened
def test_damaged_pair(corpus, tmp_path):
    with open(corpus / "corpus.bin", "ab") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match="corpus.bin has 100 bytes where its .idx says"):
        create_pretrained_dataset(data_arguments(corpus), run_arguments(tmp_path))
    index = corpus / "corpus.idx"
    whole = index.read_bytes()
    for broken in (b"", b"something else", whole[:20], whole[:60]):
        index.write_bytes(broken)
        with pytest.raises(ValueError, match="corpus.idx is no index of token ids, or damaged"):
            create_pretrained_dataset(data_arguments(corpus), run_arguments(tmp_path))


def test_empty_documents(tmp_path):
    """PaddleNLP would count epochs of no tokens for ever, even for a split that the run does not use."""
    write_corpus(tmp_path / "corpus", [[1, 2, 3] * 40] * 9 + [[]])
    with pytest.raises(ValueError, match="all 1 documents of test are empty"):
        create_pretrained_dataset(data_arguments(tmp_path), run_arguments(tmp_path))


@pytest.mark.parametrize("source", ["summary", "stale summary", "tokens"])
def test_token_beyond_the_vocabulary(source, tmp_path):
    write_corpus(tmp_path / "corpus", [[1, 2, 3, 70000] * 20] * 20, np.int32)
    if source != "tokens":
        tokens, largest = (1600, 70000) if source == "summary" else (99, 3)
        (tmp_path / "corpus.json").write_text(json.dumps({"tokens": tokens, "max_token_id": largest}))
    with pytest.raises(ValueError, match="token id 70000, but the model's vocab_size is 70000: .* another tokenizer"):
        create_pretrained_dataset(data_arguments(tmp_path), run_arguments(tmp_path), vocab_size=70000)
    create_pretrained_dataset(data_arguments(tmp_path), run_arguments(tmp_path), vocab_size=70001)


def test_index_builder_missing(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fast_dataindex", None)
    with pytest.raises(ValueError, match="pip install fast_dataindex"):
        create_pretrained_dataset(data_arguments(corpus), run_arguments(tmp_path))
