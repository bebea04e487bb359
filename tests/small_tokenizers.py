"""Tokenizer folders of each kind that Hugging Face's models come with, small and made without any library.

`python tests/small_tokenizers.py FILE`, in an environment with transformers 4.51.3, writes what AutoTokenizer makes of
them: tests/unit/data/tokens_of_transformers.json.
"""

import json
import struct
import sys
import tempfile
from pathlib import Path

TEXTS = [
    "",
    " ",
    "hello world",
    "  hello   the\n\n\tworld ",
    "<s>the</s> hello<unk>",
    "<|im_start|>the hello<|im_end|>\n",
    "the<|endoftext|>hello <|begin|> <|end|>",
    "the 123 世界 é e\u0301 \u200d😀",
    "the ▁▁ hello .  the , do n't",
    "[INST] the [/INST]hello<tool> the Word Words",
]
PIECES = (
    "the hello world in ▁ ▁▁ ▁t ▁the he ▁he ll ▁hell ▁hello ▁w or ▁wor ld ▁world [ ] . , ▁. ' n't < > / s> </".split()
)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
CONTROL, USER_DEFINED = 3, 4


def _field(number, content):
    """A field of a protobuf message: bytes, an int or a float."""
    if isinstance(content, bytes):
        return _varint(number << 3 | 2) + _varint(len(content)) + content
    if isinstance(content, float):
        return _varint(number << 3 | 5) + struct.pack("<f", content)
    return _varint(number << 3) + _varint(content)


def _varint(number):
    out = b""
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def sentencepiece_model(*further, kind=2):
    """A .model file with Llama's layout. further: (piece, type). kind: 2 for byte pairs, 1 for unigrams."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(piece, 0.0, kind_of) for piece, kind_of in further]
    pieces += [(f"<0x{i:02X}>", 0.0, 6) for i in range(256)]
    pieces += [(piece, -float(i), 1) for i, piece in enumerate(dict.fromkeys([*PIECES, *LETTERS]))]
    messages = [_field(1, text.encode()) + _field(2, score) + _field(3, of) for text, score, of in pieces]
    trainer = _field(2, _field(3, kind) + _field(35, 1) + _field(45, b"<unk>"))
    normalizer = _field(3, _field(1, b"identity") + _field(4, 0))
    return b"".join(_field(1, message) for message in messages) + trainer + normalizer


def byte_level():
    """(vocabulary, merges) of byte pairs over GPT-2's 256 characters for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(others))]
    merges = "Ġ t,h e,Ġt he,l l,he ll,hell o,Ġ hell,Ġhell o,o r,l d,Ġ w,Ġw or,Ġwor ld,Ċ Ċ,1 2,Ã ©".split(",")
    vocabulary = {token: number for number, token in enumerate(alphabet + [merge.replace(" ", "") for merge in merges])}
    return vocabulary, merges


def _token(text, special=True, **settings):
    plain = dict(lstrip=False, rstrip=False, normalized=False, single_word=False)
    return {"content": text, "special": special} | plain | settings


def _tokenizer_json(specials, pre_tokenizer, normalizer=None, begin=None):
    vocabulary, merges = byte_level()
    added = [{"id": len(vocabulary) + i} | token for i, token in enumerate(specials)]
    steps = [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}]
    if begin is not None:
        tokens = {begin: {"id": begin, "ids": [len(vocabulary)], "tokens": [begin]}}
        first = [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*first, {"Sequence": {"id": "B", "type_id": 1}}]
        steps.append({"type": "TemplateProcessing", "single": first, "pair": pair, "special_tokens": tokens})
    model = dict(type="BPE", vocab=vocabulary, merges=merges, dropout=None, unk_token=None, fuse_unk=False)
    model |= dict(continuing_subword_prefix=None, end_of_word_suffix=None, byte_fallback=False, ignore_merges=True)
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {"type": "Sequence", "processors": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def _gemma_json():
    """Byte pairs of characters, not of bytes, with bytes for what is unknown; spaces are ▁."""
    merges = ["t h", "th e", "h e", "l l", "he ll", "hell o", "▁ ▁", "▁ the", "1 2"]
    vocabulary = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
    vocabulary += [merge.replace(" ", "") for merge in merges]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoded = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    model = dict(type="BPE", vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges, dropout=None)
    model |= dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True, ignore_merges=False)
    model |= dict(continuing_subword_prefix=None, end_of_word_suffix=None)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i} | _token(vocabulary[i]) for i in range(4)],
        "normalizer": space,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [decoded, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": model,
    }  # fmt: skip


