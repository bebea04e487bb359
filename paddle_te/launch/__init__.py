"""The launcher behind llm/llama/scripts/*.sh: `python -m paddle_te.launch JOB ...` checks, builds one command, runs it.

A wrong argument or an impossible combination is one line that names it and what it may be, exit status 2, before
anything starts or is written. Imports neither paddle nor paddlenlp, which take seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from paddle_te.options import Option


class JobModule(Protocol):
    """What a job is here: the module `pretrain`, `finetune`, `dpo` or `kto`.

    ARGUMENTS: its options (`paddle_te.options.launcher`), in the order of its script's positional arguments. VARIABLES:
    those of its own that are read from the environment, beside those of all jobs. FIXED: {name: value} of what other
    jobs choose and this one does not. OUTPUT_NAME: what chooses its output folder, for messages.
    """

    __name__: str
    __doc__: str | None
    ARGUMENTS: tuple[Option, ...]
    VARIABLES: tuple[Option, ...]
    FIXED: Mapping[str, object]
    OUTPUT_NAME: str

    def model_config(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the model's config.json."""

    def folders(self, args: argparse.Namespace, nodes: int, dp: int) -> tuple[Path, Path]:
        """Return where it keeps its logs, and what its script writes."""

    def told(self, args: argparse.Namespace, device: str, world: int) -> dict[str, object]:
        """Return the training script's flags that say how it trains; None leaves one out."""

    def flags(self, args: argparse.Namespace, device: str, world: int, output: Path) -> dict[str, object]:
        """Return all its script's flags, in PaddleNLP's names."""
