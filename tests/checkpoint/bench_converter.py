"""Time and peak memory of the converter on a synthetic Llama-2 7B sized bf16 checkpoint (13.5 GB with 32 layers).

    python tests/checkpoint/bench_converter.py FOLDER [--layers 32] [--workers 2] [--mode pd2te] [...]

FOLDER needs room for twice the checkpoint and is left empty. Prints JSON: seconds to copy the files and seconds to
convert them in the same run, both through fsync, and the converting process's peak memory.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from paddle_te.checkpoint.layout import Dims, native_layout
from paddle_te.checkpoint.pdparams import Writer
from paddle_te.checkpoint.plan import _shards
from paddle_te.checkpoint.tensors import TensorSpec

CONVERT = """
import json, resource, sys, time
from paddle_te.checkpoint import convert
start = time.perf_counter()
convert(sys.argv[1], sys.argv[2], progress=False, **json.loads(sys.argv[3]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seconds, cpu = time.perf_counter() - start, time.process_time()
print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_gb": peak * 1024 / 1e9}))
"""


class Sized:
    """What _shards asks of an entry."""

    def __init__(self, spec):
        self.spec = spec


def make(folder, layers):
    """A native checkpoint in 4 GB shards; the data are pieces of one random buffer."""
    dims, layout = Dims(4096, 11008, layers, 32, 32, 32000), native_layout()
    specs = [TensorSpec(layout.full_name(n, s), "bfloat16", dims.slot_shape(s)) for n, s in layout.tensors(layers)]
    noise = np.random.default_rng().integers(0, 2**16, 2**28, np.uint16)
    groups = [[entry.spec for entry in group] for group in _shards([Sized(spec) for spec in specs], 4e9)]
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


def copy(source, target):
    """(seconds, CPU seconds) to copy a folder's files through to the disk."""
    start, cpu = time.perf_counter(), time.process_time()
    target.mkdir()
    for path in source.iterdir():
        with open(path, "rb") as read, open(target / path.name, "wb") as written:
            shutil.copyfileobj(read, written, 2**24)
            written.flush()
            os.fsync(written.fileno())
    return time.perf_counter() - start, time.process_time() - cpu


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mode", default="pd2te")
    parser.add_argument("--tensor_parallel_degree", type=int)
    arguments = parser.parse_args()
    options = dict(mode=arguments.mode, workers=arguments.workers)
    options["tensor_parallel_degree"] = arguments.tensor_parallel_degree
    source, copied, converted = (arguments.folder / name for name in ("source", "copied", "converted"))
    try:
        largest = make(source, arguments.layers)
        size = sum(path.stat().st_size for path in source.iterdir())
        seconds, cpu = copy(source, copied)
        shutil.rmtree(copied)
        command = [sys.executable, "-c", CONVERT, source, converted, json.dumps(options)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    finally:
        for folder in (source, copied, converted):
            shutil.rmtree(folder, ignore_errors=True)
    result |= {"gb": size / 1e9, "largest_tensor_gb": largest / 1e9, "copy_seconds": seconds, "copy_cpu_seconds": cpu}
    print(json.dumps(options | result | {"ratio": result["seconds"] / seconds}, indent=2))


if __name__ == "__main__":
    main()
