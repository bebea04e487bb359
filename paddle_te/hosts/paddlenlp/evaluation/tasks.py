"""Zero-shot evaluation by likelihood: perplexity, LAMBADA, BoolQ and other multiple choice.

A model's answer is the continuation that it finds likeliest after the context; prompts, tokenization and metrics are
those of EleutherAI's lm-evaluation-harness (boolq of SuperGLUE, lambada, and its perplexity over rolling windows).
Sequences are padded on the right and need no mask, so every backend runs them.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from numpy.typing import NDArray
from paddle import Tensor
from tqdm import tqdm

from paddle_te.data import corpus
from paddle_te.data.jsonl import field, read_json_lines
from paddle_te.data.questions import IGNORED
from paddle_te.data.samples import Sample
from paddle_te.data.tokenizer import AnyTokenizer
from paddle_te.host import HostModel
from paddle_te.hosts.paddlenlp.loading import check_token_ids
from paddle_te.options import FP8_RECIPES, LayerOptions

Metrics = dict[str, Any]  # {name: number, or None where it is not known}

# --------------------------------------------------------------------------------------------- likelihood of tokens


@dataclass(frozen=True)
class Request:
    """How likely is `continuation` after `context`? Both are lists of token ids, neither is empty."""

    context: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class Likelihood:
    """log p(continuation | context) in nats, and whether each of its tokens was the likeliest one."""

    logprob: float
    is_greedy: bool


class Scorer:
    """Asks a model for likelihoods.

    model: in evaluation mode. max_seq_length: tokens it sees at most; of longer requests it sees the
    end. pad_to_multiple_of: of batches' lengths; None: what fp8 GEMMs take under the model's recipe, in fp8 or not.
    """

    def __init__(
        self,
        model: HostModel,
        max_seq_length: int,
        batch_size: int = 8,
        pad_to_multiple_of: int | None = None,
        progress: bool = True,
    ) -> None:
        self.model, self.max_seq_length, self.batch_size = model, max_seq_length, batch_size
        self.multiple = pad_to_multiple_of or FP8_RECIPES[LayerOptions.of(model.config).fp8_recipe]
        self.progress = progress
        self.truncated = 0

    def __call__(self, requests: Sequence[Request], title: str | None = None) -> list[Likelihood]:
        """Return the requests' Likelihoods. Raise ValueError for one without context or continuation."""
        for request in requests:
            check_token_ids([request.context, request.continuation], self.model.config)
        # the longest first: little padding, and too little memory shows at once
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].context) - len(requests[i].continuation))
        results: dict[int, Likelihood] = {}
        with tqdm(total=len(requests), desc=title, disable=not self.progress) as bar:
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                for i, result in zip(batch, self._score([requests[i] for i in batch]), strict=True):
                    results[i] = result
                bar.update(len(batch))
        return [results[i] for i in range(len(requests))]

    @paddle.no_grad()
    def _score(self, requests: Sequence[Request]) -> list[Likelihood]:
        rows, counts = [], []
        for request in requests:
            if not request.context or not request.continuation:
                raise ValueError(f"a context or a continuation without tokens: {request}")
            tokens = [*request.context, *request.continuation]
            self.truncated += len(tokens) > self.max_seq_length + 1
            rows.append(tokens[-self.max_seq_length - 1 :])
            counts.append(min(len(request.continuation), self.max_seq_length))
        length = -(-max(len(row) - 1 for row in rows) // self.multiple) * self.multiple
        ids = paddle.to_tensor([row[:-1] + [0] * (length - len(row) + 1) for row in rows], dtype="int64")
        return self._answers(ids, rows, counts)

    def _answers(self, ids: Tensor, rows: Sequence[list[int]], counts: Sequence[int]) -> list[Likelihood]:
        """Return the Likelihoods of the rows' last `counts` tokens. ids: the rows but their last tokens, [b, s]."""
        logits = self.model(ids)
        return self._read(logits[0] if isinstance(logits, tuple) else logits, rows, counts)

    @staticmethod
    def _read(logits: Tensor, rows: Sequence[list[int]], counts: Sequence[int]) -> list[Likelihood]:
        return [
            _likelihood(logits[i, len(row) - 1 - count : len(row) - 1], row[-count:])
            for i, (row, count) in enumerate(zip(rows, counts, strict=True))
        ]


def _likelihood(logits: Tensor, tokens: Sequence[int]) -> Likelihood:
    """Return the Likelihood by logits [n, vocabulary], those that predict the n tokens.

    Raises ValueError where they are not finite: Paddle's CPU makes ln(vocabulary) of NaN.
    """
    logits, wanted = logits.astype("float32"), paddle.to_tensor(tokens, dtype="int64")
    if not paddle.isfinite(logits).all():
        raise ValueError(
            "the model's logits are not finite, though its weights are: its numbers are too large for --dtype, or the "
            "weights are damaged"
        )
    logprob = -float(F.cross_entropy(logits, wanted, reduction="sum"))
    return Likelihood(logprob, bool(paddle.equal_all(logits.argmax(-1), wanted)))


# --------------------------------------------------------------------------------------------- perplexity


def windows(tokens: Sequence[int] | NDArray[Any], max_seq_length: int) -> Iterator[Request]:
    """Yield Requests that ask for each token but the first once, in windows of at most max_seq_length predictions.

    Each has one token of context; the last one, if it is shorter, as much as fits (the harness's rolling windows).
    """
    for start in range(0, len(tokens) - 1, max_seq_length):
        end = min(start + max_seq_length, len(tokens) - 1)
        window = [int(token) for token in tokens[max(end - max_seq_length, 0) : end + 1]]
        count = end - start
        yield Request(window[:-count], window[-count:])


def begun(tokenizer: AnyTokenizer, text: str) -> list[int]:
    """Return the tokens of a text after that which begins texts, or which ends them where there is none."""
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    tokens = tokenizer.encode(text)
    return tokens if begin is None or tokens[:1] == [begin] else [begin, *tokens]


def read_documents(path: Path, limit: int | None = None) -> list[str]:
    """Return the texts of JSON lines {"text": …}. Raise ValueError or FileNotFoundError."""
    return [field(where, record, "text", str) for where, record in read_json_lines(path, limit)]


def perplexity_of_documents(scorer: Scorer, tokenizer: AnyTokenizer, documents: Sequence[str]) -> Metrics:
    """Measure texts: each after a begin-of-text token, by itself.

    Returns loss (nats a token), perplexity, word_perplexity, bits_per_byte, tokens, documents.
    """
    requests: list[Request] = []
    for text in documents:
        requests += windows(begun(tokenizer, text), scorer.max_seq_length)
    result = _perplexity(scorer, requests)
    nats = result["loss"] * result["tokens"]
    words = sum(len(re.split(r"\s+", text)) for text in documents)  # the harness's count
    size = sum(len(text.encode()) for text in documents)
    extra = {"word_perplexity": _exp(nats / words), "bits_per_byte": nats / size / math.log(2)}
    return result | extra | {"documents": len(documents)}


def perplexity_of_samples(scorer: Scorer, samples: Sequence[Sample]) -> Metrics:
    """Measure fine-tuning's samples (`data.samples`): the mean over what they train on, as the loss of training.

    Returns loss (nats a token), perplexity, tokens, conversations.
    """
    requests = [request for sample in samples for request in _answers_of(sample)]
    return _perplexity(scorer, requests) | {"conversations": len(samples)}


def _answers_of(sample: Sample) -> Iterator[Request]:
    """Yield a Request for each stretch of tokens that a sample trains on; all before it is context."""
    tokens = [*sample.input_ids.tolist(), int(sample.labels[-1])]
    learned = np.flatnonzero(sample.labels != IGNORED)
    for stretch in np.split(learned, np.flatnonzero(np.diff(learned) > 1) + 1):
        begin, end = int(stretch[0]) + 1, int(stretch[-1]) + 2
        yield Request(tokens[:begin], tokens[begin:end])


def open_corpus(prefix: str | Path) -> NDArray[Any]:
    """Return the token ids of a .bin/.idx pair, its documents one after another. Raise CorpusError."""
    prefix = str(prefix).removesuffix(".bin").removesuffix(".idx")
    if not (Path(f"{prefix}.bin").exists() or Path(f"{prefix}.idx").exists()):
        raise corpus.CorpusError(
            f"--perplexity {prefix}: there is no such file, and no {prefix}.bin; give JSON lines, or the prefix of a "
            "pair that paddle-te prepare-data made"
        )
    corpus.check_files(prefix)
    return corpus.tokens(prefix, corpus.read_index(prefix))


def perplexity_of_corpus(scorer: Scorer, tokens: NDArray[Any], limit: int | None = None) -> Metrics:
    """Measure `open_corpus`'s tokens, cut into windows as in pretraining.

    limit: of windows. Returns loss (nats a token), perplexity, tokens.
    """
    tokens = tokens if limit is None else tokens[: limit * scorer.max_seq_length + 1]
    corpus.check_sequences(tokens, scorer.model.config.vocab_size)
    return _perplexity(scorer, list(windows(tokens, scorer.max_seq_length)))


def _perplexity(scorer: Scorer, requests: Sequence[Request]) -> Metrics:
    if not requests:
        raise ValueError("perplexity: the data have fewer than two tokens")
    nats = -sum(answer.logprob for answer in scorer(requests, "perplexity"))
    tokens = sum(len(request.continuation) for request in requests)
    return {"loss": nats / tokens, "perplexity": _exp(nats / tokens), "tokens": tokens}


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


# --------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Example:
    """A question: its context, the texts that may follow it, and the number of the right one."""

    context: str
    choices: list[str]
    gold: int = 0


def boolq(where: str, record: dict[str, Any]) -> Example:
    """Read SuperGLUE's {"passage", "question", "answer": true or false} ("label": 1 or 0 in place of answer)."""
    answer = record["label"] if "label" in record else field(where, record, "answer", bool)
    if answer not in (0, 1):
        raise ValueError(f'{where}: "label" is {answer!r}; it may be 0 or 1')
    passage, question = field(where, record, "passage", str), field(where, record, "question", str)
    return Example(f"{passage}\nQuestion: {question.rstrip('?')}?\nAnswer:", [" no", " yes"], int(answer))


def lambada(where: str, record: dict[str, Any]) -> Example:
    """Read {"text": …}, whose last word is to be found."""
    context, _, word = field(where, record, "text", str).strip().rpartition(" ")
    if not context:
        raise ValueError(f"{where}: LAMBADA needs a text of two words or more")
    return Example(context, [" " + word])


def multiple_choice(where: str, record: dict[str, Any]) -> Example:
    """Read {"query", "choices": [texts], "gold": number of the right one, from 0}."""
    choices, gold = field(where, record, "choices", list), field(where, record, "gold", int)
    if len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError(f'{where}: "choices" needs two texts or more')
    if not 0 <= gold < len(choices):
        raise ValueError(f'{where}: "gold" is {gold}, "choices" has {len(choices)}')
    texts = [choice if choice[0].isspace() else " " + choice for choice in choices]
    return Example(field(where, record, "query", str), texts, gold)


TASKS: dict[str, Callable[[str, dict[str, Any]], Example]] = {
    "boolq": boolq,
    "lambada": lambada,
    "multiple_choice": multiple_choice,
}


def tokenize(tokenizer: AnyTokenizer, context: str, continuation: str, add_special_tokens: bool = True) -> Request:
    """Return the Request of two texts. A word's tokens may depend on what precedes, so both are tokenized together.

    add_special_tokens: with those that the tokenizer puts around a text; a rendered chat has them already.
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    before = tokenizer.encode(stripped, add_special_tokens=add_special_tokens)
    whole = tokenizer.encode(stripped + continuation, add_special_tokens=add_special_tokens)
    return Request(whole[: len(before)], whole[len(before) :])


def read_examples(task: str, path: Path, limit: int | None = None) -> list[Example]:
    """Return the Examples of a task in TASKS in a file of JSON lines. Raise ValueError or FileNotFoundError."""
    return [TASKS[task](where, record) for where, record in read_json_lines(path, limit)]


def evaluate_task(scorer: Scorer, tokenizer: AnyTokenizer, task: str, examples: Sequence[Example]) -> Metrics:
    """Return metrics of a task in TASKS on its examples.

    Returns examples, accuracy and its standard error; accuracy_norm, where likelihoods are divided by the choices'
    bytes, with several choices; perplexity of the right word for lambada, which is right when greedy decoding gives it.
    """
    requests = [tokenize(tokenizer, example.context, choice) for example in examples for choice in example.choices]
    each = iter(scorer(requests, task))
    answers = [[next(each) for _ in example.choices] for example in examples]
    if task == "lambada":
        nats = -sum(answer[0].logprob for answer in answers)
        metrics = _accuracy("accuracy", [answer[0].is_greedy for answer in answers])
        return {"examples": len(examples)} | metrics | {"perplexity": _exp(nats / len(examples))}
    plain, normed = [], []
    for example, answer in zip(examples, answers, strict=True):
        logprobs = np.array([likelihood.logprob for likelihood in answer])
        sizes = np.array([len(choice.strip().encode()) for choice in example.choices])
        plain.append(logprobs.argmax() == example.gold)
        normed.append((logprobs / sizes).argmax() == example.gold)
    return {"examples": len(examples)} | _accuracy("accuracy", plain) | _accuracy("accuracy_norm", normed)


def _accuracy(name: str, right: Sequence[bool]) -> Metrics:
    mean, n = float(np.mean(right)), len(right)
    return {name: mean, f"{name}_stderr": math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None}
