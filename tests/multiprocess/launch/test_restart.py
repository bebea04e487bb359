"""Jobs that die, hang, are told to end, or meet another one in their folder: small programs in place of training."""

import argparse
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from paddle_te.launch import job as jobs
from paddle_te.launch.devices import Devices
from paddle_te.launch.errors import LaunchError
from paddle_te.launch.restart import Restarts, fewer, restarted
from paddle_te.launch.supervise import HUNG, OTHER_NODE_DIED, OTHER_NODE_FAILED, Outcome
from paddle_te.runs.rollback import ROLLED_BACK
from tests.multiprocess.launch.job import Job, two_nodes

# Each start of a rank appends its flags to SEEN/starts.RANK.
TRAINING = """
        import faulthandler
        from paddle_te.runs.heartbeat import *
        faulthandler.register(signal.SIGUSR2)
        beat = Heartbeat().beat
        starts = seen / f"starts.{rank}"
        with open(starts, "a") as file:
            print(*sys.argv[1:], file=file)
        start = len(starts.read_text().splitlines())
        output = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
        def step(number):
            beat(STEPPING, number)
            beat(LOADING, number)
        def save(number):
            folder = output / f"checkpoint-{number}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".checkpoint_done").touch()
        def wait_in_a_collective():
            time.sleep(600)
        beat(STARTING)
"""


def starts(job, rank):
    return (job.seen / f"starts.{rank}").read_text().splitlines()


def resumes(line):
    return "--resume_from_checkpoint auto" in line


def test_a_job_that_dies_starts_anew_from_its_newest_checkpoint(tmp_path):
    code = """
        for number in range(1, 4):
            step(number)
        if start == 2 and rank == "0":
            save(3)
        if start < 3 and rank == "1":
            step(3 + start)
            time.sleep(1)  # the other one is there
            os.kill(os.getpid(), 9) if start == 1 else sys.exit(7)
        if start < 3:
            time.sleep(600)
        print("the end")
    """
    with Job(tmp_path, TRAINING + code, MAX_RESTARTS="5") as job:
        assert job.end() == 0, job.screen()
        assert job.left() == []
        for rank in "01":
            assert [resumes(line) for line in starts(job, rank)] == [False, False, True]
        screen = job.screen()
        assert "rank 1 was killed by SIGKILL" in screen and "rank 1 ended with status 7" in screen
        assert "start 2 of at most 6, as the first, for there is no checkpoint yet" in screen
        assert "start 3 of at most 6, from the newest checkpoint" in screen


@pytest.mark.parametrize(
    "outcomes, reason",
    [
        ([Outcome(2, 0)], "a refused start"),
        ([Outcome(-9, 3), Outcome(-9, 3)], "was killed by SIGKILL"),
        ([Outcome(HUNG, 3), Outcome(1, 5), Outcome(HUNG, 3)], "hung at step 3 for the second time"),
        ([Outcome(1, 1), Outcome(1, 2), Outcome(1, 3), Outcome(1, 4)], "MAX_RESTARTS=3 are used up"),
        ([Outcome(OTHER_NODE_DIED, 3, node_died=True)], "a node is gone"),
        ([Outcome(-15, 3, stopped=True)], ""),
        ([Outcome(0, 3)], ""),
    ],
)
def test_what_does_not_start_anew(outcomes, reason):
    restarts = Restarts(limit=3)
    *before, last = outcomes
    for outcome in before:
        assert restarts.why_not(outcome) is None
        restarts.count += 1
    why = restarts.why_not(last)
    assert reason in why and bool(reason) == bool(why)


def test_what_starts_anew():
    restarts = Restarts(limit=9)
    for outcome in (
        Outcome(-9, 3),
        Outcome(-9, 4),
        Outcome(1, 4),
        *[Outcome(OTHER_NODE_FAILED, 4), Outcome(ROLLED_BACK, 4)] * 2,
    ):
        assert restarts.why_not(outcome) is None
    assert Restarts(limit=0).why_not(Outcome(1, 3)) == ""


HANG = """
        ready()
        everyone()  # or the first one would be late before the other has begun
        for number in range(1, 4):
            step(number)
        if start > 1:
            sys.exit()
"""


