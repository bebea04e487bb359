"""Preferences as samples: the tokens of a question with each answer, and which of them are the answer's.

A pair is two samples that stand side by side in one packed row, each with the question before it. So is an answer with
a label, for KTO: behind it stands its question with another record's answer, of which KTO estimates how far the model
has moved from the reference (Ethayarajh et al., 2024, arXiv 2402.01306; TRL's `KTOTrainer` pairs them alike).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np

from paddle_te.data.chat_template import Renderer
from paddle_te.data.conversations import Conversation
from paddle_te.data.preferences import Answered, Judged, read_judged
from paddle_te.data.questions import IGNORED
from paddle_te.data.samples import Sample, SampleMaker, check_has_template


@dataclass(frozen=True)
class Pair:
    """Two samples that share a row: the better and the worse answer, or for KTO an answer and another record's.

    good: whether the first one is wanted.
    """

    samples: tuple[Sample, Sample]
    good: bool = True

    def __len__(self) -> int:
        """Tokens of a row that it takes."""
        return sum(len(sample.input_ids) for sample in self.samples)

    @property
    def repeated(self) -> int:
        """Tokens of the question, which both samples have."""
        return min(_first_label(sample) for sample in self.samples)


@dataclass
class Tally:
    """What became of the records of a data set."""

    kept: int = 0
    left_out: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("equal", "empty", "long"), 0))

    def words(self, what: str, longest: str) -> str:
        """Return a line for the log. what: pairs, or answers with a label. longest: the flags that bound them."""
        why = {"equal": "equal answers", "empty": "an empty answer", "long": f"more tokens than {longest}"}
        parts = [f"{count} with {why[name]}" for name, count in self.left_out.items() if count]
        return f"{self.kept} {what}" + (f"; left out: {', '.join(parts)}" if parts else "")


@dataclass
class PairMaker:
    """Make pairs of judged records.

    maker: for its tokenizer and template. most_tokens: of a pair. most_asked: of a question.
    """

    maker: SampleMaker
    most_tokens: int
    most_asked: int
    tally: Tally = field(default_factory=Tally)

    def pairs(self, judged: Iterable[Judged]) -> Iterator[Pair]:
        """Yield a pair for each record with two answers that fits. Raises ConversationError as `SampleMaker`."""
        for answers, samples in self._samples(judged):
            self._count(answers)
            if samples and (pair := self._fitting(samples[0], samples[1])):
                yield pair

    def labelled(self, judged: Iterable[Judged]) -> Iterator[Pair]:
        """Yield a pair for each answer with a label that fits, with the answer of the record before.

        The first one gets the last's. Raises ConversationError as `SampleMaker`.
        """
        found: list[tuple[Answered, Sample]] = []
        for record, samples in self._samples(judged):
            self._count(record)
            found += [(record.answers[0], sample) for sample in samples]
        for number, (answered, sample) in enumerate(found):
            other = _with_answer(sample, found[number - 1][1], self.most_tokens - len(sample.input_ids))
            if pair := self._fitting(sample, other):
                yield replace(pair, good=answered.good)

    def _count(self, record: Judged) -> None:
        if record.fault:
            self.tally.left_out[record.fault] += 1

    def _fitting(self, first: Sample, second: Sample | None) -> Pair | None:
        pair = None if second is None else Pair((first, second))
        if pair is None or len(pair) > self.most_tokens or pair.repeated >= self.most_asked:
            self.tally.left_out["long"] += 1
            return None
        self.tally.kept += 1
        return pair

    def _samples(self, judged: Iterable[Judged]) -> Iterator[tuple[Judged, list[Sample]]]:
        """Yield each record with the samples of its answers."""
        judged, again = tee(judged)
        answers = (answered for record in again for answered in record.answers)
        template = self.maker.template
        with Renderer(template) if template else nullcontext() as renderer:
            made = self._rendered(answers, renderer) if renderer else map(self._plain, answers)
            for record in judged:
                yield record, [next(made) for _ in record.answers]

    def _rendered(self, answers: Iterable[Answered], renderer: Renderer) -> Iterator[Sample]:
        answers, again = tee(answers)
        for answered, rendered in zip(answers, renderer.render(each.conversation for each in again), strict=True):
            turns = sum(message["role"] == "assistant" for message in answered.answer)
            encoding = self.maker.encoding(rendered.text)
            yield self.maker.sample(answered.conversation, encoding, rendered.spans[-turns:])

    def _plain(self, answered: Answered) -> Sample:
        """Return the sample of texts without a template, as PaddleNLP makes it.

        Each question has the tokens that the tokenizer puts around a text, and end-of-text stands behind each answer.
        """
        conversation: Conversation = answered.conversation
        check_has_template(replace(conversation, question=answered.plain))
        encode: Any = self.maker.tokenizer
        tokens: list[int] = []
        begins = 0
        for number, message in enumerate(conversation.messages):
            if number == answered.asked:
                begins = len(tokens)
            asks = message["role"] == "user"
            tokens += encode(message["content"], add_special_tokens=asks)["input_ids"]
            tokens += [] if asks else [encode.eos_token_id]
        return _sample_of(tokens, begins)


def _sample_of(tokens: list[int], begins: int) -> Sample:
    """Return the sample of tokens of which those from `begins` on are learned."""
    all_tokens = np.array(tokens, np.int32)
    learned = np.arange(len(tokens)) >= begins
    return Sample(all_tokens[:-1], np.where(learned, all_tokens, IGNORED)[1:])


def _first_label(sample: Sample) -> int:
    """Return the number of input tokens whose label is not an answer's."""
    return int(np.flatnonzero(sample.labels != IGNORED)[0])


def _with_answer(question: Sample, other: Sample, room: int) -> Sample | None:
    """Return one sample's question with another's answer, cut to so many tokens; None where not one of it fits."""
    asked = _first_label(question) + 1
    answer = other.labels[other.labels != IGNORED][: max(room + 1 - asked, 0)]
    if not len(answer):
        return None
    return _sample_of([*question.input_ids[:asked].tolist(), *answer.tolist()], asked)


def pairs_of(paths: list[Path], maker: PairMaker, labelled: bool, limit: int | None = None) -> list[Pair]:
    """Return the pairs of the records in files; of no more than `limit`.

    labelled: for KTO. Raises FileNotFoundError or ValueError, in one line, for a file or a record that cannot be one,
    and where none fits.
    """
    judged = read_judged(paths, labelled, limit)
    made = list(maker.labelled(judged) if labelled else maker.pairs(judged))
    if not made and limit is None:
        what, why = "answer" if labelled else "pair", maker.tally.words("fit", "there is room for")
        raise ValueError(f"{paths[0]}: no {what} is left: {why}")
    return made
