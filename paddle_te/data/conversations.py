"""Records of chats and of questions as conversations: lists of messages, as chat templates take them.

{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}], "tools": […]}     OpenAI's
{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}], "system": …}          ShareGPT's
{"src": question, "tgt": answer}, {"src": [question, …], "tgt": [answer, …]}                          PaddleNLP's
{"instruction": question, "input": more of it, "output": answer, "history": [[question, answer], …]}  Alpaca's
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, cycle, zip_longest
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
FORMS = '"messages", "conversations", "src" and "tgt", or "instruction" and "output"'
SPOKEN = ("user", "assistant")  # roles whose turns may not be empty


class ConversationError(ValueError):
    """A record that is no conversation; in one line, with file, line and turn."""


@dataclass(frozen=True)
class Conversation:
    """The messages of a record, in the order of their turns, as a chat template takes them.

    where: file and line, for messages. tools: JSON schemas, or None. question: whether it is one question and its
    answer as texts, which need no template.
    """

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    question: bool = False

    @property
    def answers(self) -> list[int]:
        """The numbers of the assistant's turns, from 0."""
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]

    def up_to(self, number: int) -> Conversation:
        """Return the conversation until message `number`, that one included."""
        return Conversation(self.where, self.messages[: number + 1], self.tools, self.question)


Form = Callable[[str, dict[str, Any]], Conversation]  # reads a record of one form: where it stands, and the record


def parse(where: str, record: dict[str, Any]) -> Conversation:
    """Return the conversation of a record, with an answer. Raises ConversationError for a record of another form."""
    form = _form_of(where, record)
    conversation = _read(form, where, record)
    count = len(conversation.answers)
    if conversation.messages[-1]["role"] != "assistant":
        if form is _of_questions:
            raise _uneven(where, count + 1, count)
        if form is _of_alpaca:
            raise ConversationError(f'{where}: needs "output", the answer to its "instruction"')
    if not count:
        raise ConversationError(f"{where}: has no turn of the assistant, so there is nothing to train on")
    for number in conversation.answers:
        _check_weight(where, conversation.messages[number])
    return conversation


def _check_weight(where: str, answer: Message) -> None:
    """Refuse an answer that OpenAI's format leaves out of the loss: ours counts all answers."""
    if (weight := answer.get("weight", 1)) != 1:
        raise ConversationError(
            f'{where}: "weight" of an answer is {weight!r}, and the loss counts all answers alike: end the '
            "conversation before that turn, or delete its weight"
        )


def parse_prompt(where: str, record: dict[str, Any]) -> tuple[Conversation, str | None]:
    """(a conversation that asks for the assistant's next turn, that turn's text where the record ends with it).

    Raises ConversationError for a record of another form.
    """
    conversation = _read(_form_of(where, record), where, record)
    *before, last = conversation.messages
    if last["role"] != "assistant":
        return conversation, None
    if not before:
        raise ConversationError(f"{where}: has nothing that the assistant could answer")
    return replace(conversation, messages=before), last.get("content") or ""


def _form_of(where: str, record: dict[str, Any]) -> Form:
    forms = {form for name, form in _FORMS.items() if record.get(name) is not None}
    if len(forms) > 1:
        forms.discard(_of_alpaca)  # sets of conversations have an instruction as a further column
    if len(forms) != 1:
        has = ", ".join(f'"{name}"' for name in record) or "nothing"
        raise ConversationError(f"{where}: needs {FORMS}, one of these forms; it has {has}")
    return forms.pop()


def _read(form: Form, where: str, record: dict[str, Any]) -> Conversation:
    conversation = form(where, record)
    _check_text(where, conversation)
    return conversation


def _of_messages(name: str) -> Form:
    def read(where: str, record: dict[str, Any]) -> Conversation:
        turns = record[name]
        if not isinstance(turns, list) or not turns:
            raise ConversationError(f'{where}: "{name}" must be a list of turns, and not empty')
        messages = [_message(f"{where}, turn {number}", turn) for number, turn in enumerate(turns, 1)]
        for number, message in enumerate(messages, 1):
            _check_message(f"{where}, turn {number} ({message['role']})", message)
        return Conversation(where, _system(where, record) + messages, _tools(where, record))

    return read


def _of_questions(where: str, record: dict[str, Any]) -> Conversation:
    """PaddleNLP's: texts, or lists of as many questions as answers; the last question may be without one."""
    if record.get("history"):
        raise ConversationError(
            f'{where}: "history" stands beside "src": put its questions and answers into both lists'
        )
    asked, answered = _texts(where, record, "src"), _texts(where, record, "tgt") if "tgt" in record else []
    if not asked or len(asked) - len(answered) not in (0, 1):
        raise _uneven(where, len(asked), len(answered))
    pairs = zip_longest(asked, answered)
    turns = [turn for pair in pairs for turn in zip(SPOKEN, pair, strict=True) if turn[1] is not None]
    messages = [{"role": role, "content": text} for role, text in turns]
    system = _system(where, record)
    return Conversation(where, system + messages, _tools(where, record), question=len(asked) == 1 and not system)


def _uneven(where: str, asked: int, answered: int) -> ConversationError:
    return ConversationError(f'{where}: "src" has {asked} texts and "tgt" {answered}: each question needs its answer')


def _texts(where: str, record: dict[str, Any], name: str) -> list[str]:
    value = record.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        if name in record:
            raise ConversationError(f'{where}: "{name}" must be a text or a list of texts, not {value!r:.40}')
        raise ConversationError(f'{where}: needs "{name}", a text or a list of texts; it has {", ".join(record)}')
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise ConversationError(f'{where}: "{name}" is empty' + (f" in turn {number}" if len(texts) > 1 else ""))
    return texts


