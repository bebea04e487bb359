"""Write the tokens of JSON lines as a corpus: all of it, or nothing."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tqdm import tqdm

from paddle_te import host
from paddle_te.data.prepare.encoding import Encoder, encode_all
from paddle_te.data.prepare.reading import PrepareError, find_inputs, read_chunks
from paddle_te.data.tokenizer import load_tokenizer
from paddle_te.options.option import WORKERS
from paddle_te.outputs import check_file

# The host, PaddleNLP or PaddleFormers, is imported where it is first needed: it takes seconds, and wrong arguments are
# told before that.


def of_host(module: str) -> ModuleType:
    """Import a module of the host that is installed: both have those used here. Raises HostError without one."""
    return importlib.import_module(f"{host.find(what='paddle-te prepare-data')}.{module}")


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
def refusing() -> Iterator[None]:
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
    make_builder = of_host("data.indexed_dataset").make_builder
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
    with refusing():
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

    of_host("data.indexed_dataset")  # before the scratch folder: Paddle sets its own handler of SIGTERM at import
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
