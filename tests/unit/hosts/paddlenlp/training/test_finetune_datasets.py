"""Data of fine-tuning: samples by hand, padding, and packed samples that do not see each other."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_te.data.tokenizer import load_tokenizer
from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.hosts.paddlenlp.training import finetune_datasets as data
from paddle_te.hosts.paddlenlp.training.finetune_datasets import IGNORED, Collator, FinetuneDataArguments
from paddle_te.hosts.paddlenlp.training.packing import needs_mask
from tests import chats
from tests.small_checkpoints import random_words, save_tokenizer, write_lines
from tests.te_weights import relative
from tests.unit.hosts.paddlenlp.native import tiny_config

TRANSFORMERS = json.loads(
    (Path(chats.__file__).parent / "unit/data/transformers.json").read_text()
)  # see tests/chats.py


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def arguments(**settings):
    return FinetuneDataArguments(**dict(src_length=40, max_length=64) | settings)


def make(tmp_path, tokenizer, records, **settings):
    path = write_lines(tmp_path / "train.json", records)
    return data.create_dataset([path], tokenizer, None, arguments(**settings))


def random_records(seed, count):
    generator = np.random.default_rng(seed)
    return [{"src": random_words(generator, n % 4 + 1), "tgt": random_words(generator, 1)} for n in range(count)]


def test_a_sample_is_source_answer_and_end(tokenizer, tmp_path):
    (sample,) = make(tmp_path, tokenizer, [{"src": "what is it", "tgt": "a list"}])
    source = tokenizer("what is it")["input_ids"]
    answer = tokenizer("a list")["input_ids"][1:]  # without begin-of-text
    assert source[0] == tokenizer.bos_token_id
    whole = source + answer + [tokenizer.eos_token_id]
    assert sample["input_ids"].tolist() == whole[:-1]
    assert sample["labels"].tolist() == [IGNORED] * (len(source) - 1) + answer + [tokenizer.eos_token_id]
    (same,) = make(tmp_path, tokenizer, [{"src": ["what is it"], "tgt": ["a list"]}])
    assert all(same[name].tolist() == sample[name].tolist() for name in sample)


def test_long_texts_are_cut(tokenizer, tmp_path, seed):
    generator = np.random.default_rng(seed)
    record = {"src": random_words(generator, 90), "tgt": random_words(generator, 90)}
    (sample,) = make(tmp_path, tokenizer, [record])
    source, answer = (tokenizer(record[name])["input_ids"] for name in ("src", "tgt"))
    assert len(sample["input_ids"]) == len(sample["labels"]) == 63
    assert sample["input_ids"][:40].tolist() == source[:1] + source[-39:]  # begin-of-text and the end
    assert sample["labels"].tolist() == [IGNORED] * 39 + answer[1:25]


@pytest.mark.parametrize("form", ["MARKED", "PLAIN"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_samples_of_chats_are_those_of_transformers(tmp_path, name, form):
    """From the folders of a tokenizer and of data to the rows of a packed batch."""
    tokenizer = load_tokenizer(chats.save_tokenizer(tmp_path / "tokenizer", getattr(chats, form)[name]))
    cases = TRANSFORMERS[name]
    write_lines(tmp_path / "train.jsonl", [chats.CONVERSATIONS[called] for called in cases])
    flags = arguments(dataset_name_or_path=str(tmp_path), max_length=2048, zero_padding=True)
    template = data.chat_template(flags, tokenizer, tmp_path)
    (packed,), none = data.create_datasets(flags, tokenizer, template, do_train=True, do_eval=False)
    batch = Collator(flags, masked=True)([packed])
    begin = 0
    for (ids, mask), length in zip(cases.values(), packed["lengths"], strict=True):
        labels = [token if int(bit) else IGNORED for token, bit in zip(ids, mask, strict=True)]
        rows = slice(begin, begin := begin + length)
        assert batch["input_ids"][0, rows].tolist() == ids[:-1]
        assert batch["labels"][0, rows].tolist() == labels[1:]
        assert batch["position_ids"][0, rows].tolist() == list(range(length))
    assert none is None and set(batch["labels"][0, begin:].tolist()) <= {IGNORED}


@pytest.mark.parametrize(
    "record, message",
    [
        ({"src": "a"}, '"tgt"'),
        ({"src": "a", "tgt": 3}, '"tgt"'),
        ({"src": "a", "tgt": " "}, '"tgt" is empty'),
        ({"src": ["a", "b"], "tgt": ["c", "d"]}, "no chat template.*--chat_template"),
        ({"messages": chats.turns("a", "b")}, "no chat template.*--chat_template"),
    ],
)
def test_unfit_records_are_named(tokenizer, tmp_path, record, message):
    with pytest.raises(ValueError, match=message) as error:
        make(tmp_path, tokenizer, [{"src": "a", "tgt": "b"}, record])
    assert "train.json:2" in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [dict(src_length=64), dict(src_length=0), dict(pad_to_multiple_of=48), dict(greedy_zero_padding=True)],
)
def test_unfit_arguments_are_refused(settings):
    with pytest.raises(ValueError, match=f"--{next(iter(settings))}"):
        arguments(**settings)


def test_batches_are_padded_on_the_right(tokenizer, tmp_path, seed):
    dataset = make(tmp_path, tokenizer, random_records(seed, 6))
    longest = max(len(sample["input_ids"]) for sample in dataset)
    for settings, length in (({}, -(-longest // 16) * 16), (dict(pad_to_max_length=True), 64)):
        batch = Collator(arguments(**settings), pad_token_id=7)(list(dataset))
        assert set(batch) == {"input_ids", "labels"} and batch["input_ids"].shape == (6, length)
        for i, sample in enumerate(dataset):
            n = len(sample["input_ids"])
            assert batch["input_ids"][i].tolist() == sample["input_ids"].tolist() + [7] * (length - n)
            assert batch["labels"][i].tolist() == sample["labels"].tolist() + [IGNORED] * (length - n)
    total = sum(len(sample["input_ids"]) for sample in dataset)
    assert data.tokens_per_sample(dataset) == pytest.approx(total / 6)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("backend", ["none", "paddle"])
def test_packed_samples_do_not_see_each_other(tokenizer, tmp_path, seed, backend, greedy):
    """Logits and the summed loss of packed samples are those of each sample alone."""
    paddle.seed(seed)
    config = tiny_config(vocab_size=400, initializer_range=0.2, transformer_engine_backend=backend)
    model = model_class(config)(config)
    records = random_records(seed, 9)
    alone = list(make(tmp_path, tokenizer, records))
    packed = make(tmp_path, tokenizer, records, zero_padding=True, greedy_zero_padding=greedy)
    assert len(packed) < len(alone)
    batch = Collator(arguments(zero_padding=True), needs_mask(config))(list(packed))
    assert ("attention_mask" in batch) == (backend == "none") and batch["input_ids"].shape[1] <= 64
    tensors = {name: paddle.to_tensor(value) for name, value in batch.items()}
    labels = tensors.pop("labels")
    logits = model(**tensors)[0]
    found = {}
    for row, positions in enumerate(batch["position_ids"].tolist()):
        ends = [i for i, p in enumerate(positions) if p == 0] + [len(positions)]
        for start, end in zip(ends, ends[1:], strict=False):
            tokens = batch["input_ids"][row, start:end].tolist()
            found[tuple(tokens)] = logits[row, start:end]
    seen = 0
    for sample in alone:
        tokens = sample["input_ids"].tolist()
        want = model(paddle.to_tensor([tokens]))[0][0]
        got = next(value for key, value in found.items() if list(key[: len(tokens)]) == tokens)
        assert relative(got[: len(tokens)], want) < 1e-5
        seen += sum(label != IGNORED for label in sample["labels"])
    assert (labels != IGNORED).sum().item() == seen
