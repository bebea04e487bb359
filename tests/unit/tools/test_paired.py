"""tools/benchmark/paired.py: pairs that part by chance, and pairs that part by a cause."""

import numpy as np
import pytest

from tests.unit.runs.test_convergence import write_run
from tools.benchmark import paired


def pairs(folder, factors):
    """Folders of runs whose second losses are the first's, and whose last 100 steps differ by a factor."""
    folders = []
    for number, factor in enumerate(factors):
        losses = np.linspace(9, 3, 150)
        above = np.where(np.arange(150) < 50, losses, losses * factor)
        folders += [
            write_run(folder / f"{name}{number}", values.tolist()) for name, values in dict(a=above, b=losses).items()
        ]
    return folders


def test_mean_and_standard_error(tmp_path, capsys):
    factors = [1.01, 0.99, 1.03]
    assert paired.main([*map(str, pairs(tmp_path, factors)), "--output", str(tmp_path / "pairs.json")]) == 0
    text = capsys.readouterr().out
    assert "+1.00%" in text and "-1.00%" in text and "mean +1.00%, standard error 1.15%" in text
    assert "standard_error" in (tmp_path / "pairs.json").read_text()


def test_what_cannot_be_compared(tmp_path, capsys):
    one, two = pairs(tmp_path, [1.5])
    assert np.isnan(paired.compare([one, two], 100)["standard_error"])
    with pytest.raises(ValueError, match="even number"):
        paired.compare([one, two, one], 100)
    assert paired.main([str(one), str(tmp_path / "nothing")]) == 2
    assert "train_log.jsonl not found" in capsys.readouterr().err
