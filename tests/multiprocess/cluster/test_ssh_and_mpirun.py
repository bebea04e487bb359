"""docs/guides/cluster.md's commands for nodes without Slurm, by a real sshd and a real mpirun, on two nodes."""

import json
import os
import re
import shutil
import signal
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

from tests.multiprocess.cluster.machines import Unavailable
from tests.multiprocess.cluster.pair import Pair
from tests.processes import run, with_in_environment

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = ROOT / "llm/llama/scripts/llama_single_node_interactive.sh"
SETTINGS = dict(PYTHON=sys.executable, DEVICE="cpu", DEVICES="0", MOCK_DATA="1", MAX_STEPS="3", LEARNING_RATE="0.01")
SETTINGS |= dict(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
# What else a cluster's shells may hold: neither may keep the nodes from finding each other.
SHELL = dict(http_proxy="http://192.0.2.1:9", SSL_CERT_FILE="/no/such/certificates")
ARGUMENTS = "tiny-llama-demo none 1 1 1 1 1 {} false 32 stage1 pd fp32"
PROGRAM = """
    import os, pathlib, signal, subprocess, sys, time
    rank, seen = os.environ["PADDLE_TRAINER_ID"], pathlib.Path(os.environ["SEEN"])
    signal.signal(signal.SIGUSR1, lambda *_: (seen / f"usr1.{rank}").touch())
    # as a data loader, deaf to SIGTERM
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    cores = len(os.sched_getaffinity(0))
    (seen / f"ready.{rank}").write_text(f"{os.uname().nodename} {cores}")
    time.sleep(600)
"""


@pytest.fixture(scope="module", autouse=True)
def interrupt():
    """Ctrl-C's default for what is started here, also where a shell has started pytest in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    pair = None
    try:
        pair = Pair(folder, SETTINGS | SHELL)
        pair.start()
        yield pair
    except Unavailable as reason:
        pytest.skip(str(reason))
    finally:
        if pair:
            pair.stop()
        shutil.rmtree(folder)  # the packages


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    """Losses of the same batches on one node."""
    folder = tmp_path_factory.mktemp("one")
    environ = os.environ | SETTINGS | {"OUTPUT_BASE": str(folder), "EXP_NAME": "run"}
    run(["bash", LAUNCHER, *ARGUMENTS.format(2).split()], env=environ, check=True)
    return losses(folder)


def losses(folder):
    records = map(json.loads, (folder / "run/output/train_log.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records}


def documented(command, **settings):
    """The documentation's block, with the test's model and further settings among its own."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/guides/cluster.md").read_text(), re.DOTALL)
    (block,) = (block for block in blocks if command in block)
    prefix = ""
    if command == "mpirun":  # sshd's configuration has SETTINGS for ssh, as a user's shell might
        prefix, settings = "-x ", SETTINGS | settings
    data = f"{prefix}DATA_PATH=/shared/data"
    assert block.count(data) == block.count("llama-2-7b") == 1
    block = block.replace(data, " ".join(f"{prefix}{name}={value}" for name, value in settings.items()))
    return block.replace("llama-2-7b", ARGUMENTS.format(1))


@pytest.mark.parametrize("command", ["ssh", "mpirun"])
def test_it_trains_over_two_nodes_as_on_one(command, pair, one_node, tmp_path):
    script = documented(command, OUTPUT_BASE=tmp_path, EXP_NAME="run")
    with open(tmp_path / "screen", "wb") as screen:
        job = pair.run("node1", script, screen, cwd=ROOT)
        status = pair.end(job, 300)
    text = (tmp_path / "screen").read_text(errors="replace")
    assert status == 0, text[-9000:]
    two = losses(tmp_path)
    assert list(one_node) == list(two) == [1, 2, 3] and two[3] != two[1]
    for step, loss in one_node.items():
        assert abs(two[step] - loss) < 1e-5 * loss
    for rank in range(2):
        assert f" --start_port 6070 --host 10.0.0.{rank + 1} " in text, "each node knows its own address"


@pytest.mark.parametrize(
    "command, signum",
    [("ssh", signal.SIGINT), ("ssh", signal.SIGKILL), ("mpirun", signal.SIGINT)],
)
def test_ending_it_leaves_no_process(command, signum, pair, tmp_path):
    (tmp_path / "seen").mkdir()
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    tag = str(uuid.uuid4())
    script = documented(
        command,
        OUTPUT_BASE=tmp_path,
        EXP_NAME="run",
        SEEN=tmp_path / "seen",
        TRAINING_SCRIPT=tmp_path / "train.py",
        TAG=tag,
        TERM_GRACE="4",  # mpirun kills the launchers 5 s after it has told them to end
    )
    with open(tmp_path / "screen", "wb") as screen:
        job = pair.run("node1", script, screen, cwd=ROOT)
    seen = tmp_path / "seen"
    pair.wait_for(lambda: sum(file.stat().st_size > 0 for file in seen.glob("ready.*")) == 2, "start", 200)
    for rank in range(2):
        ready = (tmp_path / f"seen/ready.{rank}").read_text()
        assert ready == f"node{rank + 1} {len(os.sched_getaffinity(0))}", "each on its node, with all cores"
    assert len(with_in_environment("TAG", tag)) >= 8
    if command == "mpirun":  # it passes SIGUSR1 on: save a checkpoint
        pair.signal(job, signal.SIGUSR1)
        pair.wait_for(lambda: len(list((tmp_path / "seen").glob("usr1.*"))) == 2, "SIGUSR1 on both nodes")
        assert job.poll() is None
    pair.signal(job, signum)
    assert pair.end(job, 120) not in (0, None), (tmp_path / "screen").read_text(errors="replace")[-6000:]
    pair.wait_for(
        lambda: with_in_environment("TAG", tag) == [], "end of all processes", 150
    )  # the grace in which they save
