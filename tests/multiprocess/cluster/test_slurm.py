"""llama_multi_node.sub under a real Slurm of two nodes: it trains, is requeued, cancelled, loses a node."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multiprocess.cluster.machines import Unavailable
from tests.multiprocess.cluster.slurm import Cluster
from tests.processes import with_in_environment, write_stacks

ROOT = Path(__file__).resolve().parents[3]
SUB = ROOT / "llm/llama/scripts/llama_multi_node.sub"
SETTINGS = dict(
    PYTHON=sys.executable,
    DEVICE="cpu",
    GPUS_PER_NODE="1",
    MOCK_DATA="1",
    MODEL_NAME="tiny-llama-demo",
    TOKENIZER_NAME="none",
    MBS="1",
    TP_SIZE="1",
    GA_SIZE="1",
    MAX_SEQLEN="32",
    BACKEND="pd",
    PREC="fp32",
    LEARNING_RATE="0.01",
    OMP_NUM_THREADS="1",
    EXP_NAME="run",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    try:
        cluster = Cluster(folder)
    except Unavailable as reason:
        pytest.skip(str(reason))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)  # the packages


class Job:
    """The real .sub, submitted."""

    def __init__(self, cluster, folder, *options, nodes=2, **settings):
        self.cluster, self.folder = cluster, folder
        environ = SETTINGS | {"OUTPUT_BASE": str(folder)} | settings
        self.experiment = folder / environ["EXP_NAME"]
        command = ["sbatch", f"-N{nodes}", *options, f"--output={folder / 'batch.txt'}", SUB]
        self.id = cluster.call(*command, environ=environ).strip()

    def end(self, seconds=120):
        """(state, exit status) once the job has ended, none of its processes left."""
        self.wait_for(lambda: self.cluster.has_ended(self.id), "end of the job", seconds)
        self.wait_for(lambda: self.processes() == [], "end of the job's processes", 120)
        return self.cluster.state(self.id)

    def wait_for(self, condition, what, seconds):
        try:
            self.cluster.wait_for(condition, what, seconds)
        except AssertionError as error:
            write_stacks(*(process.pid for process in self.processes()))
            raise AssertionError(f"{error}\n{self.text()}") from None

    def processes(self):
        return with_in_environment("SLURM_JOB_ID", self.id)

    def losses(self):
        log = self.experiment / "output/train_log.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return {record["step"]: record["loss"] for record in map(json.loads, lines)}

    def wait_for_step(self, step):
        self.wait_for(lambda: max(self.losses(), default=0) >= step, f"step {step}", 120)

    def wait_for_requeue(self):
        self.wait_for(lambda: self.cluster.state(self.id)[0] == "PENDING", "requeue", 120)

    def start_requeued(self):
        """Now: by itself it would wait for two minutes."""
        self.wait_for_requeue()
        self.cluster.wait_for_idle_nodes()
        # slurmd refuses a job in the second in which it ended; the order to end it may still be on its way
        time.sleep(5)
        self.cluster.call("scontrol", "update", f"jobid={self.id}", "StartTime=now")

    def text(self):
        """Everything the job printed."""
        files = [self.folder / "batch.txt", *sorted(self.experiment.glob("output-*.txt"))]
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in files if file.exists())


def test_it_trains_over_two_nodes_as_on_one(cluster, tmp_path):
    settings = dict(MAX_STEPS="3", EXP_NAME="")
    (tmp_path / "one").mkdir()
    one = Job(cluster, tmp_path / "one", nodes=1, GA_SIZE="2", **settings)
    one.experiment = (
        tmp_path / "one" / f"tiny-llama-demo_SEQLEN32_N1_MBS1_DP1_TP1_VP1_GA2_FSDP1_PP1_SPfalse_none_pd_fp32_{one.id}"
    )
    assert one.end() == ("COMPLETED", 0), one.text()
    two = Job(cluster, tmp_path, **settings)
    two.experiment = (
        tmp_path / f"tiny-llama-demo_SEQLEN32_N2_MBS1_DP2_TP1_VP1_GA1_FSDP1_PP1_SPfalse_none_pd_fp32_{two.id}"
    )
    assert two.end() == ("COMPLETED", 0), two.text()
    assert list(one.losses()) == list(two.losses()) == [1, 2, 3] and two.losses()[3] != two.losses()[1]
    for step, loss in one.losses().items():
        assert abs(two.losses()[step] - loss) < 1e-5 * loss
    assert {path.name for path in two.experiment.iterdir()} == {"logs", "output", "output-0.txt", "output-1.txt"}
    for rank in range(2):
        command = (two.experiment / f"output-{rank}.txt").read_text()
        assert f"--host 127.0.0.{rank + 2} " in command, "each node knows its own address"


def test_the_signal_before_the_limit_saves_and_the_requeued_job_resumes(cluster, tmp_path):
    job = Job(cluster, tmp_path, MAX_STEPS="400", SAVE_STEPS="100000")
    job.wait_for_step(3)
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)  # what --signal=B:USR1@300 does
    job.wait_for_requeue()
    (checkpoint,) = (job.experiment / "output").glob("checkpoint-*")
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    before = job.losses()
    assert max(before) == step >= 3 and (checkpoint / ".checkpoint_done").exists()
    assert (job.experiment / "output/stopped").read_text() == f"{step}\n"
    assert f"stopped at step {step}; requeued" in job.text()

    job.start_requeued()
    job.wait_for_step(step + 3)
    after = job.losses()
    assert list(after) == list(range(1, max(after) + 1)) and before.items() <= after.items()
    assert "start 2: 2 nodes" in job.text() and not (job.experiment / "output/stopped").exists()

    # cancelled in the middle: nothing is left
    assert len(job.processes()) > 4
    cluster.call("scancel", job.id)
    assert job.end(60)[0] == "CANCELLED"


def test_a_real_time_limit(cluster, tmp_path):
    """Slurm itself sends the signal: its shortest limit is a minute, and it may be early by as much."""
    job = Job(cluster, tmp_path, "--time=1", "--signal=B:USR1@15", nodes=1, MAX_STEPS="100000", SAVE_STEPS="100000")
    job.wait_for(lambda: job.cluster.state(job.id)[0] == "PENDING" and job.losses(), "requeue", 100)
    (checkpoint,) = (job.experiment / "output").glob("checkpoint-*")
    assert (checkpoint / ".checkpoint_done").exists() and f"step {max(job.losses())}; requeued" in job.text()
    assert "SIGUSR1: the ranks are asked to save" in job.text() and "TIMEOUT" not in job.text()
    cluster.call("scancel", job.id)
    assert job.end(30)[0] == "CANCELLED"


def test_a_node_that_dies_is_named_and_the_job_goes_on_without_loss(cluster, tmp_path):
    job = Job(cluster, tmp_path, MAX_STEPS="400", SAVE_STEPS="2")
    job.wait_for_step(5)
    cluster.node_down("node2")
    try:
        job.wait_for(lambda: job.processes() == [], "end of the other node", 120)
    finally:
        cluster.node_up("node2")
    assert "launch: node 1 (node2) died" in job.text(), job.text()
    complete = [mark.parent for mark in (job.experiment / "output").glob("checkpoint-*/.checkpoint_done")]
    assert complete and all(len(list(folder.glob("model_state*"))) == 1 for folder in complete)
    last, before = max(int(folder.name.removeprefix("checkpoint-")) for folder in complete), job.losses()

    # Requeued. Slurm still owes node2 the order to end this job, which would hit it there after less than its two
    # minutes of waiting; so what follows is its twin.
    job.wait_for_requeue()
    cluster.call("scancel", job.id)
    cluster.wait_for_idle_nodes()
    job = Job(cluster, tmp_path, MAX_STEPS="400", RESUME_STEP="auto")
    job.wait_for_step(max(before) + 2)
    after = job.losses()
    assert list(after) == list(range(1, max(after) + 1))
    assert all(after[step] == loss for step, loss in before.items() if step <= last)
    cluster.call("scancel", job.id)
    assert job.end(60)[0] == "CANCELLED"


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(WORK_DIR="/no/such/folder"), "WORK_DIR: '/no/such/folder' must be the folder of this repository"),
        (dict(MOCK_DATA="0", DS_DIR="/no/such/data"), "DS_DIR: there is no folder '/no/such/data'"),
        (dict(OUTPUT_BASE="/proc/outputs"), "OUTPUT_BASE: the folder /proc/outputs/run cannot be made"),
        (dict(TP_SIZE="two"), "TP_SIZE: 'two' must be a whole number"),
    ],
)
def test_wrong_settings_end_it_before_anything_starts(cluster, tmp_path, settings, message):
    job = Job(cluster, tmp_path, nodes=1, **settings)
    assert job.end(30) == ("FAILED", 2)
    assert f"error: {message}" in job.text() and "start 1" not in job.text()
    assert not job.experiment.exists()


STAND_INS = {
    "srun": 'printf "%s\\n" "$@" "OUTPUT_BASE=$OUTPUT_BASE" "DATA_PATH=$DATA_PATH" "MASTER=$MASTER" "PYTHON=$PYTHON"',
    "scontrol": f'case "$2" in job) echo "   Command={SUB}";; hostnames) echo head; echo other;; esac',
}


@pytest.mark.parametrize("name", ["../..", "../beside", "."])
def test_an_experiment_stays_below_its_base(tmp_path, name):
    for tool, text in STAND_INS.items():
        (tmp_path / tool).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / tool).chmod(0o755)
    environ = dict(SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="head", MOCK_DATA="1", EXP_NAME=name)
    environ |= dict(OUTPUT_BASE=f"{tmp_path}/out", PATH=f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(["bash", SUB, "8"], env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and f"EXP_NAME: '{name}' must name a folder in OUTPUT_BASE" in done.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "beside").exists()


def test_with_a_container(tmp_path):
    """What pyxis is told; docs/guides/cluster.md says what it made of it. srun, a stand-in, shows what it was given."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "data").mkdir()
    environ = dict(SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="head,other", MASTER="10.0.0.1")
    environ |= dict(CONTAINER="nvcr.io#nvidia/paddlepaddle:24.04-py3", CONTAINER_MOUNTS="/weights:/weights")
    environ |= dict(DS_DIR=f"{tmp_path}/data", OUTPUT_BASE=f"{tmp_path}/out", EXP_NAME="e", INIT_WEIGHT="/weights/te")
    environ |= dict(PATH=f"{tmp_path}:{os.environ['PATH']}", TP_SIZE="8", GPUS_PER_NODE="", VIRTUAL_ENV="/host/.venv")
    done = subprocess.run(["bash", SUB, "8"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    for word in (
        "--container-image=nvcr.io#nvidia/paddlepaddle:24.04-py3",
        f"--container-mounts={ROOT}:/workspace,{tmp_path}/out:/outputs,{tmp_path}/data:/dataset,/weights:/weights",
        "--container-workdir=/workspace",
        "--container-writable",
        f"--output={tmp_path}/out/e/output-%t.txt",
        "OUTPUT_BASE=/outputs",
        "DATA_PATH=/dataset",
        "MASTER=10.0.0.1",
        "PYTHON=python3",
    ):
        assert word in words
    assert not any(word.startswith("--container-name") for word in words)
    i = words.index("node")  # $0 of the command on the node
    script = "llm/llama/scripts/llama_single_node_interactive.sh"
    assert words[i + 1 : i + 4] == ["/outputs/e", "/workspace", script]
    values = "2 1 8 1 1 1 false 4096 stage2 te bf16 none none /weights/te false"
    assert words[i + 4 : i + 21] == ["meta-llama/Llama-2-7b", "", *values.split()], "the model's own tokenizer"
