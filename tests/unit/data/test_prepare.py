"""data.prepare and its script: what is written is what PaddleNLP reads back, for every form of input; every error."""

import base64
import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from paddle_te.data.host_tokenizer import HostTokenizer
from paddle_te.data.prepare import PrepareError, demo, main, prepare, reading
from paddle_te.data.tokenizer import TokenizerError, load_tokenizer
from tests.processes import with_in_environment

TOOL = Path(__file__).parents[3] / "tools" / "prepare_data.py"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Small, and trained on other text than the tests': most of theirs goes through the byte fallback."""
    texts = ["the quick brown fox jumps over the lazy dog\n  and back again"] * 20
    return demo.train_tokenizer(texts, 300, tmp_path_factory.mktemp("tokenizer") / "tokenizer")


@pytest.fixture
def texts(seed):
    """Unicode, line feeds, blanks at both ends, long and short; new ones in each run."""
    rng = np.random.default_rng(seed)
    alphabet = np.array(list('abcdef  \n\t{}"\\äß€語🙂\r\x1f\u2028\x85'))
    return ["".join(rng.choice(alphabet, rng.integers(1, 400))) for _ in range(60)] + ["x" * 3000]


def json_lines(texts):
    return "".join(json.dumps({"text": text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(texts)).encode()


def write_zst(path, data):
    zstandard = pytest.importorskip("zstandard", reason="zstandard is an extra of this package: '.[data]'")
    path.write_bytes(zstandard.ZstdCompressor().compress(data))


WRITERS = {
    ".jsonl": lambda path, data: path.write_bytes(data),
    ".jsonl.gz": lambda path, data: path.write_bytes(gzip.compress(data)),
    ".jsonl.zst": write_zst,
}


def read_documents(prefix):
    from paddlenlp.data.indexed_dataset import make_dataset

    dataset = make_dataset(str(prefix), "mmap", skip_warmup=True)
    assert list(dataset.doc_idx) == list(range(len(dataset) + 1))  # each document is one sequence
    return [dataset.get(i)[0].tolist() for i in range(len(dataset))]


def outputs(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".json")]


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("suffix", WRITERS)
def test_round_trip(suffix, tmp_path, tokenizer, texts):
    """The texts come back from the ids that PaddleNLP reads; each document ends with the end-of-text token."""
    file = tmp_path / f"in{suffix}"
    WRITERS[suffix](file, json_lines(texts))
    summary = prepare([file], tmp_path / "new" / "corpus", tokenizer)
    documents = read_documents(tmp_path / "new" / "corpus")
    assert all(ids[-1] == tokenizer.eos_token_id == 2 for ids in documents)
    assert [tokenizer.decode(ids[:-1]) for ids in documents] == texts
    assert summary["documents"] == len(texts) and summary["tokens"] == sum(map(len, documents))
    assert summary["max_token_id"] == max(map(max, documents)) < summary["vocab_size"] == 300
    assert summary == json.loads((tmp_path / "new" / "corpus.json").read_text())
    assert leftovers(tmp_path / "new") == []


@pytest.mark.parametrize("suffix", WRITERS)
def test_workers_and_chunks_change_nothing(suffix, tmp_path, tokenizer, texts, monkeypatch):
    """Same bytes from one process that reads all at once and from three that get lines cut over many blocks."""
    for i, part in enumerate((texts[:20], texts[20:])):
        WRITERS[suffix](tmp_path / f"in{i}{suffix}", json_lines(part))
    prepare([tmp_path], tmp_path / "one", tokenizer, workers=1)
    monkeypatch.setattr(reading, "READ_BYTES", 97)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 500)
    prepare([tmp_path], tmp_path / "three", tokenizer, workers=3)
    assert outputs(tmp_path / "one") == outputs(tmp_path / "three")


