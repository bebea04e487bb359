"""Tokenizers of Hugging Face's folders: transformers' tokens without transformers; what cannot be read is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from paddle_te.data.prepare.encoding import plain_text_options
from paddle_te.data.tokenizer import Tokenizer, TokenizerError, load_tokenizer, portable_files
from tests import small_tokenizers
from tests.small_tokenizers import TEXTS, folders, results, write

# Written by `python tests/small_tokenizers.py`: what AutoTokenizer of transformers 4.51.3 makes of the same folders
THEIRS = json.loads((Path(__file__).parent / "tokens_of_transformers.json").read_text())
HF_PYTHON = os.environ.get("PADDLE_TE_HF_PYTHON")
ALPHABET = ["the", " ", "  ", "\n", "\t", "hello", "world", "12", "é", "e\u0301", "漢", "😀", "▁", ".", " .", "'s"]
ALPHABET += ["<s>", "[INST]", "<|im_end|>", "<|begin|>", "<|end|>", "<tool>", "Word", "<|endoftext|>"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("tokenizers")
    for name, files in folders().items():
        write(place / name, files)
    return place


def same(ours, theirs):
    """But where transformers makes a control token of a text's "</s>", which is text here: see `sentencepiece`."""
    for name, value in theirs.items():
        if name == "split":
            assert [x for x, y in zip(ours[name], value, strict=True) if x != y and not {1, 2} & {*y}] == []
        else:
            assert ours[name] == value, name


@pytest.mark.parametrize("name", folders())
def test_transformers_tokens(place, name):
    same(results(load_tokenizer(place / name), TEXTS), THEIRS[name])


@pytest.mark.skipif(not HF_PYTHON, reason="PEERS=1 installs transformers")
def test_transformers_tokens_of_random_texts(place, tmp_path, seed):
    generator = np.random.default_rng(seed)
    texts = ["".join(generator.choice(ALPHABET, generator.integers(0, 20))) for _ in range(200)]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    code = "import json; from tests.small_tokenizers import of_transformers as of; "
    code += f"print('FOUND' + json.dumps(of(json.load(open({str(tmp_path / 'texts.json')!r})))))"
    root = Path(small_tokenizers.__file__).parents[1]
    printed = subprocess.run([HF_PYTHON, "-c", code], cwd=root, check=True, capture_output=True, text=True).stdout
    for name, theirs in json.loads(printed.partition("FOUND")[2]).items():
        same(results(load_tokenizer(place / name), texts), theirs)


def test_sentencepieces_own_tokens(place, seed):
    """Also for "</s>", which is text to sentencepiece; and PaddleNLP's name of the file."""
    content = folders()["llama_legacy"]["tokenizer.model"]
    pieces = sentencepiece.SentencePieceProcessor(model_proto=content)
    folder = write(place / "paddlenlps", {"sentencepiece.bpe.model": content})
    generator = np.random.default_rng(seed)
    for name in ("llama_legacy", "paddlenlps"):
        tokenizer = load_tokenizer(folder.parent / name)
        for _ in range(100):
            text = "".join(generator.choice([*ALPHABET, "</s>", "<unk>"], generator.integers(1, 20)))
            assert tokenizer.encode(text, **plain_text_options()) == pieces.encode(text), repr(text)


def test_end_tokens_special_tokens_and_templates(place):
    files = folders()["qwen2"]
    templates = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
    files["tokenizer_config.json"] |= {"chat_template": templates}
    files["generation_config.json"] = {"eos_token_id": [274, 272]}
    tokenizer = load_tokenizer(write(place / "templates", files))
    assert tokenizer.eos_token_id == 274 and tokenizer.end_token_ids == [274, 272]
    assert tokenizer.chat_templates == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    assert tokenizer.chat_template == "{{ 1 }}"
    assert tokenizer.special_tokens == dict(
        eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<|endoftext|>"
    )
    write(place / "model", {"generation_config.json": {"eos_token_id": 7}})
    assert load_tokenizer(place / "templates", place / "model").end_token_ids == [274, 272, 7]
    assert load_tokenizer(place / "qwen2", place / "qwen2").end_token_ids == [274]
    files["chat_template.jinja"] = "{{ 3 }}"
    assert load_tokenizer(write(place / "templates", files)).chat_template == "{{ 3 }}"


def test_saves_the_files_that_it_was_read_from(place, tmp_path):
    for name in ("llama_chatml", "qwen2_json", "llama_older"):
        files = folders()[name]
        load_tokenizer(place / name).save_pretrained(tmp_path / name)
        saved = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        assert saved == {file: (place / name / file).read_bytes() for file in files}


