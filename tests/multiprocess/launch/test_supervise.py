"""What the supervisor says; that it ends all processes is test_launcher.py."""

import signal
from types import SimpleNamespace

from paddle_te.launch.logs import LAUNCHER_LOG, Copy, Logs
from paddle_te.launch.ranks import Rank
from paddle_te.launch.supervise import Supervisor


def test_a_log_is_shown_as_it_grows_with_its_progress_bars(tmp_path, capfd):
    log = tmp_path / "workerlog.0"
    copy = Copy(log, len("of another start\n"))
    copy.catch_up()  # there is none yet
    with open(log, "w", newline="") as file:
        for text, shown in (("of another start\n", ""), ("0%\r50", "0%\r50"), ("%\r100%\n", "%\r100%\n"), ("", "")):
            print(text, end="", file=file, flush=True)
            copy.catch_up()
            assert capfd.readouterr().out == shown


def test_what_ends_without_a_rank_shows_the_launchers_own_log(tmp_path, capsys):
    log = tmp_path / LAUNCHER_LOG
    log.write_text("of the start before\n")
    supervisor = Supervisor.__new__(Supervisor)  # starts nothing
    supervisor.failed = supervisor.stopped_by = supervisor.peers = supervisor.hung = None
    supervisor.child, supervisor.launched, supervisor.left = SimpleNamespace(returncode=1), True, []
    supervisor.logs = Logs(tmp_path)
    with open(log, "a") as file:
        file.write("port is taken\n")
    supervisor._explain(1)
    screen = capsys.readouterr().err
    assert "[launcher] port is taken" in screen and "the start before" not in screen


def test_a_failed_rank_keeps_its_own_status(tmp_path, capsys):
    """Also where the user stops the job then, or another node had failed before."""
    supervisor = Supervisor.__new__(Supervisor)  # starts nothing
    supervisor.logs, supervisor.left = Logs(tmp_path), []
    (tmp_path / "workerlog.1").write_text("no memory\n")
    supervisor.failed = Rank(pid=0, number=3, local=1, pidfd=None, status=7)
    supervisor.stopped_by, supervisor.peers, supervisor.launched = signal.SIGINT, None, True
    supervisor._explain(-signal.SIGINT)
    screen = capsys.readouterr().err
    assert "rank 3 ended with status 7; the end of its log" in screen and "[rank 3] no memory" in screen
    assert "the job was stopped; no process is left" in screen
