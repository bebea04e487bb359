"""python -m paddle_te.launch JOB [--name=value ...] [values, in the order of the job's script]"""

from __future__ import annotations

import importlib.util
import os
import sys

from paddle_te.launch import finetune, pretrain
from paddle_te.launch.machines import LaunchError
from paddle_te.launch.plan import make_plan

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
                f"PYTHON: {sys.executable} has no paddle; install one (pip install 'paddle_te[cpu]', or "
                "paddlepaddle-gpu; in the repository scripts/quickstart.sh does), or set PYTHON to another Python"
            )
    except LaunchError as error:
        print(f"error: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    if args.DRY_RUN:
        print(plan.shell())
        return 0
    from paddle_te.launch.job import run

    return run(JOBS[name], plan, args)


if __name__ == "__main__":
    sys.exit(main())
