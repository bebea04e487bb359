"""Processes that tests start: ports for their servers, their ends, and what they were doing where they hang."""

import collections
import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

CHILDREN = Path(__file__).parent / "children"  # what Python processes that tests start do first
# Below those that Linux takes connections' own ends from (32768 and up), and Slurm jobs' (launch/nodes.py).
PORTS, LAUNCHER_PORTS = range(10_000, 15_000), "15000:19999"
_LATELY = 100  # of the ports given: what was given before may be given again
_given = collections.deque(maxlen=_LATELY)


def _ports_of_worker():
    """Each of pytest's workers has its own, because a port that one has chosen looks free until its server is there."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    each = len(PORTS) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return PORTS[worker * each : (worker + 1) * each]


def free_ports(count):
    """Ports in a row for servers to come.

    Not the kernel's choice (bind to 0), which any connection may take as its own end before the server is there; and
    who connects to such a port too early may even reach himself, about once in 28,000 times.
    """
    chance, own = random.SystemRandom(), _ports_of_worker()  # not the tests' seed
    while True:
        first = chance.randrange(own.start, own.stop - count)
        ports = range(first, first + count)
        if not {*_given}.intersection(ports) and all(map(_is_free, ports)):
            _given.extend(ports)
            return list(ports)


def _is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def with_in_environment(name, value):
    """Every live process with name=value in its environment, wherever it is in the process tree."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # gone, or another user's
            pass
    return found


def environment_of_children(environ):
    """Changes `environ`: the Python processes that get it begin with children/sitecustomize.py."""
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHILDREN), environ.get("PYTHONPATH")]))
    environ.setdefault("PORT_RANGE", LAUNCHER_PORTS)  # paddle.distributed.launch: 35100:64000


def _catches(process, signum):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("SigCgt:")[1].split()[0], 16) >> (signum - 1) & 1


def write_stacks(*pids):
    """Has these processes and all below them write where their threads are to their stderr; returns them."""
    tree = []
    for pid in pids:
        try:
            tree += [top := psutil.Process(pid), *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            pass
    for process in tree:
        try:
            if _catches(process, signal.SIGUSR2):
                process.send_signal(signal.SIGUSR2)
        except (OSError, psutil.Error):
            pass
    if tree:
        time.sleep(1)
    return tree


def kill_at_once(killed):
    """Kills psutil's processes before one of them can notice that another has died."""
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)


def end(process, timeout):
    """Exit status of a Popen; None if it had to be killed, with all below it, their stacks in their output."""
    try:
        return process.wait(timeout)
    except BaseException as error:  # also pytest's own limit
        kill_at_once(write_stacks(process.pid))
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None


def run(command, timeout=500, check=False, **options):
    """subprocess.run with the output as text, for what might hang: it is shown then, and leaves no process.

    Raises AssertionError after `timeout` seconds, or with `check` at an exit status other than 0.
    """
    command = [str(word) for word in command]
    # files, since what it has started may keep a pipe open
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        status = end(subprocess.Popen(command, stdout=output, stderr=errors, **options), timeout)
        texts = [written(file) for file in (output, errors)]
    failure = f"no end after {timeout} s" if status is None else f"exit status {status}"
    assert status is not None and not (check and status), (
        f"{' '.join(command)}: {failure}\n{texts[0][-6000:]}\n{texts[1][-12000:]}"
    )
    return subprocess.CompletedProcess(command, status, *texts)


def written(file):
    """The text of an open binary file."""
    file.seek(0)
    return file.read().decode(errors="replace")
