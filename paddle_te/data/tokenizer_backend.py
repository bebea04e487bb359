"""Objects of the library `tokenizers` from the files of a Hugging Face folder.

What transformers' classes do to them is told by a `Family` for each class: which special tokens it has by itself, how
it is made where there is no tokenizer.json, and what it puts around a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from paddle_te.data import sentencepiece
from paddle_te.data.tokenizer_folder import (
    CONFIG,
    FAST,
    MERGES,
    VOCABULARY,
    Folder,
    TokenizerError,
    all_tokens,
    one_line,
)

Special = dict[str, Any]  # {bos_token and the like: text, AddedToken, list of them, or None}
Added = dict[int, AddedToken]


@dataclass(frozen=True)
class Family:
    """A class of transformers.

    name: without Tokenizer and Fast. special: the special tokens of a folder that names none.
    convert: makes the object from other files than tokenizer.json; `token` then tells how its special tokens behave.
    framed: add_bos_token and add_eos_token say what surrounds a text, whatever tokenizer.json says.
    always_token: special tokens behave as `token` says with tokenizer.json, too.
    """

    name: str
    special: dict[str, str] = field(default_factory=dict)
    convert: Callable[[Folder, Special, Added], tokenizers.Tokenizer] | None = None
    token: dict[str, bool] = field(default_factory=dict)
    framed: bool = False
    always_token: bool = False


def family_of(folder: Folder) -> Family | None:
    """None where a host must read the folder. Raises TokenizerError where nobody can."""
    name, has_fast = folder.family, FAST in folder.files
    if name is None:
        name = "PreTrained" if has_fast else "Llama" if folder.sentencepiece else None
    if name is None or not folder.has_tokenizer:
        raise TokenizerError(
            f"{folder.path}: holds no tokenizer that can be read: it needs tokenizer.json, tokenizer.model, or "
            "vocab.json and merges.txt with a tokenizer_config.json that names its class; give the tokenizer's folder"
        )
    family = FAMILIES.get(name)
    if family is None:
        _check_of_a_host(folder, name)
        return None
    if family is LLAMA and not has_fast and folder.sentencepiece == sentencepiece.PADDLENLP_FILE:
        return family if sentencepiece.is_plain(_sentencepiece(folder)) else None
    return family


def _check_of_a_host(folder: Folder, name: str) -> None:
    """Raises TokenizerError unless the class may be a host's."""
    if FAST in folder.files or "auto_map" in folder.config:
        why = "is code of its own, which is not run" if "auto_map" in folder.config else "is none of those read here"
        known = ", ".join(sorted({f"{family.name}Tokenizer" for family in FAMILIES.values()}))
        raise folder.error(CONFIG, f"tokenizer_class {name!r} {why}: {known}")


def build(folder: Folder, family: Family) -> tuple[tokenizers.Tokenizer, dict[str, str | list[str]]]:
    """(the tokenizer, the texts of its special tokens). Raises TokenizerError."""
    special, added = folder.special_tokens()
    special = family.special | special
    prefix_space = folder.config.get("add_prefix_space")
    # Llama's class makes the object anew where the folder says add_prefix_space
    converts = FAST not in folder.files or family is LLAMA and prefix_space is not None
    backend = _converted(folder, family, special, added) if converts else _read(folder)
    if converts or family.always_token:
        special |= {name: _token(special.get(name), family.token) for name in _CAST if name in special}
    if backend.padding:
        special.setdefault("pad_token", backend.padding["pad_token"])
    backend.no_padding()
    backend.no_truncation()
    with refusing(f"{folder.path / CONFIG}: its tokens cannot be added"):
        _add_tokens(backend, special, added)
    if isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and not family.framed:
        backend.pre_tokenizer.add_prefix_space = bool(prefix_space)
    if family.framed:
        backend.post_processor = _frame(folder, backend, special)
    _check(folder, backend, added)
    return backend, {name: _texts(token) for name, token in special.items() if token}


_CAST = ("bos_token", "eos_token", "unk_token", "pad_token")


