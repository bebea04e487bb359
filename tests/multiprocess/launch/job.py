"""A job of the launcher on this machine, which runs a small program in the place of training."""

import os
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import psutil

from tests import processes
from tests.processes import kill_at_once, with_in_environment

SCRIPT = Path(__file__).resolve().parents[3] / "llm/llama/scripts/llama_single_node_interactive.sh"

TRAINING = """
    import os, pathlib, signal, subprocess, sys, time
    rank = os.environ.get("PADDLE_TRAINER_ID", "0")
    seen = pathlib.Path(os.environ["SEEN"])
    print("rank", rank, "starts")
    signal.signal(signal.SIGUSR1, lambda *_: (seen / f"usr1.{rank}").touch())
    def ready():
        (seen / f"ready.{rank}").touch()
    def everyone():
        while len(list(seen.glob("ready.*"))) < int(os.environ.get("PADDLE_TRAINERS_NUM", "1")):
            time.sleep(0.02)
    def child():  # as a data loader, deaf to SIGTERM
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
"""


class Job:
    """The real script on two CPU processes (or `devices`) that run a small program instead of training."""

    def __init__(self, folder, code, devices="0,1", name="", **more):
        self.folder, self.seen, self.tag = folder, folder / "seen", str(uuid.uuid4())
        self.seen.mkdir(exist_ok=True)
        self.screen_file = folder / f"screen{name}"
        program = folder / "train ing.py"
        program.write_text(textwrap.dedent(TRAINING) + textwrap.dedent(code))
        environ = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "DEVICE": "cpu", "DEVICES": devices}
        environ |= {"MOCK_DATA": "1", "OUTPUT_BASE": str(folder / "out"), "EXP_NAME": "e", "SEEN": str(self.seen)}
        environ |= {"TRAINING_SCRIPT": str(program), "TEST_TAG": self.tag, **more}
        processes.environment_of_children(environ)
        self.output = open(self.screen_file, "w")
        command = ["bash", str(SCRIPT), "llama-125m", "none", "1", "1", "1", *[""] * 7, "fp32"]
        self.start = time.monotonic()
        self.process = subprocess.Popen(command, env=environ, stdout=self.output, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        kill_at_once(self.left())
        self.process.wait()
        self.output.close()

    def left(self):
        """Every live process with this job's tag in its environment, wherever it is in the process tree."""
        return with_in_environment("TEST_TAG", self.tag)

    def wait_for(self, pattern, count):
        self.wait_until(lambda: len(list(self.seen.glob(pattern))) >= count)

    def wait_until(self, condition, seconds=200):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.screen()
            time.sleep(0.05)

    def end(self):
        status = processes.end(self.process, 200)
        assert status is not None, f"no end after 200 s:\n{self.screen()}"
        return status

    def screen(self):
        return self.screen_file.read_text()


def two_nodes():
    """What a user sets on both nodes; here both are this machine, under two loopback addresses."""
    master = f"127.0.0.2:{processes.free_ports(2)[0]}"
    return {"NNODES": "2", "MASTER": master, "IP_STR": "127.0.0.2,127.0.0.3", "JOB_TOKEN": str(uuid.uuid4())}


def wait_for_peers(job, nodes):
    """Until the launchers watch each other. That is well before training starts, but the jobs here start at once."""
    address, port = nodes["MASTER"].split(":")
    head = address, int(port) + 1

    def connected():
        connections = psutil.net_connections("tcp4")
        return any(each.laddr == head and each.status == psutil.CONN_ESTABLISHED for each in connections)

    job.wait_until(connected)
    time.sleep(1)  # for the words by which they join
