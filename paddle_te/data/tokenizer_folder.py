"""What the files of a Hugging Face tokenizer's folder say, checked, as transformers 4.51 understands them.

All files are read once, as bytes: what a tokenizer was made of is what it saves.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken

from paddle_te.data import paddlenlp_template
from paddle_te.files import read_file

CONFIG, FAST = "tokenizer_config.json", "tokenizer.json"
SPECIAL_MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
TEMPLATE, GENERATION, MODEL_CONFIG = "chat_template.jinja", "generation_config.json", "config.json"
PADDLENLPS = "chat_template.json"  # transformers' processors have one of that name, too, which no tokenizer reads
MODEL_FILES = ("tokenizer.model", "sentencepiece.bpe.model")  # Hugging Face's name and PaddleNLP's
FILES = (CONFIG, FAST, SPECIAL_MAP, ADDED, VOCABULARY, MERGES, TEMPLATE, PADDLENLPS, *MODEL_FILES)

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDITIONAL = "additional_special_tokens"
_FLAGS = (
    *("add_bos_token", "add_eos_token", "add_prefix_space", "legacy"),
    *("clean_up_tokenization_spaces", "split_special_tokens"),
)
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_WITHOUT_CLASS = {"llama": "Llama", "mistral": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen2", "gpt2": "GPT2"}
_WITHOUT_CLASS |= dict.fromkeys(("gemma2", "gemma3_text", "gemma3"), "Gemma")

Token: TypeAlias = str | AddedToken


class TokenizerError(ValueError):
    """A tokenizer's files that cannot be read, or not exactly; in one line, with the file."""


