"""Saves that are interrupted: killed at random moments, in one process and under TP2; a disk that is full.

PADDLE_TE_KILLS=50 kills each job 50 times instead of a few.
"""

import json
import os
import resource
import sys
from pathlib import Path

import pytest

from paddle_te.runs.checkpoints import complete_checkpoints
from paddle_te.training import trainer
from tests.nvgpu_processes import python_path
from tests.pretraining import command, losses, run
from tests.processes import run as run_process

HERE = Path(__file__).parent
KILLS = int(os.environ.get("PADDLE_TE_KILLS", 3))
MODEL = HERE.parents[1] / "model"
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
        sync_seconds=0.03,
    )
    (folder / "job.json").write_text(json.dumps(job))
    environment = os.environ | environment | dict(PYTHONPATH=python_path(), OMP_NUM_THREADS="1")
    arguments = [sys.executable, HERE / "killed_saves.py", folder / "job.json"]
    done = run_process(arguments, env=environment, timeout=300 + 60 * KILLS)
    logs = "".join(log.read_text()[-3000:] for log in folder.glob("rank*.log"))
    assert not done.returncode, f"{done.stderr[-2000:]}\n{logs}"
    report = folder / "report.jsonl"
    return losses(folder / "out"), [json.loads(line) for line in report.read_text().splitlines()] if kills else []


@pytest.mark.parametrize("layout", ["one process", "tp2"])
def test_killed_while_saving(layout, tmp_path, nvgpu_host):
    if layout == "tp2":
        ranks, environment, flags = 2, nvgpu_host, dict(device="nvgpu", tensor_parallel_degree=2)
    else:
        ranks, environment, flags = 1, {}, {}
    whole, _ = train(tmp_path / "whole", environment, ranks, 0, **flags)
    kill_and_compare(tmp_path, "killed", whole, environment, ranks, **flags)
    if ranks == 1:
        return
    staging = tmp_path / "staging"
    staging.mkdir()
    in_background = dict(save_in_background="true", staging_dir=staging)
    kill_and_compare(tmp_path, "background", whole, environment, ranks, **flags | in_background)
    assert not any(staging.iterdir()), "what killed runs have staged is still there"


def kill_and_compare(folder, name, whole, environment, ranks, **flags):
    """Trains with kills, and compares it with the run without."""
    got, report = train(folder / name, environment, ranks, KILLS, **flags)
    assert got == whole and len(set(whole.values())) == len(whole) == 3 * KILLS + 3

    previous = []  # complete steps before a run
    for line in report:
        newest = previous[-1] if previous else None
        expected = newest and str(folder / name / "out" / f"checkpoint-{newest}")
        assert line["resumed"] == [expected] * ranks
        assert not newest or line["complete"][-1] >= newest, "a complete checkpoint was lost"
        previous = line["complete"]
    interrupted = sum(bool(line["incomplete"]) for line in report)
    print(f"{name}, {ranks} ranks: {len(report)} kills, {interrupted} left an incomplete checkpoint")
    assert interrupted or KILLS < 10, "no kill fell into a save"
    assert sorted(p.name for p in (folder / name / "out").glob("checkpoint-*")) == sorted(
        p.name for p in (folder / "whole/out").glob("checkpoint-*")
    )


# the file that has no room; or, where that is renamed into place, how long any file may be: weights have 0.8 MB here
FULL = [("model_state.pdparams", {}), ("optimizer.pdopt", {}), ("trainer_state.json", {}), ("rng_state.pth", {})]
FULL += [("fp8_state.pp00.pdparams.partial", dict(use_fp8="true", fp8_amax_history_len=2))]
FULL += [("optimizer.pdopt", dict(save_in_background="true"))]
FULL += [(500_000, dict(unified_checkpoint="true")), (1_000_000, dict(unified_checkpoint="true"))]


@pytest.mark.parametrize("what, flags", FULL)
def test_a_full_disk_is_one_clear_error(monkeypatch, tmp_path, caplog, what, flags):
    """The file leads to /dev/full, where every write lacks space; or the process may write none longer than that."""
    flags = FLAGS | flags | dict(max_steps=4)
    whole = run(monkeypatch, tmp_path / "whole", **flags)
    remove = trainer.remove_checkpoint

    def remove_and_fill_the_disk(folder):
        remove(folder)
        if folder.name == "checkpoint-3" and isinstance(what, int):
            resource.setrlimit(resource.RLIMIT_FSIZE, (what, kept[1]))
        elif folder.name == "checkpoint-3":
            folder.mkdir()
            (folder / what).symlink_to("/dev/full")

    output, kept = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "remove_checkpoint", remove_and_fill_the_disk)
        try:
            with pytest.raises(SystemExit) as stop:
                run(patched, output, **flags)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert stop.value.code == 1
    error = [record.message for record in caplog.records if record.levelname == "ERROR"][-1]
    assert "checkpoint-3 could not be saved" in error
    assert ("File too large" if isinstance(what, int) else "No space left on device") in error
    assert "untouched: 1, 2. Make room" in error
    assert [step for step, _ in complete_checkpoints(output)] == [1, 2]

    assert run(monkeypatch, output, **flags, resume_from_checkpoint="auto") == whole
    assert [step for step, _ in complete_checkpoints(output)] == [3, 4]
