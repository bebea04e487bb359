"""scripts/quickstart.sh as a user runs it (fewer steps), and the part of the scripts that makes .venv."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run

ROOT = Path(__file__).parents[2]
STEPS = 10


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory, demo_data, warm_start):
    if not (ROOT / ".venv").exists():
        pytest.skip("run through scripts/test.sh: without .venv the quickstart would first install everything")
    out = tmp_path_factory.mktemp("quickstart")
    shutil.copytree(demo_data, out / "data")
    command = ["bash", "scripts/quickstart.sh", out]
    return out, run(command, cwd=ROOT, env={**os.environ, "STEPS": str(STEPS), **warm_start}, check=True)


def test_summary(quickstart):
    out, _ = quickstart
    summary = json.loads((out / "summary.json").read_text())
    usable = json.loads((out / "env.json").read_text())["usable"]
    expected, tolerance = (usable["bf16"], 1e-2) if "te" in usable["bf16"] else (["none", "pd"], 1e-5)
    assert summary["backends"] == expected and summary["tolerance"] == tolerance
    assert 0 <= summary["max_relative_difference"] <= tolerance
    assert summary["steps"] == list(range(1, STEPS + 1))
    for backend in expected:
        losses = summary["losses"][backend]
        assert len(losses) == STEPS and losses[-1] < losses[0]
        assert summary["tokens_per_second"][backend] > 0


def test_table_and_picture(quickstart):
    out, result = quickstart
    lines = result.stdout.splitlines()
    (header,) = (number for number, line in enumerate(lines) if line.startswith("backend "))
    assert lines[header].split() == ["backend", "loss@1", f"loss@{STEPS}", "max", "rel.", "diff.", "tokens/s"]
    assert lines[header + 2].startswith("none ") and lines[header + 3].startswith("pd ")
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_both_backends_started_from_the_same_converted_weights(quickstart):
    out, _ = quickstart
    losses = json.loads((out / "summary.json").read_text())["losses"]
    assert losses["pd"][0] == pytest.approx(losses["none"][0], rel=1e-6)
    assert (out / "init_te" / "config.json").exists()
    assert sorted(path.name for path in (out / "init").glob("checkpoint-*")) == ["checkpoint-1"]


def test_progress_is_shown(quickstart):
    _, result = quickstart
    sections = [line[3:] for line in result.stdout.splitlines() if line.startswith("== ")]
    assert [section.split(":")[0].split()[0] for section in sections] == [
        "this",
        "preparing",
        "training",
        "converting",
        "training",
        "training",
        "comparing",
    ]
    assert result.stderr.count(f"{STEPS}/{STEPS}") >= 2


def test_visualdl_has_loss_and_speed(quickstart):
    from visualdl import LogReader

    out, _ = quickstart
    (log,) = (out / "pd").rglob("vdlrecords*")
    names = LogReader(file_path=str(log)).get_tags()["scalar"]
    assert {"train/loss", "train/learning_rate", "train/tokens_per_second", "train/peak_memory_bytes"} <= set(names)


def shell(script, cwd, path=None, **environ):
    """Runs `script` after scripts/common.sh, in an empty folder."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    env.update(environ, PATH=path or env["PATH"])
    script = f"set -euo pipefail; . '{ROOT}/scripts/common.sh'; {script}"
    return subprocess.run([shutil.which("bash"), "-c", script], cwd=cwd, env=env, capture_output=True, text=True)


