"""Saves that are interrupted: killed at random moments, in one process and under TP2; a disk that is full.

PADDLE_TE_KILLS=50 kills each job 50 times instead of a few.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.conftest import nvgpu_host  # noqa: F401  (a fixture)
from tests.llm.test_run_pretrain import command, losses

HERE = Path(__file__).parent
KILLS = int(os.environ.get("PADDLE_TE_KILLS", 3))
MODEL = HERE.parents[0] / "distributed/model"
FLAGS = dict(
    model_name_or_path=MODEL,
    save_steps=1,
    save_total_limit=2,
    gradient_accumulation_steps=1,
    transformer_engine_backend="paddle",
)


def train(folder, environment, ranks, kills, **flags):
    """Trains in `ranks` processes to the end, after being killed; returns (losses, a line of report for each kill)."""
    folder.mkdir()
    flags = FLAGS | flags | dict(max_steps=3 * KILLS + 3, resume_from_checkpoint="auto")
    seed = int.from_bytes(os.urandom(3), "little")
    print(f"seed of the kills: {seed}")
    job = dict(
        flags=command(folder / "out", **flags),
        output=str(folder / "out"),
        report=str(folder / "report.jsonl"),
        kills=kills,
        ranks=ranks,
        seed=seed,
        save_seconds=0.15 * ranks,
    )
    (folder / "job.json").write_text(json.dumps(job))
    environment = os.environ | environment | dict(PYTHONPATH=str(HERE.parents[1]), OMP_NUM_THREADS="1")
    arguments = [sys.executable, HERE / "killed_saves.py", folder / "job.json"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300 + 60 * KILLS)
    logs = "".join(log.read_text()[-3000:] for log in folder.glob("rank*.log"))
    assert not done.returncode, f"{done.stderr[-2000:]}\n{logs}"
    report = folder / "report.jsonl"
    return losses(folder / "out"), [json.loads(line) for line in report.read_text().splitlines()] if kills else []


@pytest.mark.parametrize("layout", ["one process", "tp2"])
def test_killed_while_saving(layout, tmp_path, nvgpu_host):  # noqa: F811
    if layout == "tp2":
        ranks, environment, flags = 2, nvgpu_host, dict(device="nvgpu", tensor_parallel_degree=2)
    else:
        ranks, environment, flags = 1, {}, {}
    whole, _ = train(tmp_path / "whole", environment, ranks, 0, **flags)
    got, report = train(tmp_path / "killed", environment, ranks, KILLS, **flags)
    assert got == whole and len(set(whole.values())) == len(whole) == 3 * KILLS + 3

    previous = []  # complete steps before a run
    for line in report:
        newest = previous[-1] if previous else None
        expected = newest and str(tmp_path / "killed/out" / f"checkpoint-{newest}")
        assert line["resumed"] == [expected] * ranks
        assert not newest or line["complete"][-1] >= newest, "a complete checkpoint was lost"
        previous = line["complete"]
    interrupted = sum(bool(line["incomplete"]) for line in report)
    print(f"{layout}: {len(report)} kills, {interrupted} left an incomplete checkpoint")
    assert interrupted or KILLS < 10, "no kill fell into a save"
    assert sorted(p.name for p in (tmp_path / "killed/out").glob("checkpoint-*")) == sorted(
        p.name for p in (tmp_path / "whole/out").glob("checkpoint-*")
    )
