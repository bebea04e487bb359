"""The result file (JSON, with every time that was measured), its name, and a readable table of it (Markdown)."""

import itertools
import json
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from paddle_te.outputs import file_argument, write_file

PACKAGES = (
    "paddlepaddle paddlepaddle-gpu paddle_te torch transformers numpy transformer_engine transformer_engine_torch "
    "transformer_engine_cu12 transformer_engine_cu13 triton nvidia-cublas nvidia-cudnn-cu13 nvidia-cuda-runtime"
).split()
CUDA_LIBRARIES = r"lib(cudart|cublas|cublasLt|cudnn|nvrtc|nccl|transformer_engine)\.so"
# Above these relative L2 errors a layer computes something else, and its time means nothing.
ERROR_LIMITS = {"bf16": 0.03, "fp8_delayed": 0.3, "fp8_current": 0.3, "fp8_block": 0.3}
SPEEDUP_OVER = "hf_bf16"
# In what the frameworks say when a GPU's memory is full.
OUT_OF_MEMORY = re.compile(r"(?:CUDA )?out of memory.*|cannot allocate.*|CUDA_ERROR_OUT_OF_MEMORY.*", re.IGNORECASE)
ROOT = Path(__file__).resolve().parents[2]


def versions():
    """{package: version} of those that are installed, and Python's."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware():
    """What nvidia-smi says of the first GPU; the processor's name where there is none."""
    fields = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")
    query = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        values = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    except (OSError, subprocess.CalledProcessError):
        return {"name": f"CPU {platform.machine()}"}
    return dict(zip(fields, values, strict=True))


def loaded_libraries(maps=Path("/proc/self/maps")):
    """{name: the last folders of each file it was loaded from}. Two files of one library: results to distrust."""
    found = {}
    for line in maps.read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if re.match(CUDA_LIBRARIES, path.name):
            found.setdefault(path.name.split(".so")[0], set()).add("/".join(path.parts[-4:]))
    return {name: sorted(paths) for name, paths in sorted(found.items())}


def git_commit():
    """The checkout's commit, None outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def header(benchmark, arguments, definitions):
    """What every result begins with. arguments: of the command line, None for the process's own."""
    words = ["python", f"tools/benchmark/{benchmark}.py", *(sys.argv[1:] if arguments is None else arguments)]
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(words),
        "commit": git_commit(),
        "hardware": hardware(),
        "versions": versions(),
        "definitions": definitions,
    }


def add_destination(parser, benchmark):
    """The options that say where a benchmark's result goes; `destination` reads them."""
    name = f"benchmarks/{benchmark}/<date>_<gpu>x<n>_WHAT.json"
    parser.add_argument("--what", help=f"a word or two on what is measured, for the name {name}")
    parser.add_argument("--output", type=file_argument, help="JSON file to write instead; an earlier one is replaced")


def destination(result, arguments, what, benchmark=None):
    """The path that --output or --what asks for.

    Without --output it is a new one, benchmarks/<benchmark>/<date>_<gpu>x<n>_<what>.json, and -2, -3, … are added to
    the name where that day has such a result already.

    result: begins with `header`'s entries. what: used where --what was not given. benchmark: the folder, by default
    the result's own benchmark.
    """
    if arguments.output:
        return arguments.output
    hardware = result["hardware"]
    device = _slug(hardware["name"].lower().removeprefix("nvidia "))
    if not device.startswith("cpu"):
        device += f"x{hardware.get('gpus', 1)}"
    folder = ROOT / "benchmarks" / (benchmark or result["benchmark"])
    name = f"{result['date'][:10]}_{device}_{_slug(arguments.what or what)}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in (folder / f"{name}.json" for name in names) if not path.exists())


def _slug(text):
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def write(result, path, text=None):
    """Writes `path` and, under the same name, the text (None: `markdown`'s) as .md."""
    write_file("the result", path, json.dumps(result, indent=1) + "\n")
    write_file("the table", path.with_suffix(".md"), text or markdown(result))


