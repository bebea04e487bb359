"""Raise an error in a data set in the training loop as it is, whether worker processes read the data or none.

Paddle hands batches to the training loop from a thread. Without workers, where the data set or the collation raises,
the thread ends with a traceback and leaves its queue open, on which the training loop waits for ever. With workers the
training loop learns only that "the data reader raises an exception".
"""

from typing import Any

from paddle.io.dataloader.dataloader_iter import _DataLoaderIterMultiProcess, _DataLoaderIterSingleProcess

from paddle_te.upstream.replacement import Replacement, Replacements, Theirs

PACKAGE, VERSION = "paddle", "3.3."
SYMPTOM = "After an error in the data, with --dataloader_num_workers 0, the training waits for ever."


def _repairs(iterator: type) -> tuple[Replacement, Replacement]:
    """Return the replacements of an iterator's thread and of what takes batches from it."""

    def _thread_loop(self: Theirs, place: Theirs) -> None:
        """Do as Paddle's, keep the error and close the queue behind the batches before it."""
        try:
            loop.original(self, place)
        except Exception as error:
            self.failure = error
            self._exit_thread_expectedly()

    def _next(self: Theirs) -> Any:
        """Do as Paddle's; raise the thread's error where the queue ends."""
        try:
            return following.original(self)
        except Exception:
            failure = vars(self).get("failure")
            if failure is None:
                raise
            raise failure from None

    loop = Replacement(iterator, "_thread_loop", _thread_loop)
    following = Replacement(iterator, "__next__", _next)
    return loop, following


_replacements = Replacements(*_repairs(_DataLoaderIterSingleProcess), *_repairs(_DataLoaderIterMultiProcess))
apply, undo = _replacements.apply, _replacements.undo
