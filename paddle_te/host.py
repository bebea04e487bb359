"""Which host is installed here, the library that models and the Trainer come from, and what to install without one.

Imports none of them, nor Paddle.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

# Hosts come without types. What they give us is any of these in our signatures:
HostConfig = Any  # a model's configuration, a PretrainedConfig
HostModel = Any  # a model, or a pipeline's stage: a paddle.nn.Layer with a host's methods
HostArguments = Any  # TrainingArguments, with the flags of ours that their class adds
HostTrainer = Any  # a Trainer
if TYPE_CHECKING:
    HostClass = Any  # the base of what is mixed into a host's class, whose methods super() means
else:
    HostClass = object

# {name of its package, of its folder in paddle_te/hosts and of the extra that installs it: what it is called}
PADDLENLP, PADDLEFORMERS = "paddlenlp", "paddleformers"
HOSTS = {PADDLENLP: "PaddleNLP", PADDLEFORMERS: "PaddleFormers"}


class HostError(ValueError):
    """No host is there that can do what is wanted, or it is not clear which; what to do, in one line."""


def installed() -> list[str]:
    """Return the hosts that this Python can import."""
    return [name for name in HOSTS if _is_there(name)]


def _is_there(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # else it is just a folder of that name


def find(wanted: str | None = None, of: Iterable[str] = tuple(HOSTS), what: str = "this") -> str:
    """Return the host to use: `wanted`, or without that the one that is installed, where it is one `of` those that can.

    what: needs it, for messages.
    Raises HostError where it is not installed, or where several are and none is wanted.
    """
    of, there = tuple(of), installed()
    known = [name for name in there if name in of]
    if wanted is None and len(known) > 1:
        raise HostError(
            f"HOST: this Python has {' and '.join(HOSTS[name] for name in known)}, which exclude each other's "
            f"versions; set HOST={' or HOST='.join(known)}, or better give each an environment of its own"
        )
    if wanted in known or wanted is None and known:
        return wanted or known[0]
    missing = [wanted] if wanted else of
    others = [HOSTS[name] for name in there if name not in missing]
    here = f", and this Python has {' and '.join(others)}, which excludes it" if others else ""
    own = " in an environment of its own" if others else ""
    raise HostError(
        f"{what} needs {' or '.join(HOSTS[name] for name in missing)}{here}: "
        f"pip install {' or '.join(repr(f'paddle_te[{name}]') for name in missing)}{own}"
    )
