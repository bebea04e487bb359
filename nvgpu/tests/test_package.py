"""The package: what is compiled, when, and where it is found afterwards."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exports import exported
from tests.nvgpu_processes import ROOT, run

PACKAGE = ROOT / "nvgpu"
LOADER = {"InitPlugin"}  # what Paddle looks up
PLUGIN = {  # what the loader and paddle_te look up
    "NvgpuInitPlugin",
    *(f"nvgpu_{what}_{when}" for what in ("group", "average", "defer") for when in ("start", "end")),
    "nvgpu_run_deferred",
}


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


def test_the_libraries_export_what_is_looked_up_alone(plugin):
    assert exported(Path(plugin, "libnvgpu.so")) == LOADER
    assert exported(Path(plugin, "plugin/libnvgpu_host.so")) == PLUGIN


@pytest.fixture
def with_its_own_cxx(monkeypatch, tmp_path):
    """CXX is a compiler that links its C++ library into what it makes, as a gcc of one's own does by default."""
    archive = subprocess.run(["g++", "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=True).stdout
    if not Path(archive.strip()).is_absolute():
        pytest.skip("needs g++'s libstdc++.a")
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\nexec g++ -static-libstdc++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return compiler


def test_a_cxx_library_that_is_linked_in_stays_local(plugin, with_its_own_cxx, tmp_path, monkeypatch):
    """Paddle's own streams else run in that copy: an error text of Paddle's ended in SIGSEGV."""
    monkeypatch.syspath_prepend(PACKAGE)
    build = importlib.import_module("build")
    objects = sorted(Path(plugin, "../objects").resolve().glob("*/loader.o"))
    build.link_library(objects, "loader.map", tmp_path / "libnvgpu.so", ["-ldl"])
    assert exported(tmp_path / "libnvgpu.so") == LOADER
    subprocess.run([with_its_own_cxx, "-shared", *objects, "-o", tmp_path / "all.so", "-ldl"], check=True)
    assert len(found := exported(tmp_path / "all.so") - LOADER) > 1000  # that is what the test is for
    assert any("codecvt" in name for name in found)


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
