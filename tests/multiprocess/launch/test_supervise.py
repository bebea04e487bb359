"""What the supervisor says; that it ends all processes is test_launcher.py."""

import signal

from paddle_te.launch.supervise import Rank, Supervisor


def test_a_failed_rank_keeps_its_own_status(tmp_path, capsys):
    """Also where the user stops the job then, or another node had failed before."""
    (tmp_path / "workerlog.1").write_text("no memory\n")
    supervisor = Supervisor.__new__(Supervisor)  # starts nothing
    supervisor.failed = Rank(pid=0, number=3, local=1, pidfd=None, status=7)
    supervisor.stopped_by, supervisor.peers, supervisor.launched = signal.SIGINT, None, True
    supervisor.logs, supervisor.log_starts, supervisor.left = tmp_path, {}, []
    supervisor._explain(-signal.SIGINT)
    screen = capsys.readouterr().err
    assert "rank 3 ended with status 7; the end of its log" in screen and "[rank 3] no memory" in screen
    assert "the job was stopped; no process is left" in screen
