"""Prompts that a model continues: texts, and conversations, whose chat template asks for the assistant's next turn."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from paddle_te.data.chat_template import ChatTemplate, Renderer
from paddle_te.data.conversations import FORMS, NAMES, Conversation, parse_prompt
from paddle_te.data.jsonl import check_text, field
from paddle_te.data.records import read_records
from paddle_te.data.samples import check_has_template

SYSTEM = ("system", "developer")


class Encoder(Protocol):
    """A tokenizer of `data.tokenizer`."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Prompt:
    """The tokens that a model continues.

    shown: the text, or the last turn. given: what the user gave, for results: {"src": text}, or {"messages": …,
    "tools": …}; "tgt" is the answer that a conversation came with.
    """

    shown: str
    given: dict[str, Any]
    tokens: list[int]


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts for a tokenizer.

    template: None where conversations have none. as_chats: texts are turns of the user, rendered with the template.
    system: the system's turn of conversations that have none.
    """

    tokenizer: Encoder
    template: ChatTemplate | None = None
    as_chats: bool = False
    system: str | None = None

    def of_texts(self, name: str, texts: Iterable[str]) -> list[Prompt]:
        """name: what the user calls the texts. Raises ValueError, in one line, for what cannot be a prompt."""
        return self._prompts((f"{name}, text {i}", {"text": text}) for i, text in enumerate(texts, 1))

    def of_file(self, path: str | Path, limit: int | None = None) -> list[Prompt]:
        """Return the prompts in a file of records: {"text": …}, or conversations as fine-tuning reads them.

        Raises ValueError or FileNotFoundError, in one line with file and line.
        """
        return self._prompts(read_records([Path(path).expanduser()], limit))

    def _prompts(self, records: Iterable[tuple[str, dict[str, Any]]]) -> list[Prompt]:
        with Renderer(self.template) if self.template else nullcontext() as renderer:
            return [self._prompt(where, record, renderer) for where, record in records]

    def _prompt(self, where: str, record: dict[str, Any], renderer: Renderer | None) -> Prompt:
        if record.keys() == {"text"}:
            return self._of_text(where, field(where, record, "text", str), renderer)
        if not record.keys() & NAMES:
            raise ValueError(f'{where}: needs "text", {FORMS}; it has {", ".join(record) or "nothing"}')
        conversation, answer = parse_prompt(where, record)
        given: dict[str, Any] = {"messages": conversation.messages}
        given |= {"tools": conversation.tools} if conversation.tools else {}
        given |= {} if answer is None else {"tgt": answer}
        return self._of_conversation(conversation, given, renderer)

    def _of_text(self, where: str, text: str, renderer: Renderer | None) -> Prompt:
        check_text(where, text)
        if self.as_chats:
            conversation = Conversation(where, [{"role": "user", "content": text}])
            return self._of_conversation(conversation, {"src": text}, renderer)
        return self._checked(where, Prompt(text, {"src": text}, self.tokenizer.encode(text)))

    def _of_conversation(self, asked: Conversation, given: dict[str, Any], renderer: Renderer | None) -> Prompt:
        if self.system is not None and asked.messages[0]["role"] not in SYSTEM:
            check_text("--system_instruction", self.system)
            system = {"role": "system", "content": self.system}
            asked = replace(asked, messages=[system, *asked.messages], question=False)
        shown = asked.messages[-1].get("content") or json.dumps(asked.messages[-1], ensure_ascii=False)
        if renderer is None:
            check_has_template(asked)
            tokens = self.tokenizer.encode(shown)
        else:
            tokens = chat_tokens(self.tokenizer, renderer.prompt(asked))
        return self._checked(asked.where, Prompt(shown, given, tokens))

    def _checked(self, where: str, prompt: Prompt) -> Prompt:
        if not prompt.tokens:
            raise ValueError(f"{where}: the prompt {prompt.shown[:40]!r} has no tokens")
        return prompt


def chat_tokens(tokenizer: Encoder, text: str) -> list[int]:
    """Return the tokens of a rendered conversation, in which the template has written those that begin a text."""
    return tokenizer.encode(text, add_special_tokens=False)
