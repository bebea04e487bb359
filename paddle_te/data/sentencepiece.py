"""A Llama tokenizer that is a sentencepiece model, as PaddleNLP has it, as Hugging Face's tokenizer.json.

PaddleFormers 1.2.0 with transformers 5.3 makes an empty tokenizer of PaddleNLP's file, without a word, and of one that
is called tokenizer.model one that puts no space before a text. From tokenizer.json all read the same tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

MODEL_FILES = ("sentencepiece.bpe.model", "tokenizer.model")  # PaddleNLP's name and Hugging Face's
SPACE = "▁"
_CONFIG = "tokenizer_config.json"


def tokenizer_files(model: Path) -> dict[str, str]:
    """{file: its text} of a tokenizer that gives the tokens of the sentencepiece model in the file `model`.

    What the tokenizer_config.json beside it says of special tokens holds.
    Raises ValueError for a model that is no BPE with byte fallback, as Llama's is.
    """
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    vocabulary = {pieces.id_to_piece(i): i for i in range(len(pieces))}
    if not any(map(pieces.is_byte, range(len(pieces)))):
        raise ValueError(f"{model}: no BPE with byte fallback, as Llama's tokenizer is one")
    beside = model.with_name(_CONFIG)
    said = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    special = {"unk_token": pieces.unk_id(), "bos_token": pieces.bos_id(), "eos_token": pieces.eos_id()}
    special = {name: pieces.id_to_piece(i) for name, i in special.items() if i >= 0}
    added = [
        dict(id=vocabulary[token], content=token, special=True) | dict.fromkeys(_PLAIN, False)
        for token in special.values()
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": _sequence("normalizers", dict(type="Prepend", prepend=SPACE), _replace(" ", SPACE)),
        "pre_tokenizer": None,
        "post_processor": _begin(special, vocabulary) if said.get("add_bos_token", True) else None,
        "decoder": _sequence(
            "decoders",
            _replace(SPACE, " "),
            dict(type="ByteFallback"),
            dict(type="Fuse"),
            dict(type="Strip", content=" ", start=1, stop=0),
        ),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": special["unk_token"],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": _merges(pieces, vocabulary),
        },
    }
    config = special | {name: said[name] for name in special if isinstance(said.get(name), str)}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=1),
        _CONFIG: json.dumps(config, ensure_ascii=False, indent=1) + "\n",
    }


_PLAIN = ("single_word", "lstrip", "rstrip", "normalized")


def _merges(pieces, vocabulary):
    """Pairs of pieces that make a piece, the best piece first: sentencepiece always merges the pair of the best one."""
    found = []
    for piece, number in vocabulary.items():
        if pieces.is_control(number) or pieces.is_unknown(number) or pieces.is_byte(number):
            continue
        splits = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        pairs = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        found += [(-pieces.get_score(number), number, vocabulary[a], vocabulary[b], a, b) for a, b in pairs]
    return [[a, b] for *_, a, b in sorted(found)]


def _sequence(what, *parts):
    return {"type": "Sequence", what: list(parts)}


def _replace(text, by):
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def _begin(special, vocabulary):
    """The token that begins a text, in front of it."""
    token = special["bos_token"]
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    sequences = [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")]
    second = {"SpecialToken": {"id": token, "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [first, sequences[0]],
        "pair": [first, sequences[0], second, sequences[1]],
        "special_tokens": {token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]}},
    }