@pytest.mark.parametrize("suffix", WRITERS)
def test_several_compressed_streams_in_one_file(suffix, tmp_path, tokenizer, texts):
    """`cat a.gz b.gz > c.gz` is a valid file; no line feed at the end is fine too."""
    WRITERS[suffix](tmp_path / "a", json_lines(texts[:30]))
    WRITERS[suffix](tmp_path / "b", json_lines(texts[30:]).rstrip(b"\n"))
    file = tmp_path / f"in{suffix}"
    file.write_bytes((tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes())
    assert prepare([file], tmp_path / "corpus", tokenizer)["documents"] == len(texts)


def test_empty_lines_and_texts_are_left_out(tmp_path, tokenizer):
    (tmp_path / "in.jsonl").write_bytes(b'\n{"text": "a"}\r\n   \n{"text": ""}\n\n{"text": "b"}\n\n')
    summary = prepare([tmp_path / "in.jsonl"], tmp_path / "corpus", tokenizer)
    assert (summary["documents"], summary["skipped_empty"], summary["skipped_malformed"]) == (2, 1, 0)


def test_append_eos_off_and_json_key(tmp_path, tokenizer):
    (tmp_path / "in.jsonl").write_text('{"body": "the fox", "text": 1}\n')
    prepare([tmp_path], tmp_path / "with", tokenizer, json_key="body")
    prepare([tmp_path], tmp_path / "without", tokenizer, json_key="body", append_eos=False)
    assert read_documents(tmp_path / "with") == [read_documents(tmp_path / "without")[0] + [tokenizer.eos_token_id]]


def llama_tokenizer(folder):
    """As a user loads it: from its folder."""
    trained = demo.train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 20, 300, folder / "tokenizer")
    return load_tokenizer(folder / "tokenizer"), trained.decode


def llama3_tokenizer(folder):
    """Llama 3's, over 256 bytes."""
    from paddlenlp.transformers import Llama3Tokenizer

    ranks = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (folder / "tokenizer.model").write_text(ranks)
    return HostTokenizer(Llama3Tokenizer(str(folder / "tokenizer.model"))), lambda ids: bytes(ids).decode()


@pytest.mark.parametrize("make", [llama_tokenizer, llama3_tokenizer])
def test_special_tokens_spelled_in_a_text_are_text(make, tmp_path):
    """A "</s>" in a web page ends no document, and loses no blanks around it."""
    tokenizer, decode = make(tmp_path)
    texts = ["  a <s> b </s> \n c <unk>", "x <|end_of_text|> <|begin_of_text|> y"]
    (tmp_path / "in.jsonl").write_bytes(json_lines(texts))
    prepare([tmp_path / "in.jsonl"], tmp_path / "corpus", tokenizer)
    documents = read_documents(tmp_path / "corpus")
    assert [decode(ids[:-1]) for ids in documents] == texts
    assert all(ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id for ids in documents)


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, "uint16"), (2**16 + 1, "int32")])
def test_dtype_holds_the_vocabulary(vocab_size, dtype, tmp_path):
    class Characters:
        kind, eos_token_id, needed_rows = "Characters", vocab_size - 1, vocab_size

        def __len__(self):
            return vocab_size

        def encode(self, text, **_):
            return [ord(character) for character in text]

    (tmp_path / "in.jsonl").write_text('{"text": "abc"}\n')
    assert prepare([tmp_path], tmp_path / "corpus", Characters())["dtype"] == dtype
    assert read_documents(tmp_path / "corpus") == [[97, 98, 99, vocab_size - 1]]


MALFORMED = {
    "not JSON": b'{"text": "cut',
    "not UTF-8": b'{"text": "\xff"}',
    "not an object": b'["text"]',
    "no such key": b'{"content": "a"}',
    "not a string": b'{"text": 3}',
    "half a surrogate pair": b'{"text": "\\ud800"}',
}


@pytest.mark.parametrize("line", MALFORMED.values(), ids=MALFORMED)
def test_malformed_line(line, tmp_path, tokenizer):
    """Named by file and line; nothing is left behind; with skip_malformed counted and passed over."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(PrepareError, match=r"a\.jsonl, line 3: .*--skip_malformed"):
        prepare([tmp_path / "in"], tmp_path / "corpus", tokenizer, workers=2)
    assert os.listdir(tmp_path) == ["in"]
    summary = prepare([tmp_path / "in"], tmp_path / "corpus", tokenizer, skip_malformed=True)
    assert (summary["documents"], summary["skipped_malformed"]) == (2, 1)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("harm, message", [("cut", "cut short"), ("overwritten", "damaged")])
def test_damaged_compressed_file(suffix, harm, message, tmp_path, tokenizer, texts):
    file = tmp_path / f"in{suffix}"
    WRITERS[suffix](file, json_lines(texts))
    data = file.read_bytes()
    file.write_bytes(data[:-7] if harm == "cut" else b"garbage!" + data[8:])
    with pytest.raises(PrepareError, match=message):
        prepare([file], tmp_path / "corpus", tokenizer)
    assert os.listdir(tmp_path) == [file.name]


def test_input_missing_or_empty(tmp_path, tokenizer):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "readme.md").write_text("no data")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    for name, message in {
        "missing.jsonl": "does not exist",
        "folder": "no .jsonl",
        "empty.jsonl": "empty",
        "blank.jsonl": "no document",
    }.items():
        with pytest.raises(PrepareError, match=message):
            prepare([tmp_path / name], tmp_path / "corpus", tokenizer)
    assert not list(tmp_path.glob("*corpus*"))


def test_files_of_other_names_in_a_folder_are_named(tmp_path, tokenizer, capsys):
    """A folder may hold JSON lines as .json.gz, as C4 does: they are not left out in silence."""
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    folder = tmp_path / "texts"
    (folder / ".git").mkdir(parents=True)
    for name in ("a.jsonl", "b.json", "c.bin", ".git/config"):
        (folder / name).write_bytes(json_lines(["a text"]))
    to = ["--output_prefix", str(tmp_path / "corpus"), "--tokenizer_name", str(tmp_path / "tokenizer"), "--overwrite"]

    assert main(["--input_path", str(folder), *to]) == 0
    out, err = capsys.readouterr()
    assert " 1 documents" in out and f"warning: {folder / 'b.json'} is left out" in err

    assert main(["--input_path", str(folder / "a.jsonl"), str(folder / "b.json"), *to]) == 0
    out, err = capsys.readouterr()
    assert " 2 documents" in out and "warning" not in err


def test_tokenizer_without_end_of_text(tmp_path):
    class NoEnd:
        kind, eos_token_id = "NoEnd", None

    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(PrepareError, match="NoEnd has no end-of-text token"):
        prepare([tmp_path], tmp_path / "corpus", NoEnd())
    with pytest.raises(TokenizerError, match="there is no such folder"):
        prepare([tmp_path], tmp_path / "corpus", tmp_path / "nothing")


def test_overwrite(tmp_path, tokenizer):
    """Refused unless asked for; when it fails, the older files stay; PaddleNLP's older sample indices go."""
    from paddlenlp.data.causal_dataset import build_train_valid_test_datasets

    def first_sample(prefix):
        return build_train_valid_test_datasets([str(prefix)], "mmap", "1,0,0", [8, 0, 0], 4, 1, True)[0][0]["text"]

    (tmp_path / "in.jsonl").write_text('{"text": "the fox jumps over the fox"}\n' * 9)
    prefix = tmp_path / "corpus"
    prepare([tmp_path], prefix, tokenizer)
    prepare([tmp_path], tmp_path / "other", tokenizer)
    first_sample(prefix), first_sample(tmp_path / "other")
    before, indices = outputs(prefix), set((tmp_path / "index-cache").iterdir())
    with pytest.raises(PrepareError, match="exists.*--overwrite"):
        prepare([tmp_path], prefix, tokenizer)
    (tmp_path / "in.jsonl").write_text('{"text": "a dog"}\n{"text"\n')
    with pytest.raises(PrepareError, match="line 2"):
        prepare([tmp_path], prefix, tokenizer, overwrite=True)
    assert outputs(prefix) == before and set((tmp_path / "index-cache").iterdir()) == indices

    (tmp_path / "in.jsonl").write_text('{"text": "a dog"}\n')
    prepare([tmp_path], prefix, tokenizer, overwrite=True)
    assert len(read_documents(prefix)) == 1
    assert len(indices & set((tmp_path / "index-cache").iterdir())) == len(indices) / 2  # those of `other` stay
    assert len(first_sample(prefix)) == 5


