"""A rule for a run: what it refuses, why, and what to do."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass

from paddle_te.job.doors import Door
from paddle_te.job.record import Job


class JobError(ValueError):
    """A rule is broken; the message says in the user's words what is wrong and what to do, in one line."""


@dataclass(frozen=True)
class Rule:
    """when: what of a Job is against it, falsy where nothing is; a text stands for {found} in the others.

    says: what is wrong, and why. remedy: what to do. host: whose runs it is for; all, where it is empty.
    """

    when: Callable[[Job], object]
    says: str
    remedy: str = ""
    breaks: str = ""
    near: str = ""
    host: str = ""

    @property
    def flag(self) -> str:
        """Return the first flag that it names; "" where that depends on the run."""
        named = re.match(r"\{(\w+)", self.says)
        return named[1] if named and named[1] != "found" else ""

    def against(self, job: Job) -> object:
        """Return the values of a Job that break the rule."""
        return self.host in ("", job.host) and self.when(job)

    def told(self, job: Job, door: Door, found: object) -> str:
        """Return the error's line in the words of a door; found: of `against`."""
        template = "; ".join(filter(None, (self.says, self.remedy)))
        return door.explain(template.replace("{found}", str(found)), job)


# Words of examples, and a remedy of many
HALF = "--bf16 true --fp16_opt_level O2"
TE, PD = f"{HALF} --transformer_engine_backend transformer_engine", "--transformer_engine_backend paddle"
FP8 = f"{TE} --use_fp8 true"
TUNED = "finetune --do_train true"
LORA = f"{TUNED} {TE} --lora true"
ONE = "leave one of them out"


def sharing_degrees(job: Job) -> list[str]:
    """Return those degrees of SEP and CP that are above 1."""
    return [name for name in ("sep_parallel_degree", "context_parallel_degree") if getattr(job, name) > 1]


def shards(job: Job, *stages: int) -> bool:
    """Return whether ranks shard the optimizer, in one of these stages."""
    return job.sharding_ranks > 1 and job.stage in stages


def counts_tied_twice(job: Job) -> bool:
    """Return whether Paddle would clip by a norm that counts embeddings on two stages twice."""
    return bool(job.pp > 1 and job.model and job.model.tied and "split_param" in job.sharding_parallel_config)


def installed(job: Job, package: str) -> bool:
    """Return whether a package is there; of another machine nothing is known, and everything is believed."""
    return job.elsewhere or importlib.util.find_spec(package) is not None
