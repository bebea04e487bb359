"""Every command of docs/get-started/tutorial.md, in order, by its notebook; only the number of steps is smaller."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import run

ROOT = Path(__file__).parents[3]
STEPS = 20
UNTESTED = r"<!-- not tested here: [^\n]* -->\n"
BACKEND = os.environ.get("BACKEND", "paddle")


def blocks():
    """(commands, commands marked as not tested)."""
    text = (ROOT / "docs/get-started/tutorial.md").read_text()
    found = re.findall(rf"({UNTESTED})?```bash\n(.*?)```", text, re.DOTALL)
    assert text.count("```") == 2 * len(found), "a block is not bash"
    return [block for mark, block in found if not mark], [block for mark, block in found if mark]


@pytest.fixture(scope="module")
def out(tmp_path_factory, demo_data, warm_start):
    out = tmp_path_factory.mktemp("tutorial") / "out"
    shutil.copytree(demo_data, out / "data")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # DEVICE, BACKEND, TRAIN, EVALUATE and TOLERANCE as the page says run it on a GPU
    environment = dict(DEVICE="cpu") | os.environ | dict(OUT=str(out), STEPS=str(STEPS), PATH=path)
    if environment["DEVICE"] == "cpu":
        environment |= warm_start
    run(
        [sys.executable, ROOT / "tools/notebook.py", "--run"],
        cwd=ROOT / "docs/get-started",
        env=environment,
        check=True,
    )
    return out


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "train_log.jsonl").read_text().splitlines()]


def test_only_installation_and_gpu_are_left_out():
    tested, untested = blocks()
    assert len(tested) >= 9 and len(untested) == 2
    assert untested[0].startswith("bash scripts/quickstart.sh") and untested[1].startswith("export DEVICE=gpu")


def test_it_learns(out):
    for name, steps, fall in (("none", STEPS, 0.5), ("tuned", STEPS, 1.0), ("lora", STEPS // 2, 0.1)):
        found = losses(out / name)
        assert len(found) == steps and sum(found[-3:]) < sum(found[:3]) - 3 * fall, (name, found)


def test_both_backends_train_alike(out):
    none, other = losses(out / "more_none"), losses(out / f"more_{BACKEND}")
    assert len(none) == 20 and other == pytest.approx(none, rel=float(os.environ.get("TOLERANCE", 1e-4)))
    assert (out / "curves/loss.png").stat().st_size > 1000


def test_evaluation(out):
    before, after = (json.loads((out / name).read_text())["results"] for name in ("before.json", "after.json"))
    for results in (before, after):
        assert results["multiple_choice"]["examples"] == 64 and 0 <= results["multiple_choice"]["accuracy"] <= 1
        assert results["perplexity"]["tokens"] == 64 * 128
    assert before["perplexity"]["loss"] != after["perplexity"]["loss"]
    assert [item["src"] for item in after["generation"]] == ["What does list.append do?", "What does str.upper do?"]


def test_what_it_leaves(out):
    for name in ("te/model_state.pdparams", "lora/lora_model_state.pdparams", "lora/merged/config.json"):
        assert (out / name).is_file(), name
    assert list((out / "hf").glob("*.safetensors")) or list((out / "hf").glob("*.bin"))
