"""Show a training's lines on the screen, and keep everything else in a file.

On the screen stand the lines of this package's loggers and the warnings and errors of others. The tables of arguments
and the reports of PaddleNLP and Paddle, Python's warnings, and the lines that `noise` knows are in the file of details.
Both are made with Python alone: what C++ code prints still comes to stderr.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from paddle_te.runs import noise

# Environment variable: set by the launcher for ranks whose output it copies to a terminal.
TERMINAL = "PADDLE_TE_TERMINAL"


_OWN = logging.getLogger("paddle_te")
_PYTHON_WARNINGS = logging.getLogger("py.warnings")


class _Screen(logging.StreamHandler[TextIO]):
    """Writes to stderr, above a progress bar, which is drawn again below."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.setLevel(level)
        self.setFormatter(_Line())

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _Line(logging.Formatter):
    """The time and the message, with "warning:" or "error:" where it is one."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self.formatTime(record, '%H:%M:%S')} {level}{record.getMessage().strip()}"


class _File(logging.FileHandler):
    """Says nothing of a full disk: whatever the run cannot do without says so, once."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _Details(logging.handlers.MemoryHandler):
    """Keeps the records until it is told their file."""

    def __init__(self) -> None:
        super().__init__(capacity=sys.maxsize, flushLevel=sys.maxsize)

    def shouldFlush(self, record: logging.LogRecord) -> bool:
        return self.target is not None

    def write_to(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _File(path)
        file.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)8s] %(name)s - %(message)s"))
        self.setTarget(file)
        self.flush()

    def close(self) -> None:
        file = self.target
        super().close()
        if file is not None:
            file.close()


_details = _Details()  # the present one's, while `shown` lasts


def before_imports() -> None:
    """Quiet Paddle before it is imported.

    Else its C++ code reports each plug-in that it loads, and its Python code warns of a compiler's cache that nobody
    here needs.
    """
    os.environ.setdefault("GLOG_minloglevel", "1")  # from warnings on
    logging.captureWarnings(True)
    _PYTHON_WARNINGS.propagate = False  # to Paddle's handler, which prints
    for name in noise.EARLY:
        logging.getLogger(name).addFilter(noise.filtered)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Send log records to the screen and to the details as this module says, while the block lasts.

    Paddle and PaddleNLP must be imported: it replaces the handlers that they have by then. It is a decorator, too.
    """
    global _details
    _details = _Details()
    with contextlib.ExitStack() as stack:
        stack.enter_context(noise.kept_out())
        others = _Screen(logging.WARNING)
        others.addFilter(lambda record: not record.name.startswith(_OWN.name))
        others.addFilter(noise.filtered)
        for logger in _printing() - {logging.root}:
            _give(stack, logger, [] if logger.propagate else [others, _details])
        _give(stack, logging.root, [others, _details])
        _give(stack, _OWN, [_Screen(logging.INFO)])
        _give(stack, _PYTHON_WARNINGS, [_details])
        _set(stack, _PYTHON_WARNINGS, "propagate", False)
        stack.callback(_OWN.setLevel, _OWN.level)
        _OWN.setLevel(logging.DEBUG)
        logging.captureWarnings(True)
        stack.callback(logging.captureWarnings, False)
        stack.callback(_details.close)
        yield


def _prints(handler: logging.Handler) -> bool:
    return type(handler) is logging.StreamHandler


def _printing() -> set[logging.Logger]:
    """Return all loggers that print by themselves."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return {each for each in loggers if isinstance(each, logging.Logger) and any(map(_prints, each.handlers))}


def _give(stack: contextlib.ExitStack, logger: logging.Logger, handlers: list[logging.Handler]) -> None:
    """Give a logger these handlers, instead of those that print, until the stack is left."""
    _set(stack, logger, "handlers", [each for each in logger.handlers if not _prints(each)] + handlers)


def _set(stack: contextlib.ExitStack, logger: logging.Logger, name: str, value: object) -> None:
    stack.callback(setattr, logger, name, getattr(logger, name))
    setattr(logger, name, value)


def keep_details(output_dir: str | Path, rank: int, host: str = "PaddleNLP") -> None:
    """Open this rank's file of details, and write to it what was logged since `shown` began."""
    path = Path(output_dir, "logs", f"details.{rank}.log")
    _details.write_to(path)
    _OWN.info(f"the messages of {host} and Paddle are in {path}")


def is_terminal() -> bool:
    """Return whether a progress bar would be seen: this process writes to a terminal, or its launcher does for it."""
    return sys.stderr.isatty() or bool(os.environ.get(TERMINAL))