def test_killed_worker_is_an_error(tmp_path):
    class Dies:
        kind, eos_token_id, needed_rows = "Dies", 0, 10

        def __len__(self):
            return 10

        def encode(self, text, **_):
            os.kill(os.getpid(), signal.SIGKILL)

    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(PrepareError, match="worker process was killed"):
        prepare([tmp_path], tmp_path / "corpus", Dies(), workers=2)


@pytest.mark.parametrize("prefix, message", [
    ("file/corpus", "--output_prefix: .*file is no folder"),
    ("folder", "--output_prefix: .*folder.bin cannot be written: it is a folder"),
])  # fmt: skip
def test_output_that_cannot_be_written_is_refused_before_work(tmp_path, prefix, message):
    (tmp_path / "file").touch()
    (tmp_path / "folder.bin").mkdir()
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(PrepareError, match=message):
        prepare([tmp_path / "in.jsonl"], tmp_path / prefix, "no tokenizer is read", overwrite=True)
    if prefix.startswith("file"):
        with pytest.raises(PrepareError, match="--demo: .*file is no folder"):
            demo.make_demo(tmp_path / prefix)


# ------------------------------------------------------------------------------------------------------- demo


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "lib"
    for name, source in {
        "json/__init__.py": '"""JSON encoder."""\n\n# A comment\n# of two lines.\n'
        'def dump():\n    """Write it."""\n    # inside\n',
        "json/tests/test_x.py": '"""Left out: a test."""\n',
        "mypackage.py": '"""Left out: not of the standard library."""\n',
        "types.py": "broken = (\n",
        "abc.py": "x = 1\n",
        "pydoc_data/topics.py": "topics = {'b': 'On b.', 'a': 'On a.'}\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
    return folder


def test_demo_documents(library):
    prose = "json.__init__\n\nJSON encoder.\n\nA comment\nof two lines.\n\ndump: Write it.\n\ninside"
    assert list(demo.demo_documents(library)) == [prose, "On a.", "On b."]
    assert list(demo.demo_documents(library, sources=True)) == [
        "x = 1\n",
        prose,
        (library / "json/__init__.py").read_text(),
        "On a.",
        "On b.",
    ]


def demo_library(folder):
    """Enough text for a vocabulary of 300: a few of this Python's modules."""
    import sysconfig

    folder.mkdir()
    for name in ("ast.py", "random.py", "string.py"):
        (folder / name).write_bytes((Path(sysconfig.get_paths()["stdlib"]) / name).read_bytes())
    return folder


def test_demo(tmp_path, monkeypatch):
    """Same bytes from any number of workers; complete means nothing to do; other parameters are not overwritten."""
    from paddlenlp.transformers import AutoTokenizer, LlamaTokenizer

    make = {"vocab_size": 420, "library": demo_library(tmp_path / "lib")}
    first = demo.make_demo(tmp_path / "one", **make)
    demo.make_demo(tmp_path / "two", workers=3, **make)
    names = sorted(str(path.relative_to(tmp_path / "one")) for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert {"corpus.bin", "corpus.idx", "corpus.jsonl.gz", "tokenizer/sentencepiece.bpe.model"} < set(names)
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name

    for kind in (AutoTokenizer, LlamaTokenizer):
        tokenizer = kind.from_pretrained(str(tmp_path / "one" / "tokenizer"))
        assert isinstance(tokenizer, LlamaTokenizer) and len(tokenizer) == 420
    with gzip.open(tmp_path / "one" / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    documents = read_documents(tmp_path / "one" / "corpus")
    assert [tokenizer.sp_model.decode(ids[:-1]) for ids in documents] == texts
    assert texts == list(demo.demo_documents(make["library"])) and len(texts) == 3

    with monkeypatch.context() as patch:
        patch.setattr(demo, "prepare", None)  # any work would fail
        assert demo.make_demo(tmp_path / "one", **make) == first | {"made": False}
    with pytest.raises(PrepareError, match="was made with.*420.*--overwrite"):
        demo.make_demo(tmp_path / "one", **make | {"vocab_size": 410})
    assert demo.make_demo(tmp_path / "one", **make | {"vocab_size": 410}, overwrite=True)["vocab_size"] == 410
    with pytest.raises(PrepareError, match="cannot train a tokenizer with --vocab_size 100000"):
        demo.make_demo(tmp_path / "one", **make | {"vocab_size": 100000}, overwrite=True)
    assert read_documents(tmp_path / "one" / "corpus") and leftovers(tmp_path) == []


def test_demo_takes_no_foreign_folder(tmp_path, library):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(PrepareError, match="no demo folder"):
        demo.make_demo(tmp_path / "mine", library=library, overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_standard_library_has_text():
    """On any Python; the first part of the demo's text is enough to tell."""
    lengths = accumulate(map(len, demo.demo_documents()))
    assert next((length for length in lengths if length > 500_000), None)


# ------------------------------------------------------------------------------------------------ command line


def run_tool(*arguments, **options):
    return subprocess.run([sys.executable, str(TOOL), *map(str, arguments)], capture_output=True, text=True, **options)


def test_command_line(tmp_path, tokenizer, texts):
    """One real run: its progress bar and summary; then the same again, refused in one line."""
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    (tmp_path / "in.jsonl").write_bytes(json_lines(texts))
    arguments = ["--input_path", tmp_path / "in.jsonl", "--output_prefix", tmp_path / "corpus"]
    arguments += ["--tokenizer_name", tmp_path / "tokenizer", "--workers", "2"]
    done = run_tool(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"{len(texts)} documents" in done.stdout and "100%" in done.stderr
    again = run_tool(*arguments)
    assert again.returncode == 1 and again.stderr.startswith("error: ") and again.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--input_path, --output_prefix, --tokenizer_name missing"),
        (["--demo", "x", "--input_path", "y"], "--demo has its own input"),
        (["--input_path", "a", "--output_prefix", "b", "--tokenizer_name", "c", "--workers", "0"], "--workers 0"),
        (["--input_path", "a", "--output_prefix", "b", "--tokenizer_name", "c"], "input a does not exist"),
    ],
)
def test_wrong_arguments(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code in (1, 2) and message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_termination_in_the_middle_of_a_run(tmp_path, tokenizer, signum):
    """The workers end and no output appears; SIGTERM leaves time to remove the scratch folder, too."""
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    (tmp_path / "in.jsonl").write_bytes(json_lines(["the quick brown fox " * 200]) * 4000)
    out, tag = tmp_path / "out", str(tmp_path)
    process = subprocess.Popen(
        [sys.executable, TOOL, "--input_path", tmp_path / "in.jsonl", "--output_prefix", out / "corpus"]
        + ["--tokenizer_name", tmp_path / "tokenizer", "--workers", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TEST_TAG": tag, "DEFERRED_IMPORTS": "1"},
    )
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in out.glob(".*/bin")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    assert len(with_in_environment("TEST_TAG", tag)) == 3
    process.send_signal(signum)
    assert process.wait(timeout=60) == (143 if signum == signal.SIGTERM else -signum)
    if signum == signal.SIGTERM:
        assert list(out.iterdir()) == []
    assert not list(out.glob("corpus*"))
    while left := with_in_environment("TEST_TAG", tag):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_full_disk_is_said_of_the_corpus(monkeypatch, tmp_path, capsys):
    """Python's error of a write names no file."""

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("paddle_te.data.prepare.prepare", fail)
    assert main(["--input_path", "a", "--output_prefix", f"{tmp_path}/c", "--tokenizer_name", "b"]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/c: [Errno 28] No space left on device\n"
