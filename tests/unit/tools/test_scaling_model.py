"""tools/benchmark/scaling_model.py: its tables. test_measured.py has the planner against all that was measured."""

import pytest

from tools.benchmark import scaling_model


def test_nothing_measured_is_said():
    assert scaling_model.check_table([])[0].startswith("No measured points")


def test_runs_are_predicted(capsys):
    """Packed rows among them."""
    assert scaling_model.main(["--predict", "sft-7b-x1", "8b-x1-compact"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[-2:]] == ["| sft-7b-x1", "| 8b-x1-compact"]
    ms, speed = (float(text.replace(",", "")) for text in rows[-2][1:3])
    assert ms * speed == pytest.approx(16 * 4096 * 1e3, rel=1e-3)


def test_runs_are_predicted_on_the_named_gpu(capsys):
    """H100s are slower, and have as many bytes to hold."""

    def row(*options):
        assert scaling_model.main(["--predict", "8b-x4-accumulated-pp4-vp2", *options]) == 0
        title, *_, last = capsys.readouterr().out.splitlines()
        return title.split()[-2], *(float(text.replace(",", "")) for text in last.split(" | ")[1:4])

    (h200, ms, speed, size), (h100, slower, less, same) = row(), row("--gpu", "h100")
    assert (h200, h100) == ("H200s:", "H100s:") and slower > 1.02 * ms and less < speed / 1.02 and size == same


def test_a_missing_input_is_named(capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        scaling_model.main(["--throughput", str(tmp_path / "throughput.json")])
    assert stopped.value.code == 2 and f"there is no file {tmp_path / 'throughput.json'}" in capsys.readouterr().err


def test_main_prints_all_tables(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling_model, "NUMBERS_OF_GPUS", (8, 512))
    path = tmp_path / "model.md"
    assert scaling_model.main(["--output", str(path), "--throughput"]) == 0
    text = capsys.readouterr().out
    assert path.read_text() == text and "No measured points" in text
    assert all(f"## Llama-3-{size}, {kind}" in text for size in ("8B", "70B") for kind in ("fp8", "bf16"))
    assert text.count("| 512 | ") == 4
