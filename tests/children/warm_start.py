"""Starts Python programs in forks of a process that has imported Paddle, PaddleNLP and our training already.

A rank needs five seconds of a core to import them, often as long as for what is tested, and tests start hundreds. Where
WARM_STARTS names a folder, a Python process that has just started (sitecustomize.py) hands its command, variables,
working directory and standard streams over to a server, which forks. The process then passes signals on to the fork,
waits for it, and ends as it ended, so that whoever started it sees an ordinary process.

Paddle reads variables when it is imported. Hence there is a server for each set of them (`_key`), started when it is
first needed; it ends when the folder is gone. Not for tests of how processes start, nor for CUDA, which a fork breaks.
"""

import fcntl
import hashlib
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path

FOLDER = "WARM_STARTS"
SELECTED = "FLAGS_selected_nvgpus"  # the number of a rank's device
# Variables that differ between ranks and tests, and that no import reads.
IGNORED = ("PADDLE_", "POD_", "PYTEST_", "TRAINER", "EMULATED_TE", "DEFERRED_IMPORTS", SELECTED, FOLDER)
PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
LONGEST = 2**20  # bytes of a message


def hand_over():
    """Runs this process's program in a fork of the server and ends as that ended; returns if it runs no program."""
    request = _program(sys.orig_argv[1:])
    if request is None:
        return
    with _connection() as server:
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until the fork is known
        request |= dict(folder=os.getcwd(), environment=dict(os.environ))
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        fork = _number(server)
        for signum in PASSED_ON:
            signal.signal(signum, lambda signum, _: os.kill(fork, signum))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        status = _number(server)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _program(words):
    """What Python's command line runs: {"program": module or script, "is_module", "arguments", "unbuffered"}; None for
    anything else, such as -c."""
    unbuffered = words[:1] == ["-u"]
    words = words[unbuffered:]
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words or words[0].startswith("-"):
        return None
    return dict(program=words[0], is_module=is_module, arguments=words[1:], unbuffered=unbuffered)


def _number(server):
    message = server.recv(LONGEST)
    if not message:
        sys.exit(f"warm_start.py: the server has ended; see {os.environ[FOLDER]}")
    return int(message)


def _key():
    variables = sorted(item for item in os.environ.items() if not item[0].startswith(IGNORED))
    return hashlib.sha256(repr((sys.executable, variables)).encode()).hexdigest()[:16]


def _connection():
    """Of the server for this process's variables, which is started if it is not there."""
    path = Path(os.environ[FOLDER]) / _key()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(str(path))
        except OSError:  # none yet, or it has ended
            path.unlink(missing_ok=True)
            _start_server(path)
            connection.connect(str(path))  # waits in the queue while the server imports
    return connection


def _start_server(path):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(64)
    environment = {name: value for name, value in os.environ.items() if name not in (FOLDER, SELECTED)}
    command = [sys.executable, __file__, str(path), str(listener.fileno())]
    with listener, open(f"{path}.log", "w") as log:
        # it forks once more, so that it is nobody's child
        subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[listener.fileno()]
        )


class Server:
    """Forks for those that connect to `listener`, whose path is `path`, and tells each how its fork ended."""

    def __init__(self, path, listener):
        self.path, self.listener = path, listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.forks = {}  # connection of a process: pid and pidfd of its fork

    def serve(self):
        """Returns a request and its standard streams in each fork; None in the server, once its folder is gone."""
        while self.path.exists():
            for event, _ in self.selector.select(timeout=2):
                if forked := event.data(event.fileobj):
                    return forked
        return None

    def _accept(self, listener):
        connection, _ = listener.accept()
        message, streams, *_ = socket.recv_fds(connection, LONGEST, 3)
        if not message:  # killed before it said what it wants
            return connection.close()
        pid = os.fork()
        if pid == 0:
            return json.loads(message), streams
        for stream in streams:
            os.close(stream)
        pidfd = os.pidfd_open(pid)
        self.forks[connection] = pid, pidfd
        self.selector.register(pidfd, selectors.EVENT_READ, lambda _: self._report_end(connection))
        self.selector.register(connection, selectors.EVENT_READ, self._kill_fork)
        connection.send(str(pid).encode())

    def _report_end(self, connection):
        pid, pidfd = self.forks.pop(connection)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.selector.unregister(pidfd)
        self.selector.unregister(connection)
        os.close(pidfd)
        with connection:
            try:
                connection.send(str(status).encode())
            except OSError:  # it was killed meanwhile
                pass

    def _kill_fork(self, connection):
        """The process was killed: the connection has ended, and nothing else ever comes from it."""
        if connection in self.forks:
            os.kill(self.forks[connection][0], signal.SIGKILL)
            os.waitid(os.P_PIDFD, self.forks[connection][1], os.WEXITED | os.WNOWAIT)
            self._report_end(connection)

    def close(self):
        """Nothing of the server stays open in a fork."""
        self.selector.close()
        self.listener.close()
        for connection, (_, pidfd) in self.forks.items():
            connection.close()
            os.close(pidfd)


def _become(request, streams):
    """Gives this fork the variables, the working directory, the standard streams and the arguments of a new process."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, closefd=False)
    buffering = dict(write_through=True) if request["unbuffered"] else {}
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = open(number, "w", closefd=False, errors="backslashreplace" if number == 2 else None)
        stream.reconfigure(line_buffering=number == 2 or stream.isatty(), **buffering)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _repeat_what_imports_did()
    sys.argv = [request["program"], *request["arguments"]]
    sys.path[0] = request["folder"] if request["is_module"] else str(Path(request["program"]).resolve().parent)


def _repeat_what_imports_did():
    """What they have read in the variables of a rank: its number, and its device."""
    import paddle

    paddle.distributed.parallel._global_parallel_env = None  # is made when it is next needed
    if SELECTED in os.environ:
        paddle.set_device(f"nvgpu:{os.environ[SELECTED]}")


def _import_what_ranks_import():
    from paddle_te.upstream import deferred_imports

    deferred_imports.apply()
    for name in (
        "paddle.distributed.launch",
        "paddlenlp.trainer",
        "paddlenlp.transformers",
        "paddle_te.hosts.paddlenlp.training.pretrain",
    ):
        importlib.import_module(name)


def main():
    if os.fork():
        os._exit(0)
    os.setsid()
    from paddle_te.scripts import not_collecting

    with not_collecting():  # nor in forks, whose memory stays shared
        _import_what_ranks_import()
    path, descriptor = sys.argv[1:]
    server = Server(Path(path), socket.socket(fileno=int(descriptor)))
    forked = server.serve()
    if forked is None:
        return
    server.close()
    request, streams = forked
    _become(request, streams)
    if request["is_module"]:
        runpy.run_module(request["program"], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(request["program"], run_name="__main__")


if __name__ == "__main__":
    main()
