"""Records of preferences: a question with a better and a worse answer, or with one answer that is good or bad.

{"messages": […], "chosen": {"role": "assistant", "content": …}, "rejected": {…}}    conversations, and their next turns
{"messages": [… the answer], "label": true}
{"src": [question, …], "tgt": [answer, …], "response": [a, b], "sort": [1, 0]}       PaddleNLP's; the greater is better
{"src": …, "tgt": …, "response": [a], "sort": [1]}
{"prompt": …, "chosen": …, "rejected": …}                                            Hugging Face's, texts or messages
{"prompt": …, "completion": …, "label": true}
{"instruction": …, "input": …, "chosen": …, "rejected": …}                           Alpaca's
{"instruction": …, "input": …, "output": …, "label": true}

"conversations" stands for "messages", and "kto_tag" for "label". "chosen" and "rejected" may be whole conversations, of
which the turns that both begin with are the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paddle_te.data.conversations import Conversation, ConversationError, Message, alpaca_turns, parse
from paddle_te.data.records import read_records

FORMS = (
    '"chosen" and "rejected" with "messages", "conversations", "src", "prompt" or "instruction", or "response" and '
    '"sort" with "src"'
)
LABELS = ("label", "kto_tag")  # of one answer: TRL's name and LLaMA-Factory's
_BESIDE = ("system", "tools")  # what a conversation has beside its turns


@dataclass(frozen=True)
class Answered:
    """A question and one answer to it.

    conversation: both; its first `asked` messages are the question. plain: it came as texts, which need no template.
    good: whether it is the better one of two, or an answer that is wanted.
    """

    conversation: Conversation
    asked: int
    plain: bool
    good: bool

    @property
    def answer(self) -> list[Message]:
        """The messages of the answer."""
        return self.conversation.messages[self.asked :]


@dataclass(frozen=True)
class Judged:
    """The answers of a record: the better and the worse one, or one with a label; none where `fault` says why not.

    fault: "empty" or "equal".
    """

    answers: tuple[Answered, ...] = ()
    fault: str = ""


def read_judged(paths: Iterable[Path], labelled: bool, limit: int | None = None) -> Iterator[Judged]:
    """Yield what the records of files say, of no more than `limit`.

    labelled: one answer each; a pair then becomes a good and a bad answer. Raises as `read_records` and
    `parse_judged`.
    """
    for where, record in read_records(paths, limit):
        judged = parse_judged(where, record)
        if not labelled:
            if len(judged.answers) == 1:
                raise ConversationError(f"{where}: has one answer with a label, which is KTO's; it needs {FORMS}")
            yield judged
        elif judged.answers:
            yield from (Judged((answer,)) for answer in judged.answers)
        else:
            yield judged


def parse_judged(where: str, record: dict[str, Any]) -> Judged:
    """Return what a record says. Raises ConversationError, in one line, for a record of another form."""
    prompt, answers, good = _parts(where, record)
    if not all(_has_text(answer) for answer in answers):
        return Judged(fault="empty")
    if len(answers) == 2 and _said(answers[0]) == _said(answers[1]):
        return Judged(fault="equal")
    plain = not record.get("system") and all(isinstance(value, str) for value in _texts_of(record))
    made = (_answered(where, record, prompt, answer, plain, each) for answer, each in zip(answers, good, strict=True))
    return Judged(tuple(made))


def _answered(
    where: str, record: dict[str, Any], prompt: list[Any], answer: list[Any], plain: bool, good: bool
) -> Answered:
    beside = {name: record[name] for name in _BESIDE if record.get(name) is not None}
    conversation = parse(where, {"messages": [*prompt, *answer], **beside})
    if conversation.messages[-1]["role"] != "assistant":
        raise ConversationError(f"{where}: an answer must end with a turn of the assistant")
    return Answered(conversation, len(conversation.messages) - len(answer), plain, good)


def _parts(where: str, record: dict[str, Any]) -> tuple[list[Any], list[list[Any]], tuple[bool, ...]]:
    """Return (the turns of the prompt, those of each answer, the better one first, whether each is good)."""
    if "response" in record or "sort" in record:
        return _of_paddlenlp(where, record)
    if record.get("chosen") is not None and record.get("rejected") is not None:
        return _of_pair(where, record)
    label = next((record[name] for name in LABELS if record.get(name) is not None), None)
    if label is None:
        has = ", ".join(f'"{name}"' for name in record) or "nothing"
        raise ConversationError(f'{where}: needs {FORMS}, or one answer and its "label"; it has {has}')
    if label not in (True, False):
        raise ConversationError(f'{where}: "label" is {label!r}; it must be true or false')
    if record.get("completion") is not None:
        return _asked(where, record), [_turns(where, "completion", record, "assistant")], (bool(label),)
    *prompt, answer = _asked(where, record) or [None]
    if not prompt:
        raise ConversationError(f'{where}: "label" judges the last turn, and there is no question before it')
    return prompt, [[answer]], (bool(label),)


def _of_paddlenlp(where: str, record: dict[str, Any]) -> tuple[list[Any], list[list[Any]], tuple[bool, ...]]:
    answers, order = record.get("response"), record.get("sort")
    if not isinstance(answers, list) or not isinstance(order, list) or not 1 <= len(answers) == len(order) <= 2:
        raise ConversationError(f'{where}: needs "response" and "sort", lists of two answers and of two numbers each')
    if not all(isinstance(each, str) for each in answers) or not all(isinstance(each, int) for each in order):
        raise ConversationError(f'{where}: "response" must have texts, and "sort" whole numbers')
    turns = [_turns(where, "response", {"response": each}, "assistant") for each in answers]
    if len(turns) == 1:
        return _asked(where, record), turns, (order[0] > 0,)
    if order[0] == order[1]:
        raise ConversationError(f'{where}: "sort" has {order[0]} twice, so neither answer is the better one')
    return _asked(where, record), turns if order[0] > order[1] else turns[::-1], (True, False)


def _of_pair(where: str, record: dict[str, Any]) -> tuple[list[Any], list[list[Any]], tuple[bool, ...]]:
    chosen, rejected = (_turns(where, name, record, "assistant") for name in ("chosen", "rejected"))
    if not (_asks(chosen) and _asks(rejected)):
        return _asked(where, record), [chosen, rejected], (True, False)
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], [chosen[shared:], rejected[shared:]], (True, False)


def _asked(where: str, record: dict[str, Any]) -> list[Any]:
    """Return the turns of a record's question."""
    if record.get("prompt") is not None:
        return _turns(where, "prompt", record, "user")
    for name in ("messages", "conversations"):
        if record.get(name) is not None:
            return _turns(where, name, record, "user")
    if record.get("src") is None:
        if record.get("instruction") is not None:
            return list[Any](alpaca_turns(where, record))
        raise ConversationError(f"{where}: has no question; it needs {FORMS}")
    asked, answered = _list(record["src"]), _list(record.get("tgt") or [])
    if len(asked) - len(answered) != 1:
        raise ConversationError(
            f'{where}: "src" has {len(asked)} texts and "tgt" {len(answered)}: each question but the last needs its '
            "answer"
        )
    roles = ("user", "assistant")
    pairs = (turn for pair in zip_longest(asked, answered) for turn in zip(roles, pair, strict=True))
    return [{"role": role, "content": text} for role, text in pairs if text is not None]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _turns(where: str, name: str, record: dict[str, Any], role: str) -> list[Any]:
    """Return the turns that a text, a turn or a list of turns stands for."""
    value = record[name]
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    turns = _list(value)
    if not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ConversationError(f'{where}: "{name}" must be a text, a turn or a list of turns')
    return turns


def _asks(turns: list[Any]) -> bool:
    """Say whether turns begin with a question, so that they are a whole conversation."""
    return turns[0].get("role", turns[0].get("from")) in ("user", "system", "human")


def _texts_of(record: dict[str, Any]) -> list[Any]:
    """Return what says a record's question and answers, lists of PaddleNLP's form taken apart."""
    names = ("prompt", "messages", "conversations", "src", "tgt", "response", "chosen", "rejected", "completion")
    history = ("history",) if record.get("instruction") is not None else ()  # Alpaca's, whose other parts are texts
    values = [record[name] for name in (*names, *history) if record.get(name) is not None]
    return [each for value in values for each in (value if isinstance(value, list) else [value])]


def _said(turns: list[Any]) -> list[Any]:
    return [turn.get("content", turn.get("value")) for turn in turns] + [turn.get("tool_calls") for turn in turns]


def _has_text(turns: list[Any]) -> bool:
    """Say whether every turn of the assistant in an answer has a text or calls a tool."""
    spoken = (turn.get("content", turn.get("value")) for turn in turns if not turn.get("tool_calls"))
    return all(not isinstance(text, str) or text.strip() for text in spoken) and None not in _said(turns)[: len(turns)]