def alpaca_turns(where: str, record: dict[str, Any]) -> list[Message]:
    """Return the turns of a record in Alpaca's form, as LLaMA-Factory reads it; the last may be without an answer.

    A question is the instruction and, in lines below, the input. Raises ConversationError for what is no such record.
    """
    history, answer = record.get("history") or [], record.get("output")
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ConversationError(f'{where}: "history" must be a list of pairs, a question and its answer each')
    parts = [record[name] for name in ("instruction", "input") if record.get(name)]
    if not all(isinstance(part, str) for part in parts):
        raise ConversationError(f'{where}: "instruction" and "input" must be texts')
    texts = [*chain.from_iterable(history), "\n".join(parts), *([] if answer is None else [answer])]
    return [{"role": role, "content": text} for role, text in zip(cycle(SPOKEN), texts, strict=False)]


def _of_alpaca(where: str, record: dict[str, Any]) -> Conversation:
    turns = alpaca_turns(where, record)
    conversation = _of_messages("messages")(where, record | {"messages": turns})
    return replace(conversation, question=len(turns) <= 2 and len(conversation.messages) == len(turns))


_FORMS = {
    "messages": _of_messages("messages"),
    "conversations": _of_messages("conversations"),
    "src": _of_questions,
    "tgt": _of_questions,
    "instruction": _of_alpaca,
}


NAMES = _FORMS.keys()


def _message(where: str, turn: Any) -> Message:
    """A turn in OpenAI's words: role and content."""
    if not isinstance(turn, dict):
        raise ConversationError(f"{where}: is no JSON object")
    if "role" in turn:
        return _openai(where, turn)
    if "from" in turn:
        return _sharegpt(where, turn)
    raise ConversationError(f'{where}: needs "role" and "content", or "from" and "value"; it has {", ".join(turn)}')


def _openai(where: str, turn: dict[str, Any]) -> Message:
    role = turn["role"]
    if role not in ROLES:
        raise ConversationError(f'{where}: "role" is {role!r}; it may be {", ".join(ROLES)}')
    # null is as good as nothing, except for templates, which ask whether a turn has tool_calls; a call's content may be
    message = {name: value for name, value in turn.items() if value is not None or name == "content"}
    if isinstance(turn.get("content"), list):
        message["content"] = _joined(where, turn["content"])
    if turn.get("tool_calls") is not None:
        message["tool_calls"] = [_call(where, call) for call in _list(where, turn["tool_calls"], "tool_calls")]
    return message


def _joined(where: str, parts: list[Any]) -> str:
    """The text of a content that consists of parts."""
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        kinds = {str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in parts}
        raise ConversationError(f'{where}: "content" has parts that are no text ({", ".join(sorted(kinds))})')
    return "".join(part["text"] for part in parts)


def _call(where: str, call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object, as templates take them; OpenAI's are the JSON text of one."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConversationError(f'{where}: "tool_calls" has a call without the name of a function')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function = function | {"arguments": _object(arguments)}
    return call | {"function": function} if "function" in call else function


def _object(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _sharegpt(where: str, turn: dict[str, Any]) -> Message:
    name, value = turn["from"], turn.get("value")
    role = SHAREGPT.get(name, name) if isinstance(name, str) else name
    if role not in ROLES:
        known = ", ".join(dict.fromkeys((*SHAREGPT, *ROLES)))
        raise ConversationError(f'{where}: "from" is {name!r}; it may be {known}')
    if not isinstance(value, str):
        raise ConversationError(f'{where}: needs "value", a text')
    if name == "function_call":
        call = _object(value)
        calls = call if isinstance(call, list) else [call]
        return {"role": role, "content": "", "tool_calls": [_function(where, each) for each in calls]}
    return {"role": role, "content": value}


def _function(where: str, call: Any) -> dict[str, Any]:
    return {"type": "function", "function": _call(where, call)}


def _system(where: str, record: dict[str, Any]) -> list[Message]:
    """A system turn that stands beside the turns."""
    text = record.get("system")
    if text is None or text == "":
        return []
    if not isinstance(text, str):
        raise ConversationError(f'{where}: "system" must be a text')
    return [{"role": "system", "content": text}]


def _tools(where: str, record: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The schemas of tools, which some data sets have as a JSON text."""
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise ConversationError(f'{where}: "tools" is no JSON: {error}') from error
    if tools is None:
        return None
    tools = _list(where, tools, "tools")
    if not all(isinstance(tool, dict) for tool in tools):
        raise ConversationError(f'{where}: "tools" must be a list of JSON schemas')
    return tools or None


def _list(where: str, value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConversationError(f'{where}: "{name}" must be a list')
    return value


def _check_message(where: str, message: Message) -> None:
    content, role = message.get("content"), message["role"]
    if content is not None and not isinstance(content, str):
        raise ConversationError(f'{where}: "content" must be a text')
    if not (content or "").strip() and role in SPOKEN and not message.get("tool_calls"):
        raise ConversationError(f'{where}: "content" is empty')
    if content is None and not message.get("tool_calls"):
        raise ConversationError(f'{where}: needs "content", a text')


def _check_text(where: str, conversation: Conversation) -> None:
    """JSON can spell half of a surrogate pair, which no tokenizer takes."""
    for number, message in enumerate(conversation.messages, 1):
        try:
            json.dumps(message, ensure_ascii=False).encode()
        except (UnicodeEncodeError, TypeError, RecursionError) as error:
            raise ConversationError(f"{where}, turn {number} ({message['role']}): is no text: {error}") from error
