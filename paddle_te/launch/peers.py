"""Let the nodes of a job find each other, watch each other, and start anew together.

A collective waits for a dead peer until its own timeout, half an hour by default. The launchers keep one TCP connection
each to the head node's launcher, on the port after the job's, and send a line every few seconds. A connection that
breaks or stays silent is a node that died. The head sends "nonce" and a node answers "join" with a proof that it knows
the job's token (HMAC-SHA256), its name, address and number of processes; "hosts" tells all that everyone is there. Then
"alive"; "failed" and "died" with the reason, which the head passes on; "ended", whether a node would start anew, which
the head answers with "again" or "stop"; "done" as the last word.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable

from paddle_te.launch.errors import LaunchError
from paddle_te.launch.nodes import Nodes

BEAT_SECONDS = 3
SILENCE_SECONDS = 30  # of a node without power or network, whose connection does not break
JOIN_SECONDS = 900  # nodes of one job may start far apart; where START_TIMEOUT says no other number
TELL_SECONDS = 10  # between two lines that say for whom this node waits
HELLO_SECONDS = 10  # from a connection's start until it has joined
AGREE_SECONDS = 120  # for the slowest node to end its processes
LINE_BYTES = 2**16  # a longer line is no node's
STRANGERS = 64  # connections at a time that have not joined


class _Stranger(Exception):
    """Who connects is no node of this job."""


class _Lines:
    """The lines of a connection, each of at most LINE_BYTES."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._data = connection, b""

    def read(self, seconds: float) -> str | None:
        """Return the next line, None at the connection's end.

        Raises:
            TimeoutError: it has not come within `seconds`. _Stranger: it is too long.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._data:
            if len(self._data) > LINE_BYTES:
                raise _Stranger
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            data = self._connection.recv(4096)
            if not data:
                return None
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        return line.decode(errors="replace")


class Peers:
    """This node's view of the others.

    rank: this node's. failure: None, or one line that names the first node that died or failed. died: whether it died.

    Args:
        nodes: of the job; its master's port + 1 must be free on the head node.
        processes: that this node starts; all nodes start equally many.
        token: what all nodes know and nobody else; "" for none.
        join_seconds: within which all nodes must be there.

    Raises:
        LaunchError: on the head node, that port is taken.
    """

    def __init__(self, nodes: Nodes, processes: int = 1, token: str = "", join_seconds: float = JOIN_SECONDS) -> None:
        self.failure: str | None = None
        self.died = False
        self.rank = nodes.rank
        self._join_seconds = join_seconds
        self.hosts: list[str] | None = None  # of all nodes, once they are there
        self._nodes, self._name, self._processes, self._key = nodes, socket.gethostname(), processes, token.encode()
        self._connections: dict[int, socket.socket] = {}  # rank -> connection; the head has all, others the head's
        self._joined = {self.rank: nodes.host}  # rank -> address
        self._over: set[int] = set()  # ranks that have said their last word
        self._wishes: dict[int, bool] = {}  # rank -> whether it would start anew; on the others: the head's answer
        self._strangers = threading.Semaphore(STRANGERS)
        self._lock, self._closing = threading.RLock(), threading.Event()
        self._changed = threading.Condition(self._lock)
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

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Run the head's side of a connection."""
        lines = _Lines(connection)
        try:
            nonce = secrets.token_hex(16)
            self._send(connection, f"nonce {nonce}")
            rank, name = self._welcome((lines.read(HELLO_SECONDS) or "").split(), nonce, connection)
        except (OSError, _Stranger):
            return connection.close()
        finally:
            self._strangers.release()
        return self._listen(connection, lines, rank, name)

    def _welcome(self, words: list[str], nonce: str, connection: socket.socket) -> tuple[int, str]:
        """Return the rank and name of a node that joins. Raises _Stranger for whatever else may knock on the port."""
        if len(words) != 6 or words[0] != "join" or not (words[1] + words[4]).isdigit():
            raise _Stranger
        rank, name, host, processes = int(words[1]), words[2], words[3], int(words[4])
        if not hmac.compare_digest(words[5], self._proof(nonce, rank)):
            self._send(connection, "failed the head node has another JOB_TOKEN")
            raise _Stranger
        with self._lock:
            if not 0 < rank < self._nodes.count or rank in self._connections:
                raise _Stranger
            self._connections[rank], self._joined[rank] = connection, host
            self._send(connection, f"name {self._name}" if self.failure is None else self._bad_news())
            if processes != self._processes:
                self._fail(
                    f"node {rank} ({name}) has {processes} devices, node 0 has {self._processes}: all nodes must use "
                    "equally many (DEVICES=0,1,... chooses them)"
                )
            elif len(self._joined) == self._nodes.count:
                hosts = [self._joined[each] for each in range(self._nodes.count)]
                self._tell(f"hosts {','.join(hosts)}")
                self._set(hosts=hosts)
        return rank, name

    def _proof(self, nonce: str, rank: int) -> str:
        return hmac.new(self._key, f"{nonce} {rank}".encode(), hashlib.sha256).hexdigest()

    def _join(self) -> None:
        deadline = time.monotonic() + self._join_seconds
        while not self._closing.is_set():
            try:
                connection = socket.create_connection(self._head, timeout=BEAT_SECONDS)
                lines = _Lines(connection)
                word, _, nonce = (lines.read(min(HELLO_SECONDS, self._join_seconds)) or "").partition(" ")
                if word == "nonce":
                    host = self._nodes.host or connection.getsockname()[0]
                    proof = self._proof(nonce, self.rank)
                    self._send(connection, f"join {self.rank} {self._name} {host} {self._processes} {proof}")
                    with self._lock:
                        self._connections[0] = connection
                    return self._listen(connection, lines, 0, self._head[0])
            except (OSError, _Stranger):
                pass
            if time.monotonic() > deadline:
                return self._fail(f"{self._head_name} has not answered for {self._join_seconds:g} s (START_TIMEOUT)")
            self._closing.wait(0.5)

    def meet(self, say: Callable[[str], None] = lambda text: None) -> list[str] | None:
        """Wait until all nodes are there. Return their addresses by rank; None where one failed before.

        say: is told for whom this node waits, every TELL_SECONDS.
        """
        start = time.monotonic()
        while not self._wait(lambda: self.hosts is not None or self.failure is not None, TELL_SECONDS):
            waited = time.monotonic() - start
            say(f"waiting for {self._awaited()}: {waited:.0f} of at most {self._join_seconds:g} s (START_TIMEOUT)")
        return self.hosts if self.failure is None else None

    @property
    def _head_name(self) -> str:
        return f"the head node, {self._head[0]} (MASTER; port {self._head[1]}),"

    def _missing(self) -> str:
        """Return on the head the numbers of the nodes that have not joined, in words."""
        missing = sorted(set(range(1, self._nodes.count)) - set(self._connections) - self._over)
        return f"node{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else ""

    def _awaited(self) -> str:
        if self.rank == 0:
            return f"{self._missing()} to join this one"
        if 0 in self._connections:
            return f"the other nodes to join {self._head_name} which has answered"
        return f"{self._head_name} which does not answer"

    # ---- talking

    def _listen(self, connection: socket.socket, lines: _Lines, rank: int, name: str) -> None:
        """Read one connection, of a node that has joined, to its end."""
        why = "its connection broke"
        try:
            with connection:
                while (line := lines.read(SILENCE_SECONDS)) is not None:
                    word, _, text = line.partition(" ")
                    if word == "done":
                        return self._is_over(rank)
                    name = text if word == "name" else name
                    self._hear(rank, word, text)
        except TimeoutError:
            why = f"nothing was heard from it for {SILENCE_SECONDS} s"
        except OSError as error:
            why = f"its connection broke: {error.strerror}"
        except _Stranger:
            why = "it sent a line without an end"
        if not self._closing.is_set():
            self._is_over(rank)
            self._fail(f"node {rank} ({name}) died: {why}", died=True)

    def _hear(self, rank: int, word: str, text: str) -> None:
        """Take note of a line of a node that has joined, whose first word says what the text behind it is."""
        if word == "hosts":
            self._set(hosts=text.split(","))
        elif word in ("failed", "died"):
            self._fail(text, word == "died")
        elif word in ("ended", "again", "stop"):
            with self._changed:
                self._wishes[rank] = "again" in (word, text)
                self._changed.notify_all()

    def _is_over(self, rank: int) -> None:
        """Take note that nothing more will be heard of a node."""
        with self._changed:
            self._over.add(rank)
            self._changed.notify_all()

    def _set(self, hosts: list[str]) -> None:
        with self._changed:
            self.hosts = hosts
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, seconds)

    def _fail(self, text: str, died: bool = False) -> None:
        with self._changed:
            if self.failure is not None or self._closing.is_set():
                return
            self.failure, self.died = text, died
            self._changed.notify_all()
        self._tell(self._bad_news())

    def _bad_news(self) -> str:
        return f"{'died' if self.died else 'failed'} {self.failure}".replace("\n", " ")

    def _beat(self) -> None:
        deadline = time.monotonic() + self._join_seconds
        while not self._closing.wait(min(BEAT_SECONDS, self._join_seconds)):
            self._tell("alive")
            if self.rank == 0 and time.monotonic() > deadline and (missing := self._missing()):
                self._fail(f"{missing} did not join within {self._join_seconds:g} s (START_TIMEOUT)")

    def _tell(self, line: str) -> None:
        for rank, connection in list(self._connections.items()):
            if rank not in self._over:
                self._send(connection, line)

    @staticmethod
    def _send(connection: socket.socket, line: str) -> None:
        try:
            connection.sendall(f"{line}\n".encode())
        except OSError:
            pass  # its reader says so

    # ---- after a failure

    def report(self, failure: str) -> bool:
        """Tell the others that this node failed; return False if another one had failed before."""
        text = f"node {self.rank} ({self._name}): {failure}"
        self._fail(text)
        return self.failure == text

    def agree(self, again: bool) -> bool:
        """Return whether all nodes start anew.

        They do if each has ended its processes and would, `again`, and none has died or left.
        """
        if self.rank > 0:
            self._tell("ended again" if again else "ended")
            self._wait(lambda: 0 in self._wishes or 0 in self._over, AGREE_SECONDS)
            return self._anew(self._wishes.get(0, False))
        everyone = set(range(1, self._nodes.count))
        self._wait(lambda: self._wishes.keys() | self._over >= everyone, AGREE_SECONDS)
        with self._lock:
            again = again and not self._over and all(self._wishes.get(rank) for rank in everyone)
            self._tell("again" if again else "stop")
            return self._anew(again)

    def _anew(self, again: bool) -> bool:
        with self._lock:
            self._wishes.clear()
            if again:
                self.failure, self.died = None, False
        return again

    # ---- leaving

    def close(self) -> None:
        """Leave in good order: what is to be said of a failure has been said."""
        with self._lock:
            self._closing.set()
        self._tell("done")
        if self.rank == 0:
            self._server.close()
        for connection in list(self._connections.values()):
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass
