"""tools/benchmark/kernels.py on the emulated library."""

import json

from tests import emulated_te
from tools.benchmark import kernels


def test_both_are_timed_and_compared(monkeypatch, tmp_path):
    emulated_te.install(monkeypatch.setattr)
    path = tmp_path / "kernels.json"
    kernels.main(["--device", "cpu", "--quick", "--sizes", "tiny", "--tilings", "--output", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * len(kernels.FUNCTIONS) and all(row["bits"] for row in rows.values())
    assert all(min(row["library_us"], row["ours_us"], *row["tilings"].values()) > 0 for row in rows.values())
    assert path.with_suffix(".md").read_text().count("| equal |") == len(rows)


def test_another_result_is_seen(monkeypatch, tmp_path):
    emulated_te.install(monkeypatch.setattr)
    monkeypatch.setattr(emulated_te.Form, "write", lambda *arguments: None)
    path = tmp_path / "kernels.json"
    arguments = ["--device", "cpu", "--quick", "--sizes", "tiny", "--functions", "cast", "--output", str(path)]
    kernels.main(arguments)
    assert not any(row["bits"] for row in json.loads(path.read_text())["rows"].values())
