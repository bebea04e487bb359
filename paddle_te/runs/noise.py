"""Keep lines of Paddle, PaddleNLP and PaddleFormers off the screen that tell a user nothing, each with why.

They are in the file of details (`screen`). A line that is not in this list is shown, whatever its level: it may be one
that a user needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Known:
    """Lines, as regular expressions of all of a line but the blanks around it, and why nobody needs them."""

    why: str
    lines: tuple[str, ...]


# Loggers that say some of them while their packages are imported, before there is a file of details
EARLY = ("transformers", "PaddleFormers")
GLOG = r"[IW]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.]+:\d+\] "  # how a line of Paddle's C++ code begins
KNOWN = (
    Known(
        "PaddleNLP prints each of its steps while it reads or builds an index, for every part of a corpus.",
        (
            "reading (sizes|pointers|document index)...",
            "creating (numpy buffer of mmap|memory view of numpy buffer)...",
            "warming up (index|data) mmap file...",
            r"searching for causual dataset, build_indices=\w+, share_folder \w+, check_rank_flag \w+",
            r"building indices on rank 0 \.\.\.",
            "build success",
            r"> WARNING: could not find index map files, building the indices on rank 0 \.\.\.",
            r"> (building dataset index|finished creating indexed dataset|dataset split|elas\w+ time to build)\b.*",
            r"> (loading (doc|sample|shuffle)-idx mapping from|building shuffle index with split) .*",
            "> only one epoch required, setting separate_last_epoch to False",
            r"> last epoch number of samples \(\d+\) is (smaller|larger) than 80% of number of samples per epoch .*",
            r"loaded indexed file in .* seconds",
            "    (using|train|validation|test):",
            r"(total )?number of (documents|epochs|samples):? +.*|sequence length: +\d+|document indices in .*",
        ),
    ),
    Known(
        "PaddleNLP counts what prepare-data has written, which says the same in one line.",
        (r"Total (sentences|documents|tokens) num: \d+", r"Average tokens per (sentence|document): [\d.]+"),
    ),
    Known(
        "Paddle lists the flags that it, PaddleNLP and our repairs have set, not the user.",
        ("=+ Modified FLAGS detected =+", r"FLAGS\(name='\w+', current_value=.*, default_value=.*\)", "={71}"),
    ),
    Known(
        "Paddle warns of a number of threads that the user, or a cluster's environment, has chosen.",
        (r"WARNING: OMP_NUM_THREADS set to \d+, not 1\. .*", r"PLEASE USE OMP_NUM_THREADS WISELY\."),
    ),
    Known(
        "PaddleFormers needs no PyTorch, and hides it from transformers.",
        (
            "PyTorch was not found. Models won't be available and only tokenizers, configuration and file/data .*",
            "Due to potential compatibility issues between PaddlePaddle and PyTorch in PaddleFormers, .*",
        ),
    ),
    Known(
        "PaddleFormers reports its own settings as warnings: processes, FlashAttention of paddlepaddle-gpu, and "
        "templates, which the launcher's recipes do not use.",
        (
            r"Process rank: -?\d+, device: \w+, world_size: \d+, distributed training: \w+, 16-bits training: \w+",
            r"Flag FLAGS_flash_attn_version cannot set its value through this function\.",
            r"`template` was not specified, use `empty` template\.",
            r"suffix is not specified, using eos token as suffix\.",
            r"callbacks: \[<paddleformers\..*",
        ),
    ),
    Known(
        "Clipping by the norm of all ranks' gradients is what the user asked for, and what Paddle then does.",
        (r"While using ClipGradByGlobalNorm in [\w, ]+, the grad clip of original optimizer will be changed\.",),
    ),
    Known(
        "Gradients in 16 bits are added to gradients in float32, and PaddleNLP's RMSNorm multiplies both kinds. Paddle "
        "says so of the first of each operation in a process, whoever called it.",
        (
            GLOG + r"(Got|got) different data type, run type promotion automatically, this may cause data type been "
            r"changed\.",
        ),
    ),
)
_PATTERN = re.compile(rf" *(?:{'|'.join(line for known in KNOWN for line in known.lines)})\s*")


def is_known(text: str) -> bool:
    """Return whether each line of a text is of the list."""
    return bool(text.strip()) and all(map(_PATTERN.fullmatch, text.strip("\n").splitlines()))


def filtered(record: logging.LogRecord) -> bool:
    """Let through what is not known, as a logging filter."""
    return not is_known(record.getMessage())


class _Stream:
    """A text stream that writes the lines that are known to the log, and the others to another stream.

    A text without the end of a line is written at once, as a progress bar is.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._ends_a_known_line = stream, False

    def write(self, text: str) -> int:
        if self._ends_a_known_line and text == "\n":
            self._ends_a_known_line = False
        elif is_known(text):
            self._ends_a_known_line = not text.endswith("\n")
            logger.debug(text.strip())
        else:
            self._ends_a_known_line = False
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Lines(_Stream):
    """The same for whole lines, of which print may write each word on its own."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            super().write("\n".join(lines) + "\n")
        return len(text)

    def flush(self) -> None:
        begun, self._begun = self._begun, ""
        if begun:
            super().write(begun)
        self._stream.flush()


@contextlib.contextmanager
def kept_out() -> Iterator[None]:
    """Send known lines that Python code prints to the log instead, in the block. C++ code writes without Python."""
    out = _Lines(sys.stdout)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(_Stream(sys.stderr)):
        try:
            yield
        finally:
            out.flush()


@contextlib.contextmanager
def kept_out_of_descriptor(number: int) -> Iterator[None]:
    """Do the same for C++ code: look in the end at what it wrote to a file descriptor.

    For moments: what a process that dies has written is lost.
    """
    kept = os.dup(number)
    with tempfile.TemporaryFile() as file:
        _flush_c()
        os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            _flush_c()
            os.dup2(kept, number)
            os.close(kept)
            file.seek(0)
            for line in file:
                _log_or_write(line, number)


def _flush_c() -> None:
    ctypes.CDLL(None).fflush(None)


def _log_or_write(line: bytes, number: int) -> None:
    text = line.decode(errors="replace")
    if is_known(text):
        logger.debug(text.strip())
    else:
        os.write(number, line)
