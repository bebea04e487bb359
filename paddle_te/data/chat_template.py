"""Chat templates: the Jinja of a tokenizer, or of a file, that makes a text of a conversation.

A template runs in a process of its own (`template_process`), because it is code from a stranger.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import xxhash

from paddle_te.data import template_process
from paddle_te.data.conversations import Conversation, ConversationError

BATCH = 64  # conversations of a request: the processes change less often
NONE = "none"  # of --chat_template: not even the tokenizer's own
OF_CONVERSATIONS = {"messages", "tools", "documents", "add_generation_prompt"}  # variables of all templates


class HasTemplates(Protocol):
    """What a tokenizer says of chats: {name: template} and {"bos_token" and the like: its text}."""

    chat_templates: dict[str, str]
    special_tokens: dict[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat templates, {name: Jinja}, or one from a file.

    origin: the folder or the file, for messages. variables: what a template finds beside the conversation.
    """

    sources: dict[str, str]
    origin: str
    variables: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: HasTemplates, origin: str, chosen: str | None = None) -> ChatTemplate | None:
        """Return the template of a file, of the tokenizer where none is chosen, or None where there is none.

        chosen: --chat_template. origin: the tokenizer's folder. Raises ValueError for a file that holds none.
        """
        if chosen == NONE or (chosen is None and not tokenizer.chat_templates):
            return None
        variables = dict(tokenizer.special_tokens)
        if chosen is None:
            return cls(dict(tokenizer.chat_templates), origin, variables)
        return cls({"default": _read(Path(chosen).expanduser())}, chosen, variables)

    def with_variables(self, variables: dict[str, Any]) -> ChatTemplate:
        """The same template with further variables, such as Qwen3's enable_thinking, as transformers passes them on.

        Raises ValueError for the name of what each conversation says.
        """
        if own := variables.keys() & OF_CONVERSATIONS:
            raise ValueError(f"--chat_template_kwargs: {', '.join(sorted(own))} is what each conversation tells")
        return replace(self, variables=self.variables | variables)

    def named(self, name: str) -> ChatTemplate:
        """Return the template of a name, for all conversations. Raises ValueError where there is none."""
        if name not in self.sources:
            names = ", ".join(sorted(self.sources))
            raise ValueError(f"{self.origin} has no chat template {name!r}, but {names}")
        return replace(self, sources={"default": self.sources[name]})

    @property
    def fingerprint(self) -> str:
        """A short text that tells templates from others, with what they find beside a conversation."""
        return xxhash.xxh3_64(json.dumps([self.sources, self.variables], sort_keys=True).encode()).hexdigest()

    def name_for(self, conversation: Conversation) -> str:
        """Return which of the templates is a conversation's. Raises ConversationError where none is."""
        if conversation.tools is not None and "tool_use" in self.sources:
            return "tool_use"
        if "default" not in self.sources:
            raise ConversationError(
                f"{conversation.where}: the tokenizer {self.origin} has the chat templates "
                f"{', '.join(sorted(self.sources))} and no default: give one in a file to --chat_template"
            )
        return "default"


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat_template {path}: cannot be read: {error}") from error
    if path.suffix == ".json":
        raise ValueError(
            f"--chat_template {path}: a template is a file of Jinja, as Hugging Face's chat_template.jinja"
        )
    if not text.strip():
        raise ValueError(f"--chat_template {path}: the file is empty")
    return text


@dataclass(frozen=True)
class Rendered:
    """A conversation's text.

    spans: [begin, end] of the characters that the assistant writes. rewords: whether the template, in this conversation
    or an earlier one, writes turns otherwise than when it asks for the answer to them.
    """

    text: str
    spans: list[list[int]]
    rewords: bool = False


class Renderer:
    """Renders conversations with a template, in a process that lives as long as the context.

    Raises ValueError for a template that cannot be compiled, and ConversationError, with file, line and turn, for a
    conversation that cannot be rendered.
    """

    def __init__(self, template: ChatTemplate):
        self.template = template

    def __enter__(self) -> Renderer:
        # -I: neither the working folder nor the environment's variables decide which modules the process finds
        command = [sys.executable, "-I", template_process.__file__]
        # what it says where it dies is for nobody: its status tells
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=quiet)
        try:
            (answer,) = self._ask([{"templates": self.template.sources}])
            if "error" in answer:
                raise ValueError(f"the chat template of {self.template.origin}: {answer['error']}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def render(self, conversations: Iterable[Conversation]) -> Iterator[Rendered]:
        """Yield each one's text, and the assistant's spans in it."""
        waiting = iter(conversations)
        while batch := list(islice(waiting, BATCH)):
            requests = [self._request(conversation) | {"spans": True} for conversation in batch]
            for conversation, answer in zip(batch, self._ask(requests), strict=True):
                _check(conversation, answer, self.template.origin)
                yield Rendered(answer["text"], answer["spans"], answer["rewords"])

    def prompt(self, conversation: Conversation) -> str:
        """Return the text that asks for the assistant's next turn."""
        return self._text(conversation, asks=True)

    def begun(self, conversation: Conversation) -> str:
        """Return the text of a conversation whose last turn has only begun: what would end that turn is left out."""
        text, last = self._text(conversation, asks=False), conversation.messages[-1]["content"]
        place = text.rfind(last.strip())
        if place < 0:
            turn = f"turn {len(conversation.messages)}"
            raise ConversationError(
                f"{conversation.where}, {turn}: the chat template of {self.template.origin} does not write its text"
            )
        kept = last.lstrip() if text.startswith(last.lstrip(), place) else last.strip()
        return text[: place + len(kept)]

    def _text(self, conversation: Conversation, asks: bool) -> str:
        (answer,) = self._ask([self._request(conversation) | {"generation_prompt": asks}])
        _check(conversation, answer, self.template.origin)
        return answer["text"]

    def _request(self, conversation: Conversation) -> dict[str, Any]:
        return {
            "template": self.template.name_for(conversation),
            "messages": conversation.messages,
            "tools": conversation.tools,
            "variables": self.template.variables,
        }

    def _ask(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        # The process reads all requests before it answers, and its pipe holds what it writes until we read it.
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(requests).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which reading tells
        return [self._answer() for _ in requests]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else {"error": self._died(), "turn": None}

    def _died(self) -> str:
        status = self._process.wait()
        if -status in template_process.TIME_IS_UP:
            return f"it takes more than {template_process.SECONDS} seconds"
        return f"its process ended with status {status}"


def _check(conversation: Conversation, answer: dict[str, Any], origin: str) -> None:
    if "error" in answer:
        raise _refusal(conversation, answer.get("turn"), f"{origin}: {answer['error']}")
    # a call that is left out would teach an empty answer, or the word None
    for turn, message in enumerate(conversation.messages):
        for call in message.get("tool_calls", ()):
            name = call.get("function", call)["name"]
            if name not in answer["text"]:
                why = f"does not write tool_calls ({name!r}): give one that does to --chat_template"
                raise _refusal(conversation, turn, f"{origin} {why}")


def _refusal(conversation: Conversation, turn: int | None, why: str) -> ConversationError:
    """Return the error of a template. turn: where, from 0; None: unknown. why: its origin, and what is wrong."""
    role = "" if turn is None else f", turn {turn + 1} ({conversation.messages[turn].get('role')})"
    return ConversationError(f"{conversation.where}{role}: the chat template of {why}")
