"""python -m paddle_te.launch JOB [--name value ...] [values, in the order of the job's script]
python -m paddle_te.launch JOB FILE.json [--name value ...]

With --print-config the second writes the whole run file, with all defaults, and starts nothing (`run_files`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import cast

from paddle_te.host import HostError, find
from paddle_te.job import DPO, FINETUNE, KTO, PRETRAIN
from paddle_te.launch import JobModule, arguments
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.paddleformers.recipe import RECIPE
from paddle_te.launch.plan import make_plan
from paddle_te.launch.run_files import PRINT_CONFIG, complete

JOBS = (PRETRAIN, FINETUNE, DPO, KTO)  # modules beside this one


def _job(name: str) -> JobModule:
    return cast("JobModule", importlib.import_module(f"paddle_te.launch.{name}"))


def make_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of a job's arguments, with the defaults of an empty environment."""
    return arguments.make_parser(_job(name), {})


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, the failed process's (128 + n if signal n ended it), or 2 for a wrong argument."""
    name, *words = (sys.argv[1:] if argv is None else argv) or [""]
    try:
        if name not in JOBS:
            raise LaunchError(f"job: {name!r} must be one of {', '.join(JOBS)}")
        if print_config := PRINT_CONFIG in words:
            words.remove(PRINT_CONFIG)
        plan, args = make_plan(_job(name), words, {**os.environ, **({"DRY_RUN": "1"} if print_config else {})})
        if not args.DRY_RUN and importlib.util.find_spec("paddle") is None:
            raise LaunchError(
                f"PYTHON: {sys.executable} has no paddle; install one (pip install 'paddle_te[cpu,paddlenlp]', or "
                "paddlepaddle-gpu; in the repository scripts/quickstart.sh does), or set PYTHON to another Python"
            )
        if not args.DRY_RUN:
            find(args.HOST, what=f"paddle-te {name}")
    except (LaunchError, HostError) as error:
        without = "" if words or name not in JOBS else f"; paddle-te {name} --help lists the arguments"
        print(f"error: {error}{without}".replace("\n", " "), file=sys.stderr)
        return 2
    if print_config:
        print(complete(_job(name), args))
        return 0
    if args.DRY_RUN:
        for path, text in plan.files.items():
            if path.name == RECIPE:
                print(f"# {path}\n{text}", end="")
        print(plan.shell())
        return 0
    from paddle_te.launch.job import run

    return run(_job(name), plan, args)


if __name__ == "__main__":
    sys.exit(main())
