"""Evaluation against a computation of its own: one sequence at a time, unpadded, in numpy float64."""

import math
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddlenlp.data import indexed_dataset

from paddle_te.hosts.paddlenlp.evaluation import tasks
from paddle_te.hosts.paddlenlp.evaluation.tasks import Request, Scorer
from paddle_te.hosts.paddlenlp.generation import generate_text
from paddle_te.hosts.paddlenlp.loading import load_model
from tests.small_checkpoints import VOCABULARY, random_words, save_models, save_tokenizer, write_lines


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"), seed=0)


@pytest.fixture(params=["none", "paddle"])
def model(request, folders):
    return load_model(folders[request.param], request.param)


def logprobs(model, tokens):
    """log p of each token but the first, and whether it is the likeliest."""
    logits = model(paddle.to_tensor([tokens[:-1]]))
    logits = (logits[0] if isinstance(logits, tuple) else logits)[0].numpy().astype("float64")
    logits -= np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) + logits.max(
        -1, keepdims=True
    )
    targets = np.array(tokens[1:])
    return logits[np.arange(len(targets)), targets], logits.argmax(-1) == targets


def scorer(model, length=32, **settings):
    return Scorer(model, length, progress=False, **settings)


@pytest.mark.parametrize("batch_size, multiple", [(1, 1), (3, 16), (8, 8)])
def test_likelihoods(model, seed, batch_size, multiple):
    generator = np.random.default_rng(seed)
    requests = []
    for _ in range(7):
        context, continuation = (generator.integers(0, VOCABULARY, n).tolist() for n in generator.integers(1, 12, 2))
        best, _ = max(enumerate(logits_after(model, context)), key=lambda pair: pair[1])
        requests.append(Request(context, [best] if generator.random() < 0.5 else continuation))
    got = scorer(model, batch_size=batch_size, pad_to_multiple_of=multiple)(requests)
    for request, answer in zip(requests, got, strict=True):
        each, likeliest = logprobs(model, request.context + request.continuation)
        n = len(request.continuation)
        assert answer.logprob == pytest.approx(each[-n:].sum(), rel=1e-5)
        assert answer.is_greedy == likeliest[-n:].all()


def logits_after(model, context):
    logits = model(paddle.to_tensor([context]))
    return (logits[0] if isinstance(logits, tuple) else logits)[0, -1].tolist()


def test_of_long_requests_the_end_is_seen(model, seed):
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, 50).tolist()
    ask = scorer(model, length=32)
    context_cut, all_cut = ask([Request(tokens[:45], tokens[45:]), Request(tokens[:5], tokens[5:])])
    each, _ = logprobs(model, tokens[-33:])
    assert context_cut.logprob == pytest.approx(each[-5:].sum(), rel=1e-5)
    assert all_cut.logprob == pytest.approx(each.sum(), rel=1e-5)
    assert ask.truncated == 2


@pytest.mark.parametrize("count", [0, 1, 2, 8, 9, 10, 30])
def test_windows_ask_for_every_token_once(count):
    requests = list(tasks.windows(list(range(count)), 8))
    assert [token for request in requests for token in request.continuation] == list(range(1, count))
    for request in requests:
        whole = request.context + request.continuation
        assert whole == list(range(whole[0], whole[-1] + 1)) and len(request.continuation) <= 8
        assert len(whole) == min(9, count), "all windows of a long text are of one length, the last one by its context"


def harness_windows(tokens, begin, length):
    """What lm-evaluation-harness asks of a document: [(context, continuation)], in its terms (lm_eval/utils.py)."""
    asked = [([begin], tokens[:length])]
    for first in range(length, len(tokens), length):
        last = min(first + length, len(tokens))
        asked.append((tokens[last - length - 1 : first], tokens[first:last]))
    return asked


@pytest.mark.parametrize("count", [1, 5, 8, 9, 16, 21])
def test_windows_are_the_harnesss(count, seed):
    tokens = np.random.default_rng(seed).integers(0, 1000, count).tolist()
    requests = tasks.windows([7, *tokens], 8)
    assert [(request.context, request.continuation) for request in requests] == harness_windows(tokens, 7, 8)