@dataclass
class Folder:
    """The files of a folder that belong to a tokenizer: {name: content}."""

    path: Path
    files: dict[str, bytes] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Folder:
        """Raise TokenizerError for a file that cannot be read."""
        names = [name for name in (*FILES, GENERATION, MODEL_CONFIG) if os.path.lexists(path / name)]
        return cls(path, {name: _read(path / name) for name in names})

    def json(self, name: str, kind: type = dict) -> Any:
        """Return the JSON object of a file, {} without it. Raises TokenizerError for anything else."""
        if name not in self.files:
            return kind()
        try:
            content = json.loads(self.text(name))
        except (ValueError, RecursionError) as error:
            raise self.error(name, f"is not JSON: {error}") from error
        if not isinstance(content, kind):
            raise self.error(name, f"holds {type(content).__name__} where a JSON object is expected")
        return content

    def text(self, name: str) -> str:
        try:
            return self.files[name].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(name, f"is not UTF-8: {error}") from error

    def error(self, name: str, what: str) -> TokenizerError:
        return TokenizerError(f"{self.path / name}: {one_line(what)}")

    @cached_property
    def config(self) -> dict[str, Any]:
        config = self.json(CONFIG)
        for name in _FLAGS:
            if not isinstance(config.get(name), bool | None):
                raise self.error(CONFIG, f"{name} is {config[name]!r}, where true or false is expected")
        return config

    @property
    def has_tokenizer(self) -> bool:
        """Whether a file is there that only tokenizers have."""
        return any(name in self.files for name in FILES)

    @property
    def kind(self) -> str | None:
        """The name of the tokenizer's class, where a file says it."""
        name = self.config.get("tokenizer_class") or self.json(MODEL_CONFIG).get("tokenizer_class")
        if name is not None and not isinstance(name, str):
            raise self.error(CONFIG, f"tokenizer_class is {name!r}, where a name is expected")
        return name or None

    @property
    def family(self) -> str | None:
        """The class without Tokenizer and Fast; where no file says it that of the model; else None."""
        if name := self.kind:
            return name.removesuffix("Fast").removesuffix("Tokenizer") or name
        return _WITHOUT_CLASS.get(str(self.json(MODEL_CONFIG).get("model_type")))

    @property
    def sentencepiece(self) -> str | None:
        """The name of the file that holds a sentencepiece model."""
        return next((name for name in MODEL_FILES if name in self.files), None)

    @cached_property
    def chat_templates(self) -> dict[str, str]:
        """{name: template}; that of an ordinary chat is "default"."""
        if TEMPLATE in self.files:
            return {"default": self.text(TEMPLATE)}
        if paddlenlp_template.is_paddlenlps(of_paddlenlp := self.json(PADDLENLPS)):
            try:  # which prefers it, too
                return {"default": paddlenlp_template.as_template(of_paddlenlp)}
            except ValueError as error:
                raise self.error(PADDLENLPS, str(error)) from error
        said = self.config.get("chat_template")
        try:
            if isinstance(said, list):
                said = {each["name"]: each["template"] for each in said}
            found = said if isinstance(said, dict) else {"default": said} if said is not None else {}
            if all(isinstance(each, str) for pair in found.items() for each in pair):
                return found
        except (KeyError, TypeError):
            pass
        raise self.error(CONFIG, "chat_template is neither a text nor a list of names and templates")

    @cached_property
    def end_token_ids(self) -> list[int]:
        """Return generation_config.json's end tokens."""
        said = self.json(GENERATION).get("eos_token_id")
        found = said if isinstance(said, list) else [said] if said is not None else []
        if any(type(number) is not int or number < 0 for number in found):
            raise self.error(GENERATION, f"eos_token_id is {said!r}, where a token id or a list of them is expected")
        return found

    def special_tokens(self) -> tuple[dict[str, Any], dict[int, AddedToken]]:
        """({bos_token and the like: its token, or None}, {id: added token}) that the files name.

        Without added_tokens_decoder, which transformers writes since 4.34, special_tokens_map.json, added_tokens.json
        and tokenizer.json tell them, the later one rather than the earlier.
        """
        config = self.config
        names = [name for name in (*SPECIAL_TOKENS, ADDITIONAL) if name in config]
        special: dict[str, Any] = {name: self._special(CONFIG, name, config[name]) for name in names}
        if "added_tokens_decoder" in config:
            added = self._decoder(config["added_tokens_decoder"])
        else:
            special |= self._mapped(special.get(ADDITIONAL) or [])
            added = self._added(special)
        special |= self._extra(special.get(ADDITIONAL) or [])
        by_text = {str(token): token for token in added.values()}
        named = {name: by_text.get(str(token), token) for name, token in special.items() if name in SPECIAL_TOKENS}
        return special | named, added

    def _special(self, file: str, name: str, value: Any) -> Token | list[Token] | None:
        if name == ADDITIONAL:
            return self._additional(file, value)
        return None if value is None else self._token(file, name, value)

    def _additional(self, file: str, value: Any) -> list[Token]:
        if not isinstance(value, list | None):
            raise self.error(file, f"{ADDITIONAL} is {value!r}, where a list of tokens is expected")
        return [self._token(file, ADDITIONAL, each) for each in value or []]

    def _token(self, file: str, name: str, value: Any) -> Token:
        """A token as a text or an object of its settings."""
        if isinstance(value, str):
            return value
        settings = {key: each for key, each in value.items() if key != "__type"} if _is_object(value) else {}
        flags = [each for key, each in settings.items() if key != "content"]
        known = settings.keys() <= {"content", *_TOKEN_FLAGS} and all(isinstance(flag, bool) for flag in flags)
        if not known or not isinstance(settings.get("content"), str):
            raise self.error(file, f"{name} is {value!r}, which is no token")
        return AddedToken(**settings)

    def _decoder(self, said: Any) -> dict[int, AddedToken]:
        if not isinstance(said, dict):
            raise self.error(CONFIG, f"added_tokens_decoder is {type(said).__name__}, where an object is expected")
        added = {}
        for key, value in said.items():
            if not key.isascii() or not key.isdigit() or not isinstance(value, dict):
                raise self.error(CONFIG, f"added_tokens_decoder has {key!r}: {value!r}, which is no id and its token")
            added[int(key)] = self._token(CONFIG, f"added_tokens_decoder[{key}]", value)
        return added

    def _extra(self, additional: list[Token]) -> dict[str, Any]:
        """extra_special_tokens: transformers 4's names and tokens, or the list that transformers 5 writes."""
        said = self.config.get("extra_special_tokens") or {}
        if isinstance(said, list):
            return {ADDITIONAL: additional + self._additional(CONFIG, said)}
        if not isinstance(said, dict):
            raise self.error(CONFIG, f"extra_special_tokens is {said!r}, where names and tokens are expected")
        return {name: self._token(CONFIG, name, value) for name, value in said.items()}

    def _mapped(self, additional: list[Token]) -> dict[str, Any]:
        """The special tokens of special_tokens_map.json; `additional`: those named elsewhere."""
        special: dict[str, Token | list[Token]] = {}
        for name, value in self.json(SPECIAL_MAP).items():
            if name == ADDITIONAL:
                more = [self._as_special(each) for each in self._additional(SPECIAL_MAP, value)]
                special[name] = additional + [token for token in more if token not in additional]
            elif name in SPECIAL_TOKENS and value is not None:
                special[name] = self._as_special(self._token(SPECIAL_MAP, name, value))
        return special

    @staticmethod
    def _as_special(token: Token) -> Token:
        if isinstance(token, AddedToken):
            token.special = True
        return token

    def _added(self, special: dict[str, Any]) -> dict[int, AddedToken]:
        """Tokens of added_tokens.json and of tokenizer.json."""
        known = {str(token) for token in all_tokens(special)}
        added = {}
        for text, number in self.json(ADDED).items():
            if type(number) is not int or number < 0:
                raise self.error(ADDED, f"{text!r} has {number!r}, which is no token id")
            added[number] = AddedToken(text, normalized=text not in known, special=text in known)
        for token in self.tokens_of_fast():
            added[token["id"]] = self._token(FAST, "added_tokens", {k: v for k, v in token.items() if k != "id"})
        return added

    def tokens_of_fast(self) -> list[dict[str, Any]]:
        """added_tokens of tokenizer.json."""
        found = self.json(FAST).get("added_tokens", [])
        if not isinstance(found, list) or not all(_is_object(each) and type(each.get("id")) is int for each in found):
            raise self.error(FAST, "added_tokens is no list of tokens with their ids")
        return found


def end_tokens(folder: str | Path) -> list[int]:
    """The tokens that end a text by a folder's generation_config.json; none without one. Raises TokenizerError."""
    path = Path(folder) / GENERATION
    return Folder(path.parent, {GENERATION: _read(path)} if os.path.lexists(path) else {}).end_token_ids


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from error


def one_line(text: object) -> str:
    return " ".join(str(text).split())


def all_tokens(special: dict[str, Any]) -> list[Token]:
    """Return the special tokens, each text once, in transformers' order."""
    order = [name for name in (*SPECIAL_TOKENS, ADDITIONAL) if name in special]
    order += [name for name in special if name not in order]
    found: dict[str, Token] = {}
    for name in order:
        for token in special[name] if isinstance(special[name], list) else [special[name]]:
            if token:
                found.setdefault(str(token), token)
    return list(found.values())


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