def test_portable_files_need_no_class(place, tmp_path):
    for name in ("llama", "llama_chatml", "qwen2"):
        tokenizer = load_tokenizer(place / name)
        again = load_tokenizer(write(tmp_path / name, portable_files(tokenizer)))
        assert results(again, TEXTS) == results(tokenizer, TEXTS)
        assert again.special_tokens == tokenizer.special_tokens
    config = json.loads((tmp_path / "llama" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_spaces_stay_unless_the_files_say_otherwise(place):
    assert (
        load_tokenizer(place / "qwen2").decode(load_tokenizer(place / "qwen2").encode("x != y , z .")) == "x != y , z ."
    )
    clean = load_tokenizer(place / "llama3")
    assert clean.decode(clean.encode("x != y , z .", add_special_tokens=False)) == "x!= y, z."


DAMAGE = {
    "cut short": ("qwen2_json", "tokenizer.json", lambda content: content[: len(content) // 2]),
    "not UTF-8": ("qwen2_json", "tokenizer.json", lambda content: content.replace(b"Split", b"Spl\xfft")),
    "another object": ("llama3", "tokenizer.json", lambda _: b"3"),
    "another type": ("llama3", "tokenizer.json", lambda content: content.replace(b'"BPE"', b'"BPF"')),
    "an id twice": ("llama3", "tokenizer.json", lambda content: content.replace(b'"hello": 261', b'"hello": 260')),
    "an id nowhere": ("llama3", "tokenizer.json", lambda content: content.replace(b'"hello": 261', b'"hello": 461')),
    "an id far away": ("llama3", "tokenizer.json", lambda c: c.replace(b'"hello": 261', b'"hello": 4294967295')),
    "an added token's id": ("deepseek", "tokenizer.json", lambda content: content.replace(b'"id": 273', b'"id": 293')),
    "a merge": ("llama3", "tokenizer.json", lambda content: content.replace(b'"h e"', b'"h  "')),
    "tokens as text": ("llama3", "tokenizer.json", lambda c: c.replace(b'ed_tokens": [', b'ed_tokens": ["x",')),
    "empty": ("llama", "tokenizer_config.json", lambda _: b""),
    "a list": ("llama", "tokenizer_config.json", lambda _: b"[]"),
    "nested": ("llama", "tokenizer_config.json", lambda _: b"[" * 100000),
    "a number": ("llama_chatml", "tokenizer_config.json", lambda c: c.replace(b'"<|im_end|>", "added', b'7, "added')),
    "a flag as text": ("llama", "tokenizer_config.json", lambda c: c.replace(b"false", b'"no"')),
    "a class": ("llama3", "tokenizer_config.json", lambda c: c.replace(b"PreTrainedTokenizerFast", b"OtherTokenizer")),
    "an id in words": ("qwen2", "tokenizer_config.json", lambda c: c.replace(b'"272"', b'"27x"')),
    "another id": ("qwen2", "tokenizer_config.json", lambda c: c.replace(b'"274"', b'"284"')),
    "a setting": ("qwen2", "tokenizer_config.json", lambda c: c.replace(b'"lstrip"', b'"lstrop"')),
    "no sentencepiece": ("llama", "tokenizer.model", lambda _: b"hello\n" * 100),
    "a cut model": ("llama", "tokenizer.model", lambda content: content[:-5]),
    "an empty model": ("llama", "tokenizer.model", lambda _: b""),
    "a piece twice": ("llama", "tokenizer.model", lambda content: content.replace(b"<0x01>", b"<0x02>")),
    "a vocabulary": ("qwen2", "vocab.json", lambda content: content.replace(b'"hello"', b'"hallo"')),
    "merges cut short": ("qwen2", "merges.txt", lambda content: content[: content.index(b"hell o")]),
    "merges of three": ("qwen2", "merges.txt", lambda content: content.replace(b"h e", b"h e e")),
    "an added list": ("llama_older", "added_tokens.json", lambda _: b"[1]"),
    "an added id": ("llama_older", "added_tokens.json", lambda content: content.replace(b": ", b': "')),
    "a map": ("llama_older", "special_tokens_map.json", lambda _: b"{"),
    "a template": ("llama", "tokenizer_config.json", lambda _: b'{"chat_template": 3}'),
    "a bad template file": ("llama", "chat_template.jinja", lambda _: b"\xff"),
    "an end": ("llama", "generation_config.json", lambda _: b'{"eos_token_id": "2"}'),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_named(damage, tmp_path, capfd):
    name, file, change = DAMAGE[damage]
    folder = write(tmp_path / "tokenizer", folders()[name])
    content = (folder / file).read_bytes() if (folder / file).is_file() else b""
    assert change(content) != content or not content
    (folder / file).write_bytes(change(content))
    with pytest.raises(TokenizerError) as error:
        load_tokenizer(folder)
    text = str(error.value)
    assert str(folder) in text and "\n" not in text and len(text) < 600, text
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["added_tokens.json", "special_tokens_map.json", "generation_config.json"])
def test_a_file_that_is_named_but_cannot_be_read_is_not_left_out(tmp_path, name):
    """Such as a link of Hugging Face's cache whose blob was removed: without the file there would be other tokens."""
    folder = write(tmp_path / "tokenizer", folders()["llama_older"])
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "blobs/0")
    with pytest.raises(TokenizerError, match=f"{name}: cannot be read: No such file"):
        load_tokenizer(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(TokenizerError, match=f"{name}: cannot be read: is no regular file"):
        load_tokenizer(folder)


def test_what_is_no_tokenizer(tmp_path):
    for name in ("/no/folder", str(tmp_path / "missing"), ""):
        with pytest.raises(TokenizerError, match="there is no such folder"):
            load_tokenizer(name)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(TokenizerError, match="holds no tokenizer that can be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TokenizerError, match="has no tokenizer.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(TokenizerError, match="holds no tokenizer that can be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", null]}}'
    )
    with pytest.raises(TokenizerError, match="is code of its own, which is not run"):
        load_tokenizer(tmp_path)


def test_needs_no_host():
    """The launcher and the planner ask for tokenizers before anything is imported that takes seconds."""
    code = "import sys, paddle_te.data.tokenizer; print({'paddle', 'paddlenlp', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"
    assert Tokenizer.__module__ == "paddle_te.data.tokenizer"