def test_perplexity_of_documents(model, tokenizer, tmp_path, seed):
    generator = np.random.default_rng(seed)
    texts = [random_words(generator, n) for n in (3, 40, 11)]
    texts[0] = f" {texts[0]}\n"  # what stands before and behind the spaces counts as a word in the harness
    path = write_lines(tmp_path / "docs.jsonl", [{"text": text} for text in texts])
    got = tasks.perplexity_of_documents(scorer(model), tokenizer, tasks.read_documents(path))
    nats = tokens = 0
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        for context, continuation in harness_windows(ids[1:], ids[0], 32):
            each, _ = logprobs(model, context + continuation)
            nats, tokens = nats - each[-len(continuation) :].sum(), tokens + len(continuation)
    assert got["tokens"] == tokens and got["documents"] == 3
    assert got["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert got["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert got["word_perplexity"] == pytest.approx(math.exp(min(nats / 56, 700)), rel=1e-3)
    assert got["bits_per_byte"] == pytest.approx(nats / math.log(2) / sum(map(len, texts)), rel=1e-5)


def test_perplexity_of_a_corpus(model, tmp_path, seed):
    generator = np.random.default_rng(seed)
    documents = [generator.integers(0, VOCABULARY, n) for n in (20, 3, 60)]
    builder = indexed_dataset.make_builder(str(tmp_path / "c.bin"), "mmap", np.uint16)
    for document in documents:
        builder.add_item(paddle.to_tensor(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "c.idx"))
    tokens = np.concatenate(documents).tolist()
    asked = harness_windows(tokens[1:], tokens[0], 32)
    each = np.concatenate([logprobs(model, before + after)[0][-len(after) :] for before, after in asked])
    for name in ("c", "c.bin"):
        got = tasks.perplexity_of_corpus(scorer(model), tasks.open_corpus(tmp_path / name))
        assert got["tokens"] == 82 and got["loss"] == pytest.approx(-each.mean(), rel=1e-5)
    with pytest.raises(ValueError, match="there is no such file, and no .*none.bin; give JSON lines"):
        tasks.open_corpus(tmp_path / "none")
    first = tasks.perplexity_of_corpus(scorer(model), tasks.open_corpus(tmp_path / "c"), limit=1)
    assert first["tokens"] == 32 and first["loss"] == pytest.approx(-each[:32].mean(), rel=1e-5)


class Bigrams:
    """A model whose logits depend on the last token only."""

    config = SimpleNamespace(vocab_size=VOCABULARY)

    def __init__(self, seed):
        self.table = np.random.default_rng(seed).standard_normal([VOCABULARY, VOCABULARY]) * 3

    def __call__(self, ids):
        return paddle.to_tensor(self.table.astype("float32"))[ids]

    def logprob(self, before, after):
        """Of the tokens `after`, which follow `before`."""
        tokens = [*before[-1:], *after]
        table = self.table - np.log(np.exp(self.table).sum(-1, keepdims=True))
        return sum(table[a, b] for a, b in zip(tokens, tokens[1:], strict=False))


def split(tokenizer, context, choice):
    """Tokens of the choice after its context, for texts that do not merge into one token."""
    whole, before = tokenizer(context + choice)["input_ids"], tokenizer(context)["input_ids"]
    assert whole[: len(before)] == before
    return before, whole[len(before) :]


def test_boolq_by_hand(tokenizer, tmp_path, seed):
    generator, model = np.random.default_rng(seed), Bigrams(seed)
    records, right = [], []
    for i in range(12):
        passage, question = random_words(generator, 9), random_words(generator, 4)
        records.append({"passage": passage, "question": question + "?" * (i % 2), "answer": bool(i % 3)})
        context = f"{passage}\nQuestion: {question}?\nAnswer:"
        no, yes = (model.logprob(*split(tokenizer, context, choice)) for choice in (" no", " yes"))
        right.append((yes > no) == bool(i % 3))
    path = write_lines(tmp_path / "b.jsonl", records)
    got = tasks.evaluate_task(scorer(model, 256), tokenizer, "boolq", tasks.read_examples("boolq", path))
    assert got["examples"] == 12 and got["accuracy"] == pytest.approx(np.mean(right))
    assert got["accuracy_stderr"] == pytest.approx(np.std(right, ddof=1) / 12**0.5)
    first = tasks.read_examples("boolq", path, limit=1)
    assert tasks.evaluate_task(scorer(model, 256), tokenizer, "boolq", first)["accuracy"] == right[0]


def test_lambada_by_hand(tokenizer, tmp_path, seed):
    generator, model = np.random.default_rng(seed), Bigrams(seed)
    texts = [random_words(generator, 6) for _ in range(5)]
    nats, greedy = [], []
    for text in texts:
        context, word = text.rsplit(" ", 1)
        before, after = split(tokenizer, context, " " + word)
        if text is texts[0]:  # one that greedy decoding finds
            for a, b in zip([before[-1], *after], after, strict=False):
                model.table[a] = -5.0
                model.table[a, b] = 5.0
    for text in texts:
        before, after = split(tokenizer, *((c := text.rsplit(" ", 1))[0], " " + c[1]))
        nats.append(-model.logprob(before, after))
        greedy.append(all(model.table[a].argmax() == b for a, b in zip([before[-1], *after], after, strict=False)))
    path = write_lines(tmp_path / "l.jsonl", [{"text": text} for text in texts])
    got = tasks.evaluate_task(scorer(model, 256), tokenizer, "lambada", tasks.read_examples("lambada", path))
    assert got["accuracy"] == pytest.approx(np.mean(greedy))
    assert got["perplexity"] == pytest.approx(math.exp(np.mean(nats)), rel=1e-4)


def test_multiple_choice_by_hand(tokenizer, tmp_path, seed):
    generator, model = np.random.default_rng(seed), Bigrams(seed)
    records, plain, normed = [], [], []
    for i in range(10):
        query, choices = random_words(generator, 5), [random_words(generator, n) for n in (1, 2, 4)]
        records.append({"query": query, "choices": choices, "gold": i % 3})
        each = np.array([model.logprob(*split(tokenizer, query, " " + choice)) for choice in choices])
        plain.append(each.argmax() == i % 3)
        normed.append((each / [len(choice) for choice in choices]).argmax() == i % 3)
    path = write_lines(tmp_path / "m.jsonl", records)
    examples = tasks.read_examples("multiple_choice", path)
    got = tasks.evaluate_task(scorer(model, 256), tokenizer, "multiple_choice", examples)
    assert (got["accuracy"], got["accuracy_norm"]) == pytest.approx((np.mean(plain), np.mean(normed)))


@pytest.mark.parametrize(
    "task, record, message",
    [
        ("boolq", {"passage": "p", "answer": True}, '"question"'),
        ("boolq", {"passage": "p", "question": "q", "answer": "yes"}, '"answer"'),
        ("boolq", {"passage": "p", "question": "q", "label": 2}, "0 or 1"),
        ("lambada", {"text": "word"}, "two words"),
        ("multiple_choice", {"query": "q", "choices": ["a"], "gold": 0}, "two texts"),
        ("multiple_choice", {"query": "q", "choices": ["a", "b"], "gold": 2}, '"gold" is 2'),
    ],
)
def test_an_unfit_record_is_named(tokenizer, tmp_path, task, record, message):
    good = {
        "boolq": {"passage": "p", "question": "q", "answer": True},
        "lambada": {"text": "two words"},
        "multiple_choice": {"query": "q", "choices": ["a", "b"], "gold": 1},
    }[task]
    path = write_lines(tmp_path / "x.jsonl", [good, record])
    with pytest.raises(ValueError, match=message) as error:
        tasks.read_examples(task, path)
    assert f"{path}:2" in str(error.value)


@pytest.mark.parametrize("text, message", [("", "no records"), ("{\n", "x.jsonl:1: is not JSON"), ("[1]\n", "object")])
def test_an_unfit_file_is_named(tokenizer, tmp_path, text, message):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        tasks.read_examples("lambada", tmp_path / "x.jsonl")


def test_a_tokenizer_of_another_model_is_refused(model, tokenizer):
    with pytest.raises(ValueError, match=f"token id {VOCABULARY}, but the model's vocab_size is {VOCABULARY}"):
        Scorer(model, 32, progress=False)([Request([1], [2]), Request([1], [VOCABULARY])])
    model.config.vocab_size = 8
    with pytest.raises(ValueError, match="the tokenizer is another model's"):
        generate_text(model, tokenizer, ["a longer text of several words"])
