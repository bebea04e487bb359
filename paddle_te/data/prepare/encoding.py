"""Tokenize chunks of JSON lines in several processes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paddle_te.data.jsonl import reason
from paddle_te.data.prepare.reading import Chunk, PrepareError

PR_SET_PDEATHSIG = 1  # linux/prctl.h
Encoded: TypeAlias = tuple[list[npt.NDArray[Any]], int, int]  # token ids a document, malformed and empty ones


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
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"is not JSON: {reason(error)}") from None
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