def test_a_stopped_rank_is_named_and_the_job_starts_anew(tmp_path):
    code = """
        beat(STEPPING, 4)
        if rank == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_in_a_collective()
    """
    with Job(tmp_path, TRAINING + HANG + code, MAX_RESTARTS="1", STEP_TIMEOUT="3") as job:
        assert job.end() == 0, job.screen()
        screen = job.screen()
        assert "launch: the job hangs: no sign of rank" in screen and "which may take 3 s (STEP_TIMEOUT)" in screen
        assert re.search(r"rank 0 wait for rank 1: its process \d+ is stopped \(SIGSTOP", screen), screen
        assert not re.search(r"wait for rank 0", screen)
        assert re.search(r"\[rank 0\] .*in wait_in_a_collective", screen), "its stack"
        assert "no stacks of rank 1: it is stopped" in screen
        assert len(starts(job, 0)) == 2 and job.left() == []


def test_a_rank_that_is_behind_is_named_and_the_job_ends(tmp_path):
    code = """
        if rank == "1":
            time.sleep(600)  # loading data
        beat(STEPPING, 4)
        wait_in_a_collective()
    """
    with Job(tmp_path, TRAINING + HANG + code, STEP_TIMEOUT="3") as job:
        assert job.end() == HUNG == 124
        screen = job.screen()
        assert "rank 0 wait for rank 1: it is behind the others: step 3, loading data" in screen, screen
        assert "launch: the job hung; no process is left" in screen and job.left() == []


def test_the_start_and_saving_have_a_bound_of_their_own(tmp_path):
    code = """
        beat(STEPPING, 1)  # compiles
        time.sleep(5)
        beat(SAVING, 1)
        time.sleep(5)
        beat(LOADING, 1)
        time.sleep(600)
    """
    with Job(tmp_path, TRAINING + code, devices="0", STEP_TIMEOUT="2", START_TIMEOUT="60") as job:
        assert job.end() == HUNG
        assert "loading data (step 1), which may take 2 s (STEP_TIMEOUT)" in job.screen(), job.screen()
    code = "beat(STEPPING, 1); time.sleep(600)"
    with Job(tmp_path, TRAINING + " " * 8 + code, devices="0", STEP_TIMEOUT="60", START_TIMEOUT="2") as job:
        assert job.end() == HUNG
        assert "in a step (step 1), which may take 2 s (START_TIMEOUT)" in job.screen()


def test_two_nodes_start_anew_together(tmp_path):
    code = """
        step(2)
        (seen / f"there.{rank}").touch()
        while len(list(seen.glob("there.*"))) < 2:
            time.sleep(0.05)
        if start == 1 and rank == "1":
            sys.exit(7)
        if start == 1:
            time.sleep(600)
    """
    nodes = two_nodes() | {"MAX_RESTARTS": "2"}
    with (
        Job(tmp_path, TRAINING + code, devices="0", name="0", NODE_RANK="0", **nodes) as first,
        Job(tmp_path, TRAINING + code, devices="0", name="1", NODE_RANK="1", **nodes) as second,
    ):
        assert first.end() == second.end() == 0, first.screen() + second.screen()
        assert len(starts(first, 0)) == len(starts(second, 1)) == 2
        assert f"node 1 ({socket.gethostname()}): rank 1 ended with status 7" in first.screen()
        assert all("start 2 of at most 3" in job.screen() for job in (first, second))


def test_sigterm_has_the_ranks_save_and_a_second_one_ends_at_once(tmp_path):
    code = """
        ready()
        while not (seen / f"usr1.{rank}").exists():
            time.sleep(0.05)
        (seen / f"saved.{rank}").touch()
        if (seen / "slow").exists():
            time.sleep(600)
    """
    with Job(tmp_path, TRAINING + code) as job:
        job.wait_for("ready.*", 2)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM
        assert len(list(job.seen.glob("saved.*"))) == 2
        assert "asked to save a checkpoint and to end within 27 s (TERM_GRACE)" in job.screen()
        for path in [*job.seen.glob("usr1.*"), *job.seen.glob("saved.*"), *job.seen.glob("ready.*")]:
            path.unlink()
    (job.seen / "slow").touch()
    with Job(tmp_path, TRAINING + code, TERM_GRACE="600") as job:
        job.wait_for("ready.*", 2)
        job.process.send_signal(signal.SIGTERM)
        job.wait_for("saved.*", 2)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM and job.left() == []


def test_a_second_run_in_the_folder_is_refused(tmp_path):
    with Job(tmp_path, TRAINING + "        ready(); time.sleep(600)", devices="0") as first:
        first.wait_for("ready.*", 1)
        with Job(tmp_path, "raise SystemExit(1)", devices="0", name="second") as second:
            assert second.end() == 2
            line = f"is in use by another run, process {first.process.pid} on {socket.gethostname()} since"
            assert line in second.screen() and second.screen().count("\n") == 1, second.screen()
        first.process.send_signal(signal.SIGINT)
        first.end()
    with Job(tmp_path, "pass", devices="0", name="third") as third:
        assert third.end() == 0, third.screen()


