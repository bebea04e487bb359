"""What a run with --fp8_statistics leaves of them: a line of JSON for each counted step. Knows no Paddle.

    {"step": 50, "columns": ["amax", …], "tensors": {"0.qkv.input": [3.4, …], "head.weight": […]}}
    {"step": 50, "in_16_bits": {"7": "fc2.grad_output: underflows 0.41, more than 0.3"}}

A tensor is named by its decoder layer's number in the whole model (or "head"), its GEMM and what it is to it. The
columns are fp8.Statistics' fields; None is a value that the recipe does not have, or that is not finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FP8_LOG = "fp8_statistics.jsonl"
DIGITS = 5  # that a value is rounded to
HEAD = "head"


@dataclass
class FP8Log:
    """The lines of a run.

    steps: {step: {tensor: {column: value}}}. in_16_bits: {layer: (step after which it computes so, why)}.
    """

    steps: dict[int, dict[str, dict[str, float | None]]] = field(default_factory=dict)
    in_16_bits: dict[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> FP8Log:
        """Read a file. Raise FileNotFoundError or ValueError, with its name."""
        log = cls()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                log._add(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: no record of fp8 statistics ({error!r})") from error
        return log

    def _add(self, record: Mapping[str, Any]) -> None:
        step = int(record["step"])
        for layer, why in record.get("in_16_bits", {}).items():
            self.in_16_bits[layer] = step, why
        if "tensors" in record:
            columns = record["columns"]
            self.steps[step] = {
                name: dict(zip(columns, values, strict=True)) for name, values in record["tensors"].items()
            }


def line_of(step: int, columns: Sequence[str], tensors: Mapping[str, Sequence[float | None]]) -> str:
    """Return the line of a step's statistics."""
    rounded = {name: [_rounded(value) for value in values] for name, values in tensors.items()}
    return json.dumps({"step": step, "columns": list(columns), "tensors": rounded}, separators=(",", ":"))


def line_of_switch(step: int, why: Mapping[int, str]) -> str:
    """Return the line that says which layers compute in 16 bits after a step, {number: why}."""
    return json.dumps({"step": step, "in_16_bits": {str(number): text for number, text in why.items()}})


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def kept_lines(path: Path, last_step: int) -> list[str]:
    """Return the lines of a file up to a step, from which a run goes on; none where there is no file."""
    if not last_step or not path.is_file():
        return []
    lines = path.read_text(errors="replace").splitlines()
    return [line for line in lines if (step := _step_of(line)) is not None and step <= last_step]


def _step_of(line: str) -> int | None:
    """Return a line's step; None for one that a crash has cut short."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None
