"""Measures how far te and pd over several GPUs part from one process: runs tests/gpu/test_parallel.py, writes JSON.

    python tools/benchmark/parallel.py [--output FILE] [-k EXPRESSION]

Every layout that fits on the GPUs here, at once; -k chooses some, as pytest's. The result has hardware, versions, date,
command, and for each layout and variant the greatest relative difference of a step's loss, and of a final weight, from
the same variant in one process. Exit status: pytest's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed

from paddle_te.native import library  # noqa: E402
from tools.benchmark import report  # noqa: E402

DEFINITIONS = {
    "model": "tests/model, 6 layers, hidden 64; 4 steps on the same 12 sequences of 32 tokens",
    "bf16": "O2, float32 master weights and main gradients",
    "fp8": "bf16 with delayed scaling, HYBRID",
    "_full": "full recompute",
    "_resumed": "from the checkpoint after step 2",
    "one": "one process, the reference",
    "seconds": "of all variants one after another, start included, with other jobs on the same GPUs at the same time",
}


def packages():
    """{package: version}: the layer benchmark's, PaddleNLP and NCCL."""
    names = [distribution.name for distribution in metadata.distributions()]
    more = [name for name in names if name == "paddlenlp" or name.startswith("nvidia-nccl")]
    return report.versions() | {name: metadata.version(name) for name in more}


def measure(selected):
    """(pytest's exit status, results of tests/gpu/test_parallel.py or None)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu/test_parallel.py"]
        command += ["-k", selected] if selected else []
        environment = os.environ | dict(PADDLE_TE_PARALLEL_RESULTS=str(path))
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        return status, json.loads(path.read_text()) if path.exists() else None


def main(argv=None):
    parser = argparse.ArgumentParser(description="Losses over several GPUs, compared with one process's.")
    report.add_destination(parser, "parallel")
    parser.add_argument("-k", dest="selected", metavar="EXPRESSION", help="layouts, as in pytest -k (default: all)")
    args = parser.parse_args(argv)
    try:
        count = len(library.gpus())
    except OSError as error:
        parser.error(f"no usable NVIDIA driver ({error})")
    if count < 2:
        parser.error(f"two GPUs or more are needed; visible here: {count}")

    status, layouts = measure(args.selected)
    if layouts is None:
        print("error: nothing was measured; pytest's output above says why", file=sys.stderr)
        return status or 1
    result = report.header("parallel", argv, DEFINITIONS)
    result |= dict(versions=packages(), passed=status == 0, layouts=layouts)
    result["hardware"]["gpus"] = count
    path = report.destination(result, args, "some-layouts" if args.selected else "all-layouts")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    return status


if __name__ == "__main__":
    sys.exit(main())
