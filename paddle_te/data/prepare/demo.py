"""A corpus and a tokenizer from Python's own standard library."""

from __future__ import annotations

import ast
import gzip
import io
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paddle_te.data.prepare.reading import PrepareError
from paddle_te.data.prepare.writing import of_host, prepare, refusing, scratch_folder
from paddle_te.data.sentencepiece import PADDLENLP_FILE
from paddle_te.data.tokenizer import load_tokenizer
from paddle_te.outputs import check_folder

DEMO_FORMAT = 1  # raise when --demo's output changes, so that older folders are not taken for complete
# Standard library folders that distributions strip, or that hold no library documentation.
DEMO_SKIP = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "tkinter", "ensurepip", "site-packages"}


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
    existing = _made_before(out_dir)
    if existing and existing["demo"] == parameters and not overwrite:
        return existing | {"made": False}
    if existing and not overwrite:
        raise PrepareError(f"{out_dir} was made with {existing['demo']}: choose another folder or add --overwrite")
    with refusing():
        check_folder("--demo", out_dir.absolute().parent)

    of_host("data.indexed_dataset")  # as in `prepare`

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


def _made_before(out_dir: Path) -> dict[str, Any] | None:
    """Return the summary in a demo folder; None without one. Raise PrepareError for a folder with something else."""
    marker = out_dir / "demo.json"
    if marker.is_file():
        summary: dict[str, Any] = json.loads(marker.read_text())
        return summary
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise PrepareError(f"{out_dir} exists and is no demo folder: choose another one for --demo")
    return None
