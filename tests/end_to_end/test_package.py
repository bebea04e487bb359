"""The package as a user gets it: what it declares, what is in the wheel and the sdist, and that the wheel trains."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from paddle_te.host import HOSTS
from tests import processes

ROOT = Path(__file__).parents[2]
# Packages that a user installs beside this one, one of several with the same modules
CHOSEN = {"paddle", "nvtx", "torch", "transformer_engine", "transformers"}
# What is imported where an extra, such as a host, is installed
OPTIONAL = tuple(f"paddle_te/{room}/" for room in ("data", "hosts", "upstream"))


def settings(monkeypatch):
    """What setup.py tells setuptools."""
    found = {}
    monkeypatch.setattr("setuptools.setup", found.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return found


def normalized(requirement):
    """PyPI's spelling of a requirement's name."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def imports(path):
    """(Name of the first package, whether it is imported when the file is) of each absolute import."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        yield from ((name.partition(".")[0], node in tree.body) for name in names)


def test_every_import_is_declared(monkeypatch):
    """Imports that are always made are required; others may be an extra's."""
    declared = settings(monkeypatch)
    required = {normalized(line) for line in declared["install_requires"]}
    optional = {normalized(line) for lines in declared["extras_require"].values() for line in lines}
    installed, missing = packages_distributions(), {}
    for path in (ROOT / "paddle_te").rglob("*.py"):
        file = str(path.relative_to(ROOT))
        for name, always in imports(path):
            if name in sys.stdlib_module_names or name in CHOSEN or name == "paddle_te":
                continue
            distributions = {normalized(distribution) for distribution in installed.get(name, [name])}
            if not distributions & (required | optional if file.startswith(OPTIONAL) or not always else required):
                missing.setdefault(name, []).append(file)
    assert not missing


# {host: where its locks and its own constraints are}, and what each leaves out
LOCKS = {"paddlenlp": "locks", "paddleformers": "locks/paddleformers"}
LEFT_OUT = {"paddlenlp": {"paddleformers"}, "paddleformers": {"paddlenlp", "harness"}}


def constraints(host):
    """The lines of the files of constraints that hold for a host."""
    files = ["constraints.txt"] if host == "paddlenlp" else ["locks/paddleformers/constraints.txt"]
    lines = [line for file in files for line in (ROOT / file).read_text().splitlines()]
    return [line for line in (line.partition("#")[0].strip() for line in lines) if line]


@pytest.mark.parametrize("host", LOCKS)
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_the_lock_is_complete_and_what_is_asked_for(version, host, monkeypatch):
    """Of what setup.py requires, of what constraints pin, and of all that those here require in turn."""
    declared = settings(monkeypatch)
    extras = {name: lines for name, lines in declared["extras_require"].items() if name not in LEFT_OUT[host]}
    asked = [*declared["install_requires"], *sum(extras.values(), []), *constraints(host)]
    lock = (ROOT / LOCKS[host] / f"python{version}.txt").read_text()
    locked = dict(re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+)$", lock, re.MULTILINE))
    assert "://" not in lock, "no place from which packages come"
    seen = set()
    while asked:
        requirement = Requirement(asked.pop())
        marker = {"python_version": version, "python_full_version": f"{version}.0", "extra": ""}
        if requirement.marker and not requirement.marker.evaluate(marker):
            continue
        name = normalized(requirement.name)
        assert name in locked and locked[name] in requirement.specifier, f"bash scripts/lock.sh: {requirement}"
        if name not in seen and (found := installed(name)) and found.version == locked[name]:
            asked += found.requires or []
        seen.add(name)
    assert len(seen) > 80


def test_no_environment_has_both_hosts(monkeypatch):
    """Their versions exclude each other, so that pip refuses to install both."""
    locks = [(ROOT / folder / "python3.12.txt").read_text() for folder in LOCKS.values()]
    assert all(("paddlenlp==" in lock) != ("paddleformers==" in lock) for lock in locks)
    assert set(LOCKS) <= settings(monkeypatch)["extras_require"].keys() and set(LOCKS) == HOSTS.keys()


def installed(name):
    try:
        return distribution(name)
    except PackageNotFoundError:  # for GPUs, say
        return None


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist); the wheel is made of what the sdist holds, as pip does it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "paddle_te", source / "paddle_te", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    env = os.environ | dict(CFLAGS="-O0", CXXFLAGS="-O0")  # the shim is not run here
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", source], cwd=source, env=env, check=True)
    (wheel,), (sdist,) = (source / "dist").glob("*.whl"), (source / "dist").glob("*.tar.gz")
    return wheel, sdist


def test_nothing_is_left_out(built):
    """Each file of the package that is not made from others is in both."""
    files = {path for path in (ROOT / "paddle_te").rglob("*") if path.is_file() and path.suffix not in (".so", ".pyc")}
    names = {str(path.relative_to(ROOT)) for path in files}
    with zipfile.ZipFile(built[0]) as wheel, tarfile.open(built[1]) as sdist:
        in_wheel = {name for name in wheel.namelist() if not name.endswith(".so")}
        in_sdist = {name.partition("/")[2] for name in sdist.getnames()}
    assert names - in_wheel == set() and names - in_sdist == set()
    assert not {name for name in in_wheel if not name.startswith(("paddle_te/", "paddle_te-"))}


def test_the_index_would_take_them(built):
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *built], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def test_the_wheel_needs_no_library_of_another_package(built):
    """So auditwheel finds a manylinux tag for it, a newer one than a release's where this compiler is newer."""
    done = subprocess.run([sys.executable, "-m", "auditwheel", "show", built[0]], capture_output=True, text=True)
    assert re.search(r'"manylinux_2_\d+_x86_64"', " ".join(done.stdout.split())), done.stdout + done.stderr


def test_a_release_has_a_wheel_for_each_python():
    release = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    locks = sorted(path.stem.removeprefix("python").replace(".", "") for path in (ROOT / "locks").glob("*.txt"))
    assert release["build"] == [f"cp{version}-manylinux_x86_64" for version in locks]


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """The folder of programs of a new environment with the wheel; what the wheel requires is this environment's."""
    folder = tmp_path_factory.mktemp("new") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    # ignored: the repository's own metadata, where PYTHONPATH or the present folder lead there
    install = ["install", "-q", "--no-deps", "--no-index", "--no-compile", "--ignore-installed", built[0]]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
    assert (folder / "bin/paddle-te").is_file()
    (packages,) = folder.glob("lib/python3*/site-packages")
    theirs = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "required.pth").write_text("\n".join(theirs))
    return folder / "bin"


def test_the_wheel_trains_in_an_empty_folder(environment, tmp_path):
    """`paddle-te pretrain` without a repository: two steps on random tokens."""
    arguments = dict(model_name="tiny-llama-demo", tokenizer_name="none", batch_size_per_device=1, TP=1, GA=1)
    arguments |= dict(max_seqlen=16, backend="pd", precision="fp32", MOCK_DATA=1, MAX_STEPS=2, DEVICE="cpu")
    arguments |= dict(EXP_NAME="run", OUTPUT_BASE=tmp_path)
    words = [f"--{name}={value}" for name, value in arguments.items()]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = processes.run([environment / "paddle-te", "pretrain", *words], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    command = next(line for line in done.stderr.splitlines() if line.startswith("+ "))
    assert f" {environment.parent}/lib/" in command and "PYTHONPATH" not in command, "it runs what is installed"
    summary = json.loads((tmp_path / "run/output/train_summary.json").read_text())
    assert summary["steps"] == 2 and 0 < summary["final_loss"] < 20
