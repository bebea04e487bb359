"""The one table of what a run may not be asked for.

The launcher, the training scripts, recipes of PaddleFormers, `auto` and the planner's search call `check`, or `fault`
where an answer is enough. Values of single flags are not here: a flag's Kind says what they may be.

A rule's texts are templates of `doors.Door.explain`, so that each user reads the names that he writes. Its examples are
words of `words.example`: `breaks` is a run that this rule refuses, `near` a similar one that no rule refuses, and
tests/unit/job tries both.
"""

from __future__ import annotations

from collections.abc import Iterable

from paddle_te.job.doors import SCRIPT, Door
from paddle_te.job.record import Job
from paddle_te.job.rules import (
    experts,
    finetuning,
    fp8,
    layers,
    layouts,
    models,
    optimizer,
    paddleformers,
    preferences,
    trainer,
)
from paddle_te.job.rules.rule import JobError, Rule

__all__ = ["FORMERS_RULES", "LAYER_RULES", "RULES", "JobError", "Rule", "check", "fault"]

LAYER_RULES = (*layers.RULES, *fp8.RULES)
FORMERS_RULES = paddleformers.LAYER_RULES
RULES = (
    *layers.RULES,
    *layouts.RULES,
    *models.RULES,
    *fp8.RULES,  # which reckon with degrees that divide the model
    *experts.RULES,
    *optimizer.RULES,
    *trainer.RULES,
    *finetuning.RULES,
    *preferences.RULES,
    *FORMERS_RULES,
    *paddleformers.LAYOUT_RULES,
)


def check(job: Job, door: Door = SCRIPT, rules: Iterable[Rule] | None = None) -> None:
    """Raise JobError for the first rule that the run breaks, in the words of a door. rules: some of them."""
    for rule in RULES if rules is None else rules:
        if found := rule.against(job):
            raise JobError(rule.told(job, door, found))


def fault(job: Job) -> Rule | None:
    """Return the first rule that the run breaks; None if it breaks none."""
    return next((rule for rule in RULES if rule.against(job)), None)