def executable(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


def python_that_is(version, path):
    return executable(path, f"#!/bin/sh\necho {version}\n")


@pytest.mark.parametrize("version, accepted", [("3.10", False), ("3.11", True), ("3.12", True), ("3.13", False)])
def test_which_pythons_are_taken(tmp_path, version, accepted):
    python = python_that_is(version, tmp_path / "python")
    result = shell("find_python", tmp_path, PYTHON=str(python))
    if accepted:
        assert (result.returncode, result.stdout.strip()) == (0, str(python))
    else:
        assert result.returncode == 1 and not (tmp_path / ".venv").exists()
        assert f"PYTHON={python} is not a Python 3.11 or 3.12 (found: {version})" in result.stderr


def test_a_newer_python3_is_passed_over(tmp_path):
    python_that_is("3.13", tmp_path / "bin/python3")
    python_that_is("3.11", tmp_path / "bin/python3.11")
    assert shell("find_python", tmp_path, path=str(tmp_path / "bin")).stdout.strip() == "python3.11"


def test_no_python_at_all(tmp_path):
    result = shell("make_venv", tmp_path, path=str(tmp_path))
    assert result.returncode == 1
    assert "no Python 3.11 or 3.12 found (python3 is missing); set PYTHON=" in result.stderr


def test_missing_compiler_is_named_with_its_remedy(tmp_path):
    for tool in ("echo", "tr", "env"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    executable(tmp_path / "bin/id", "#!/bin/sh\necho 1000\n")  # not root: nothing may be installed
    result = shell("make_venv", tmp_path, path=str(tmp_path / "bin"), PYTHON=sys.executable)
    assert result.returncode == 1 and not (tmp_path / ".venv").exists()
    assert "missing: g++" in result.stderr and "apt-get install g++" in result.stderr


def fake_checkout(folder, version):
    """A folder with a .venv whose python only answers its version and notes what it is asked to do."""
    for name in ("setup.py", "pyproject.toml", f"locks/python{version}.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    (folder / "paddle_te" / "native").mkdir(parents=True)
    (folder / "nvgpu").mkdir(parents=True)
    executable(
        folder / ".venv/bin/python",
        f'#!/bin/sh\ncase "$*" in *./nvgpu) echo "$@" >>builds ;; *pip*) echo "$@" >>calls ;; '
        f"*version_info*) echo {version} ;; esac\n",
    )


def installs(folder):
    calls = folder / "calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_nothing_is_installed_twice(tmp_path):
    fake_checkout(tmp_path, "3.11")
    for expected in (1, 1):
        assert shell("need_tools() { :; }; make_venv", tmp_path).returncode == 0
        assert installs(tmp_path) == expected
    (tmp_path / "locks/python3.11.txt").write_text("numpy==1.26.4\n")
    (tmp_path / "paddle_te/native/shim.cpp").write_text("int x;\n")
    assert shell("need_tools() { :; }; make_venv", tmp_path).returncode == 0
    assert installs(tmp_path) == 2
    assert "-c locks/python3.11.txt -e .[cpu,paddlenlp,test]" in (tmp_path / "calls").read_text()


def test_a_failed_install_is_tried_again(tmp_path):
    fake_checkout(tmp_path, "3.11")
    answers = 'case "$*" in *pip*) exit 3 ;; *version_info*) echo 3.11 ;; esac'
    executable(tmp_path / ".venv/bin/python", f"#!/bin/sh\n{answers}\n")
    assert shell("need_tools() { :; }; make_venv; echo unreachable", tmp_path).returncode == 3
    assert not (tmp_path / ".venv/stamp").exists()


def test_another_python_than_the_venvs_is_no_silent_change(tmp_path):
    fake_checkout(tmp_path, "3.11")
    other = python_that_is("3.12", tmp_path / "python3.12")
    result = shell("make_venv", tmp_path, PYTHON=str(other))
    assert result.returncode == 1 and installs(tmp_path) == 0
    assert ".venv has Python 3.11" in result.stderr and "remove .venv to change it" in result.stderr


def make_venv_with_driver(cuda, folder, **environ):
    """make_venv where the NVIDIA driver is for that CUDA version; what it was asked to install, and its result."""
    result = shell(f"need_tools() {{ :; }}; cuda_version() {{ echo {cuda}; }}; make_venv", folder, **environ)
    assert result.returncode == 0, result.stderr
    return (folder / "calls").read_text().splitlines()[-1].split()[-1], result


def test_a_gpu_brings_transformer_engine_and_the_plugin(tmp_path):
    fake_checkout(tmp_path, "3.11")
    assert make_venv_with_driver(13000, tmp_path)[0] == ".[cpu,paddlenlp,test,te-cu13,nvgpu]"
    make_venv_with_driver(13000, tmp_path)
    assert installs(tmp_path) == 1
    (tmp_path / "nvgpu/plugin.cc").write_text("int x;\n")
    make_venv_with_driver(13000, tmp_path)
    assert [line.split()[:3] for line in open(tmp_path / "builds")] == [["-m", "pip", "install"]] * 2
    assert make_venv_with_driver(13000, tmp_path, GPU="0")[0] == ".[cpu,paddlenlp,test]"
    assert installs(tmp_path) == 3 and (tmp_path / "builds").read_text().count("\n") == 2


def test_an_old_driver_is_said(tmp_path):
    fake_checkout(tmp_path, "3.11")
    extras, result = make_venv_with_driver(12080, tmp_path)
    assert extras == ".[cpu,paddlenlp,test]" and not (tmp_path / "builds").exists()
    assert "driver is for CUDA 12.8: the GPU needs one for CUDA 13 (580 or newer)" in result.stderr
    assert "CUDA" not in make_venv_with_driver(0, tmp_path)[1].stderr


def test_the_drivers_cuda_version(tmp_path):
    ask = f"cuda_version '{sys.executable}'"
    (tmp_path / "libcuda.c").write_text("int cuDriverGetVersion(int* version) { *version = 13010; return 0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "libcuda.c"], cwd=tmp_path, check=True)
    assert shell(ask, tmp_path, LD_LIBRARY_PATH=str(tmp_path)).stdout == "13010\n"
    (tmp_path / "libcuda.so.1").write_text("no library")
    assert shell(ask, tmp_path, LD_LIBRARY_PATH=str(tmp_path)).stdout == "0\n"
