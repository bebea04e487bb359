"""What a reader answers to a damaged file: the command's own entry function, in this process, within bounds."""

from __future__ import annotations

import contextlib
import io
import logging
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SECONDS = 60  # of the clock, for one reader; it takes less than one where processors are free
MEMORY = 4 * 2**30  # bytes beyond what the process has
EQUAL, REFUSED, OTHER = "equal", "refused", "other"


class TooLong(BaseException):
    """A reader waits, or works without end."""


@dataclass(frozen=True)
class Answer:
    """value: what the reader returned, None where it refused. error: its line. said: its warnings, told with it."""

    value: Any
    error: str
    said: str
    seconds: float

    def compared_with(self, whole: Answer) -> str:
        """EQUAL, REFUSED or OTHER."""
        if self.error:
            return REFUSED
        return EQUAL if self.value == whole.value else OTHER


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.errors, self.warnings = [], []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            (self.errors if record.levelno >= logging.ERROR else self.warnings).append(record.getMessage())


@contextlib.contextmanager
def _bounds() -> Iterator[None]:
    """End the block with TooLong or MemoryError where it takes more than SECONDS or MEMORY."""

    def stop(*_: object) -> None:
        raise TooLong(f"more than {SECONDS} seconds")

    handler = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, SECONDS)  # pytest-timeout's
    limits = resource.getrlimit(resource.RLIMIT_AS)
    start, used = time.monotonic(), int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1) if left else 0)


@contextlib.contextmanager
def _command_line(words: list[Any]) -> Iterator[None]:
    before, sys.argv = sys.argv, [str(word) for word in words]
    try:
        yield
    finally:
        sys.argv = before


def ask(main: Callable[..., Any], words: list[Any], result: Callable[[], Any], argv: bool = True) -> Answer:
    """Calls a command's main function.

    words: its command line, behind its name. result: makes what is compared, when it has ended well; it gets what the
    command returned and wrote to the standard output. argv: whether main reads sys.argv, or takes the words.

    A refusal is status 1 or 2, with one line. Raises what else the command raises.
    """
    lines, start = _Lines(), time.monotonic()
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    own = logging.getLogger("paddle_te")
    own.addHandler(lines)
    try:
        with tempfile.TemporaryFile("w+") as err:  # with a number, which faulthandler asks for
            with _bounds(), _command_line(["command", *words]), contextlib.redirect_stdout(out):
                with contextlib.redirect_stderr(err):
                    status = _status(main, None if argv else [str(word) for word in words])
            err.seek(0)
            printed = [line for line in err.read().splitlines() if line.startswith("error: ")]
    finally:
        own.removeHandler(lines)
    seconds, said = time.monotonic() - start, " | ".join(lines.warnings)
    if status in (None, 0):
        return Answer(result(out.buffer.getvalue().decode()), "", said, seconds)
    told = [status] if isinstance(status, str) else lines.errors or printed or [out.buffer.getvalue().decode()]
    assert isinstance(status, str) or status in (1, 2), f"status {status}"
    assert len(told) == 1 and told[0].strip(), f"an error of {len(told)} messages: {told}"
    return Answer(None, told[0], said, seconds)


def _status(main: Callable[..., Any], words: list[str] | None) -> Any:
    try:
        return main() if words is None else main(words)
    except SystemExit as ended:
        return ended.code
