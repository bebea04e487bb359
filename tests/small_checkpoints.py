"""A tokenizer and a model small enough to make in a test, in every layout."""

import inspect
import json

import numpy as np
import sentencepiece
from paddlenlp.transformers import LlamaTokenizer

from paddle_te.data.tokenizer import load_tokenizer
from paddle_te.hosts.paddlenlp.families import model_class
from paddle_te.weights import convert
from tests.te_weights import randomise
from tests.unit.hosts.paddlenlp.native import tiny_config

VOCABULARY = 400
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def save_tokenizer(folder):
    """Trains a sentencepiece tokenizer with Llama's settings on a docstring-rich module, and loads it."""
    text = [line for line in inspect.getsource(inspect).splitlines() if line.strip()]
    (folder / "text.txt").write_text("\n".join(text))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    LlamaTokenizer(str(folder / "tokenizer.model")).save_pretrained(str(folder))
    return load_tokenizer(folder)


def save_models(folder, seed, **config):
    """Checkpoints of one model: {"paddle": …, "none": …, "hf": …}. config: `tiny_config`'s, the family, too."""
    settings = dict(vocab_size=VOCABULARY, initializer_range=0.2, max_position_embeddings=128, seq_length=64)
    config = tiny_config(**settings | config)
    model = model_class(config)(config)
    decoder = model.gpt.decoder if config.model_type == "gpt" else model.get_decoder()
    for i, layer in enumerate(decoder.layers):
        randomise(layer, np.random.default_rng([seed, i]))
    model.save_pretrained(str(folder / "paddle"))
    convert(folder / "paddle", folder / "none", "te2pd", progress=False)
    convert(folder / "paddle", folder / "hf", "te2hf", progress=False)
    return {name: folder / name for name in ("paddle", "none", "hf")}


def random_words(generator, count):
    return " ".join("".join(generator.choice(list(LETTERS), generator.integers(1, 7))) for _ in range(count))


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
