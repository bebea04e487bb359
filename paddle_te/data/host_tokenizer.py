"""Tokenizers that a host reads: its own classes, and names that it knows and downloads.

The host, PaddleNLP or PaddleFormers, is imported where it is first needed: that takes seconds.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from paddle_te import host
from paddle_te.data.paddlenlp_template import as_template
from paddle_te.data.tokenizer_folder import Folder, TokenizerError, one_line


def named(name: str) -> HostTokenizer:
    """Return the tokenizer of a name such as meta-llama/Meta-Llama-3-8B. Raises TokenizerError."""
    path = Path(name)
    if path.is_absolute() or len(path.parts) > 2 or name.startswith(".") or not name:
        raise TokenizerError(f"tokenizer {name!r}: there is no such folder")
    return HostTokenizer(_load(name, "no such folder, nor a name that it can download"))


def of_folder(folder: Path, kind: str) -> HostTokenizer:
    """Return the tokenizer in a folder whose class, `kind`, only the host knows. Raises TokenizerError."""
    if not hasattr(_module("transformers"), kind):  # the host would look for it on the network
        called = host.HOSTS[host.find()]
        raise TokenizerError(f"{folder}: neither paddle_te nor {called} has the tokenizer_class {kind!r}")
    return HostTokenizer(_load(str(folder), "no tokenizer that it reads"), Folder.read(folder).chat_templates)


def _load(name: str, why: str) -> Any:
    auto = _module("transformers").AutoTokenizer
    try:
        return auto.from_pretrained(name)
    except Exception as error:  # the host raises whatever its download or the tokenizer's class raises
        called = host.HOSTS[host.find()]
        raise TokenizerError(
            f"tokenizer {name!r}: {called} finds {why} ({type(error).__name__}: {one_line(error)})"
        ) from error


def _module(name: str) -> Any:
    """A module of the host that is installed. Raises HostError without one."""
    return importlib.import_module(f"{host.find(what='this tokenizer')}.{name}")


def _templates(tokenizer: Any) -> dict[str, str]:
    """{"default": template} of a host's tokenizer; {} without one. PaddleNLP compiles Jinja and forgets the text."""
    found = getattr(tokenizer, "chat_template", None)
    if found is None or isinstance(found, str):
        return {} if found is None else {"default": found}
    if is_dataclass(found) and not isinstance(found, type):
        return {"default": as_template(asdict(found))}
    kind = type(tokenizer).__name__
    return {"default": f"{{{{ raise_exception('{kind} does not show its template: give it in a file') }}}}"}


class HostTokenizer:
    """A host's tokenizer behind the same methods as `tokenizer.Tokenizer`, without `encoding`.

    chat_templates: those of its folder's files, where it has one.
    """

    def __init__(self, tokenizer: Any, chat_templates: dict[str, str] | None = None):
        self._tokenizer, self.kind = tokenizer, type(tokenizer).__name__
        self.special_tokens = dict(tokenizer.special_tokens_map)
        ids = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
        # sentencepiece has -1 where there is none
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (None if i is None or i < 0 else i for i in ids)
        self.end_token_ids = [] if self.eos_token_id is None else [self.eos_token_id]
        self.chat_templates = _templates(tokenizer) if chat_templates is None else chat_templates
        self.chat_template = self.chat_templates.get("default")

    def __len__(self) -> int:
        return len(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def needed_rows(self) -> int:
        return max(len(self), self.vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool | None = None) -> list[int]:
        options: dict[str, Any] = dict(add_special_tokens=add_special_tokens)
        if split_special_tokens is not None:
            options["split_special_tokens"] = split_special_tokens
        tokenize = getattr(self._tokenizer, "tokenize", None)
        if split_special_tokens and tokenize and "allowed_special" in inspect.signature(tokenize).parameters:
            options["allowed_special"] = set()  # Llama 3's, over tiktoken
        return self._tokenizer(text, return_token_type_ids=False, **options)["input_ids"]

    def __call__(self, text: str, return_token_type_ids: bool = False, **options: bool) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, **options)}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        cleans = bool(self._tokenizer.init_kwargs.get("clean_up_tokenization_spaces"))
        options = dict(skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=cleans)
        return self._tokenizer.decode([int(number) for number in ids], **options)

    def batch_decode(self, rows: Sequence[Sequence[int]], **options: bool) -> list[str]:
        return [self.decode(row, **options) for row in rows]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._tokenizer.convert_tokens_to_ids(token)

    def convert_ids_to_tokens(self, number: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(number)

    def save_pretrained(self, folder: str | Path) -> None:
        self._tokenizer.save_pretrained(str(folder))
