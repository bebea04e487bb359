"""nsys_profile=true from the launcher to the profiler's window, with stand-ins for nsys, the CUDA driver and nvtx.

The machine has no GPU, so nsys would record nothing: the stand-ins write down what they are asked, in order.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = ROOT / "llm/llama/scripts/llama_single_node_interactive.sh"
NSYS = """#!/bin/bash
printf '%s\\n' "$@" >"$NOTES.nsys"
while [ "$1" != "-o" ]; do shift; done
touch "$2.nsys-rep"
shift 2
exec "$@"
"""
DRIVER = r"""
#include <cstdio>
#include <cstdlib>
static int note(const char* text) {
  FILE* file = fopen(getenv("NOTES"), "a");
  fprintf(file, "%s\n", text);
  return fclose(file);
}
extern "C" {
int cuInit(unsigned) { return 0; }
int cuProfilerStart() { return note("window opens"); }
int cuCtxSynchronize() { return note("waits"); }
int cuProfilerStop() { return note("window closes"); }
}
"""
NVTX = """
import os


def note(text):
    with open(os.environ["NOTES"], "a") as file:
        print(text, file=file)


def push_range(name):
    note(name)


def pop_range():
    note("end")
"""


@pytest.fixture
def stand_ins(tmp_path):
    """The environment in which they are found."""
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    (folder / "nsys").write_text(NSYS)
    (folder / "nsys").chmod(0o755)
    (folder / "nvtx.py").write_text(NVTX)
    library = folder / "libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=DRIVER, text=True, check=True)
    return {
        "NOTES": str(tmp_path / "notes"),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}",
        "LD_LIBRARY_PATH": str(folder),
        "PYTHON": sys.executable,
    }


def test_the_window_is_around_the_chosen_steps(stand_ins, tmp_path):
    settings = dict(DEVICE="cpu", MOCK_DATA="1", MAX_STEPS="4", EXP_NAME="run", OUTPUT_BASE=str(tmp_path))
    settings |= dict(PROFILE_START_STEP="1", PROFILE_STOP_STEP="2", OMP_NUM_THREADS="1")
    arguments = "tiny-llama-demo none 1 1 1 1 1 2 false 32 stage1 pd fp32 none none none true".split()
    command = ["bash", LAUNCHER, *arguments]
    done = run(command, env=os.environ | stand_ins | settings)
    assert done.returncode == 0, done.stderr[-3000:]
    given = (tmp_path / "notes.nsys").read_text().split("\n")
    assert given[:7] == ["profile", "-s", "none", "-c", "cudaProfilerApi", "-t", "cuda,nvtx"]
    assert "--capture-range-end=stop" in given and str(ROOT / "llm/llama/run_pretrain.py") in given
    assert [path.name for path in (tmp_path / "run/profile").iterdir()] == ["run.nsys-rep"]

    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes[0] == "window opens" and notes[-2:] == ["waits", "window closes"]
    assert [note for note in notes if note.startswith("step")] == ["step 1", "step 2"]
    for name, count in (("forward", 4), ("backward", 4), ("optimizer", 2), ("layers.0 forward", 4)):
        assert notes.count(name) == count, name  # two micro-batches a step
    names = [note for note in notes[1:-2] if note != "end"]
    assert len(names) == notes.count("end"), "a range stays open"


@pytest.mark.parametrize("first, last", [("2", "1"), ("4", "4")])
def test_steps_outside_the_run_are_refused(stand_ins, tmp_path, first, last):
    settings = dict(DEVICE="cpu", MOCK_DATA="1", MAX_STEPS="4", OUTPUT_BASE=str(tmp_path / "out"))
    settings |= dict(PROFILE_START_STEP=first, PROFILE_STOP_STEP=last)
    arguments = "tiny-llama-demo none 1 1 1 1 1 2 false 32 stage1 pd fp32 none none none true".split()
    done = run(["bash", LAUNCHER, *arguments], env=os.environ | stand_ins | settings)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.startswith(f"error: PROFILE_START_STEP, PROFILE_STOP_STEP: {first} to {last} must be")
