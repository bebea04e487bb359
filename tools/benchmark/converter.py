"""Time and peak memory of the checkpoint converter and of a plain copy of the same files, in one run on one disk.

    python tools/benchmark/converter.py FOLDER [--layers 32] [--workers 2] [--modes pd2te te2pd ...] [--what NAME]

Writes benchmarks/converter/<date>_cpu-<machine>_<what>.json.

The checkpoint is synthetic, in bf16, of Llama-2 7B's sizes (13.5 GB with 32 layers). FOLDER needs room for twice as
much (three times with more than one mode) and is left empty. Copy and conversion both read from the disk, not from the
page cache, and end when everything is through to the disk (fsync). The copy is timed before and after the conversions,
because a disk's speed drifts; the ratios are to the mean of both.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout, installed or not

from paddle_te import configs  # noqa: E402
from paddle_te.configs.spec import spec_of  # noqa: E402
from paddle_te.outputs import write_file  # noqa: E402
from paddle_te.weights.dims import Dims  # noqa: E402
from paddle_te.weights.layouts import native_layout  # noqa: E402
from paddle_te.weights.pdparams import Writer  # noqa: E402
from paddle_te.weights.tensors import TensorSpec  # noqa: E402
from tools.benchmark import report as results  # noqa: E402

SHARD = 4 * 10**9  # bytes of the input's files

CONVERT = """
import json, resource, sys, time
from paddle_te.weights import convert
start = time.perf_counter()
convert(sys.argv[1], sys.argv[2], progress=False, **json.loads(sys.argv[3]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seconds, cpu = time.perf_counter() - start, time.process_time()
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_gb": peak * 1024 / 1e9}))
"""


def shards(specs):
    """The specs in order, in groups of at most SHARD bytes."""
    groups, size = [[]], 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > SHARD:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    return groups


def make(folder, layers):
    """A native checkpoint in 4 GB shards; the data are pieces of one random buffer."""
    sizes = configs.read("llama-2-7b") | {"num_hidden_layers": layers}
    dims, layout = Dims(spec_of(sizes)), native_layout()
    places = layout.tensors(dims.spec)
    specs = [TensorSpec(layout.full_name(place), "bfloat16", dims.slot_shape(place)) for place in places]
    noise = np.random.default_rng().integers(0, 2**16, 2**28, np.uint16)
    groups = shards(specs)
    folder.mkdir(parents=True)
    names = [f"model_state-{n + 1:05d}-of-{len(groups):05d}.pdparams" for n in range(len(groups))]
    weight_map = {spec.name: name for name, group in zip(names, groups, strict=True) for spec in group}
    for name, group in zip(names, groups, strict=True):
        writer = Writer(folder / name, group)
        for number, spec in enumerate(group):
            start = number * 4099
            writer.add([noise[start : start + spec.nbytes // 2]])
        writer.close()
    (folder / "model_state.pdparams.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    (folder / "config.json").write_text(json.dumps({key: getattr(dims, key) for key in keys}))
    return max(spec.nbytes for spec in specs)


def forget(folder):
    """Drops a folder's files from the page cache."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source, target):
    """{seconds, cpu_seconds} to copy a folder's files through to the disk, one after another."""
    forget(source)
    start, cpu = time.perf_counter(), time.process_time()
    target.mkdir()
    for path in source.iterdir():
        with open(path, "rb") as read, open(target / path.name, "wb") as written:
            shutil.copyfileobj(read, written, 2**24)
            written.flush()
            os.fsync(written.fileno())
    measured = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    shutil.rmtree(target)
    return measured


def convert(source, target, options):
    """{seconds, cpu_seconds, peak_gb} of a conversion in a process of its own."""
    forget(source)
    command = [sys.executable, "-c", CONVERT, source, target, json.dumps(options)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)


def measure(folder, layers, modes, workers):
    """The report, but for its head."""
    source, target, te = folder / "source", folder / "target", folder / "te"
    largest = make(source, layers)
    size = sum(path.stat().st_size for path in source.iterdir())
    report = {"gb": size / 1e9, "largest_tensor_gb": largest / 1e9, "copies": [copy(source, target)], "modes": {}}
    for mode in modes:
        options = OPTIONS.get(mode, dict(mode=mode)) | dict(workers=workers)
        if options["mode"] == "te2pd" and not te.exists():
            raise SystemExit("te2pd converts what pd2te has written: put pd2te before it")
        report["modes"][mode] = convert(te if options["mode"] == "te2pd" else source, target, options)
        if mode == "pd2te" and "te2pd" in modes:
            target.rename(te)
        shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(te, ignore_errors=True)
    report["copies"].append(copy(source, target))
    baseline = statistics.fmean(measured["seconds"] for measured in report["copies"])
    for measured in report["modes"].values():
        measured["ratio"] = measured["seconds"] / baseline
    return report


# names of --modes that are more than the converter's --mode
OPTIONS = {"tp2": dict(mode="reshard", tensor_parallel_degree=2)}
OPTIONS["pd2te_tp2"] = dict(mode="pd2te", tensor_parallel_degree=2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--modes", nargs="+", default=["pd2te"], choices=["pd2te", "te2pd", "pd2hf", *OPTIONS])
    results.add_destination(parser, "converter")
    arguments = parser.parse_args()
    head = {
        "benchmark": "converter",
        "hardware": {"name": f"CPU {platform.machine()}"},
        "commit": results.git_commit(),
        "command": shlex.join(["python", "tools/benchmark/converter.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "workers": arguments.workers,
        "layers": arguments.layers,
    }
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        report = head | measure(arguments.folder, arguments.layers, arguments.modes, arguments.workers)
    finally:
        for name in ("source", "target", "te"):
            shutil.rmtree(arguments.folder / name, ignore_errors=True)
    print(text := json.dumps(report, indent=2))
    path = results.destination(report, arguments, f"{arguments.layers}-layers")
    write_file("the result", path, text + "\n")
    print(path)


if __name__ == "__main__":
    main()
