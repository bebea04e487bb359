"""One door to tokenizers, for training, evaluation, generation, `paddle-te prepare-data` and the launcher's checks.

`load_tokenizer` reads a Hugging Face folder with the library `tokenizers` and gives the tokens that transformers' own
AutoTokenizer gives (4.51), with neither transformers nor a host. What only a host reads, its own classes and names that
it downloads, is read by that host (`host_tokenizer`). What cannot be read exactly is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from paddle_te.data import host_tokenizer, tokenizer_backend
from paddle_te.data.tokenizer_folder import CONFIG, FAST, FILES, Folder, TokenizerError, end_tokens

__all__ = ["Tokenizer", "TokenizerError", "load_tokenizer", "portable_files", "read_tokenizer"]


def load_tokenizer(name_or_path: str | Path, model: str | Path | None = None) -> AnyTokenizer:
    """Return the tokenizer of a folder, or of a name that the host knows and downloads.

    model: the folder of the model that generates with it, whose generation_config.json adds to `end_token_ids`.
    Raises TokenizerError, a ValueError, in one line that names the file.
    """
    tokenizer = _load(name_or_path)
    if model is not None:
        tokenizer.end_token_ids = list(dict.fromkeys([*tokenizer.end_token_ids, *end_tokens(model)]))
    return tokenizer


def _load(name_or_path: str | Path) -> AnyTokenizer:
    path = Path(name_or_path).expanduser()
    if not str(name_or_path) or not path.is_dir():
        return host_tokenizer.named(str(name_or_path))
    files = Folder.read(path)
    family = tokenizer_backend.family_of(files)
    return (
        host_tokenizer.of_folder(path, files.kind or "LlamaTokenizer") if family is None else Tokenizer(files, family)
    )


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a folder, without a host; None where its class is one that only a host has.

    Raises TokenizerError.
    """
    files = Folder.read(folder)
    family = tokenizer_backend.family_of(files)
    return None if family is None else Tokenizer(files, family)


class Tokenizer:
    """A tokenizer from the files of a Hugging Face folder.

    special_tokens: {"bos_token" and the like: its text}, a list of them for "additional_special_tokens".
    bos_token_id, eos_token_id, pad_token_id: None where there is no such token.
    chat_templates: {name: Jinja template}; chat_template: the one of an ordinary chat, or None.
    end_token_ids: the tokens that end a text: eos_token and those of generation_config.json.
    """

    def __init__(self, folder: Folder, family: tokenizer_backend.Family):
        self.folder, self.kind, self._files = folder.path, f"{family.name}Tokenizer", folder.files
        self.chat_templates = folder.chat_templates
        self.chat_template = self.chat_templates.get("default")
        self._cleans = folder.config.get("clean_up_tokenization_spaces") or False
        self._splits = folder.config.get("split_special_tokens") or False
        self._backend, self.special_tokens = tokenizer_backend.build(folder, family)
        self.bos_token_id, self.eos_token_id, self.pad_token_id = map(self._id_of, ("bos", "eos", "pad"))
        ends = [] if self.eos_token_id is None else [self.eos_token_id]
        self.end_token_ids = list(dict.fromkeys([*ends, *folder.end_token_ids]))

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(f"{name}_token")
        return None if token is None else self._backend.token_to_id(token)

    def __len__(self) -> int:
        """The number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """The number of tokens without the added ones, as hosts call it: `needed_rows` is what an embedding needs."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    @property
    def needed_rows(self) -> int:
        """The number of rows of an embedding for all tokens: the largest id and one."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encoding(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool | None = None
    ) -> tokenizers.Encoding:
        """Return a text's tokens, with their places in it.

        add_special_tokens: with those that the tokenizer puts around a text.
        split_special_tokens: whether "</s>" in the text is text, too, instead of that token.
        """
        splits = self._splits if split_special_tokens is None else split_special_tokens
        self._backend.encode_special_tokens = splits
        with tokenizer_backend.refusing(f"{self.folder}: cannot encode {text[:40]!r}"):
            return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def encode(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool | None = None) -> list[int]:
        """Return the ids of a text's tokens; arguments as `encoding`'s."""
        return self.encoding(text, add_special_tokens, split_special_tokens).ids

    def __call__(self, text: str, return_token_type_ids: bool = False, **options: bool) -> dict[str, list[int]]:
        """{"input_ids": …}, as hosts' tokenizers answer; options as `encode`'s. No token has a type here."""
        return {"input_ids": self.encode(text, **options)}

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """Return the text of tokens. Spaces before punctuation go only where the tokenizer's files say so."""
        with tokenizer_backend.refusing(f"{self.folder}: cannot decode"):
            text = self._backend.decode([int(number) for number in ids], skip_special_tokens=skip_special_tokens)
        cleans = self._cleans if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        return _without_spaces(text) if cleans else text

    def batch_decode(self, rows: Sequence[Sequence[int]], **options: bool) -> list[str]:
        return [self.decode(row, **options) for row in rows]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def convert_ids_to_tokens(self, number: int) -> str | None:
        return self._backend.id_to_token(number)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files that the tokenizer was read from."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if name in self._files:
                (Path(folder) / name).write_bytes(self._files[name])

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The object of the library `tokenizers`."""
        return self._backend


def portable_files(tokenizer: Tokenizer) -> dict[str, str]:
    """{file: its text} of a folder from which any transformers reads the same tokens, without the tokenizer's class.

    transformers 5.3, PaddleFormers' own, makes an empty tokenizer of PaddleNLP's sentencepiece model, without a word,
    and of one that is called tokenizer.model one that puts no space before a text.
    """
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    config |= tokenizer.special_tokens
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    return {
        FAST: tokenizer.backend.to_str(pretty=True),
        CONFIG: json.dumps(config, ensure_ascii=False, indent=1) + "\n",
    }


def _without_spaces(text: str) -> str:
    for found in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(found, found.strip())
    return text


AnyTokenizer = Tokenizer | host_tokenizer.HostTokenizer
