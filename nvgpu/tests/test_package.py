"""The package: what is compiled, when, and where it is found afterwards."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nvgpu_processes import ROOT, run

PACKAGE = ROOT / "nvgpu"


def copy_of_the_package(folder, plugin):
    """The package elsewhere, with what is compiled."""
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("tests", "*.egg-info", "lib.*", "bdist.*"))
    return folder, folder / Path(plugin).relative_to(PACKAGE)


def compiled_at(folder):
    return [path.stat().st_mtime_ns for path in sorted(folder.rglob("*.so")) + sorted(folder.rglob("*.o"))]


def test_an_unchanged_build_is_not_repeated_wherever_it_lies(plugin, tmp_path):
    package, built = copy_of_the_package(tmp_path / "nvgpu", plugin)
    before = compiled_at(package)
    command = [sys.executable, package / "build.py", "--runtime", "host"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == str(built)
    assert len(before) > 20 and compiled_at(package) == before


def test_a_changed_file_is_compiled_alone(plugin, tmp_path):
    package, built = copy_of_the_package(tmp_path / "nvgpu", plugin)
    loader = package / "csrc/loader.cc"
    loader.write_text(loader.read_text().replace("cannot be used", "is of no use here"))
    before = {path: path.stat().st_mtime_ns for path in package.rglob("*.o")}
    subprocess.run([sys.executable, package / "build.py", "--runtime", "host"], check=True)
    changed = {path.name for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert changed == {"loader.o"} and b"is of no use here" in (built / "libnvgpu.so").read_bytes()


def install(target, **environ):
    """What pip's build puts into a wheel, laid out in a folder. (pip itself wants the index for its setuptools.)"""
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(target)]
    return subprocess.run(command, cwd=PACKAGE, env={**os.environ, **environ}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(plugin, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    result = install(folder, NVGPU_RUNTIMES="host")
    assert result.returncode == 0, result.stderr
    return folder


def ask(installed, *arguments):
    """python -m nvgpu in an environment that has the package, in a folder that has one of its name."""
    command = [sys.executable, "-m", "nvgpu", *arguments]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)])}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)


def test_the_host_runtime_is_there_for_who_asks(installed):
    found = ask(installed, "host")
    assert found.stdout.splitlines() == [str(installed / "nvgpu/host")], found.stderr
    assert not (installed / "paddle_custom_device").exists()  # or every process of this Python would compute on it
    code = "import paddle; paddle.set_device('nvgpu:7'); print((paddle.ones([2]) + 1).place)"
    result = run(found.stdout.strip(), "-c", code)
    assert "Place(nvgpu:7)" in result.stdout, result.stderr[-2000:]


def test_a_runtime_that_is_not_there_is_refused(installed):
    for arguments, remedy in (
        (["cuda"], "NVGPU_RUNTIMES=host,cuda pip install"),
        (["rocm"], "it is host or cuda"),
        ([], "usage"),
    ):
        result = ask(installed, *arguments)
        assert result.returncode == 2 and remedy in result.stderr and "Traceback" not in result.stderr


def test_an_unknown_runtime_is_not_compiled(tmp_path):
    result = install(tmp_path, NVGPU_RUNTIMES="host,rocm")
    assert result.returncode == 1 and not list(tmp_path.rglob("*.so"))
    assert "NVGPU_RUNTIMES=host,rocm must be host, cuda or host,cuda" in result.stderr
