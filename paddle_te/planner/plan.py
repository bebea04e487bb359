"""A layout with the memory and the time of its step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paddle_te.job import Job
from paddle_te.planner.memory import Memory


@dataclass(frozen=True)
class Plan:
    """A layout with what it needs. times: {part: ms}."""

    layout: Job
    memory: Memory
    times: dict[str, float]

    @cached_property
    def milliseconds(self) -> float:
        """The ms of a step."""
        return sum(self.times.values())

    @property
    def tokens_per_second(self) -> float:
        """The tokens that one GPU trains in a second."""
        return self.layout.tokens_per_step / self.milliseconds * 1e3 / self.layout.world