def finish(result, arguments, what, table):
    """Adds the loaded libraries, writes the result with table(result) to `destination`, and prints both."""
    result["libraries"] = loaded_libraries()
    path, text = destination(result, arguments, what), table(result)
    write(result, path, text)
    print(text)
    print(f"{path} and {path.with_suffix('.md')}")


def markdown(result):
    """The readable table of a result."""
    lines = heading("One decoder layer, forward + backward", result)
    for name, size in result["sizes"].items():
        lines += _size_table(name, size)
    if enqueue := result.get("enqueue"):
        lines += _enqueue_table(enqueue)
    return "\n".join(lines)


def heading(title, result):
    """Lines: what was measured, where and how."""
    hardware, lines = result["hardware"], []
    lines += [f"# {title}: {hardware['name']}, {result['date'][:10]}", ""]
    lines += [f"`{result['command']}`, commit {result['commit']}", ""]
    lines += [", ".join(f"{name} {value}" for name, value in hardware.items() if name != "name"), ""]
    lines += [", ".join(f"{name} {version}" for name, version in result["versions"].items()), ""]
    if twice := [name for name, paths in result["libraries"].items() if len(paths) > 1]:
        lines += [f"**Loaded twice, so distrust these results: {', '.join(twice)}**", ""]
    return lines + [text + "\n" for text in result["definitions"]]


def describe(dims):
    """The values of `problem.Dims`, {name: value}, in words."""
    values = dims | dims.get("variant", {})
    numbers = [f"{name} {value:g}" for name, value in values.items() if type(value) in (int, float)]
    return ", ".join([*numbers, *(f"{name} {value}" for name, value in values.items() if type(value) in (str, bool))])


def rows(header, peers, row):
    """Lines of a table; row(name, peer): the cells after the name, of a peer that ran."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name, peer in peers.items():
        cells = row(name, peer) if peer["status"] == "ok" else [f"**{peer['status']}**: {one_line(peer['reason'])}"]
        cells = [name, *cells]
        lines.append("| " + " | ".join(cells + [""] * (len(header) - len(cells))) + " |")
    return lines + [""]


def one_line(text):
    """A text's beginning, as a table's cell."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")[:200]


def _size_table(name, size):
    peers = size["peers"]

    def row(peer_name, peer):
        median = peer["step_ms"]["median"]
        own = peers.get("te_torch" + peer_name.removeprefix("paddle_te")) if peer_name.startswith("paddle_te") else None
        return [
            f"{median:.2f}",
            f"{peer['step_ms']['min']:.2f} to {peer['step_ms']['max']:.2f}",
            f"{size['flops'] / median / 1e9:.0f}",
            _ratio(peers.get(SPEEDUP_OVER), lambda other: other / median),
            _ratio(own, lambda other: median / other),
            "" if peer["peak_bytes"] is None else f"{peer['peak_bytes'] / 1e9:.2f}",
            error_cell(peer),
            peer["note"],
        ]

    header = ["", "ms", "over rounds", "TFLOP/s", "× HF", "of TE's PyTorch", "peak GB", "error y / dx / worst dW", ""]
    return [f"## {name}: {describe(size['dims'])}", "", *rows(header, peers, row)]


def _ratio(other, ratio):
    return f"{ratio(other['step_ms']['median']):.2f}" if other and other["status"] == "ok" else ""


def error_cell(peer):
    """The errors of y, dx and the worst weight's gradient, marked where they are none of rounding."""
    error = peer["error"]
    if error is None:
        return "not measured: needs PyTorch"
    worst = max(value for name, value in error.items() if name not in ("y", "dx"))
    cell = f"{error['y']:.4f} / {error['dx']:.4f} / {worst:.4f}"
    # "not all below" rather than "any above": NaN must not pass
    wrong = not all(value <= ERROR_LIMITS[peer["precision"]] for value in error.values())
    return f"**WRONG** {cell}" if wrong else cell


def _enqueue_table(enqueue):
    def row(_, peer):
        times = peer["step_us"]
        return [f"{times['median']:.0f}", f"{times['min']:.0f} to {times['max']:.0f}"]

    title = f"## Host time to launch a layer: {describe(enqueue['dims'])}"
    return [title, "", *rows(["", "µs", "over rounds"], enqueue["peers"], row)]
