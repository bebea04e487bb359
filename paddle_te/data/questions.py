"""Make a question and its answer a sample of fine-tuning, the same for all hosts."""

from __future__ import annotations

from typing import Any

IGNORED = -100  # the label of a token that is not trained on


def encode(tokenizer: Any, src: str, tgt: str, src_length: int, max_length: int) -> dict[str, list[int]]:
    """Return {"input_ids": [n], "labels": [n]}, n < max_length.

    A label is the token after its input, IGNORED within src.

    A sample is src, with the tokens that the tokenizer puts around a text, tgt and end-of-text. Of a longer src than
    src_length tokens the end is kept, with the token that begins a text; a tgt that is too long is cut off.
    """
    source = tokenizer(src)["input_ids"]
    if len(source) > src_length:
        begin = source[:1] if source[0] == tokenizer.bos_token_id else []
        source = begin + source[len(source) - src_length + len(begin) :]
    room = max_length - len(source)
    target = tokenizer(tgt, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    tokens = source + target[:room]
    return {"input_ids": tokens[:-1], "labels": [IGNORED] * (len(source) - 1) + tokens[len(source) :]}