def _token(token: Any, settings: dict[str, bool]) -> Any:
    return AddedToken(token, **settings) if isinstance(token, str) else token


def _texts(token: Any) -> str | list[str]:
    return [str(each) for each in token] if isinstance(token, list) else str(token)


def _read(folder: Folder) -> tokenizers.Tokenizer:
    with refusing(f"{folder.path / FAST}: is no tokenizer, or damaged"):
        return tokenizers.Tokenizer.from_str(folder.text(FAST))


def _converted(folder: Folder, family: Family, special: Special, added: Added) -> tokenizers.Tokenizer:
    if family.convert is None:
        raise TokenizerError(f"{folder.path}: has no tokenizer.json, which {family.name}Tokenizer needs")
    return family.convert(folder, special, added)


def _add_tokens(backend: tokenizers.Tokenizer, special: Special, added: Added) -> None:
    """Adds those that the object does not have, or has with other settings, in transformers' order."""
    there = backend.get_added_tokens_decoder().values()
    known, texts = set(map(repr, there)), set(map(str, there))
    new = [token for _, token in sorted(added.items()) if repr(token) not in known]
    texts |= set(map(str, new))
    tokens = all_tokens(special)
    new += [token for token in tokens if not (isinstance(token, str) and token in texts) and token not in new]
    for i, token in enumerate(new):
        token = new[i] = AddedToken(token, special=False) if isinstance(token, str) else token
        token.special = token.special or str(token) in map(str, tokens)
    backend.add_tokens(new)


