"""Nodes that watch each other: three on one machine, some of them other processes that die."""

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from paddle_te.launch import peers
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.nodes import Nodes
from paddle_te.launch.peers import Peers
from tests.processes import free_ports

OTHER = """
import sys, time
from paddle_te.launch import peers
from paddle_te.launch.nodes import Nodes
peers.BEAT_SECONDS, peers.SILENCE_SECONDS = 0.1, 5.0
node = peers.Peers(Nodes(count=3, rank=int(sys.argv[1]), master=sys.argv[2]))
while not node.failure:
    time.sleep(0.05)
print(node.died, node.failure, flush=True)
node.close()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(peers, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(peers, "SILENCE_SECONDS", 5.0)  # a busy machine may let a process wait for seconds


@pytest.fixture
def short_silence(monkeypatch):
    """Where all nodes are in one process, which waits as a whole."""
    monkeypatch.setattr(peers, "SILENCE_SECONDS", 1.0)


@pytest.fixture
def master():
    return f"127.0.0.1:{free_ports(2)[0]}"


@pytest.fixture
def start(master):
    """start(rank): a node in a process of its own."""
    started = []

    def start(rank):
        command = [sys.executable, "-c", OTHER, str(rank), master]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def joined(head, count=2):
    wait_for(lambda: len(head._connections) == count)


@pytest.mark.parametrize(
    "signum, why", [(signal.SIGKILL, "its connection broke"), (signal.SIGSTOP, "nothing was heard")]
)
def test_a_node_that_dies_is_named_to_all(start, master, signum, why):
    head, other, victim = Peers(Nodes(3, 0, master)), start(1), start(2)
    joined(head)
    os.kill(victim.pid, signum)
    wait_for(lambda: head.failure)
    assert head.failure.startswith(f"node 2 ({socket.gethostname()}) died: {why}")
    assert head.died and other.stdout.readline() == f"True {head.failure}\n", "the head passes it on"
    head.close()


def test_the_heads_death_is_seen_by_the_others(start, master):
    head, others = start(0), [Peers(Nodes(3, rank, master)) for rank in (1, 2)]
    for other in others:
        joined(other, 1)
    head.kill()
    for other in others:
        wait_for(lambda other=other: other.failure)
        names = f"{re.escape(socket.gethostname())}|127.0.0.1"  # its own follows the connection
        assert re.match(rf"node 0 \(({names})\) died: its connection broke", other.failure), other.failure
        other.close()


def test_a_report_reaches_all_and_the_first_one_counts(master):
    nodes = [Peers(Nodes(3, rank, master)) for rank in range(3)]
    joined(nodes[0])
    assert nodes[1].report("rank 8 ended with status 1")
    wait_for(lambda: all(node.failure for node in nodes))
    assert not nodes[2].report("rank 16 ended with status 1") and not any(node.died for node in nodes)
    assert {node.failure for node in nodes} == {f"node 1 ({socket.gethostname()}): rank 8 ended with status 1"}
    for node in nodes:
        node.close()


@pytest.mark.usefixtures("short_silence")
def test_a_good_end_is_no_failure(master):
    nodes = [Peers(Nodes(3, rank, master)) for rank in range(3)]
    joined(nodes[0])
    for node in nodes:  # the head first
        node.close()
        time.sleep(0.3)
    time.sleep(peers.SILENCE_SECONDS + 0.3)
    assert [node.failure for node in nodes] == [None] * 3


def test_who_does_not_join_or_answer_is_named(master, monkeypatch):
    monkeypatch.setattr(peers, "TELL_SECONDS", 0.2)
    for count, rank, address, waits, failure in (
        (3, 0, master, "nodes 1, 2 to join this one", "nodes 1, 2 did not join within 1 s (START_TIMEOUT)"),
        (
            2,
            1,
            "127.0.0.9:1",
            "the head node, 127.0.0.9 (MASTER; port 2), which does not answer",
            "has not answered for",
        ),
    ):
        said, start = [], time.monotonic()
        node = Peers(Nodes(count, rank, address), join_seconds=1)
        assert node.meet(said.append) is None and time.monotonic() - start < 10
        assert failure in node.failure
        assert said[0] == f"waiting for {waits}: 0 of at most 1 s (START_TIMEOUT)" and len(said) > 2
        node.close()


def test_a_node_that_waits_for_a_third_one_says_so(master, monkeypatch):
    monkeypatch.setattr(peers, "TELL_SECONDS", 0.2)
    head, other = (Peers(Nodes(3, rank, master), join_seconds=3) for rank in (0, 1))
    joined(head, 1)
    said = []
    assert other.meet(said.append) is None and other.failure.startswith("node 2 did not join")
    assert "which has answered" in said[-1]
    other.close()
    head.close()


@pytest.mark.usefixtures("short_silence")
def test_strangers_do_no_harm(master):
    head = Peers(Nodes(2, 0, master))
    for text in (b"", b"GET / HTTP/1.1\r\n", b"join 7 x\n", b"\xff\xfe\n"):
        with socket.create_connection(head._head) as stranger:
            stranger.sendall(text)
    reset, silent = (socket.create_connection(head._head) for _ in range(2))
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # what a port scanner sends
    time.sleep(0.2)
    reset.close()
    time.sleep(peers.SILENCE_SECONDS + 0.3)
    assert head.failure is None and not head._connections
    head.close()
    silent.close()


def test_a_taken_port_is_said_before_the_start(master):
    address, port = master.split(":")
    with socket.create_server((address, int(port) + 1)):
        with pytest.raises(LaunchError, match="MASTER: port .* choose another MASTER_PORT"):
            Peers(Nodes(2, 0, master))