def test_shared_memory_is_left_as_it_was_found(tmp_path):
    """A data loader's worker that is killed with its rank leaves its batches."""
    code = """
        worker = "import os, time; open(f'/dev/shm/paddle_{os.getpid()}_1_2', 'w').close(); time.sleep(600)"
        process = subprocess.Popen([sys.executable, "-c", worker], start_new_session=True)
        batch = pathlib.Path(f"/dev/shm/paddle_{process.pid}_1_2")
        while not batch.exists():
            time.sleep(0.02)
        (seen / f"batch.{rank}").write_text(str(batch))
        if rank == "1":
            sys.exit(5)
        time.sleep(600)
    """
    mine = Path(f"/dev/shm/paddle_{os.getpid()}_1_2")  # of a process that lives, and of another job
    mine.touch()
    try:
        with Job(tmp_path, TRAINING + code) as job:
            assert job.end() == 5
            batches = [Path(path.read_text()) for path in job.seen.glob("batch.*")]
            assert batches and not any(batch.exists() for batch in batches)
        assert mine.exists()
    finally:
        mine.unlink()


# ---------------------------------------------------------------------------------------------- fewer devices


def arguments(**more):
    values = dict(
        TP=1, PP=1, SEP=1, CP=1, EP=1, FSDP=1, GA=2, DEVICES=None, resume_step="none", init_weight="w", EXP_NAME=None
    )
    return argparse.Namespace(**values | dict(OUTPUT_BASE="/out", ELASTIC=True) | more)


@pytest.mark.parametrize(
    "before, left, degrees, after",
    [
        (4, 3, dict(), (2, 4, 1)),  # 8 sequences over 3 do not go
        (4, 1, dict(FSDP=4), (1, 8, 1)),
        (4, 3, dict(FSDP=2, GA=3), (3, 4, 1)),  # 12 sequences over 3
        (8, 7, dict(TP=2, FSDP=2), (4, 4, 2)),
        (8, 7, dict(TP=2, FSDP=4), (4, 4, 2)),
    ],
)
def test_the_batch_stays_on_fewer_devices(before, left, degrees, after):
    args = fewer(arguments(**degrees), [str(i) for i in range(left)], before)
    assert (len(args.DEVICES), args.GA, args.FSDP) == after


@pytest.mark.parametrize("left, overlap", [(2, True), (1, False)])
def test_overlap_stays_where_there_is_sharding(left, overlap):
    """Else OVERLAP=1 would be refused, and the job not start again."""
    args = fewer(arguments(FSDP=4, OVERLAP=True), [str(i) for i in range(left)], 4)
    assert args.FSDP == left and args.OVERLAP is overlap


def test_tensor_and_pipeline_parallelism_need_their_devices():
    assert fewer(arguments(TP=2, PP=2), ["0", "1", "2"], 4) is None


def test_devices_that_are_gone_are_said(monkeypatch, capsys):
    plan = argparse.Namespace(devices=Devices("nvgpu", ["0", "1", "2", "3"], ["0", "1", "2", "3"]))
    there = ["0", "1", "3"]
    monkeypatch.setattr(jobs, "find_devices", lambda args, environ: Devices("nvgpu", there, there))
    assert jobs._on_what_is_left(plan, arguments()).DEVICES == ["0", "1"]
    expected = "devices 2 are gone: FSDP from 1 to 1, data ranks from 4 to 2, GA from 2 to 4, on devices 0,1"
    assert expected in capsys.readouterr().err
    with pytest.raises(LaunchError, match="TP x PP x SEP x CP = 4 devices are not left"):
        jobs._on_what_is_left(plan, arguments(TP=4))


def test_the_next_start_has_the_same_folder_and_the_newest_checkpoint(tmp_path):
    args = arguments(OUTPUT_BASE=str(tmp_path))
    folder = tmp_path / "N1_DP4"
    made = restarted(args, folder, folder / "output")
    assert (made.EXP_NAME, made.resume_step, made.init_weight) == ("N1_DP4", "none", "w")
    checkpoint = folder / "output/checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".checkpoint_done").touch()
    made = restarted(args, folder, folder / "output")
    assert (made.resume_step, made.init_weight) == ("auto", "none") and args.resume_step == "none"
