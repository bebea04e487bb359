"""What a test sees of a process that is a fork: its output, its exit status, its working directory, and signals."""

import os
import signal
import subprocess
import sys

import pytest

from tests.nvgpu_processes import python_path

PROGRAM = """
import os, sys, time
assert "paddlenlp" in sys.modules
print(__name__, sys.argv[1:], os.environ["PADDLE_NAME"], os.getcwd(), flush=True)
print("to stderr", file=sys.stderr)
if sys.argv[1] == "wait":
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def start(tmp_path, warm_start):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | warm_start | dict(PYTHONPATH=python_path(), OMP_NUM_THREADS="1", PADDLE_NAME="mine")

    def start(argument):
        command = [sys.executable, "program.py", argument]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)

    return start


@pytest.mark.parametrize("status", [0, 3])
def test_it_ends_as_the_fork_does(start, status, tmp_path):
    process = start(str(status))
    output, errors = process.communicate(timeout=120)
    assert process.returncode == status
    assert output == f"__main__ ['{status}'] mine {tmp_path}\n" and "to stderr" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_fork(start, number):
    process = start("wait")
    process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=120)  # ends when the fork has closed its end, too
    assert process.returncode == -number
