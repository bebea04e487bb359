"""Where a training step's time goes on a GPU, from a trace of Paddle's profiler (PROFILER=paddle of the launchers).

    python tools/benchmark/timeline.py outputs/RUN/output/profile/rank0*.json [--picture step.svg] [--page step.html]

It prints a table of the milliseconds of a step by parts and, for each trace, a table of its kernels. Traces in the same
folder are those of one run's ranks: what these wait in collectives for each other is told apart. --picture FILE
draws the first table. --page FILE writes a page for a browser, which shows every kernel of a step and names the one
under the mouse. device_trace.py defines which kernels belong to which part.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from paddle_te.outputs import file_argument, write_file  # noqa: E402
from tools.benchmark import timeline_views  # noqa: E402
from tools.benchmark.device_trace import ROWS, read_ranks  # noqa: E402


def markdown(accounts):
    """Tables of {name: account}: each row's ms in a step and share, and the first one's longest kernels."""
    lines = ["| ms of a step (share) | " + " | ".join(accounts) + " |", "|---" * (len(accounts) + 1) + "|"]

    def line(name, of):
        cells = [f"{ms:.2f} ({ms / found['total_ms']:.1%})" if (ms := of(found)) else "" for found in accounts.values()]
        return f"| {name} | " + " | ".join(cells) + " |"

    for row in ROWS:
        if any(row in found["ms"] for found in accounts.values()):
            lines.append(line(row, lambda found, row=row: found["ms"].get(row, 0)))
    lines.append(line("**all**", lambda found: found["total_ms"]))
    lines.append(line("communication, hidden or not", lambda found: found["communication_ms"]))
    return [*lines, ""]


def read(traces):
    """{name: Profile} of trace files, of which those in a folder are one run's ranks."""
    runs = defaultdict(list)
    for trace in traces:
        runs[trace.parent].append(trace)
    found = (profile for ranks in runs.values() for profile in read_ranks(ranks).items())
    return {trace.name.partition(".")[0]: profile for trace, profile in found}


def kernels_table(found):
    lines = ["| kernel | ms of a step | calls |", "|---|---|---|"]
    return [*lines, *(f"| `{name[:100]}` | {ms:.2f} | {calls:g} |" for name, ms, calls in found["kernels"]), ""]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="of one or several ranks or runs")
    parser.add_argument("--picture", type=file_argument, metavar="FILE", help="draws the steps by parts: .svg or .png")
    parser.add_argument("--page", type=file_argument, metavar="FILE", help="writes all kernels of a step, as .html")
    arguments = parser.parse_args(argv)
    for name, endings in (("picture", (".svg", ".png")), ("page", (".html",))):
        path = getattr(arguments, name)
        if path and path.suffix not in endings:
            parser.error(f"--{name} {path}: the name must end with {' or '.join(endings)}")
    try:
        profiles = read(arguments.traces)
        accounts = {name: profile.account() for name, profile in profiles.items()}
        if arguments.picture:
            timeline_views.draw(accounts, arguments.picture)
        if arguments.page:
            write_file("--page", arguments.page, timeline_views.page(profiles))
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.exit(f"timeline.py: {error}")
    print("\n".join(markdown(accounts)))
    for name, found in accounts.items():
        print("\n".join([f"## {name}", "", *kernels_table(found)]))


if __name__ == "__main__":
    main()
