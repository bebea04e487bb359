"""What a run is asked for: one typed record, one table of rules that it must keep, one reader of flag words. No Paddle.

| | |
|---|---|
| `record` | `Job`, made of the sections of `options`, and what follows from its fields |
| `rules` | `RULES`, by topics, and `check`, which launcher, scripts, PaddleFormers' recipes and planner call |
| `doors` | how a user of each of these writes a field of the record |
| `words` | flags as words of a command line: the one reader and the one printer |
"""

from paddle_te.job.doors import LAUNCHER, SCRIPT, Door
from paddle_te.job.record import DPO, FINETUNE, KTO, PRETRAIN, Job
from paddle_te.job.rules import RULES, JobError, Rule, check, fault

__all__ = [
    "DPO",
    "FINETUNE",
    "KTO",
    "LAUNCHER",
    "PRETRAIN",
    "RULES",
    "SCRIPT",
    "Door",
    "Job",
    "JobError",
    "Rule",
    "check",
    "fault",
]
