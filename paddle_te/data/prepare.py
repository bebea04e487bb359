"""Turn JSON lines into the memory-mapped ``.bin``/``.idx`` pair that the hosts' causal datasets read.

    paddle-te prepare-data --input_path openwebtext2/ --output_prefix data/openwebtext2 \
        --tokenizer_name facebook/llama-7b --workers 16
    paddle-te prepare-data --demo data/demo

Input is one JSON object a line, ``{"text": "..."}``, plain, ``.gz`` or ``.zst`` (the form of OpenWebText2). Output is
``PREFIX.bin`` (all token ids, one document after another), ``PREFIX.idx`` (where each begins) and ``PREFIX.json``
(counts; the largest token id, which `training.datasets` checks against the model's vocabulary). The bytes do
not depend on --workers.

``--demo`` needs no download: it makes a corpus from the docstrings, comments and documentation topics of Python's own
standard library, and trains a small sentencepiece tokenizer on it.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import gzip
import importlib
import io
import json
import os
import platform
import re
import shutil
import signal
import sys
import sysconfig
import textwrap
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from paddle_te import host
from paddle_te.data.sentencepiece import PADDLENLP_FILE
from paddle_te.data.tokenizer import TokenizerError, load_tokenizer
from paddle_te.options.option import PATH, SEQUENCES, TEXT, WORKERS
from paddle_te.outputs import check_file, check_folder
from paddle_te.runs import noise, screen

# The host, PaddleNLP or PaddleFormers, is imported where it is first needed: it takes seconds, and wrong arguments are
# told before that.

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")  # taken from a folder; a file given by name may have any
READ_BYTES = 1 << 18
CHUNK_BYTES = 1 << 18  # of text for one task of a worker: large against its cost, small against the corpus
PR_SET_PDEATHSIG = 1  # linux/prctl.h
DEMO_FORMAT = 1  # raise when --demo's output changes, so that older folders are not taken for complete
# Standard library folders that distributions strip, or that hold no library documentation.
DEMO_SKIP = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "tkinter", "ensurepip", "site-packages"}


class PrepareError(ValueError):
    """What is wrong with the input or the arguments, and what to do."""


Encoded: TypeAlias = tuple[list[npt.NDArray[Any]], int, int]  # token ids a document, malformed and empty ones

# ---------------------------------------------------------------------------------------------------- reading


@dataclass
class Chunk:
    """Consecutive lines of one file, the number of the first, and the bytes of the file read for them."""

    path: Path
    first_line: int
    lines: list[bytes]
    bytes_read: int


def find_inputs(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files named by `paths` (files or folders, searched recursively), sorted within a folder."""
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
            if not inside:
                raise PrepareError(f"no {', '.join(SUFFIXES)} file in the folder {path}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise PrepareError(f"input {path} does not exist: give files or folders of JSON lines to --input_path")
    return found


def import_zstandard(path: Path) -> ModuleType:
    """Import zstandard, which is optional, unlike all else that is imported here: only .zst files need it."""
    try:
        import zstandard
    except ImportError as error:
        raise PrepareError(f"{path} needs the package zstandard: pip install zstandard") from error
    return zstandard


def read_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield (uncompressed block, bytes of the file read for it); an incomplete or damaged file is an error."""
    open_stream: Callable[[], Any] | None = None
    damage: type[Exception] | tuple[()] = ()
    stream = None
    if path.suffix == ".gz":
        open_stream, damage = partial(zlib.decompressobj, wbits=31), zlib.error
    elif path.suffix == ".zst":
        zstandard = import_zstandard(path)
        open_stream = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
        damage = zstandard.ZstdError
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            size = len(data)
            if open_stream is None:
                yield data, size
                continue
            out = []
            try:
                while data:  # a file may hold several compressed streams, one after another
                    stream = stream or open_stream()
                    out.append(stream.decompress(data))
                    data = stream.unused_data if stream.eof else b""
                    stream = None if stream.eof else stream
            except damage as error:
                raise PrepareError(f"{path} is damaged or not a {path.suffix} file: {error}") from error
            yield b"".join(out), size
    if stream is not None:
        raise PrepareError(f"{path} is cut short: its last compressed stream does not end")


def read_chunks(path: Path) -> Iterator[Chunk]:
    """Yield `Chunk`s of the file's lines, in order. Lines end at a line feed only, as JSON lines do."""
    pending, line_number, bytes_read = [], 1, 0
    for block, size in read_blocks(path):
        bytes_read += size
        pending.append(block)
        if b"\n" not in block or sum(map(len, pending)) < CHUNK_BYTES:
            continue
        *lines, rest = b"".join(pending).split(b"\n")
        pending = [rest]
        for part in _split_by_bytes(lines):
            yield Chunk(path, line_number, part, bytes_read)
            line_number, bytes_read = line_number + len(part), 0
    yield Chunk(path, line_number, b"".join(pending).split(b"\n"), bytes_read)


def _split_by_bytes(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    part, size = [], 0
    for line in lines:
        part.append(line)
        size += len(line)
        if size >= CHUNK_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


# ------------------------------------------------------------------------------------------------- tokenizing


@dataclass
class Encoder:
    """Tokenizes chunks; one lives in each worker process."""

    tokenizer: Any
    dtype: type[np.integer[Any]]
    json_key: str = "text"
    eos: int | None = None  # appended to each document
    skip_malformed: bool = False

    def encode(self, chunk: Chunk) -> Encoded:
        """Return (one array of token ids a document, lines skipped as malformed, documents skipped as empty)."""
        documents, malformed, empty = [], 0, 0
        for number, line in enumerate(chunk.lines, chunk.first_line):
            if not line.strip():
                continue
            try:
                text = self.parse(line)
            except ValueError as error:
                if not self.skip_malformed:
                    raise PrepareError(
                        f"{chunk.path}, line {number}: {error} (--skip_malformed counts such lines and goes on)"
                    ) from None
                malformed += 1
                continue
            ids = self.tokenizer.encode(text, **plain_text_options())
            if not ids:
                empty += 1
                continue
            documents.append(np.array(ids if self.eos is None else [*ids, self.eos], dtype=self.dtype))
        return documents, malformed, empty

    def parse(self, line: bytes) -> str:
        """Return the document's text.

        Raises ValueError: not JSON, not UTF-8, not an object, no such key, not a string.
        """
        try:
            record = json.loads(line)
        except RecursionError:
            raise ValueError("JSON that is nested too deeply") from None
        if not isinstance(record, dict):
            raise ValueError(f"a JSON object is expected, not {type(record).__name__}")
        if self.json_key not in record:
            raise ValueError(f"no key {self.json_key!r} among {sorted(record)}: name the text's key with --json_key")
        text = record[self.json_key]
        if not isinstance(text, str):
            raise ValueError(f"the value of {self.json_key!r} is no string but {type(text).__name__}")
        text.encode("utf-8")  # JSON can spell half of a surrogate pair, which no tokenizer takes
        return text


def plain_text_options(_tokenizer: object = None) -> dict[str, bool]:
    """Ask for no tokens around the text, and none for a "</s>" in it: that is text too, and ends no document."""
    return {"add_special_tokens": False, "split_special_tokens": True}


_encoder: Encoder


def _start_worker(encoder: Encoder, parent: int) -> None:
    global _encoder
    _encoder = encoder
    if sys.platform == "linux":  # a killed parent leaves its workers waiting: each has the others' pipes open
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _encode(chunk: Chunk) -> tuple[Encoded, int]:
    return _encoder.encode(chunk), chunk.bytes_read


def encode_all(encoder: Encoder, chunks: Iterable[Chunk], workers: int) -> Iterator[tuple[Encoded, int]]:
    """Yield `Encoder.encode`'s results with the bytes read, in the input's order, from `workers` processes.

    At most four chunks a worker are under way: the corpus need not fit in memory. Workers are forked: they have the
    tokenizer and PaddleNLP's imports at once.
    """
    with ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (encoder, os.getpid())) as pool:
        under_way: deque[Future[tuple[Encoded, int]]] = deque()
        try:
            for chunk in chunks:
                under_way.append(pool.submit(_encode, chunk))
                if len(under_way) >= 4 * workers:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool as error:
            raise PrepareError("a worker process was killed (out of memory?): try fewer --workers") from error
        finally:
            for future in under_way:
                future.cancel()


def _of_host(module: str) -> ModuleType:
    """Import a module of the host that is installed: both have those used here. Raises HostError without one."""
    return importlib.import_module(f"{host.find(what='paddle-te prepare-data')}.{module}")


# ---------------------------------------------------------------------------------------------------- writing


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Make a folder beside `target`, and remove it at the end whatever happens, SIGTERM included."""
    folder = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    folder.mkdir(parents=True)
    in_main_thread = threading.current_thread() is threading.main_thread()  # elsewhere Python sets no signals
    previous = in_main_thread and signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if in_main_thread:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise PrepareError(str(error)) from error


def remove_index_cache(prefix: Path) -> None:
    """Remove the sample orders that PaddleNLP keeps beside a corpus: their names do not tell its contents."""
    for description in prefix.parent.glob("index-cache/*.dsc"):
        match = re.search(r"^Data prefix (.*)$", description.read_text(), re.MULTILINE)
        if match and Path(match[1]).name == prefix.name:
            for file in description.parent.glob(f"{description.stem}*"):
                file.unlink()


def write_corpus(folder: Path, encoder: Encoder, files: Sequence[Path], workers: int, title: str) -> dict[str, int]:
    """Encode `files` into FOLDER/bin and FOLDER/idx, the host's indexed dataset.

    Returns:
        dict: documents, tokens, skipped_malformed, skipped_empty, max_token_id (-1 where there is no token).

    Raises:
        PrepareError: a malformed line, or no document at all.
    """
    make_builder = _of_host("data.indexed_dataset").make_builder
    counts = dict(documents=0, tokens=0, skipped_malformed=0, skipped_empty=0, max_token_id=-1)
    # Not merge_file_: it turns sizes into int32, whose sum, the pointers, overflows beyond 2 GiB with NumPy 2.
    builder = make_builder(str(folder / "bin"), "mmap", encoder.dtype)
    chunks = (chunk for file in files for chunk in read_chunks(file))
    with tqdm(total=_bytes_of(files), unit="B", unit_scale=True, desc=title) as bar:
        for (documents, malformed, empty), bytes_read in encode_all(encoder, chunks, workers):
            for ids in documents:
                builder.add_item(ids)
                builder.end_document()
                counts["tokens"] += ids.size
                counts["max_token_id"] = max(counts["max_token_id"], int(ids.max()))
            counts["documents"] += len(documents)
            counts["skipped_malformed"] += malformed
            counts["skipped_empty"] += empty
            bar.update(bytes_read)
            bar.set_postfix(tokens=counts["tokens"], refresh=False)
    if counts["documents"] == 0:
        raise PrepareError(
            f"no document in the input ({counts['skipped_malformed']} malformed lines, "
            f"{counts['skipped_empty']} empty texts): is --json_key {encoder.json_key} right?"
        )
    builder.finalize(str(folder / "idx"))
    return counts


def _bytes_of(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _outputs(prefix: Path, overwrite: bool) -> list[Path]:
    """Return the files of a corpus, in the order in which they are written."""
    outputs = [Path(f"{prefix}{suffix}") for suffix in (".bin", ".json", ".idx")]
    existing = [str(path) for path in outputs if path.exists()]
    if existing and not overwrite:
        raise PrepareError(f"{', '.join(existing)} exists: choose another --output_prefix or add --overwrite")
    with _refusing():
        for path in outputs:
            check_file("--output_prefix", path)
    return outputs


def prepare(
    inputs: Iterable[str | Path],
    output_prefix: str | Path,
    tokenizer: Any,
    *,
    json_key: str = "text",
    append_eos: bool = True,
    workers: int = 1,
    skip_malformed: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Tokenize the JSON lines of `inputs` into ``output_prefix``.bin, .idx and .json.

    Args:
        inputs: files and folders of JSON lines.
        output_prefix: path without extension; its folder is made. Nothing appears under it before all is complete.
        tokenizer: what `load_tokenizer` returns, or the name or folder of one.
        json_key: where a line's text is.
        append_eos: whether the tokenizer's end-of-text token follows each document.
        workers: processes that tokenize.
        skip_malformed: whether lines that are none are counted and left out.
        overwrite: whether output that exists is replaced.

    Returns:
        dict: what PREFIX.json holds: documents, tokens, skipped lines, dtype, vocab_size, max_token_id, eos_token_id.

    Raises:
        PrepareError: no input, nothing in it, a malformed line, a tokenizer without an end-of-text token, or output
            that exists while not `overwrite`.
    """
    prefix = Path(output_prefix)
    outputs = _outputs(prefix, overwrite)
    if fault := WORKERS.fault(workers):
        raise PrepareError(f"--workers {workers}: it must be {fault}")
    files = find_inputs(inputs)
    if _bytes_of(files) == 0:
        raise PrepareError(f"the input is empty: {', '.join(map(str, files))}")

    _of_host("data.indexed_dataset")  # before the scratch folder: Paddle sets its own handler of SIGTERM at import
    if isinstance(tokenizer, (str, Path)):
        tokenizer = load_tokenizer(tokenizer)
    eos = tokenizer.eos_token_id
    if append_eos and eos is None:
        raise PrepareError(
            f"{tokenizer.kind} has no end-of-text token: choose a tokenizer with one or add --no-append_eos"
        )
    dtype = np.uint16 if tokenizer.needed_rows <= 2**16 else np.int32
    encoder = Encoder(tokenizer, dtype, json_key, eos if append_eos else None, skip_malformed)
    with scratch_folder(prefix) as folder:
        summary = write_corpus(folder, encoder, files, workers, prefix.name) | dict(
            dtype=np.dtype(dtype).name,
            tokenizer_class=tokenizer.kind,
            vocab_size=len(tokenizer),
            eos_token_id=encoder.eos,
        )
        (folder / "json").write_text(json.dumps(summary, indent=1) + "\n")
        _publish(folder, prefix, outputs)
    return summary


def _publish(folder: Path, prefix: Path, outputs: Sequence[Path]) -> None:
    """Move what is complete in the scratch folder to its place."""
    remove_index_cache(prefix)
    outputs[-1].unlink(missing_ok=True)  # .idx first out and last in: with it, the pair is complete
    for path in outputs:
        os.replace(folder / path.suffix[1:], path)


# ------------------------------------------------------------------------------------------------------- demo


def demo_documents(library: str | Path | None = None, sources: bool = False) -> Iterator[str]:
    """Yield documents from Python's standard library. Nothing is imported or run.

    Each module gives one, its docstrings and comments in the source's order, and each topic of Python's language
    reference one, as ``help()`` has them.

    Args:
        library: folder of the standard library's .py files; this Python's own by default.
        sources: add each module's whole source as a further document.
    """
    library = Path(library or sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or DEMO_SKIP.intersection(parts):
            continue
        try:
            source = path.read_text("utf-8")
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # the library keeps a few files that are broken on purpose
            continue
        if parts == ("pydoc_data", "topics"):
            yield from _topics(tree)
            continue
        text = _prose(source, tree)
        if text:
            yield f"{'.'.join(parts)}\n\n{text}"
        if sources and source.strip():
            yield source


def _topics(tree: ast.Module) -> Iterator[str]:
    """Yield the texts in pydoc_data/topics.py, which is one dict of strings."""
    (topics,) = (ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    yield from (text for _, text in sorted(topics.items()))


def _prose(source: str, tree: ast.Module) -> str:
    """Return docstrings and blocks of comment lines, in the source's order."""
    pieces: dict[int, str] = {}
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                place = node.body[0]
                inside.update(range(place.lineno, (place.end_lineno or place.lineno) + 1))
                pieces[place.lineno] = docstring if isinstance(node, ast.Module) else f"{node.name}: {docstring}"
    start = None
    for number, line in enumerate(source.split("\n"), 1):
        comment = re.match(r"\s*#[#!:]*(.*)", line)
        if not comment or number in inside:
            start = None
            continue
        start = start or number
        pieces[start] = pieces.get(start, "") + comment[1].removeprefix(" ").rstrip() + "\n"
    return "\n\n".join(text for _, piece in sorted(pieces.items()) if (text := textwrap.dedent(piece).strip()))


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> Any:
    """Train a byte-fallback BPE sentencepiece model (Llama's settings) and save it in PaddleNLP's layout."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.split("\n") if line.strip()),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            num_threads=1,  # no order of threads in the result
            minloglevel=2,
        )
    except RuntimeError as error:
        raise PrepareError(f"cannot train a tokenizer with --vocab_size {vocab_size}: {error}") from error
    folder.mkdir()
    (folder / PADDLENLP_FILE).write_bytes(model.getvalue())
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = special | {"add_bos_token": True, "add_eos_token": False, "tokenizer_class": "LlamaTokenizer"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def write_jsonl_gz(texts: Iterable[str], path: Path) -> None:
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:  # no time, no name: same bytes
        for text in texts:
            file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")


def make_demo(
    out_dir: str | Path,
    *,
    vocab_size: int = 4096,
    sources: bool = False,
    library: str | Path | None = None,
    workers: int = 1,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Make OUT_DIR/corpus.jsonl.gz, OUT_DIR/tokenizer/ and OUT_DIR/corpus.{bin,idx,json}; see `demo_documents`.

    The result depends on Python's version and the arguments only. The folder appears when all in it is complete; one
    that is there already, from the same arguments, is left as it is.

    Returns:
        dict: `prepare`'s summary, "demo" (the parameters), and "made": whether it was made now.

    Raises:
        PrepareError: OUT_DIR holds something else; vocab_size does not fit the corpus.
    """
    out_dir = Path(out_dir)
    parameters = dict(
        format=DEMO_FORMAT, python=platform.python_version(), vocab_size=vocab_size, sources=sources,
        library=str(library) if library else "standard",
    )  # fmt: skip
    marker = out_dir / "demo.json"
    existing = json.loads(marker.read_text()) if marker.is_file() else None
    if existing and existing["demo"] == parameters and not overwrite:
        return existing | {"made": False}
    if out_dir.exists() and not (out_dir.is_dir() and (existing or not any(out_dir.iterdir()))):
        raise PrepareError(f"{out_dir} exists and is no demo folder: choose another one for --demo")
    if existing and not overwrite:
        raise PrepareError(f"{out_dir} was made with {existing['demo']}: choose another folder or add --overwrite")
    with _refusing():
        check_folder("--demo", out_dir.absolute().parent)

    _of_host("data.indexed_dataset")  # as in `prepare`

    with scratch_folder(out_dir) as folder:
        print("Collecting the standard library's documentation ...", flush=True)
        texts = list(demo_documents(library, sources))
        if not texts:
            raise PrepareError(f"no documentation found in {library or sysconfig.get_paths()['stdlib']}")
        write_jsonl_gz(texts, folder / "corpus.jsonl.gz")
        print(f"Training a tokenizer of {vocab_size} pieces on {sum(map(len, texts)):,} characters ...", flush=True)
        tokenizer = train_tokenizer(texts, vocab_size, folder / "tokenizer")
        summary = prepare([folder / "corpus.jsonl.gz"], folder / "corpus", tokenizer, workers=workers)
        summary["demo"] = parameters
        (folder / "demo.json").write_text(json.dumps(summary, indent=1) + "\n")
        if existing:
            shutil.rmtree(out_dir)
        os.replace(folder, out_dir)
    return summary | {"made": True}


# ------------------------------------------------------------------------------------------------ command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input_path", type=PATH.argument, nargs="+", metavar="PATH", help="files or folders of JSON lines"
    )
    parser.add_argument(
        "--output_prefix", type=PATH.argument, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, PREFIX.json"
    )
    parser.add_argument(
        "--tokenizer_name", type=PATH.argument, metavar="NAME", help="a tokenizer's folder, or the host's name of it"
    )
    parser.add_argument(
        "--json_key", type=TEXT.argument, default="text", help="key of the text in a line's object (%(default)s)"
    )
    parser.add_argument(
        "--append_eos", action=argparse.BooleanOptionalAction, default=True,
        help="end each document with the tokenizer's end-of-text token (default: yes)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (%(default)s)")
    parser.add_argument("--skip_malformed", action="store_true", help="count malformed lines and go on")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier run wrote")
    parser.add_argument(
        "--demo", type=PATH.argument, metavar="OUT_DIR", help="make a corpus and a tokenizer from this Python's library"
    )
    parser.add_argument(
        "--vocab_size", type=SEQUENCES.argument, default=4096, help="of the demo's tokenizer (%(default)s)"
    )
    parser.add_argument("--demo_sources", action="store_true", help="add the library's source code to the demo")
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    needed = dict(input_path=args.input_path, output_prefix=args.output_prefix, tokenizer_name=args.tokenizer_name)
    if args.demo and any(needed.values()):
        parser.error("--demo has its own input, output and tokenizer: leave out " + ", ".join(f"--{k}" for k in needed))
    missing = [f"--{name}" for name, value in needed.items() if not value]
    if missing and not args.demo:
        parser.error(f"{', '.join(missing)} missing (or --demo OUT_DIR)")
    return args


@noise.kept_out()
def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    screen.before_imports()
    try:
        if args.demo:
            summary = make_demo(
                args.demo, vocab_size=args.vocab_size, sources=args.demo_sources,
                workers=args.workers, overwrite=args.overwrite,
            )  # fmt: skip
            prefix = Path(args.demo) / "corpus"
        else:
            summary = prepare(
                args.input_path, args.output_prefix, args.tokenizer_name, json_key=args.json_key,
                append_eos=args.append_eos, workers=args.workers, skip_malformed=args.skip_malformed,
                overwrite=args.overwrite,
            )  # fmt: skip
            prefix = args.output_prefix
    except host.HostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PrepareError, TokenizerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not summary.get("made", True):
        print(f"{args.demo} is already complete.")
    skipped = f", {summary['skipped_malformed']} malformed lines skipped" if summary["skipped_malformed"] else ""
    print(f"{prefix}.bin, .idx: {summary['documents']:,} documents, {summary['tokens']:,} tokens{skipped}")
    return 0
