"""The nodes of a job watch each other, so that all end, naming the one that died or failed, when one does.

A collective waits for a dead peer until its own timeout, half an hour by default. The launchers keep one TCP connection
each to the head node's launcher, on the port after the job's, and send a line every few seconds: "alive", at the end
"done" or "failed" and why. A connection that breaks or stays silent without one of these is a node that died; the head
passes on "died" and "failed".
"""

from __future__ import annotations

import socket
import threading
import time

from paddle_te.launch.machines import LaunchError, Nodes

BEAT_SECONDS = 3
SILENCE_SECONDS = 30  # of a node without power or network, whose connection does not break
JOIN_SECONDS = 900  # nodes of one job may start far apart


class Peers:
    """This node's view of the others.

    rank: this node's. failure: None, or one line that names the first node that died or failed. died: whether it died.

    Args:
        nodes: of the job; its master's port + 1 must be free on the head node.

    Raises:
        LaunchError: on the head node, that port is taken.
    """

    def __init__(self, nodes: Nodes):
        self.failure: str | None = None
        self.died = False
        self.rank = nodes.rank
        self._nodes, self._name = nodes, socket.gethostname()
        self._connections: dict[int, socket.socket] = {}  # rank -> connection; the head has all, others the head's
        self._over: set[int] = set()  # ranks that have said their last word
        self._lock, self._closing = threading.RLock(), threading.Event()
        address, port = nodes.master.split(":")
        self._head = address, int(port) + 1
        if self.rank == 0:
            try:
                self._server = socket.create_server(self._head, backlog=nodes.count)
            except OSError as error:
                raise LaunchError(
                    f"MASTER: port {self._head[1]} of {address}, where the nodes watch each other, cannot be opened "
                    f"({error.strerror}); choose another MASTER_PORT, whose successor is free too"
                ) from error
        for target in (self._accept if self.rank == 0 else self._join, self._beat):
            threading.Thread(target=target, daemon=True).start()

    # ---- joining

    def _accept(self):
        while not self._closing.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def _join(self):
        deadline = time.monotonic() + JOIN_SECONDS
        while not self._closing.is_set():
            try:
                connection = socket.create_connection(self._head, timeout=BEAT_SECONDS)
                connection.sendall(f"join {self.rank} {self._name}\n".encode())
                return self._listen(connection)
            except OSError:
                if time.monotonic() > deadline:
                    return self._fail(f"the head node, {self._head[0]}, has not answered for {JOIN_SECONDS} s")
                self._closing.wait(0.5)

    def _welcome(self, words) -> int | None:
        """The rank of a node that joins; None for whatever else may knock on the port."""
        if len(words) != 3 or words[0] != "join" or not words[1].isdigit():
            return None
        rank = int(words[1])
        return rank if 0 < rank < self._nodes.count and rank not in self._connections else None

    # ---- talking

    def _listen(self, connection):
        """Reads one connection to its end."""
        connection.settimeout(SILENCE_SECONDS)
        rank, name, why = None if self.rank == 0 else 0, self._head[0], "its connection broke"
        try:
            with connection, connection.makefile("r", encoding="utf-8", errors="replace") as lines:
                if self.rank == 0:
                    words = lines.readline().split()
                    with self._lock:
                        rank = self._welcome(words)
                        if rank is None:
                            return
                        name = words[2]
                        self._connections[rank] = connection
                else:
                    self._connections[rank] = connection
                self._send(connection, f"name {self._name}" if self.failure is None else self._bad_news())
                for line in lines:
                    word, _, text = line.rstrip("\n").partition(" ")
                    if word == "name":
                        name = text
                    elif word in ("done", "failed", "died"):
                        self._over.add(rank)
                        return None if word == "done" else self._fail(text, word == "died")
        except TimeoutError:
            why = f"nothing was heard from it for {SILENCE_SECONDS} s"
        except OSError as error:
            why = f"its connection broke: {error.strerror}"
        if rank is not None and not self._closing.is_set():  # None: it never joined, so it is no node
            self._over.add(rank)
            self._fail(f"node {rank} ({name}) died: {why}", died=True)

    def _fail(self, text, died=False):
        with self._lock:
            if self.failure is not None or self._closing.is_set():
                return
            self.failure, self.died = text, died
        self._tell(self._bad_news())

    def _bad_news(self):
        return f"{'died' if self.died else 'failed'} {self.failure}"

    def _beat(self):
        deadline = time.monotonic() + JOIN_SECONDS
        while not self._closing.wait(BEAT_SECONDS):
            self._tell("alive")
            missing = sorted(set(range(1, self._nodes.count)) - set(self._connections) - self._over)
            if self.rank == 0 and missing and time.monotonic() > deadline:
                self._fail(f"node {', '.join(map(str, missing))} has not joined for {JOIN_SECONDS} s")

    def _tell(self, line):
        for rank, connection in list(self._connections.items()):
            if rank not in self._over:
                self._send(connection, line)

    @staticmethod
    def _send(connection, line):
        try:
            connection.sendall(f"{line}\n".encode())
        except OSError:
            pass  # its reader says so

    # ---- leaving

    def report(self, failure: str) -> bool:
        """Tells the others that this node failed; False if another one had failed before."""
        text = f"node {self.rank} ({self._name}): {failure}"
        self._fail(text)
        return self.failure == text

    def close(self) -> None:
        """Leaves, in good order unless some node has failed."""
        with self._lock:
            self._closing.set()
        if self.failure is None:
            self._tell("done")
        if self.rank == 0:
            self._server.close()
        for connection in list(self._connections.values()):
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass
