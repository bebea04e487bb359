"""llm/llama/scripts/llama_single_node_interactive.sh as a user runs it, and what it leaves when a rank dies."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paddle_te.launch.pretrain import ARGUMENTS
from tests import processes
from tests.multiprocess.launch.job import SCRIPT, Job, two_nodes, wait_for_peers
from tests.processes import kill_at_once

ROOT = Path(__file__).resolve().parents[3]
NAMES = [option.name for option in ARGUMENTS]
DRY = {"DRY_RUN": "1", "MOCK_DATA": "1", "DEVICES": "0,1,2,3,4,5,6,7"}


def shell(environ, *positional, cwd=None, script=SCRIPT):
    """Runs the script with nothing of this process's environment but PATH."""
    clean = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    command = ["bash", str(script), *map(str, positional)]
    return processes.run(command, env=clean | environ, cwd=cwd)


def with_argument(name, value):
    return [""] * NAMES.index(name) + [value]


# ---------------------------------------------------------------------------------------------------- arguments


def test_dry_run_by_default_is_the_originals_example(tmp_path):
    for package in ("paddle", "paddlenlp", "numpy"):  # seconds that a dry run must not take
        (tmp_path / f"{package}.py").write_text("raise SystemExit(__name__ + ' is imported')")
    done = shell({**DRY, "OUTPUT_BASE": str(tmp_path / "out put"), "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0 and done.stderr == ""
    words = shlex.split(done.stdout)
    assert "paddle.distributed.launch" in words and done.stdout.count("\n") == 1
    for flag, value in {
        "--devices": "0,1,2,3,4,5,6,7",
        "--model_name_or_path": str(ROOT / "paddle_te/configs/meta-llama/Llama-2-7b"),
        "--tensor_parallel_degree": "2",
        "--gradient_accumulation_steps": "8",
        "--max_seq_length": "4096",
        "--mock_data": "1",
        "--device": "gpu",
    }.items():
        assert words[words.index(flag) + 1] == value
    assert str(ROOT / "llm/llama/run_pretrain.py") in words
    assert not (tmp_path / "out put").exists()


@pytest.mark.parametrize("name, value", [("model_name", "no/such/model"), ("TP", "3"), ("SP", "maybe")])
def test_a_wrong_argument_is_one_line_and_status_2(name, value, tmp_path):
    """All of them: tests/unit/launch/test_plan.py."""
    done = shell({**DRY, "DRY_RUN": "0", "DEVICE": "gpu", "OUTPUT_BASE": str(tmp_path)}, *with_argument(name, value))
    if done.stderr.startswith("error: DEVICE"):  # found before combinations, where there are no 8 GPUs
        done = shell({**DRY, "OUTPUT_BASE": str(tmp_path)}, *with_argument(name, value))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and name in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_too_many_arguments():
    done = shell(DRY, *[""] * 17, "more")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: too many arguments: 18 given, at most 17 (the last is nsys_profile)\n"


def test_arguments_with_names():
    done = shell(DRY, "tiny-llama-demo", "none", "--TP")
    assert done.returncode == 2 and done.stderr == "error: --TP: its value is missing; write --TP=VALUE or --TP VALUE\n"
    done = shell(DRY, "tiny-llama-demo", "--tokenizer_name=none", "--TP", "1", "--DEVICES=0")
    assert done.returncode == 0 and "--tokenizer_name_or_path none" in done.stdout, done.stderr


def test_missing_data_says_what_to_set():
    if Path("/dataset").is_dir():
        pytest.skip("this machine has the default data set")
    done = shell({"DEVICE": "cpu"}, "meta-llama/Meta-Llama-3-8B", "", 1, 1, 1, *[""] * 7, "fp32")
    assert done.returncode == 2 and "set DATA_PATH=folder, or MOCK_DATA=1" in done.stderr
    dry = shell({"DRY_RUN": "1", "DEVICES": "0,1"})
    assert dry.returncode == 0 and "--input_dir /dataset" in dry.stdout and dry.stderr.startswith("note: ")


def test_help_lists_all_arguments():
    done = shell({}, "--help")
    assert done.returncode == 0 and all(f"--{name} " in done.stdout for name in [*NAMES, "DEVICES", "EXTRA_ARGS"])


def test_it_runs_from_anywhere_through_a_link_free_path(tmp_path):
    done = shell({**DRY, "PYTHONPATH": "/other path"}, cwd=tmp_path)
    assert done.returncode == 0
    assert f"PYTHONPATH={ROOT}:/other path" in shlex.split(done.stdout)
    assert str(tmp_path / "outputs") in done.stdout


# ---------------------------------------------------------------------------------------------------- processes


def test_a_rank_that_raises_ends_the_job_with_its_error(tmp_path):
    """Rank 0, deaf to SIGTERM and with a child in another session, must not survive rank 1."""
    code = """
        ready()
        if rank == "1":
            everyone()
            raise RuntimeError("the loss is " + "nan")
        child()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    """
    with Job(tmp_path, code) as job:
        job.wait_for("ready.*", 2)
        assert job.end() == 1
        assert job.left() == []
        assert "[rank 1] RuntimeError: the loss is nan" in job.screen(), job.screen()
        assert "launch: rank 1 ended with status 1" in job.screen()
        assert (tmp_path / "out/e/logs/workerlog.1").is_file()


def test_a_rank_that_ends_at_once_is_named(tmp_path):
    """Sooner than anyone could have looked at its arguments, and its neighbour fails of SIGKILL later."""
    code = """
        if rank == "1":
            os._exit(7)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    """
    with Job(tmp_path, code) as job:
        assert job.end() == 7, job.screen()
        assert "launch: rank 1 ended with status 7" in job.screen(), job.screen()


STUCK = """
    from paddle_te.runs.heartbeat import Heartbeat
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    everyone()
    if rank == os.environ["FAILS"]:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        print("no", "memory", flush=True)
        Heartbeat().fail(7)
        (seen / "failed").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("devices, signum", [("0,1", signal.SIGUSR1), ("0,1", signal.SIGTERM), ("0", None)])
def test_a_job_does_not_wait_for_a_rank_that_has_failed(tmp_path, devices, signum):
    """Its process hangs in its end, and the others in a collective. No signal gives them more time."""
    with Job(tmp_path, STUCK, devices=devices, FAILS=devices[-1], TERM_GRACE="600") as job:
        job.wait_for("failed", 1)
        start = time.monotonic()
        if signum:
            time.sleep(1)  # the launcher knows by then
            job.process.send_signal(signum)
        assert job.end() == (128 + signum if signum == signal.SIGTERM else 7), job.screen()
        assert time.monotonic() - start < 10 and job.left() == []
        screen = job.screen()
        assert f"rank {devices[-1]} failed 5 s ago and its process does not end: it is killed" in screen, screen
        assert screen.count("no memory") == 1 and "does not handle" not in screen


def test_a_killed_rank_is_named_and_not_its_victim(tmp_path):
    """Rank 0 fails too, a moment after rank 1 was killed: as NCCL and gloo do when a peer is gone."""
    code = """
        ready()
        if rank == "1":
            everyone()
            (seen / "pid.1").write_text(str(os.getpid()))
            time.sleep(600)
        victim = seen / "pid.1"
        while not victim.exists() or not victim.read_text():
            time.sleep(0.02)
        while pathlib.Path(f"/proc/{victim.read_text()}/cmdline").read_text():  # empty for a zombie
            (seen / "watching").touch()
            time.sleep(0.02)
        time.sleep(0.3)
        raise ConnectionResetError("peer is gone")
    """
    with Job(tmp_path, code) as job:
        job.wait_for("watching", 1)
        time.sleep(1)  # for the launcher to find its ranks, which it looks for ten times a second
        os.kill(int((job.seen / "pid.1").read_text()), signal.SIGKILL)
        assert job.end() == 128 + signal.SIGKILL
        assert job.left() == []
        assert "launch: rank 1 was killed by SIGKILL; often out of memory" in job.screen(), job.screen()
        assert "[rank 0]" not in job.screen()


def test_signals_reach_the_ranks_and_end_everything(tmp_path):
    """SIGUSR1 is for the ranks (save a checkpoint) and leaves the job running; SIGTERM ends all of it."""
    code = """
        ready()
        child()
        time.sleep(600)
    """
    with Job(tmp_path, code) as job:
        job.wait_for("ready.*", 2)
        job.process.send_signal(signal.SIGUSR1)
        job.wait_for("usr1.*", 2)
        assert job.process.poll() is None
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM
        assert job.left() == []
        assert "the job was stopped; no process is left" in job.screen()


def test_a_killed_launcher_leaves_no_ranks(tmp_path):
    with Job(tmp_path, "ready(); time.sleep(600)") as job:
        job.wait_for("ready.*", 2)
        job.process.kill()
        deadline = time.monotonic() + 120
        while job.left() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert job.left() == []


@pytest.fixture
def hangup():
    """SIGHUP's default for what is started here; the launcher keeps to nohup's wish, pytest's own included."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_one_process_is_stopped_with_its_children(tmp_path, signum):
    with Job(tmp_path, "child(); ready(); time.sleep(600)", devices="0") as job:
        job.wait_for("ready.*", 1)
        job.process.send_signal(signum)
        assert job.end() == 128 + signum
        assert job.left() == []


def test_one_process_that_fails(tmp_path):
    with Job(tmp_path, "child(); sys.exit('no ' + 'data')", devices="0") as job:
        assert job.end() == 1
        assert "no data" in job.screen() and job.left() == []


def test_a_signal_without_handler_is_not_sent(tmp_path):
    code = """
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        ready()
        while not (seen / "end").exists():
            time.sleep(0.02)
    """
    with Job(tmp_path, code, devices="0") as job:
        job.wait_for("ready.*", 1)
        job.process.send_signal(signal.SIGUSR1)
        job.wait_until(lambda: "rank 0 does not handle SIGUSR1; not sent" in job.screen())
        (job.seen / "end").touch()
        assert job.end() == 0


def test_a_job_that_succeeds(tmp_path):
    code = "ready(); everyone(); print('all there', os.environ['PADDLE_MASTER'])"
    with Job(tmp_path, code, PORT_RANGE="") as job:
        assert job.end() == 0
        assert job.left() == []
        log = (tmp_path / "out/e/logs/workerlog.1").read_text()
        assert log.startswith("rank 1 starts\nall there 127.0.0.1:"), log
        assert 10_000 <= int(log.rpartition(":")[2]) < 20_000, "an ephemeral port may be taken before rank 0 listens"
        assert "[rank" not in job.screen() and "failed" not in job.screen()


def test_two_nodes_without_slurm(tmp_path):
    """The same script by hand on each node, with the head's address and the node's rank."""
    nodes = two_nodes()
    code = "ready(); everyone(); print(os.environ['PADDLE_TRAINERS_NUM'], os.environ['PADDLE_NNODES']);"
    code += "print(os.environ['PADDLE_CURRENT_ENDPOINT'].split(':')[0]); print(os.environ['PADDLE_MASTER'])"
    with (
        Job(tmp_path, code, devices="0,1", name="1", NODE_RANK="1", **nodes) as second,
        Job(tmp_path, code, devices="0,1", name="0", NODE_RANK="0", **nodes) as first,
    ):
        assert first.end() == second.end() == 0, first.screen() + second.screen()
        assert first.left() == second.left() == []
        for rank in range(4):
            log = tmp_path / f"out/e/logs/node{rank // 2}/workerlog.{rank % 2}"
            expected = [f"rank {rank} starts", "4 2", f"127.0.0.{2 + rank // 2}", nodes["MASTER"]]
            assert log.read_text().splitlines() == expected


def test_nodes_with_different_devices_are_refused(tmp_path):
    nodes = two_nodes()
    with (
        Job(tmp_path, "pass", devices="0,1", name="1", NODE_RANK="1", **nodes) as second,
        Job(tmp_path, "pass", devices="0", name="0", NODE_RANK="0", **nodes) as first,
    ):
        assert first.end() == second.end() == os.EX_UNAVAILABLE
        assert "has 2 devices, node 0 has 1: all nodes must use equally many" in first.screen()
        assert "has 2 devices, node 0 has 1" in second.screen()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_dies_ends_the_other_which_names_it(tmp_path, victim):
    nodes = two_nodes()
    with (
        Job(tmp_path, "ready(); time.sleep(600)", devices="0", name="0", NODE_RANK="0", **nodes) as first,
        Job(tmp_path, "ready(); time.sleep(600)", devices="0", name="1", NODE_RANK="1", **nodes) as second,
    ):
        first.wait_for("ready.*", 2)
        wait_for_peers(first, nodes)
        dead, other = (first, second) if victim == 0 else (second, first)
        kill_at_once(dead.left())
        assert other.end() == os.EX_TEMPFAIL
        assert other.left() == []
        assert f"launch: node {victim} ({socket.gethostname()}) died" in other.screen(), other.screen()


def test_a_rank_that_fails_ends_the_other_node(tmp_path):
    code = """
        ready()
        everyone()
        if rank == "1":
            while not (seen / "go").exists():
                time.sleep(0.02)
            sys.exit("no memory")
        time.sleep(600)
    """
    nodes = two_nodes()
    with (
        Job(tmp_path, code, devices="0", name="0", NODE_RANK="0", **nodes) as first,
        Job(tmp_path, code, devices="0", name="1", NODE_RANK="1", **nodes) as second,
    ):
        wait_for_peers(first, nodes)
        (first.seen / "go").touch()
        assert second.end() == 1 and first.end() == os.EX_UNAVAILABLE
        assert "[rank 1] no memory" in second.screen()
        assert f"launch: node 1 ({socket.gethostname()}): rank 1 ended with status 1" in first.screen(), first.screen()


def trained_losses(folder):
    """{step: loss} of a run's log."""
    records = map(json.loads, (folder / "output/train_log.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records}


def test_two_nodes_train_as_one(tmp_path):
    """The real run_pretrain: data parallel over two nodes, and the same batches on one."""
    environ = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "DEVICE": "cpu"}
    environ |= {
        "DEVICES": "0",
        "MOCK_DATA": "1",
        "MAX_STEPS": "3",
        "OUTPUT_BASE": str(tmp_path),
        "LEARNING_RATE": "0.01",
    }
    processes.environment_of_children(environ)

    def start(accumulation, **more):
        values = ["tiny-llama-demo", "none", 1, 1, 1, 1, 1, accumulation, "false", 32, "", "pd", "fp32"]
        command = ["bash", str(SCRIPT), *map(str, values)]
        screen = tmp_path / f"screen{more.get('NODE_RANK')}"
        with open(screen, "w") as output:
            return subprocess.Popen(command, env=environ | more, stdout=output, stderr=output), screen

    nodes = two_nodes() | {"EXP_NAME": "two"}
    jobs = [start(2, EXP_NAME="one")] + [start(1, NODE_RANK=rank, **nodes) for rank in "01"]
    statuses = [processes.end(job, 200) for job, _ in jobs]
    assert statuses == [0] * 3, [screen.read_text()[-6000:] for _, screen in jobs]
    one, two = trained_losses(tmp_path / "one"), trained_losses(tmp_path / "two")
    assert list(one) == list(two) == [1, 2, 3] and one[3] != one[1]
    for step in one:
        assert abs(two[step] - one[step]) < 1e-5 * one[step]
    first, second = (screen.read_text() for _, screen in jobs[1:])
    assert first.count("\n") < 30 and "step 3/3: loss" in first and "step 3/3: loss" not in second, first
    logs = tmp_path / "two/logs/node0"
    assert "Configuration" in (logs / "launcher.log").read_text() and "step 3/3" in (logs / "workerlog.0").read_text()


def test_it_trains_and_resumes(tmp_path):
    """The real run_pretrain on one CPU process, stopped after two steps and resumed by `auto` for a third."""
    environ = {"DEVICE": "cpu", "MOCK_DATA": "1", "SAVE_STEPS": "2", "OUTPUT_BASE": str(tmp_path), "EXP_NAME": "e"}
    values = ["tiny-llama-demo", "none", 1, 1, 1, 1, 1, 1, "false", 32, "", "pd", "fp32", "none"]
    for steps, resume in (("2", "none"), ("3", "auto")):
        done = shell({**environ, "MAX_STEPS": steps}, *values, resume)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stderr.count("\n") < 20 and f"step {steps}/{steps}: loss" in done.stderr, done.stderr
    details = (tmp_path / "e/output/logs/details.0.log").read_text()
    assert details.count("Training Configuration Arguments") == 2, "the tables of both starts"
    log = (tmp_path / "e/output/train_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [1, 2, 3]
    refused = shell(environ, *values, "none")
    assert refused.returncode == 2 and "holds checkpoints (steps 2" in refused.stderr
