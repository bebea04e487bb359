"""python -m paddle_te.launch JOB [--name=value ...] [values, in the order of the job's script]"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from paddle_te.launch import finetune, pretrain
from paddle_te.launch.machines import LaunchError
from paddle_te.launch.plan import make_plan
from paddle_te.options import STAGING_DIR
from paddle_te.runs.background import remove_leftovers
from paddle_te.runs.checkpoints import set_aside

JOBS = {"pretrain": pretrain, "finetune": finetune}


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, the failed process's (128 + n if signal n ended it), or 2 for a wrong argument."""
    name, *words = (sys.argv[1:] if argv is None else argv) or [""]
    try:
        if name not in JOBS:
            raise LaunchError(f"job: {name!r} must be one of {', '.join(JOBS)}")
        plan, args = make_plan(JOBS[name], words, os.environ)
        if not args.DRY_RUN and importlib.util.find_spec("paddle") is None:
            raise LaunchError(
                f"PYTHON: {sys.executable} has no paddle; make .venv with scripts/quickstart.sh, or set PYTHON"
            )
    except LaunchError as error:
        print(f"error: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    if args.DRY_RUN:
        print(plan.shell())
        return 0
    from paddle_te.launch.peers import Peers
    from paddle_te.launch.supervise import supervise

    try:
        peers = Peers(plan.nodes) if plan.nodes.count > 1 else None
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"+ {plan.shell()}", file=sys.stderr, flush=True)
    for folder in plan.folders:
        folder.mkdir(parents=True, exist_ok=True)
    if plan.nodes.rank == 0 and (kept := set_aside(plan.output, args.resume_step)):
        print(f"launch: checkpoints of an earlier run, later than this one's start, are now in {kept}", file=sys.stderr)
    env = {key: value for key, value in os.environ.items() if key not in plan.unset} | plan.env
    try:
        return supervise(plan.command, env, script=plan.script, processes=plan.processes, logs=plan.logs, peers=peers)
    finally:
        remove_leftovers(_staging_dir(plan.command))  # ranks that were killed could not


def _staging_dir(command: list[str]) -> str:
    """The training script's flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--staging_dir", default=STAGING_DIR)
    return parser.parse_known_args(command)[0].staging_dir


if __name__ == "__main__":
    sys.exit(main())
