"""runs.compare, and tools/benchmark/compare.py, on logs as the callbacks write them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_te.runs.compare import main

SCRIPT = Path(__file__).parents[3] / "tools/benchmark/compare.py"


def write_run(folder, backend, losses, step_time, **more):
    """An experiment of one sequence of 100 tokens a step on two devices."""
    output = folder / "output"
    output.mkdir(parents=True)
    records = [{"step": step, "loss": loss, "tokens_per_second": 100 / step_time} for step, loss in losses.items()]
    (output / "train_log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = dict(backend=backend, steps=max(losses), final_loss=losses[max(losses)], devices=2, seq_length=100)
    summary |= dict(global_batch_size=1, step_time=step_time, tokens_per_second=100 / step_time)
    summary |= dict(tokens_per_second_per_device=50 / step_time, model_tflops_per_device=300.0, peak_memory_bytes=2**31)
    (output / "train_summary.json").write_text(json.dumps(summary | more))
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    return [
        write_run(tmp_path / "bf16", "te", {1: 8.0, 2: 4.0}, 0.5, model_tflops_per_device=0.0164),
        write_run(tmp_path / "fp8", "te-fp8", {1: 8.0, 2: 4.4, 3: 4.0}, 0.25, mfu=0.325, peak_memory_bytes=3 * 2**30),
    ]


def test_table(runs, capsys):
    assert main(runs) == 0
    header, rule, first, second = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()
    )
    assert dict(zip(header, first, strict=True)) | dict(zip(header, second, strict=True)) == {
        **{"run": "fp8", "backend": "te-fp8", "devices": "2", "batch": "1", "seq": "100", "step (ms)": "250.0"},
        **{"tokens/s/device": "200", "speedup": "2.00x", "TFLOP/s/device": "300.0", "of peak": "32.5%"},
        **{"memory (GiB)": "3.00", "steps": "3", "final loss": "4.00000", "loss diff.": "1.0e-01"},
    }
    assert first[header.index("TFLOP/s/device")] == "0.016", "as on a CPU"
    assert first[header.index("of peak")] == "-" and first[header.index("speedup")] == "1.00x"


def test_files(runs, tmp_path):
    assert main([*runs, "--output", str(tmp_path / "new" / "folder")]) == 0
    rows = json.loads((tmp_path / "new/folder/compare.json").read_text())
    assert [row["loss_difference"] for row in rows] == [0.0, pytest.approx(0.1)]
    assert [row["speedup"] for row in rows] == [1.0, 2.0]
    assert (tmp_path / "new/folder/compare.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "new/folder/compare.md").read_text().count("\n") == 4


def test_a_run_that_cannot_be_read_is_named(runs, tmp_path, capsys):
    assert main([runs[0], str(tmp_path / "none")]) == 2
    assert "none/output/train_log.jsonl not found" in capsys.readouterr().err
    (Path(runs[1]) / "output/train_summary.json").unlink()
    assert main(runs) == 2
    assert "fp8/output/train_summary.json not found: has the run ended?" in capsys.readouterr().err
    (Path(runs[1]) / "output/train_summary.json").write_text("{}")
    assert main(runs) == 2 and "has no 'backend'" in capsys.readouterr().err


def test_it_runs_from_anywhere_and_takes_the_output_folder_too(runs, tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, runs[0] + "/output"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "| bf16 | te " in done.stdout, done.stderr
