"""The loops of docs/cluster.md that start a launcher on each node, with stand-ins for ssh and mpirun, as a dry run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_INS = {
    "ssh": '#!/bin/bash\n[ "$1" = -tt ] && shift 2 && exec bash -c "$*"\n',
    # -np 2 --map-by ppr:1:node -x A=B -x C=D command...
    "mpirun": """#!/bin/bash
count=$2; shift 4
while [ "$1" = -x ]; do export "$2"; shift 2; done
export OMPI_COMM_WORLD_SIZE=$count
for OMPI_COMM_WORLD_RANK in $(seq 0 $((count - 1))); do OMPI_COMM_WORLD_RANK=$OMPI_COMM_WORLD_RANK "$@" & done
wait
""",
}


@pytest.mark.parametrize("word", STAND_INS)
def test_each_node_gets_its_rank(word, tmp_path):
    (block,) = [
        b for b in re.findall(r"```bash\n(.*?)```", (ROOT / "docs/cluster.md").read_text(), re.DOTALL) if word in b
    ]
    (tmp_path / word).write_text(STAND_INS[word])
    (tmp_path / word).chmod(0o755)
    environment = dict(PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHON=sys.executable)
    environment |= dict(DRY_RUN="1", MOCK_DATA="1", DEVICE="gpu", DEVICES="0,1,2,3,4,5,6,7")
    done = subprocess.run(["bash", "-c", block], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commands = sorted(
        re.search(r"--master (\S+) --nnodes (\d) --rank (\d)", line).groups() for line in done.stdout.splitlines()
    )
    assert commands == [("10.0.0.1:6070", "2", "0"), ("10.0.0.1:6070", "2", "1")]
