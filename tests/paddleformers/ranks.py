"""Runs recipes of PaddleFormers with several processes each, on nvgpu's host runtime: python ranks.py jobs.json.

jobs.json: [{"name", "size", "recipe", "emulated": whether TE's kernels are}]. The outputs of a job's ranks are in the
files NAME.RANK.log beside it. Ends with 1 where a rank failed, after the other jobs.

All ranks are forks of one process that has imported PaddleFormers, which takes 20 seconds of a core.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import paddle
from paddle.distributed import sharding

from paddle_te.hosts.paddleformers.recipes import train
from tests.processes import free_ports

LONGEST = 300  # seconds a job may take on a loaded machine


def slice_small_parameters():
    """Stage 3 slices parameters of 2**20 elements or more: too many for these models, which it would leave whole."""
    original = sharding.group_sharded_parallel
    sharding.group_sharded_parallel = lambda *args, **kwargs: original(*args, **kwargs, segment_size=256)


def run(job, folder):
    """Whether all ranks of a job ended well."""
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(job["size"])]
    ranks = {}
    for rank in range(job["size"]):
        if (pid := os.fork()) == 0:
            _run_rank(job, rank, endpoints, folder / f"{job['name']}.{rank}.log")
        ranks[pid] = rank
    try:
        while ranks:
            pid, status = os.wait()
            del ranks[pid]
            if status:
                return False
        return True
    finally:
        for pid in ranks:  # they would wait for the one that failed
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run_rank(job, rank, endpoints, log):
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1), os.dup2(descriptor, 2)
    signal.alarm(LONGEST)
    os.environ.update(
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_RANK_IN_NODE=str(rank),
        PADDLE_TRAINERS_NUM=str(len(endpoints)),
        PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
        PADDLE_CURRENT_ENDPOINT=endpoints[rank],
        PADDLE_DISTRI_BACKEND="xccl",
        PADDLE_XCCL_BACKEND="nvgpu",
        FLAGS_selected_nvgpus=str(rank),
    )
    paddle.distributed.parallel._global_parallel_env = None  # made by imports, of the variables then
    status = 1
    try:
        paddle.set_device(f"nvgpu:{rank}")
        if job.get("emulated"):
            from tests import emulated_te

            emulated_te.install(setattr)
        slice_small_parameters()
        train(job["recipe"])
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def main():
    path = Path(sys.argv[1])
    return 0 if all([run(job, path.parent) for job in json.loads(path.read_text())]) else 1


if __name__ == "__main__":
    sys.exit(main())