def _frame(folder: Folder, backend: tokenizers.Tokenizer, special: Special) -> processors.TemplateProcessing:
    """What add_bos_token, true by default, and add_eos_token put around a text."""
    asked = {"bos_token": folder.config.get("add_bos_token", True), "eos_token": folder.config.get("add_eos_token")}
    for name in (name for name in asked if asked[name] and special.get(name) is None):
        raise folder.error(CONFIG, f"add_{name} is true, and there is no {name}")
    begin, end = (str(special[name]) if asked[name] else None for name in asked)
    part = lambda letter, kind: [  # noqa: E731
        f"{begin}:{kind} " if begin else "", f"${letter}:{kind}", f" {end}:{kind}" if end else ""
    ]  # fmt: skip
    single = "".join(part("A", 0))
    pair = f"{single}{f' {begin}:1' if begin else ''} $B:1{f' {end}:1' if end else ''}"
    tokens = [(token, backend.token_to_id(token)) for token in (begin, end) if token]
    with refusing(f"{folder.path / CONFIG}: bos_token and eos_token cannot surround a text"):
        return processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def _check(folder: Folder, backend: tokenizers.Tokenizer, added: Added) -> None:
    """Refuses ids that contradict each other, which a tokenizer would resolve in silence. Raises TokenizerError."""
    for number, token in added.items():
        if (found := backend.token_to_id(str(token))) != number:
            raise TokenizerError(f"{folder.path}: its files say that {str(token)!r} has id {number} and id {found}")
    for token in folder.tokens_of_fast():
        if backend.token_to_id(token.get("content")) != token["id"]:
            raise folder.error(
                FAST, f"added_tokens has {token.get('content')!r} with id {token['id']}, which it is not"
            )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if len(set(vocabulary.values())) < len(vocabulary):
        raise TokenizerError(f"{folder.path}: two tokens have the same id")
    ids, others = set(vocabulary.values()), set(backend.get_added_tokens_decoder())
    unused = next(number for number in count() if number not in ids)
    if unused < max(ids - others, default=0):
        raise TokenizerError(f"{folder.path}: no token has id {unused}, and others have larger ones")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn whatever the library `tokenizers` raises into a TokenizerError that begins with `what`."""
    try:
        yield
    except (TokenizerError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise TokenizerError(f"{what}: {one_line(error)}") from error


# ------------------------------------------------------------------------------------- without a tokenizer.json


def _sentencepiece_file(folder: Folder) -> str:
    if folder.sentencepiece is None:
        raise TokenizerError(f"{folder.path}: has no tokenizer.model, from which LlamaTokenizer is made")
    return folder.sentencepiece


def _sentencepiece(folder: Folder) -> Any:
    name = _sentencepiece_file(folder)
    try:
        return sentencepiece.parse(folder.files[name])
    except ValueError as error:
        raise folder.error(name, str(error)) from error


def _llama(folder: Folder, special: Special, added: Added) -> tokenizers.Tokenizer:
    model = _sentencepiece(folder)
    begin = [str(added.get(number, model.pieces[number].piece)) for number in range(3)]
    legacy = folder.config.get("legacy") is not False
    prefix_space = folder.config.get("add_prefix_space", True)
    with refusing(f"{folder.path / _sentencepiece_file(folder)}: is damaged"):
        return sentencepiece.convert(model, begin, legacy, bool(prefix_space))


def _byte_level(
    folder: Folder, special: Special, added: Added, read_merges: Callable[[str], list[tuple[str, ...]]]
) -> tokenizers.Tokenizer:
    for name in (VOCABULARY, MERGES):
        if name not in folder.files:
            raise TokenizerError(f"{folder.path}: has neither tokenizer.json nor {name}")
    known = set(map(str, [*added.values(), *all_tokens(special)]))
    vocabulary, merges = folder.json(VOCABULARY), dict.fromkeys(read_merges(folder.text(MERGES)))
    with refusing(f"{folder.path}: vocab.json and merges.txt do not make a tokenizer"):
        model = BPE(vocabulary, list(merges), continuing_subword_prefix="", end_of_word_suffix="")
        tokenizer = tokenizers.Tokenizer(model)
    # a file that is cut short at the end of a line would make other tokens, without a word
    made = {"".join(pair) for pair in merges}
    if lost := [token for token in vocabulary if len(token) > 1 and token not in made and token not in known]:
        raise folder.error(MERGES, f"makes none of {len(lost)} tokens of vocab.json, such as {lost[0]!r}")
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _qwen2(folder: Folder, special: Special, added: Added) -> tokenizers.Tokenizer:
    def read_merges(text: str) -> list[tuple[str, ...]]:
        lines = [line.strip() for line in text.split("\n")]
        lines = lines[1:] if lines[0].startswith("#version:") else lines
        return [tuple(line.split()) for line in lines if line]

    tokenizer = _byte_level(folder, special, added, read_merges)
    tokenizer.normalizer = normalizers.NFC()
    prefix_space = bool(folder.config.get("add_prefix_space"))
    split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return tokenizer


def _gpt2(folder: Folder, special: Special, added: Added) -> tokenizers.Tokenizer:
    read_merges = lambda text: [tuple(line.split()) for line in text.split("\n")[1:-1]]  # noqa: E731
    tokenizer = _byte_level(folder, special, added, read_merges)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(folder.config.get("add_prefix_space")))
    if folder.config.get("add_bos_token"):
        begin = str(special["bos_token"])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin}:0 $A:0",
            pair=f"{begin}:0 $A:0 $B:1",
            special_tokens=[(begin, tokenizer.token_to_id(begin))],
        )
    return tokenizer


_SPECIAL = {"normalized": False, "special": True}
LLAMA = Family(
    "Llama",
    {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    convert=_llama,
    token=_SPECIAL,
    framed=True,
)
_END = "<|endoftext|>"
QWEN2 = Family(
    "Qwen2",
    dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END),
    convert=_qwen2,
    token=_SPECIAL,
    always_token=True,
)
GEMMA = Family("Gemma", {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad")}, framed=True)
GPT2 = Family("GPT2", dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END), convert=_gpt2)
PLAIN = Family("PreTrained")
FAMILIES = {family.name: family for family in (LLAMA, QWEN2, GEMMA, GPT2, PLAIN)}
FAMILIES |= dict.fromkeys(("Pretrained", "TokenizersBackend"), PLAIN)  # PaddleNLP's and transformers 5's names
