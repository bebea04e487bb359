"""tokenizer.json of a sentencepiece model gives the tokens that sentencepiece gives."""

import json

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer

from paddle_te.data import prepare
from paddle_te.data.sentencepiece import MODEL_FILES, tokenizer_files

ALPHABET = list("abcdefghij    \n\t.,0123é漢😀▁<>/s")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice(ALPHABET[:10], generator.integers(1, 8))) for _ in range(300)]
    texts = [" ".join(generator.choice(words, 200)) for _ in range(20)]
    folder = tmp_path_factory.mktemp("of") / "tokenizer"
    prepare.train_tokenizer(texts, 400, folder)
    return folder


def test_the_same_tokens(seed, folder):
    generator = np.random.default_rng(seed)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / MODEL_FILES[0]))
    made = tokenizer_files(folder / MODEL_FILES[0])
    tokenizer = Tokenizer.from_str(made["tokenizer.json"])
    for _ in range(200):
        text = "".join(generator.choice(ALPHABET, generator.integers(1, 60)))
        if "<s>" in text or "</s>" in text:  # which sentencepiece never takes for the special ones
            continue
        assert tokenizer.encode(text, add_special_tokens=False).ids == pieces.encode(text), repr(text)
    assert tokenizer.encode("abc").ids == [pieces.bos_id(), *pieces.encode("abc")]
    assert tokenizer.decode(pieces.encode("abc 12é")) == "abc 12é"
    config = json.loads(made["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
