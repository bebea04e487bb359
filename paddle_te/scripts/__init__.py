"""What each process of the launcher's jobs runs. In a folder of their own, which Python puts on the path of modules.

All commands that need Paddle begin with `run`.
"""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator

from paddle_te.host import PADDLENLP, HostError, find
from paddle_te.runs import noise, screen
from paddle_te.runs.leaving import leaving_at_once
from paddle_te.upstream import deferred_imports


def run(module: str, host: str | None = PADDLENLP) -> int | None:
    """Return what the main() of `module` returns, which may import Paddle and its host: neither may be imported before.

    Ends the process with 2 where the host is not installed; None: it needs none. A main() that fails ends it at once.
    """
    try:
        if host:
            find(host, what=sys.argv[0].rpartition("/")[2])
    except HostError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    with leaving_at_once():
        screen.before_imports()
        deferred_imports.apply()
        with noise.kept_out(), not_collecting():
            imported = importlib.import_module(module)
        return imported.main()


@contextlib.contextmanager
def not_collecting() -> Iterator[None]:
    """Keep Python from looking for garbage in what is imported here, now and later: a quarter of the time to import."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