def _split(digits):
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    pattern = {"Regex": (pattern + r"|\s+(?!\S)|\s+").replace("DIGITS", digits)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


def folders():
    """{name: {file: its content}}"""
    vocabulary, merges = byte_level()
    count = len(vocabulary)
    bytes_only = {"vocab.json": vocabulary, "merges.txt": "#version: 0.2\n" + "\n".join(merges) + "\n"}
    llama, chatml = {"tokenizer_class": "LlamaTokenizer"}, ["<|im_start|>", "<|im_end|>"]
    model, size = sentencepiece_model(), 3 + 256 + len(dict.fromkeys([*PIECES, *LETTERS]))
    begun = {str(i): _token(text) for i, text in enumerate(["<unk>", "<s>", "</s>"])}
    with_chatml = begun | {str(size + i): _token(text) for i, text in enumerate(chatml)}
    with_chatml |= {str(size + 2): _token("<tool>", special=False), str(size + 3): _token("Word", single_word=True)}
    mistral = sentencepiece_model(("[INST]", CONTROL), ("[/INST]", CONTROL), ("<tool>", USER_DEFINED))
    qwen = {str(count + i): _token(text) for i, text in enumerate(["<|endoftext|>", *chatml])}
    qwen |= {str(count + 3): _token("<tool>", special=False)}
    qwen_config = dict(tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>", pad_token="<|endoftext|>")
    qwen_config |= dict(add_bos_token=False, add_prefix_space=False, clean_up_tokenization_spaces=False)
    ends = [_token(text) for text in ("<|begin|>", "<|end|>", "<|eot|>")]
    llama3 = _tokenizer_json(ends, _split(r"\p{N}{1,3}"), begin="<|begin|>")
    fast = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<|begin|>", eos_token="<|eot|>")
    deepseek = dict(tokenizer_class="LlamaTokenizerFast", add_bos_token=True, add_eos_token=False, legacy=True)
    deepseek |= dict(bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>", unk_token=None)
    return {
        "llama": {"tokenizer.model": model, "tokenizer_config.json": llama | {"legacy": False}},
        "llama_legacy": {"tokenizer.model": model, "tokenizer_config.json": llama},
        "llama_alone": {"tokenizer.model": model, "config.json": {"model_type": "llama"}},
        "llama_no_space": {"tokenizer.model": model, "tokenizer_config.json": llama | {"add_prefix_space": False}},
        "llama_chatml": {
            "tokenizer.model": model,
            "tokenizer_config.json": llama
            | {"eos_token": "<|im_end|>", "added_tokens_decoder": with_chatml, "add_eos_token": True},
        },
        "llama_older": {
            "tokenizer.model": model,
            "tokenizer_config.json": llama,
            "added_tokens.json": {text: size + i for i, text in enumerate(chatml)},
            "special_tokens_map.json": {"eos_token": "<|im_end|>", "additional_special_tokens": chatml},
        },
        "llama_unigrams": {
            "tokenizer.model": sentencepiece_model(kind=1),
            "tokenizer_config.json": llama | {"legacy": False},
        },
        "mistral": {
            "tokenizer.model": mistral,
            "tokenizer_config.json": llama | {"legacy": False, "add_prefix_space": True},
        },
        "qwen2": {**bytes_only, "tokenizer_config.json": qwen_config | {"added_tokens_decoder": qwen}},
        "qwen2_alone": {**bytes_only, "config.json": {"model_type": "qwen2"}},
        "qwen2_json": {
            "tokenizer.json": _tokenizer_json([*qwen.values()], _split(r"\p{N}"), {"type": "NFC"}),
            "tokenizer_config.json": qwen_config | {"added_tokens_decoder": qwen},
        },
        "gemma": {
            "tokenizer.json": _gemma_json(),
            "tokenizer_config.json": {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True},
        },
        "gpt2": {**bytes_only, "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}},
        "llama3": {
            "tokenizer.json": llama3,
            "tokenizer_config.json": fast | {"clean_up_tokenization_spaces": True, "pad_token": "<|pad|>"},
        },
        "deepseek": {"tokenizer.json": _tokenizer_json(ends, _split(r"\p{N}{1,3}")), "tokenizer_config.json": deepseek},
    }


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        content = content if isinstance(content, bytes | str) else json.dumps(content, ensure_ascii=False)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def results(tokenizer, texts):
    """What is compared; `tokenizer` is transformers' or ours."""
    plain = dict(add_special_tokens=False)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return {
        "length": len(tokenizer),
        "ends": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "ids": ids,
        "plain": [tokenizer(text, **plain)["input_ids"] for text in texts],
        "split": [tokenizer(text, **plain, split_special_tokens=True)["input_ids"] for text in texts],
        "decoded": [tokenizer.decode(row) for row in ids],
        "without_special": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
    }


def of_transformers(texts):
    """{name of a folder: results}"""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as place:
        made = {name: write(Path(place) / name, files) for name, files in folders().items()}
        return {name: results(AutoTokenizer.from_pretrained(str(path)), texts) for name, path in made.items()}


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in of_transformers(TEXTS).items()]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")
