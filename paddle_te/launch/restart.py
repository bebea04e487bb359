"""When a job that has failed starts anew by itself, and with which arguments."""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass, field
from pathlib import Path

from paddle_te.launch.flags import ranks_of_a_sequence
from paddle_te.launch.supervise import HUNG, OTHER_NODE_FAILED, Outcome, ending
from paddle_te.runs.checkpoints import complete_checkpoints
from paddle_te.runs.rollback import ROLLED_BACK

REFUSED = 2  # exit status of the launcher and the training scripts for wrong arguments: the next start would be refused


@dataclass
class Restarts:
    """The restarts of one job. limit: MAX_RESTARTS."""

    limit: int
    count: int = 0
    _failures: set[tuple[int, int]] = field(default_factory=set)  # (status, step)

    def why_not(self, outcome: Outcome) -> str | None:
        """Why a job that ended so does not start anew; "" where nothing is to be said, None where it may."""
        if outcome.status == 0 or outcome.stopped or self.limit == 0:
            return ""
        if outcome.status == REFUSED:
            return "not started again: a refused start would be refused again"
        if self.count == self.limit:
            return f"not started again: MAX_RESTARTS={self.limit} are used up"
        if outcome.node_died:
            return "not started again: a node is gone (under Slurm the job is requeued)"
        if outcome.status not in (OTHER_NODE_FAILED, ROLLED_BACK):  # that node knows; that rank asks to be started
            if (failure := (outcome.status, outcome.step)) in self._failures:
                what = "hung" if outcome.status == HUNG else ending(outcome.status)
                return f"not started again: it {what} at step {outcome.step} for the second time"
            self._failures.add(failure)
        return None


def restarted(args: argparse.Namespace, folder: Path, output: Path) -> argparse.Namespace:
    """A job's arguments for its next start: from the newest checkpoint, or, where there is none yet, as at first.

    folder, output: the job's, which stay.
    """
    args = copy.copy(args)
    if hasattr(args, "EXP_NAME"):  # made from the layout, which may change
        args.EXP_NAME = str(folder.relative_to(Path(args.OUTPUT_BASE).expanduser().absolute()))
    if complete_checkpoints(output):  # which of them is good, the ranks find out
        args.resume_step, args.init_weight = "auto", "none"
    return args


def fewer(args: argparse.Namespace, devices: list[str], before: int) -> argparse.Namespace | None:
    """Return the arguments on the devices that are left of `before`, with the same batch; None where no layout fits.

    TP, PP, SEP, CP and EP stay. The data-parallel and sharding ranks become fewer, and gradient accumulation longer:
    their product is what a step trains on, and must stay.
    """
    model = ranks_of_a_sequence(args)
    sequences = args.GA * before // model
    for data_ranks in range(len(devices) // model, 0, -1):
        if sequences % data_ranks or data_ranks % args.EP:
            continue
        made = copy.copy(args)
        made.DEVICES = devices[: data_ranks * model]
        made.GA = sequences // data_ranks
        sharded = before // model == args.FSDP
        made.FSDP = (
            data_ranks
            if sharded
            else next(n for n in range(min(args.FSDP, data_ranks), 0, -1) if data_ranks % n == 0 and n % args.EP == 0)
        )
        if made.FSDP == 1:
            made.OVERLAP = False  # which is for sharding only
        return made
    return None
