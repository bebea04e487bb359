"""A program that fails is gone at once, with its words and its status, and its launcher knows."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from paddle_te.launch.watchdog import Watchdog
from paddle_te.runs.heartbeat import LAUNCHER

PROGRAM = """
import atexit, multiprocessing, os, signal, sys, threading, time
from paddle_te.runs.heartbeat import STEPPING, Heartbeat
from paddle_te.runs.leaving import leaving_at_once
HANGS = {
    "exit": lambda: atexit.register(time.sleep, 600),
    "thread": threading.Thread(target=time.sleep, args=[600]).start,
    "child": multiprocessing.get_context("fork").Process(target=time.sleep, args=[600], daemon=True).start,
    "nothing": lambda: None,
}
HANGS[sys.argv[1]]()
print("said", end="")  # stays in a buffer
with leaving_at_once():
"""


def run(code, hangs="exit", **environ):
    program = PROGRAM + textwrap.indent(textwrap.dedent(code), "    ")
    return subprocess.run(
        [sys.executable, "-c", program, hangs], env=environ, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("hangs", ["exit", "thread", "child"])
def test_nothing_holds_up_its_end(hangs):
    done = run("raise RuntimeError('no memory')", hangs)  # its pipes end with the last process that has them
    assert done.returncode == 1 and done.stdout == "said"
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("RuntimeError: no memory\n")


@pytest.mark.parametrize("code, status, words", [("sys.exit(75)", 75, ""), ("sys.exit('no data')", 1, "no data\n")])
def test_its_status_and_words_are_those_it_would_have_had(code, status, words):
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (status, "said", words)


@pytest.mark.parametrize("code", ["pass", "sys.exit()", "sys.exit(0)"])
def test_a_good_end_is_pythons_own(code):
    done = run(f"atexit.register(print, ', and the end')\n{code}", "nothing")
    assert (done.returncode, done.stdout, done.stderr) == (0, "said, and the end\n", "")


def test_who_presses_ctrl_c_sees_no_traceback():
    done = run("os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(600)")
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "said", "")


def test_the_launcher_is_told():
    watchdog = Watchdog()
    run("Heartbeat().beat(STEPPING, 4)\nsys.exit(75)", **{LAUNCHER: watchdog.name, "PADDLE_TRAINER_ID": "3"})
    deadline = time.monotonic() + 60
    while not watchdog.failures() and time.monotonic() < deadline:
        time.sleep(0.01)
    (sign,) = watchdog.failures()
    assert (sign.rank, sign.status, sign.step, watchdog.step) == (3, 75, 4, 4) and watchdog.ending() == {3}
