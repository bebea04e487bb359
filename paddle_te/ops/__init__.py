"""The math of a decoder layer: one interface, two implementations.

`get_ops("paddle")` is plain Paddle operations (`ops.pd`, the reference, runs anywhere), `get_ops("transformer_engine")`
is TE's kernels (`ops.te`). Layers hold parameters and parallelism and call nothing but this interface.
The interface is `ops.interface.Ops`.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, cast

from paddle_te.ops.interface import Ops

if TYPE_CHECKING:  # mypy compares the modules with the interface
    from paddle_te.ops import pd, te

    _IMPLEMENTATIONS: tuple[Ops, Ops] = (pd, te)

BACKENDS = {"paddle": "paddle_te.ops.pd", "transformer_engine": "paddle_te.ops.te"}


@cache
def get_ops(backend: str) -> Ops:
    """Return the module that implements `backend`, "paddle" or "transformer_engine".

    Raises ValueError for another name, and what the backend itself raises where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not known; it may be {' or '.join(map(repr, BACKENDS))}")
    return cast(Ops, importlib.import_module(BACKENDS[backend]))
