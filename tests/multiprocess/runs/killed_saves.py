"""Trains in child processes that are killed with SIGKILL, again and again; kills.py starts it.

    killed_saves.py JOB.json

The job: {"flags": words of run_pretrain, "kills": N, "ranks": N, "seed": N, "save_seconds": how long a save takes,
"sync_seconds": how much longer flushing a file in the background takes, "report": file}.
Paddle is imported once; every run is forked from here, one process a rank, resumes with `auto`, and is
killed: all ranks at once, or one of them first. Every other kill comes at a random moment of a run's first or second
save, the others at any moment, from its start until about half a time longer than the first save took to begin. The
report, one line of JSON a kill: {"resumed": what each rank's `auto` took, "complete": steps of the folders after the
kill, "interrupted": steps of those that the run had begun to write}.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import paddle
import paddlenlp.trainer  # noqa: F401
import paddlenlp.transformers  # noqa: F401

from paddle_te.hosts.paddlenlp.training import pretrain, resuming
from paddle_te.runs import background, checkpoints
from tests.processes import free_ports


def environments(ranks):
    """What paddle.distributed.launch sets for each rank."""
    if ranks == 1:
        return [{}]
    ports = free_ports(ranks + 1)
    endpoints = [f"127.0.0.1:{port}" for port in ports[1:]]
    common = dict(
        PADDLE_MASTER=f"127.0.0.1:{ports[0]}",
        PADDLE_TRAINERS_NUM=ranks,
        PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
        PADDLE_LOCAL_SIZE=ranks,
        PADDLE_NNODES=1,
        PADDLE_DISTRI_BACKEND="xccl",
        PADDLE_XCCL_BACKEND="nvgpu",
    )
    each = [
        dict(
            PADDLE_TRAINER_ID=n,
            PADDLE_RANK_IN_NODE=n,
            PADDLE_LOCAL_RANK=n,
            PADDLE_GLOBAL_RANK=n,
            PADDLE_CURRENT_ENDPOINT=endpoints[n],
            FLAGS_selected_nvgpus=n,
        )  # fmt: skip
        for n in range(ranks)
    ]
    return [{key: str(value) for key, value in (common | own).items()} for own in each]


def flush_slowly(seconds):
    sync = background.sync

    def slowly(path):
        time.sleep(seconds)
        sync(path)

    background.sync = slowly


def train(job, environment, log, resumed):
    """One rank, in a process of its own; never returns."""
    status = 1
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphans
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(environment)
        paddle.distributed.parallel._global_parallel_env = None  # it has read the environment when it was imported
        find = checkpoints.find_checkpoint

        def noted(*args):
            found = find(*args)
            resumed.write_text(json.dumps(found))
            return found

        resuming.find_checkpoint = noted
        flush_slowly(job["sync_seconds"])
        sys.argv = ["run_pretrain.py", *job["flags"]]
        pretrain.main()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def start(job, folder):
    pids = []
    for rank, environment in enumerate(environments(job["ranks"])):
        pid = os.fork()
        if not pid:
            train(job, environment, folder / f"rank{rank}.log", folder / f"resumed{rank}.json")
        pids.append(pid)
    return pids


def inodes(output):
    """{checkpoint folder: its inode}; a folder may vanish meanwhile."""
    with os.scandir(output) if output.exists() else contextlib.nullcontext([]) as entries:
        return {entry.name: entry.inode() for entry in entries if entry.name.startswith("checkpoint-")}


def begun(output, before):
    """The names of the checkpoint folders that a run has begun to write."""
    return {name for name, inode in inodes(output).items() if before.get(name) != inode}


def wait_for_a_save(output, pids, before):
    """Until a checkpoint folder is there that was not, or has lost its files since."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if begun(output, before):
            return
        if os.waitpid(pids[0], os.WNOHANG)[0]:
            raise SystemExit("rank 0 ended by itself: see its log")
        time.sleep(0.002)
    raise SystemExit("no save within 300 s")


def wait_on(output, before, seconds):
    """So long, or until a third save begins: quick machines must not run out of steps before the last kill."""
    saves, deadline = set(), time.monotonic() + seconds
    while time.monotonic() < deadline and len(saves) < 3:
        saves |= begun(output, before)
        time.sleep(0.002)


def kill(pids, chance):
    order = chance.sample(pids, len(pids))
    for pid in order:
        os.kill(pid, signal.SIGKILL)
        if len(pids) > 1 and chance.random() < 0.5:
            time.sleep(chance.uniform(0, 0.1))
    for pid in pids:
        os.waitpid(pid, 0)


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    folder, output = Path(sys.argv[1]).parent, Path(job["output"])
    chance = random.Random(job["seed"])
    for number in range(job["kills"]):
        for path in folder.glob("resumed*.json"):
            path.unlink()
        before, began = inodes(output), time.monotonic()
        pids = start(job, folder)
        try:
            if number % 2 == 0:
                wait_for_a_save(output, pids, before)
                until_save = time.monotonic() - began
                wait_on(output, before, chance.uniform(0, 2 * job["save_seconds"]))
            else:
                wait_on(output, before, chance.uniform(0, 1.5 * until_save))
        finally:
            kill(pids, chance)
        complete = [step for step, _ in checkpoints.complete_checkpoints(output)]
        written = {int(name.rpartition("-")[2]) for name in begun(output, before)}
        resumed = [json.loads(path.read_text()) for path in folder.glob("resumed*.json") if path.stat().st_size]
        record = dict(resumed=resumed, complete=complete, interrupted=sorted(written.difference(complete)))
        with open(job["report"], "a") as report:
            report.write(json.dumps(record) + "\n")
    pids = start(job, folder)  # to the end
    if any(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids):
        raise SystemExit("the last run failed: see the logs")


main()
