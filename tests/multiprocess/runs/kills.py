"""Kills runs with SIGKILL again and again, lets them go on with `auto`, and compares them with undisturbed runs.

    python -m tests.multiprocess.runs.kills [--kills 15] [--ways "one process" "tp2, unified" …] [--folder DIR]

Prints a line for each way of saving. Half of the kills come at the beginning of a save or soon after, the others at any
moment of a run. Afterwards every loss and every number of the last checkpoint must be those of the undisturbed run.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from paddle_te.launch.overlap import OVERLAPS
from tests import processes, seeds
from tests.multiprocess.distributed.jobs import BF16, LAYOUTS, MODEL
from tests.nvgpu_processes import build_host, python_path
from tests.pretraining import command, losses, numbers

CHILD = Path(__file__).parent / "killed_saves.py"
FLAGS = dict(
    model_name_or_path=MODEL,
    save_steps=1,
    save_total_limit=2,
    gradient_accumulation_steps=1,
    transformer_engine_backend="paddle",
)
SAVES = 3  # begin between two kills at most


class Way(NamedTuple):
    """A layout, one of `LAYOUTS` or one process on the CPU, and flags that make a way of saving."""

    layout: str
    flags: dict = {}

    @property
    def undisturbed(self):
        """The way that writes the same files without a thread in the background."""
        return Way(self.layout, {name: value for name, value in self.flags.items() if name != "staging_dir"})


BACKGROUND, UNIFIED = dict(staging_dir="staging"), dict(unified_checkpoint="true")
PIPELINE = dict(gradient_accumulation_steps=2)  # a micro-batch a stage
# as the launcher's OVERLAP=1, which reads the loss of every second step only
OVERLAP1, OVERLAP2 = (
    BF16 | dict(sharding_parallel_config=OVERLAPS[stage], logging_steps=2, save_steps=2) for stage in OVERLAPS
)
WAYS = {
    "one process": Way("one process"),
    "one process, background": Way("one process", BACKGROUND),
    "one process, unified": Way("one process", UNIFIED),
    "tp2": Way("tp2"),
    "tp2, background": Way("tp2", BACKGROUND),
    "tp2, unified": Way("tp2", UNIFIED),
    "pp2": Way("pp2", PIPELINE),
    "pp2, background": Way("pp2", PIPELINE | BACKGROUND),
    "pp2, unified": Way("pp2", PIPELINE | UNIFIED),
    "dp2": Way("dp2"),
    "sharding1": Way("sharding1"),
    "sharding1, unified": Way("sharding1", UNIFIED),
    "sharding2": Way("sharding2"),
    "sharding3": Way("sharding3"),
    "sharding1, overlap": Way("sharding1", OVERLAP1),
    "sharding1, overlap, unified": Way("sharding1", OVERLAP1 | UNIFIED),
    "sharding2, overlap": Way("sharding2", OVERLAP2),
}


def train(folder, way, kills, steps, plugin, seed=0):
    """Trains to the end, after so many kills at moments that `seed` tells.

    Returns a record for each kill, as killed_saves.py writes them.
    """
    folder.mkdir(parents=True)
    ranks, layout = LAYOUTS.get(way.layout, (1, {}))
    run = dict(device="nvgpu" if ranks > 1 else "cpu", max_steps=steps, resume_from_checkpoint="auto")
    flags = FLAGS | layout | way.flags | run
    if "staging_dir" in flags:
        flags["staging_dir"] = folder / flags["staging_dir"]
        flags["staging_dir"].mkdir()
    job = dict(
        flags=command(folder / "out", **flags),
        output=str(folder / "out"),
        report=str(folder / "report.jsonl"),
        kills=kills,
        ranks=ranks,
        seed=seed,
        save_seconds=0.15 * ranks,
        sync_seconds=0.03,
    )
    (folder / "job.json").write_text(json.dumps(job))
    own = dict(PYTHONPATH=python_path(), OMP_NUM_THREADS="1", DEFERRED_IMPORTS="1")
    environment = os.environ | (plugin if ranks > 1 else {}) | own
    done = processes.run([sys.executable, CHILD, folder / "job.json"], env=environment, timeout=300 + 60 * kills)
    logs = "".join(f"\n{log.name}:\n{log.read_text()[-3000:]}" for log in folder.glob("rank*.log"))
    assert not done.returncode, f"seed {job['seed']}: {done.stderr[-2000:]}{logs}"
    report = folder / "report.jsonl"
    return [json.loads(line) for line in report.read_text().splitlines()] if kills else []


def kill_and_compare(folder, name, kills, plugin):
    """Kills runs of one of WAYS. Returns how many of the kills fell into a save; AssertionError for any difference."""
    folder, way = Path(folder), WAYS[name]
    steps = (kills + 1) * SAVES * way.flags.get("save_steps", 1)
    whole = folder / next(other for other, each in WAYS.items() if each == way.undisturbed)
    if not whole.exists():
        train(whole, way.undisturbed, 0, steps, plugin)
    killed = folder / f"{name}, killed"
    records = train(killed, way, kills, steps, plugin, seeds.seed_of(name))
    check_resumes(killed / "out", records)

    expected, got = losses(whole / "out"), losses(killed / "out")
    assert got == expected and max(got) == steps and len(set(got.values())) == len(got), f"{name}: other losses"
    expected, got = numbers(whole / "out"), numbers(killed / "out")
    differ = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
    assert expected and not differ, f"{name}: other numbers in {differ}"
    kept = [sorted(path.name for path in run.glob("out/checkpoint-*")) for run in (whole, killed)]
    assert kept[0] == kept[1], f"{name}: folders {kept}"
    assert not list(killed.glob("staging/*")), f"{name}: what killed runs have staged is still there"
    return sum(bool(record["interrupted"]) for record in records)


def check_resumes(output, records):
    """That each run took up the newest complete checkpoint, and that no kill lost one."""
    newest = None  # complete step before a run
    for record in records:
        expected = newest and str(output / f"checkpoint-{newest}")
        assert all(found == expected for found in record["resumed"]), f"resumed {record}, not {expected}"
        assert not newest or record["complete"][-1] >= newest, f"{record}: checkpoint {newest} was lost"
        newest = record["complete"][-1] if record["complete"] else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, metavar="WAY")
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    os.environ.setdefault(seeds.VARIABLE, "fresh")
    seeds.settle(os.environ)
    print(f"{seeds.VARIABLE}={os.environ[seeds.VARIABLE]}")
    folder, plugin, failed = args.folder or tempfile.mkdtemp(), dict(CUSTOM_DEVICE_ROOT=build_host()), []
    for name in args.ways:
        start = time.monotonic()
        try:
            inside = kill_and_compare(folder, name, args.kills, plugin)
            result = f"{args.kills} kills, {inside} of them inside a save: equal to the bit"
        except AssertionError as error:
            failed.append(name)
            result = f"FAILED: {error}"
        print(f"{name}: {result}, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(args.ways) * args.kills} kills, in {folder}; failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
