"""Conversations as samples of fine-tuning: the tokens of their text, and which of them are trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import tee
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paddle_te.data import questions
from paddle_te.data.chat_template import ChatTemplate, Renderer
from paddle_te.data.conversations import Conversation, ConversationError, parse
from paddle_te.data.questions import IGNORED
from paddle_te.data.records import read_records

FIRST = 100  # records that are looked at before a run starts


class Encoder(Protocol):
    """A tokenizer of `data.tokenizer`, or a host's."""

    kind: str
    eos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Sample:
    """input_ids, labels: int32 [n]; a label is the token after its input, IGNORED where nothing is learned."""

    input_ids: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]


@dataclass
class Tally:
    """What became of the conversations of a data set."""

    kept: int = 0
    cut: int = 0  # after one of the assistant's turns
    dropped: int = 0
    shortest: int | None = None  # tokens up to the end of the first answer, in the dropped one with fewest
    reworded: str = ""  # where the first conversation stands of which turns are not what they were for their answer

    def words(self, max_length: int) -> str:
        """Return a line for the log."""
        parts = [f"{self.kept} samples"]
        if self.cut:
            parts.append(f"{self.cut} of them cut after the last answer that fits into --max_length {max_length}")
        if self.dropped:
            parts.append(f"{self.dropped} conversations left out, whose first answer does not fit into it")
        return ", ".join(parts)


def token_mask(encoding: Any, spans: Iterable[Sequence[int]]) -> npt.NDArray[np.bool_]:
    """Return which tokens of a text stand in its spans of characters, bool [n].

    From the token that holds a span's first character to the one that holds its last, as transformers tells them. A
    character may be in no token.
    """
    mask = np.zeros(len(encoding.ids), bool)
    for begin, end in spans:
        found = (encoding.char_to_token(place) for place in range(begin, end))
        first = next((token for token in found if token is not None), None)
        found = (encoding.char_to_token(place) for place in range(end - 1, begin - 1, -1))
        last = next((token for token in found if token is not None), None)
        if first is not None and last is not None:
            mask[first : last + 1] = True
    return mask


@dataclass
class SampleMaker:
    """Makes samples of conversations; with a template in the context of its renderer.

    max_length: tokens of a sample at most. src_length: those of a question without a template. Raises ValueError for a
    tokenizer that cannot go with a template.
    """

    tokenizer: Encoder
    template: ChatTemplate | None
    src_length: int
    max_length: int
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        if self.template is None and self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token, with which an answer without a chat template ends")
        if self.template and not hasattr(self.tokenizer, "encoding"):
            raise ValueError(
                f"the chat template of {self.template.origin}: {self.tokenizer.kind} is a class of the host's, which "
                "does not tell where in a text a token stands: take a folder with Hugging Face's tokenizer.json "
                "(--tokenizer_name_or_path), or --chat_template none for questions and answers without a template"
            )

    def samples(self, conversations: Iterable[Conversation]) -> Iterator[Sample]:
        """Yield a sample for each conversation that fits. Raises ConversationError for one that cannot be one."""
        with Renderer(self.template) if self.template else nullcontext() as renderer:
            made = self._rendered(conversations, renderer) if renderer else map(self._question, conversations)
            for sample in made:
                if sample is None:
                    self.tally.dropped += 1
                    continue
                self.tally.kept += 1
                yield sample

    def _question(self, conversation: Conversation) -> Sample:
        """PaddleNLP's sample of a question and its answer, without a template."""
        check_has_template(conversation)
        src, tgt = (message["content"] for message in conversation.messages)
        made = questions.encode(self.tokenizer, src, tgt, self.src_length, self.max_length)
        return Sample(*(np.array(made[name], np.int32) for name in ("input_ids", "labels")))

    def _rendered(self, conversations: Iterable[Conversation], renderer: Renderer) -> Iterator[Sample | None]:
        conversations, again = tee(conversations)
        for conversation, rendered in zip(again, renderer.render(conversations), strict=True):
            encoding = self.encoding(rendered.text)
            if rendered.rewords and not self.tally.reworded:
                self.tally.reworded = conversation.where
            if len(encoding.ids) > self.max_length:
                yield self._shortened(conversation, renderer)
            else:
                yield self.sample(conversation, encoding, rendered.spans)

    def encoding(self, text: str) -> Any:
        """Return the tokens of a rendered conversation, with the characters that each has."""
        tokenizer: Any = self.tokenizer  # `__post_init__` refuses one without this method
        return tokenizer.encoding(text, add_special_tokens=False)  # the template writes them

    def sample(self, conversation: Conversation, encoding: Any, spans: list[list[int]]) -> Sample:
        """Return the sample of a rendered conversation, with labels in some spans of its text.

        Raises ConversationError where no token stands in them.
        """
        tokens, learned = np.array(encoding.ids, np.int32), token_mask(encoding, spans)
        if not learned[1:].any():
            origin = self.template.origin if self.template else "none"
            raise ConversationError(
                f"{conversation.where}: the chat template of {origin} marks nothing of it as the "
                "assistant's: {% generation %} and {% endgeneration %} must stand around what the assistant writes"
            )
        return Sample(tokens[:-1], np.where(learned, tokens, IGNORED)[1:])

    def _shortened(self, conversation: Conversation, renderer: Renderer) -> Sample | None:
        """The sample of as many of the first turns as fit, up to one of the assistant's.

        They are rendered anew: a template may write a turn differently when it is the last.
        """
        answers, best, needed = conversation.answers, None, 0
        low, high = 0, len(answers)
        while low < high:
            middle = (low + high) // 2
            shorter = conversation.up_to(answers[middle])
            (rendered,) = renderer.render([shorter])
            encoding = self.encoding(rendered.text)
            if len(encoding.ids) <= self.max_length:
                best, low = (shorter, encoding, rendered.spans), middle + 1
            else:
                high, needed = middle, len(encoding.ids)
        if best is None:
            self.tally.shortest = min(needed, self.tally.shortest or needed)
            return None
        self.tally.cut += 1
        return self.sample(*best)


def check_has_template(conversation: Conversation) -> None:
    """Raise ConversationError for what only a chat template makes a text of."""
    if not conversation.question:
        raise ConversationError(
            f"{conversation.where}: is a conversation, and the tokenizer has no chat template: give one in a file to "
            "--chat_template (Jinja, as Hugging Face's chat_template.jinja), or take the tokenizer of a model that was "
            "tuned for chats (--tokenizer_name_or_path)"
        )


def read_conversations(paths: Iterable[Path], limit: int | None = None) -> Iterator[Conversation]:
    """Yield the conversations of files, no more than `limit`. Raises as `read_records` and `parse`."""
    return (parse(where, record) for where, record in read_records(paths, limit))


def samples_of(paths: list[Path], maker: SampleMaker, limit: int | None = None) -> list[Sample]:
    """Return the samples of the conversations in files; of no more than `limit`.

    Raises FileNotFoundError or ValueError, in one line, for a file or a conversation that cannot be one, and where no
    conversation fits.
    """
    samples = list(maker.samples(read_conversations(paths, limit)))
    if not samples and (limit is None or maker.tally.dropped < limit):
        needed = f"; the shortest needs {maker.tally.shortest}" if maker.tally.shortest else ""
        raise ValueError(f"{paths[0]}: no conversation fits into --max_length {maker.max_length}{needed}")
    return samples
