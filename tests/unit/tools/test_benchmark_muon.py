"""tools/benchmark/muon.py on the emulated library."""

import json

import pytest

from paddle_te import native
from tests import emulated_te
from tools.benchmark import muon


def test_program(monkeypatch, tmp_path):
    """Each way is taken, and its difference from the others is bfloat16's rounding."""
    emulated_te.install(monkeypatch.setattr)
    monkeypatch.setattr(muon, "start_on_paddles", lambda device: ("cpu", 0, 0))
    path = tmp_path / "muon.json"
    muon.main(["--sizes", "tiny", "--quick", "--device", "cpu", "--output", str(path)])
    tiny = json.loads(path.read_text())["sizes"]["tiny"]
    assert set(tiny["ways"]) == {*muon.WAYS, muon.CHOSEN}
    assert {way["status"] for way in tiny["ways"].values()} == {"ok"}
    differences = {name: way["difference"] for name, way in tiny["ways"].items()}
    assert differences["singly"] == 0 and all(d < 0.05 for d in differences.values())
    called = {name for name, _ in native.load().counts()}
    assert called == {"gemm", "grouped_gemm", "launch"}
    assert tiny["flops"] == pytest.approx(2 * 5 * (4 * 256**2 * 384 + 2 * 256**3))
    assert "4 block rows" in path.with_suffix(".md").read_text()
